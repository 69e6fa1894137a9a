//! `dataplane config`.

use std::{
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};

use super::output;
use crate::config;

/// Look into configuration files: check one, print their schema, translate kube-proxy's.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Say everything that is wrong with a configuration file, by line and key
    ///
    /// Exits with 0 if it can be used, and with 1 if not.
    Check {
        /// The file; `-` is standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Print the JSON schema of configuration files, for editors and checks
    Schema,
    /// Print a configuration that says what kube-proxy's says
    ///
    /// FILE is a KubeProxyConfiguration (v1alpha1), or the ConfigMap that kubeadm keeps it in:
    /// `kubectl -n kube-system get configmap kube-proxy -o yaml`. What cannot be carried over is
    /// listed on standard error, key by key with the reason.
    FromKubeProxy {
        /// The file; `-` is standard input
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
    write!(output::stdout(), "{}", imported.config.to_yaml())?;
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
