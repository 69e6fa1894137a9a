//! Captured connections in the practice node: the agent's L4 proxy relays them, and its access log contains each
//! client's original destination.

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use dataplane_tests::{Agent, Lab, Process, report::Report};
use serde::Deserialize;

use super::{CLIENT, ENDPOINT_PORT, SERVICE};
use crate::style;

/// The pod whose connections the proxy relays, and its address.
pub const POD: &str = "shop";
pub const ADDRESS: &str = "10.244.2.13";

/// Time limit for the proxy to write a line of its access log.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the pod's manifest.
pub fn manifest(node: &str) -> String {
    format!(
        "\
apiVersion: v1
kind: Pod
metadata:
  name: {POD}
  namespace: default
  labels: {{istio.io/dataplane-mode: ambient}}
  annotations: {{dataplane.io/mode: proxy}}
spec: {{nodeName: {node}}}
status: {{podIP: {ADDRESS}}}
"
    )
}

/// Starts the pod's own server.
pub fn serve(lab: &Lab) -> Result<Process> {
    let at = format!("{ADDRESS}:{ENDPOINT_PORT}");
    Ok(lab.pod(POD).serve(&["--http", &at])?)
}

/// A connection, as the client and the proxy saw it.
pub struct Relayed {
    /// The name of the server that answered, or the error.
    answer: Result<String, String>,
    /// The proxy's record.
    record: Record,
}

/// The fields of a line of the access log that the practice node shows.
#[derive(Deserialize)]
struct Record {
    direction: String,
    src: String,
    dst: String,
    #[serde(default)]
    endpoint: String,
}

/// Prints one line, without columns.
impl fmt::Display for Relayed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Record {
            direction,
            src,
            dst,
            ..
        } = &self.record;
        let asked = self.asked();
        write!(f, "{POD}: {direction} connection of {src} to {asked}: ")?;
        write!(f, "the proxy saw the destination {dst}: ")?;
        match &self.answer {
            Ok(name) => write!(f, "reached {name}"),
            Err(error) => f.write_str(error),
        }
    }
}

impl Relayed {
    /// Returns whether a server answered, and the proxy logged the address that the client had connected to.
    pub fn is_right(&self) -> bool {
        self.answer.is_ok() && self.record.dst == self.asked().to_string()
    }

    /// Returns the address that the client connected to.
    fn asked(&self) -> SocketAddr {
        match self.record.direction.as_str() {
            "outbound" => SERVICE,
            _ => own(),
        }
    }
}

/// Returns the address of the pod's own server.
fn own() -> SocketAddr {
    let address: Ipv4Addr = ADDRESS.parse().expect("an address");
    (address, ENDPOINT_PORT).into()
}

/// Connects from the pod to the service, and from another pod to the pod.
///
/// # Errors
/// Fails if a client cannot be started, or if the proxy did not relay such a connection.
pub fn connect(lab: &Lab, agent: &Agent) -> Result<Vec<Relayed>> {
    let ways = [("outbound", POD, SERVICE), ("inbound", CLIENT, own())];
    ways.into_iter()
        .map(|(direction, client, to)| {
            let to = to.to_string();
            let probe = lab.pod(client).probe("http");
            let probe = probe.args(["--each", "--timeout-ms", "5000", "--to", &to]);
            let report: Report = probe.json()?;
            let attempt = report.each.into_iter().next().context("no attempt")?;
            let answer = match (attempt.endpoint, attempt.error) {
                (Some(endpoint), None) => Ok(endpoint),
                (_, error) => Err(error.unwrap_or_default()),
            };
            let record = record(agent, direction)?;
            Ok(Relayed { answer, record })
        })
        .collect()
}

/// Waits for the access log's line about a connection in this direction.
fn record(agent: &Agent, direction: &str) -> Result<Record> {
    let started = Instant::now();
    loop {
        let log = agent.log();
        let mut records = log
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        if let Some(found) = records.rfind(|record: &Record| record.direction == direction) {
            return Ok(found);
        }
        if started.elapsed() > PATIENCE {
            bail!(
                "the proxy relayed no {direction} connection of {POD} within {} s: its access log has no line about it",
                PATIENCE.as_secs()
            );
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Prints the table for people.
pub fn print(relayed: &[Relayed]) {
    let (bold, reset) = (style::BOLD, style::RESET);
    anstream::println!(
        "\nConnections of the pod {POD}, which the agent's L4 proxy relays. The pod has no iptables rules: programs in the\n\
         kernel hand the connections to the proxy, and the proxy sees where each client wanted to go.\n"
    );
    anstream::println!(
        "{bold}{:<10} {:<18} {:<20} {:<16}  REACHED{reset}",
        "DIRECTION",
        "CLIENT",
        "WANTED",
        "ENDPOINT",
    );
    for Relayed { answer, record } in relayed {
        let answer = match answer {
            Ok(name) => name.clone(),
            Err(error) => format!("{}{error}{reset}", style::ERROR),
        };
        let Record {
            direction,
            src,
            dst,
            endpoint,
        } = record;
        anstream::println!("{direction:<10} {src:<18} {dst:<20} {endpoint:<16}  {answer}");
    }
}
