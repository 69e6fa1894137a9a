//! `dataplane config`.

use std::{
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use settings::config;
use terminal::output;

/// Check a configuration file, print the schema, or convert kube-proxy's configuration.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// List every error of a configuration file, by line and key
    ///
    /// Exits with 0 if the file can be used, and with 1 if not.
    Check {
        /// The file; `-` for standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Print the JSON schema of configuration files, for editors and checks
    Schema,
    /// Convert kube-proxy's configuration and print the result
    ///
    /// FILE is a KubeProxyConfiguration (v1alpha1), or the ConfigMap in which kubeadm keeps it:
    /// `kubectl -n kube-system get configmap kube-proxy -o yaml`. Keys that cannot be converted are
    /// listed on standard error with the reason.
    FromKubeProxy {
        /// The file; `-` for standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

impl ConfigArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            ConfigCommand::Check { file } => {
                let config = if is_stdin(&file) {
                    config::parse(Path::new("standard input"), &stdin()?)
                } else {
                    config::read(&file)
                };
                match config {
                    Ok(_) => {
                        writeln!(output::stdout(), "{}: can be used", file.display())?;
                        Ok(ExitCode::SUCCESS)
                    }
                    Err(errors) => {
                        eprintln!("{errors}");
                        Ok(ExitCode::FAILURE)
                    }
                }
            }
            ConfigCommand::Schema => {
                output::json(&mut output::stdout(), &config::schema())?;
                Ok(ExitCode::SUCCESS)
            }
            ConfigCommand::FromKubeProxy { file } => from_kube_proxy(&file),
        }
    }
}

fn from_kube_proxy(file: &Path) -> anyhow::Result<ExitCode> {
    let text = if is_stdin(file) {
        stdin()?
    } else {
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?
    };
    let imported = config::import(&text).map_err(|wrong| anyhow!("{}: {wrong}", file.display()))?;
    write!(output::stdout(), "{}", config::to_yaml(&imported.config))?;
    for note in &imported.notes {
        eprintln!("{} ({}): {}", note.key, note.value, note.why);
    }
    Ok(ExitCode::SUCCESS)
}

fn is_stdin(file: &Path) -> bool {
    file == Path::new("-")
}

fn stdin() -> anyhow::Result<String> {
    let mut text = String::new();
    io::stdin()
        .read_to_string(&mut text)
        .context("cannot read standard input")?;
    Ok(text)
}
