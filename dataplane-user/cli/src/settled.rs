//! Combines the command line with its configuration file: the file has the values that the command line and the
//! environment do not set.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};

use admin::cni::PLUGIN;
use clap::{ArgMatches, CommandFactory, FromArgMatches as _};
use settings::{Node, Settings, Source, config};
use terminal::{PathArgs, Refusal, SocketArgs};

use super::{Cli, Command, cni::CniArgs, source::SourceArgs};

/// Reads the command line and the configuration file.
///
/// # Errors
///
/// If one of them is invalid.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, Refusal> {
    let mut arguments: Vec<OsString> = arguments.into_iter().collect();
    let program = arguments.first().map(Path::new);
    if program.and_then(Path::file_name) == Some(OsStr::new(PLUGIN)) {
        // A container runtime calls its plug-ins by their names, and without arguments, twice for each pod: the description of
        // all commands and a configuration file are not needed.
        if arguments.len() == 1 {
            let command = Command::Cni(CniArgs::default());
            return Ok(Cli {
                config: None,
                command,
            });
        }
        arguments.insert(1, "cni".into());
    }
    let mut command = terminal::without_values(Cli::command());
    // The second reading reports invalid or missing options.
    let first = command
        .clone()
        .ignore_errors(true)
        .try_get_matches_from(&arguments);
    let mut file = Settings::default();
    if let Ok(matches) = first
        && let Some((name, given)) = matches.subcommand()
        && let Some(path) = given.get_one::<PathBuf>("config")
    {
        file = config::read(path).map_err(Refusal::Config)?;
        if file.source != Source::default() {
            command = command.mut_subcommand(name, without_source);
        }
    }
    let matches = command
        .clone()
        .try_get_matches_from(arguments)
        .map_err(Refusal::Usage)?;
    let mut cli = Cli::from_arg_matches(&matches).map_err(Refusal::Usage)?;
    if let Some((_, given)) = matches.subcommand() {
        let settled = cli.command.fill_from(&file, given);
        settled.map_err(|error| Refusal::Usage(error.format(&mut command)))?;
    }
    Ok(cli)
}

/// Makes the source optional for a command and its subcommands.
fn without_source(command: clap::Command) -> clap::Command {
    let takes_source = (command.get_groups()).any(|group| group.get_id() == SourceArgs::GROUP);
    let command = command.mut_subcommands(without_source);
    if takes_source {
        command.mut_group(SourceArgs::GROUP, |group| group.required(false))
    } else {
        command
    }
}

impl Command {
    /// Completes the command's options from the file. Keys of the file without an option of the command are ignored.
    fn fill_from(&mut self, file: &Settings, given: &ArgMatches) -> Result<(), clap::Error> {
        match self {
            Self::Run(args) => args.fill_from(file, given)?,
            Self::Proxy(args) => args.fill_from(file, given)?,
            Self::Dns(args) => args.fill_from(file, given)?,
            Self::Plan(args) => {
                args.source.fill_from(file);
                args.path = file.packets.path.unwrap_or_default();
                node(&mut args.node, file, given)?;
                args.paths.fill_from(file);
            }
            Self::Status(args) => both(&mut args.paths, &mut args.socket, file),
            Self::Services(args) => both(&mut args.paths, &mut args.socket, file),
            Self::Explain(args) => both(&mut args.paths, &mut args.socket, file),
            Self::Policies(args) => args.socket.fill_from(file),
            Self::Certs(args) => args.socket.fill_from(file),
            Self::Monitor(args) => both(&mut args.paths, &mut args.socket, file),
            Self::Cleanup(args) => both(&mut args.paths, &mut args.socket, file),
            Self::Conntrack(args) => {
                let common = args.common();
                both(&mut common.paths, &mut common.socket, file);
            }
            Self::Doctor(args) => args.fill_from(file),
            Self::Guard(args) => args.fill_from(file),
            Self::Ca(_)
            | Self::Cni(_)
            | Self::Config(_)
            | Self::KeepNat(_)
            | Self::Completions(_)
            | Self::Opener(_) => {}
        }
        Ok(())
    }
}

fn both(paths: &mut PathArgs, socket: &mut SocketArgs, file: &Settings) {
    paths.fill_from(file);
    socket.fill_from(file);
}

/// Makes a node that of the file, with the values that the command line and the environment set.
pub(super) fn node(
    node: &mut Node,
    file: &Settings,
    given: &ArgMatches,
) -> Result<(), clap::Error> {
    node.clone_from(&file.node);
    node.update_from_arg_matches(given)?;
    name(node);
    Ok(())
}

