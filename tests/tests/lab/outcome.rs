//! Output of a command, and answers of an agent's endpoints.

use std::{
    ffi::OsStr,
    fs::{self, File},
    process::Output,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_tests::{Agent, Host, patience};
use serde_json::Value;

/// The exit code and output of a command.
#[derive(Debug)]
pub struct Outcome {
    /// Its exit code; none: a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    /// The outcome of a command that has ended.
    pub fn of(output: &Output) -> Result<Self> {
        Ok(Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout.clone())?,
            stderr: String::from_utf8(output.stderr.clone())?,
        })
    }

    /// Requires this exit code.
    pub fn exits(self, code: i32) -> Result<Self> {
        ensure!(self.code == Some(code), "not exit code {code}: {self:?}");
        Ok(self)
    }

    /// Requires that each of these words is in the program's stdout or stderr.
    pub fn says(self, words: &[&str]) -> Result<Self> {
        for word in words {
            ensure!(
                self.stdout.contains(word) || self.stderr.contains(word),
                "it does not say {word:?}: {self:?}"
            );
        }
        Ok(self)
    }

    /// Its stdout, which must be one JSON document.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.stdout).with_context(|| format!("no JSON: {self:?}"))
    }
}

/// Runs a `dataplane` command about an agent, on its node: `run(agent, "status -o json")`.
pub fn run(agent: &Agent, arguments: &str) -> Result<Outcome> {
    run_args(agent, arguments.split_whitespace())
}

/// Likewise, for arguments with spaces or paths in them.
pub fn run_args(
    agent: &Agent,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Result<Outcome> {
    Outcome::of(&agent.dataplane(arguments).output()?)
}

/// Runs a `dataplane-migrate` command about an agent, on its node.
pub fn migrate(
    agent: &Agent,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Result<Outcome> {
    Outcome::of(&agent.migrate(arguments)?.output()?)
}

/// Runs a `dataplane run` that should end by itself, because it cannot do its work.
pub fn cannot_run(
    agent: &Agent,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Result<Outcome> {
    let directory = tempfile::tempdir()?;
    let said = directory.path().join("stderr");
    let mut process = agent
        .dataplane(["run", "--node-name", agent.node().name()])
        .args(arguments)
        .stderr(File::create(&said)?)
        .spawn()?;
    let limit = Instant::now() + patience(Duration::from_secs(20));
    let status = loop {
        match process.try_wait()? {
            Some(status) => break status,
            None if Instant::now() > limit => {
                bail!("it goes on running: {}", fs::read_to_string(&said)?)
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    Ok(Outcome {
        code: status.code(),
        stdout: String::new(),
        stderr: fs::read_to_string(&said)?,
    })
}

/// A GET from a host: the status and the body; an error if the connection is refused.
pub fn http(from: &Host, url: &str) -> Result<(u16, String)> {
    let arguments = ["-sS", "--max-time", "20", "-w", "\n%{http_code}", url];
    let answer = from.command("curl").args(arguments).run()?;
    let (body, status) = answer.rsplit_once('\n').context("curl says no status")?;
    Ok((status.parse()?, body.to_owned()))
}
