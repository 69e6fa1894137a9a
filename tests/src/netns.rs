//! Named network namespaces, by `ip`.

use std::{
    fmt::Write as _,
    io::Write as _,
    process::{Command, Stdio},
};

use crate::error::{Doing, Error, Result};

/// Where `ip netns` keeps the names of namespaces.
pub(crate) const NETNS_DIR: &str = "/run/netns";

/// Runs `ip -batch -` in a namespace (`None`: this process's own).
pub(crate) fn ip_batch(netns: Option<&str>, script: &str) -> Result<()> {
    if script.is_empty() {
        return Ok(());
    }
    let mut command = Command::new("ip");
    if let Some(netns) = netns {
        command.args(["-netns", netns]);
    }
    let mut child = command
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .doing(|| "run `ip` (is iproute2 installed?)".into())?;
    let mut stdin = child.stdin.take().expect("stdin is piped");
    // A broken pipe means that `ip` has ended; its stderr has the reason.
    let _ = stdin.write_all(script.as_bytes());
    drop(stdin);
    let output = child.wait_with_output().doing(|| "wait for `ip`".into())?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Failed {
        program: format!(
            "ip -batch in {}",
            netns.unwrap_or("the machine's own namespace")
        ),
        status: output.status,
        stderr: format!("{}of\n{script}", String::from_utf8_lossy(&output.stderr)),
    })
}

/// Removes named namespaces, and with them their links.
pub(crate) fn delete(names: &[impl AsRef<str>]) -> Result<()> {
    ip_batch(None, &lines("netns delete", names))
}

/// A line of an `ip` batch for each name.
pub(crate) fn lines(verb: &str, names: &[impl AsRef<str>]) -> String {
    names.iter().fold(String::new(), |mut script, name| {
        let _ = writeln!(script, "{verb} {}", name.as_ref());
        script
    })
}