/// Sets the name that a DaemonSet passes by the downward API, if there is no other.
pub(super) fn name(node: &mut Node) {
    if node.name.is_none() {
        node.name = env::var("NODE_NAME").ok();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use settings::{Limits, Listeners, Packets};

    use super::*;

    /// Every key of the file, with a value.
    const ALL: &str = include_str!("../../settings/tests/config/all.yaml");

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
            "name: Some(\"node1\")",
            "zone: Some(\"z-flag\")",
            "frontends: Some(1000),",
            "level: Some(Debug)",
            "on_exit: Some(Detach)",
            "metrics: Some(Listen(Some(0.0.0.0:9100)))",
            "admin: Some(Listen(None))",
            "manifests: [\"/etc/dataplane/manifests\", \"/etc/dataplane/more.yaml\"]",
        ] {
            assert!(cli.contains(part), "{part} in {cli}");
        }
        assert!(!cli.contains("z-file"), "{cli}");
        // A command uses only the keys for its own options.
        let cli = parsed(ALL, &["status"]).unwrap();
        assert!(cli.contains("\"/run/other/agent.sock\""), "{cli}");
    }

    #[test]
    fn the_plug_in_is_a_command_by_its_name() {
        let said =
            |words: &[&str]| format!("{:?}", parse(words.iter().map(OsString::from)).unwrap());
        let by_name = said(&["/opt/cni/bin/dataplane-cni"]);
        assert_eq!(by_name, said(&["dataplane", "cni"]));
        let uninstall = said(&["dataplane-cni", "uninstall", "--conf-dir=/a"]);
        assert_eq!(
            uninstall,
            said(&["dataplane", "cni", "uninstall", "--conf-dir=/a"])
        );
    }

    #[test]
    fn a_source_on_the_command_line_is_the_only_one() {
        let cli = parsed(ALL, &["run", "-f", "mine.yaml"]).unwrap();
        assert!(cli.contains("manifests: [\"mine.yaml\"]"), "{cli}");
        let api = "source: {kubernetes: {apiServer: \"https://192.0.2.1:6443\"}}";
        let cli = parsed(api, &["run"]).unwrap();
        for part in [
            "kubernetes: Some(Kubernetes {",
            "api_server: Some(\"https://192.0.2.1:6443\")",
        ] {
            assert!(cli.contains(part), "{part} in {cli}");
        }
        let cli = parsed(api, &["run", "-f", "mine.yaml"]).unwrap();
        assert!(cli.contains("kubernetes: None"), "{cli}");
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

    /// The command-line flags for the settings of `tests/config/all.yaml`.
    const FLAGS: &[(&str, &str)] = &[
        (
            "manifests",
            "/etc/dataplane/manifests,/etc/dataplane/more.yaml",
        ),
        ("node-name", "node1"),
        ("zone", "z-file"),
        ("nodeport-addresses", "10.0.0.0/8,fd00::/64"),
        ("on-exit", "detach"),
        ("replace", ""),
        ("stay", ""),
        ("log-format", "json"),
        ("verbose", ""),
        ("socket", "/run/other/agent.sock"),
        ("metrics-addr", "0.0.0.0:9100"),
        ("admin-addr", "off"),
        ("packet-path", "off"),
        ("tc-hook", "clsact"),
        ("bpffs", "/sys/fs/bpf/other"),
        ("cgroup", "/sys/fs/cgroup/unified"),
    ];

    fn settings(words: &[OsString]) -> Settings {
        let words = [&["dataplane".into(), "run".into()], words].concat();
        match parse(words).unwrap().command {
            Command::Run(args) => args.settings.clone(),
            other => panic!("{other:?}"),
        }
    }

    /// The file without the keys that have no flag.
    fn with_flags_only(file: &Settings) -> Settings {
        Settings {
            destroy_stale: Vec::new(),
            node: Node {
                external_ips: Vec::new(),
                reserved_ports: Vec::new(),
                ..file.node.clone()
            },
            listen: Listeners {
                metrics_auth: None,
                health: None,
                healthz: None,
                proxy_mode: None,
                ..file.listen.clone()
            },
            packets: Packets {
                path: file.packets.path,
                hook: file.packets.hook,
                ..Packets::default()
            },
            cni: None,
            limits: Limits::default(),
            ..file.clone()
        }
    }

    /// The file and the flags build equal settings. A flag without a key could not be set in a DaemonSet's ConfigMap.
    #[test]
    fn flags_say_what_the_file_says() {
        let file = config::parse("all.yaml".as_ref(), ALL).unwrap();
        let place = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(place.path(), ALL).unwrap();
        assert_eq!(settings(&["--config".into(), place.path().into()]), file);

        let mesh = serde_saphyr::to_string(file.mesh.as_ref().unwrap()).unwrap();
        let dns = serde_saphyr::to_string(file.dns.as_ref().unwrap()).unwrap();
        let mut words: Vec<OsString> = vec![
            format!("--mesh={mesh}").into(),
            format!("--dns={dns}").into(),
        ];
        words.extend(FLAGS.iter().map(|(flag, value)| match *value {
            "" => format!("--{flag}").into(),
            value => format!("--{flag}={value}").into(),
        }));
        assert_eq!(settings(&words), with_flags_only(&file));
        // With a file that sets every key, and all flags, the settings are those of the file.
        words.extend(["--config".into(), place.path().into()]);
        assert_eq!(settings(&words), file);

        let mut tried: BTreeSet<&str> = FLAGS.iter().map(|(flag, _)| *flag).collect();
        tried.extend(["mesh", "dns"]);
        // Options that exclude others are tried elsewhere.
        tried.extend(["kubernetes", "kubeconfig", "api-server", "pod-cidr"]);
        // Options that a file does not have.
        tried.extend(["config", "help", "version"]);
        let command = Cli::command();
        let run = command.find_subcommand("run").unwrap();
        let flags = run.get_arguments().filter_map(clap::Arg::get_long);
        let missing: Vec<_> = flags.filter(|flag| !tried.contains(flag)).collect();
        assert!(
            missing.is_empty(),
            "{missing:?} cannot be said in a configuration file: add them to src/settings and \
             tests/config/all.yaml"
        );
    }

    #[test]
    fn the_command_line_counts_more_than_the_file() {
        let place = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(place.path(), ALL).unwrap();
        let words = [
            "--zone=z-flag",
            "--tc-hook=tcx",
            "--on-exit=keep",
            "--metrics-addr=off",
            "-vv",
            "--config",
        ];
        let mut words = words.map(OsString::from).to_vec();
        words.push(place.path().into());
        let found = settings(&words);
        let mut wanted = config::parse("all.yaml".as_ref(), ALL).unwrap();
        wanted.node.zone = Some("z-flag".to_owned());
        wanted.packets.hook = Some(settings::TcHook::Tcx);
        wanted.on_exit = Some(settings::OnExit::Keep);
        wanted.listen.metrics = "off".parse().ok();
        wanted.log.level = Some(settings::LogLevel::Trace);
        assert_eq!(found, wanted);
    }

    #[test]
    fn the_file_and_a_flag_may_contradict_each_other() {
        let file = "source: {kubernetes: {}}\npackets: {podsByInterface: true}\n";
        let wrong = parsed(file, &["run", "--pod-cidr=10.0.0.0/8"]).unwrap_err();
        assert!(
            wrong.contains("both podCidrs and podsByInterface"),
            "{wrong}"
        );
        let file = "listen: {metricsAuth: kubernetes}\n";
        let wrong = parsed(file, &["run", "--manifests=a"]).unwrap_err();
        assert!(wrong.contains("listen.metricsAuth"), "{wrong}");
    }

    /// Options of nested commands count, too. A command's own `--verbose` is not that of the log.
    #[test]
    fn every_command_takes_the_places_of_the_file() {
        for words in [
            &["status"][..],
            &["services"],
            &["monitor"],
            &["cleanup"],
            &["conntrack", "list"],
            &["conntrack", "count"],
            &["conntrack", "flush", "--all"],
            &["explain", "default/web", "10.96.0.1:80"],
        ] {
            let cli = parsed(ALL, words).unwrap();
            for place in ["\"/run/other/agent.sock\"", "\"/sys/fs/bpf/other\""] {
                assert!(cli.contains(place), "{words:?}: no {place} in {cli}");
            }
            assert!(!cli.contains("verbose: true"), "{cli}");
        }
        for words in [&["plan"][..], &["doctor"], &["guard"]] {
            let cli = parsed(ALL, words).unwrap();
            assert!(cli.contains("\"/sys/fs/bpf/other\""), "{words:?}: {cli}");
        }
    }
}
