//! The command line together with the configuration file that it names: what the file says is
//! added as flags where neither the command line nor the environment says anything.

use std::{ffi::OsString, path::PathBuf};

use clap::{ArgMatches, Command, CommandFactory, FromArgMatches, parser::ValueSource};

use super::Cli;
use crate::{
    config::{self, Argument},
    source::manifests,
};

/// Flags that say where the services come from: one of them on the command line, and none of the
/// file's counts.
const SOURCES: [&str; 4] = ["manifests", "kubernetes", "kubeconfig", "api-server"];

/// Why there is nothing to do.
#[derive(Debug)]
pub enum Refusal {
    /// The command line makes no sense, or asked for help.
    Usage(clap::Error),
    /// The configuration file has faults.
    Config(manifests::Errors),
}

/// Reads the command line and the configuration file.
///
/// # Errors
///
/// If one of them makes no sense.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, Refusal> {
    let mut arguments: Vec<OsString> = arguments.into_iter().collect();
    let command = Cli::command();
    // What is wrong with it, or missing, is said by the second reading.
    let first = command
        .clone()
        .ignore_errors(true)
        .try_get_matches_from(&arguments);
    if let Ok(matches) = first
        && let Some((name, given)) = matches.subcommand()
        && let Some(file) = given.get_one::<PathBuf>("config")
        && let Some(subcommand) = command.find_subcommand(name)
    {
        let config = config::read(file).map_err(Refusal::Config)?;
        let added = flags(subcommand, given, &config.arguments());
        let end = arguments
            .iter()
            .position(|word| word == "--")
            .unwrap_or(arguments.len());
        arguments.splice(end..end, added);
    }
    let matches = command
        .try_get_matches_from(arguments)
        .map_err(Refusal::Usage)?;
    Cli::from_arg_matches(&matches).map_err(Refusal::Usage)
}

/// What is to be added to a command line of which `given` was understood.
fn flags(command: &Command, given: &ArgMatches, configured: &[Argument]) -> Vec<OsString> {
    let said = |flag: &str| {
        let arg = command.get_arguments().find(|a| a.get_long() == Some(flag));
        arg.map(|arg| {
            matches!(
                given.value_source(arg.get_id().as_str()),
                Some(ValueSource::CommandLine | ValueSource::EnvVariable)
            )
        })
    };
    let source_said = SOURCES.iter().any(|flag| said(flag) == Some(true));
    let mut words = Vec::new();
    for Argument { flag, values } in configured {
        // A command that has no such flag needs no such thing.
        if said(flag) != Some(false) || (source_said && SOURCES.contains(flag)) {
            continue;
        }
        if values.is_empty() {
            words.push(format!("--{flag}").into());
        }
        words.extend(
            values
                .iter()
                .map(|value| format!("--{flag}={value}").into()),
        );
    }
    words
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Every key of the file, with a value.
    const ALL: &str = include_str!("../../tests/config/all.yaml");

    fn parsed(file: &str, words: &[&str]) -> Result<String, String> {
        let place = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(place.path(), file).unwrap();
        let mut arguments: Vec<OsString> = vec!["dataplane".into()];
        arguments.extend(words.iter().map(OsString::from));
        arguments.extend(["--config".into(), place.path().into()]);
        match parse(arguments) {
            Ok(cli) => Ok(format!("{cli:?}")),
            Err(Refusal::Usage(error)) => Err(error.to_string()),
            Err(Refusal::Config(errors)) => Err(errors.to_string()),
        }
    }

    #[test]
    fn the_file_says_what_the_command_line_does_not() {
        let cli = parsed(ALL, &["run", "--zone", "z-flag"]).unwrap();
        for part in [
            "node_name: Some(\"node1\")",
            "zone: Some(\"z-flag\")",
            "max_frontends: 1000,",
            "verbose: 1",
            "on_exit: Detach",
            "metrics: Listen(Some(0.0.0.0:9100))",
            "admin: Listen(None)",
            "manifests: [\"/etc/dataplane/manifests\", \"/etc/dataplane/more.yaml\"]",
        ] {
            assert!(cli.contains(part), "{part} in {cli}");
        }
        assert!(!cli.contains("z-file"), "{cli}");
        // A command takes what it knows.
        let cli = parsed(ALL, &["status"]).unwrap();
        assert!(cli.contains("\"/run/other/agent.sock\""), "{cli}");
    }

    #[test]
    fn a_source_on_the_command_line_is_the_only_one() {
        let cli = parsed(ALL, &["run", "-f", "mine.yaml"]).unwrap();
        assert!(cli.contains("manifests: [\"mine.yaml\"]"), "{cli}");
        let api = "source: {kubernetes: {apiServer: \"https://192.0.2.1:6443\"}}";
        let cli = parsed(api, &["run"]).unwrap();
        for part in [
            "kubernetes: true",
            "api_server: Some(\"https://192.0.2.1:6443\")",
        ] {
            assert!(cli.contains(part), "{part} in {cli}");
        }
        let cli = parsed(api, &["run", "-f", "mine.yaml"]).unwrap();
        assert!(cli.contains("kubernetes: false"), "{cli}");
        let none = parsed("", &["run"]).unwrap_err();
        assert!(
            none.contains("--manifests") && none.contains("--kubernetes"),
            "{none}"
        );
    }

    #[test]
    fn nothing_is_run_with_a_faulty_file() {
        let wrong = parsed("nodename: a\n", &["status"]).unwrap_err();
        assert!(
            wrong.contains(":1:11: nodename: unknown key; did you mean `node.name`?"),
            "{wrong}"
        );
    }

    /// A flag that the file cannot say is one that a DaemonSet's ConfigMap cannot say.
    #[test]
    fn every_flag_of_run_has_a_key() {
        let config = config::parse("all.yaml".as_ref(), ALL).unwrap();
        let mut keys: BTreeSet<&str> = config.arguments().iter().map(|a| a.flag).collect();
        keys.extend(SOURCES);
        keys.insert("pod-cidr");
        let command = Cli::command();
        let run = command.find_subcommand("run").unwrap();
        let mut flags: BTreeSet<&str> = run
            .get_arguments()
            .filter_map(clap::Arg::get_long)
            .collect();
        for not_for_a_file in ["config", "help", "version"] {
            flags.remove(not_for_a_file);
        }
        // And a key that no flag stands for would say nothing.
        let empty: Vec<_> = keys.difference(&flags).collect();
        assert!(empty.is_empty(), "{empty:?} are no flags of run");
        let missing: Vec<_> = flags.difference(&keys).collect();
        assert!(
            missing.is_empty(),
            "{missing:?} cannot be said in a configuration file: add them to src/config/mod.rs, \
             src/config/keys.rs and tests/config/all.yaml"
        );
    }
}
