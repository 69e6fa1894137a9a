//! Runs kubectl as the cluster's administrator.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::{
    place::{self, CONTROL, in_netns},
    programs::Programs,
};
use crate::command::{output, shown};

/// A kubectl that asks the cluster's API server.
#[derive(Debug, Clone)]
pub struct Kubectl {
    program: PathBuf,
}

impl Kubectl {
    pub fn new(programs: &Programs) -> Self {
        Self {
            program: programs.kubernetes("kubectl"),
        }
    }

    /// Uses the kubectl in this directory.
    pub fn in_directory(directory: &Path) -> Self {
        Self {
            program: directory.join("kubectl"),
        }
    }

    /// Returns a kubectl command; the caller adds the arguments.
    pub fn command(&self) -> Command {
        let mut command = in_netns(CONTROL, &self.program);
        command
            .env("KUBECONFIG", place::admin_config())
            .env("KUBECACHEDIR", place::control_directory().join("cache"));
        command
    }

    /// Runs kubectl and returns its output.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        output(self.command().args(arguments))
    }

    /// Returns an object, or a list.
    pub fn get(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.run(&[&["get", "--output=json"], arguments].concat())?;
        serde_json::from_str(&text).context("kubectl printed no JSON")
    }

    /// Returns the items of a list.
    pub fn list(&self, arguments: &[&str]) -> Result<Vec<Value>> {
        let list = self.get(arguments)?;
        list["items"].as_array().cloned().context("a list")
    }

    /// Creates or changes an object, or each object of a list.
    pub fn apply(&self, object: &Value) -> Result<()> {
        self.feed(
            &["apply", "--server-side", "--force-conflicts", "-f", "-"],
            &object.to_string(),
        )
        .map(drop)
    }

    /// Creates or changes the objects in a YAML text.
    pub fn apply_text(&self, text: &str) -> Result<()> {
        self.feed(
            &["apply", "--server-side", "--force-conflicts", "-f", "-"],
            text,
        )
        .map(drop)
    }

    /// Runs kubectl with a text as its standard input, and returns its output.
    pub fn feed(&self, arguments: &[&str], text: &str) -> Result<String> {
        let mut command = self.command();
        command
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start {}", shown(&command)))?;
        let mut stdin = child.stdin.take().expect("was asked for");
        stdin
            .write_all(text.as_bytes())
            .context("cannot write to kubectl")?;
        drop(stdin);
        let output = child.wait_with_output().context("lost kubectl")?;
        if !output.status.success() {
            let complaint = String::from_utf8_lossy(&output.stderr);
            bail!("kubectl {}: {}", arguments.join(" "), complaint.trim());
        }
        String::from_utf8(output.stdout).context("kubectl printed no text")
    }
}

/// Repeats `ask` until it succeeds.
///
/// # Errors
/// Returns the last error after `limit`.
pub fn eventually<T>(limit: Duration, mut ask: impl FnMut() -> Result<T>) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        match ask() {
            Ok(answer) => return Ok(answer),
            Err(error) if Instant::now() > end => {
                return Err(error.context(format!("still so after {} s", limit.as_secs())));
            }
            Err(_) => thread::sleep(Duration::from_millis(200)),
        }
    }
}
