//! Clients that notice failures: some connect all the time, others hold their connections open.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::SocketAddr,
    process::{Child, ChildStdout, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::report::{KeepReport, LoadEvent, LoadReport};

use super::pods::From;
use crate::cluster::Cluster;

/// Clients that connect all the time, until they are stopped.
pub struct Load {
    child: Child,
    what: String,
}

impl Load {
    /// Starts the clients.
    pub fn start(cluster: &Cluster, from: &From, to: &str) -> Result<Self> {
        Self::start_with(cluster, from, to, None)
    }

    /// Starts the clients, with a report of each connection.
    pub fn start_each(cluster: &Cluster, from: &From, to: &str) -> Result<Self> {
        Self::start_with(cluster, from, to, Some("--each"))
    }

    fn start_with(cluster: &Cluster, from: &From, to: &str, more: Option<&str>) -> Result<Self> {
        let _: SocketAddr = to
            .parse()
            .with_context(|| format!("{to} is no address with a port"))?;
        let mut probe = from.probe(cluster)?;
        probe
            .args(["load", "--until-stdin-closes", "--threads", "2"])
            .args(["--pause-us", "3000", "--to", to])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let child = probe.spawn().context("cannot start the load")?;
        let what = format!("{from:?} to {to}");
        Ok(Self { child, what })
    }

    /// Stops the clients and returns their report.
    pub fn report(mut self) -> Result<LoadReport> {
        drop(self.child.stdin.take());
        let output = self.child.wait_with_output().context("lost the load")?;
        let text = String::from_utf8_lossy(&output.stdout);
        // The first line only reports the start.
        let report = text.lines().nth(1).unwrap_or_default();
        serde_json::from_str(report)
            .with_context(|| format!("{}: probe printed {} bytes", self.what, text.len()))
    }

    /// Stops the clients. Returns how many connections were answered, how many failed, and the errors.
    fn stop(self) -> Result<(u64, u64, String)> {
        let what = self.what.clone();
        let report = self.report()?;
        let failed: u64 = report.errors.values().sum();
        let details = report.failures.first().map_or_else(String::new, |first| {
            let since = first.at_ns.saturating_sub(report.started_at_ns) / 1_000_000;
            format!("{what}: {:?}, the first after {since} ms", report.errors)
        });
        Ok((report.answered, failed, details))
    }

    /// Stops the clients. Fails if a connection failed. Returns how many were answered.
    pub fn none_failed(self) -> Result<u64> {
        let (answered, failed, details) = self.stop()?;
        ensure!(
            failed == 0,
            "{failed} of {} connections failed: {details}",
            answered + failed
        );
        ensure!(answered > 100, "only {answered} connections were made");
        Ok(answered)
    }
}

/// Returns the connections that took longer than `limit` to be made. The report must contain each connection.
pub fn slower(report: &LoadReport, limit: Duration) -> impl Iterator<Item = &LoadEvent> {
    let took = |begin: u64, end: u64| Duration::from_nanos(end.saturating_sub(begin));
    let each = report.each.iter();
    each.filter(move |event| took(event.started_at_ns, event.connected_at_ns) > limit)
}

/// Connections that are made once and stay open.
pub struct OpenConnections {
    child: Child,
    answers: BufReader<ChildStdout>,
    count: u64,
}

impl OpenConnections {
    /// Makes `count` connections.
    pub fn start(cluster: &Cluster, from: &From, to: &str, count: u64) -> Result<Self> {
        let mut probe = from.probe(cluster)?;
        probe
            .args(["keep", "--to", to, "--count", &count.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = probe.spawn().context("cannot start `probe keep`")?;
        let answers = child.stdout.take().expect("was asked for");
        let mut kept = Self {
            child,
            answers: BufReader::new(answers),
            count,
        };
        kept.read()?;
        Ok(kept)
    }

    /// Sends a byte there and back on each connection. Fails if a connection is not alive.
    pub fn all_alive(&mut self) -> Result<()> {
        let stdin = self.child.stdin.as_mut().expect("was asked for");
        stdin.write_all(b"\n").context("lost `probe keep`")?;
        self.read()
    }

    fn read(&mut self) -> Result<()> {
        let mut line = String::new();
        self.answers
            .read_line(&mut line)
            .context("lost `probe keep`")?;
        let report: KeepReport =
            serde_json::from_str(&line).with_context(|| format!("`probe keep` printed {line}"))?;
        ensure!(
            report.alive == self.count,
            "{} of {} kept connections are alive: {:?}",
            report.alive,
            self.count,
            report.errors
        );
        Ok(())
    }
}

impl Drop for OpenConnections {
    fn drop(&mut self) {
        // The program ends when its standard input closes.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
