//! The reports of `probe`: one JSON document per run, read back by the scenarios.
//!
//! Times are nanoseconds. Times whose name ends in `_at_ns` are read from the machine's monotonic clock, so they can be
//! compared between processes. Errors have their names of errno(3); `TIMEOUT` means that the peer did not answer within
//! the limit.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use serde::{Deserialize, Serialize};

/// How many attempts failed with which error.
pub type Errors = BTreeMap<String, u64>;

/// One attempt to connect or to get a datagram answered.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Attempt {
    /// The name of the endpoint that answered; empty when it was not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The client's address as the endpoint saw it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<SocketAddr>,
    /// getpeername(2) of the client's socket, if it is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<SocketAddr>,
    /// getsockname(2) of the client's socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<SocketAddr>,
    /// The source of a datagram, from recvfrom(2).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<SocketAddr>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// TCP: duration of connect(2). UDP: from sending to the answer.
    pub latency_ns: u64,
}

/// An endpoint's answers to a client.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct EndpointReport {
    /// How many attempts it answered.
    pub answers: u64,
    /// Under which addresses it saw the client.
    pub sources: BTreeMap<IpAddr, u64>,
}

/// `probe connect`, `probe http` and `probe udp`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Report {
    /// How many attempts were made.
    pub attempts: u64,
    /// How many were answered.
    pub answered: u64,
    /// Why the others failed.
    pub errors: Errors,
    /// The endpoints that answered.
    pub endpoints: BTreeMap<String, EndpointReport>,
    /// getpeername(2) of the connected sockets, each once.
    pub peers: Vec<SocketAddr>,
    /// recvfrom(2)'s address of the answers to datagrams, each once.
    pub from: Vec<SocketAddr>,
    /// Latency of the answered attempts.
    pub latency_ns: Quantiles,
    /// Every attempt, when `--each` asked for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub each: Vec<Attempt>,
}

/// `probe talk`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct TalkReport {
    /// Connections on which all bytes were sent and came back.
    pub answered: u64,
    /// How many bytes were sent on them.
    pub bytes: u64,
    /// The errors of the other connections, with the kind of conversation that each had.
    pub errors: Errors,
}

/// A distribution, in nanoseconds; zeros if there is no sample.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Quantiles {
    /// The fastest.
    pub min: u64,
    /// The median.
    pub p50: u64,
    /// 90 of 100 are faster.
    pub p90: u64,
    /// 99 of 100 are faster.
    pub p99: u64,
    /// The slowest.
    pub max: u64,
}

impl Quantiles {
    /// Of these samples, by the nearest rank; sorts them.
    pub fn of(samples: &mut [u64]) -> Self {
        samples.sort_unstable();
        let Some(last) = samples.len().checked_sub(1) else {
            return Self::default();
        };
        let at = |percent: usize| samples[last * percent / 100];
        Self {
            min: at(0),
            p50: at(50),
            p90: at(90),
            p99: at(99),
            max: at(100),
        }
    }
}

impl Report {
    /// Sums up attempts; keeps them when `each` is set.
    pub fn of(attempts: Vec<Attempt>, each: bool) -> Self {
        let mut report = Self {
            attempts: attempts.len() as u64,
            ..Self::default()
        };
        let mut latencies = Vec::with_capacity(attempts.len());
        for attempt in &attempts {
            if let Some(error) = &attempt.error {
                *report.errors.entry(error.clone()).or_default() += 1;
                continue;
            }
            report.answered += 1;
            latencies.push(attempt.latency_ns);
            if let Some(name) = &attempt.endpoint {
                let endpoint = report.endpoints.entry(name.clone()).or_default();
                endpoint.answers += 1;
                if let Some(source) = attempt.source {
                    *endpoint.sources.entry(source.ip()).or_default() += 1;
                }
            }
            for (seen, address) in [
                (&mut report.peers, attempt.peer),
                (&mut report.from, attempt.from),
            ] {
                if let Some(address) = address.filter(|address| !seen.contains(address)) {
                    seen.push(address);
                }
            }
        }
        report.latency_ns = Quantiles::of(&mut latencies);
        if each {
            report.each = attempts;
        }
        report
    }
}

/// The input of `probe flows` is an array of these. It prints an array of [`Report`]s, with every attempt, in the order
/// of the input.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq, Hash)]
pub struct Flow {
    /// The address to connect to.
    pub to: SocketAddr,
    /// Whether to use datagrams: for each attempt, one from a socket of its own, and its answer.
    pub udp: bool,
    /// How many attempts to make, one after the other.
    pub count: u32,
    /// How long to wait for an answer. If the first two attempts get no answer, the third waits until the refusal of a
    /// repeated SYN would arrive, which decides.
    pub timeout_ms: u64,
    /// Make no more attempts after so many that were not answered in time.
    pub timeouts: u32,
    /// The client's own port for every attempt; `None`: each attempt has another port.
    #[serde(default)]
    pub from_port: Option<u16>,
}

/// The report of `probe keep`: a line when its connections are made, and one for each line that it reads.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct KeepReport {
    /// How many connections there are and answered.
    pub alive: u64,
    /// Why others failed, since the line before.
    pub errors: Errors,
    /// How long it took to make them, or to ask them all.
    pub took_ns: u64,
}

/// `probe load`: clients that connect all the time.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct LoadReport {
    /// When the first client began.
    pub started_at_ns: u64,
    /// When the last client ended.
    pub ended_at_ns: u64,
    /// How many connections were made and answered.
    pub answered: u64,
    /// Why others failed.
    pub errors: Errors,
    /// The failures; at most the first 1 000, unless `--each` asked for all.
    pub failures: Vec<Failure>,
    /// Answered connections per endpoint.
    pub endpoints: BTreeMap<String, u64>,
    /// Duration of connect(2) of the answered connections.
    pub connect_ns: Quantiles,
    /// Every answered connection, in the order of each client, when `--each` asked for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub each: Vec<LoadEvent>,
}

/// The report of `probe dns`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct LookupReport {
    /// How many queries were sent.
    pub asked: u64,
    /// How many of them were answered.
    pub answered: u64,
    /// The addresses that have answered.
    pub sources: BTreeMap<SocketAddr, u64>,
    /// Why others failed.
    pub errors: Errors,
    /// The failures, and when each query was sent.
    pub failures: Vec<Failure>,
    /// From a query to its answer.
    pub took_ns: Quantiles,
}

/// A connection that failed.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Failure {
    /// When it was tried.
    pub at_ns: u64,
    /// Why it failed.
    pub error: String,
}

/// `probe pods`: the start of a pod.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct StartReport {
    /// How long the CNI plug-in took for ADD, in nanoseconds.
    pub add_ns: u64,
    /// The endpoint that answered the pod's first connection, or the error.
    pub first: String,
    /// The errors of the connections, by TCP and by UDP, that have to be refused, or `passed`.
    pub denied: [String; 2],
}

/// A connection that an endpoint answered. An endpoint that left at a time T must not be in an
/// event that started later than T plus the grace period.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct LoadEvent {
    /// When connect(2) was called.
    pub started_at_ns: u64,
    /// When it returned.
    pub connected_at_ns: u64,
    /// When the answer was there.
    pub answered_at_ns: u64,
    /// The endpoint that answered.
    pub endpoint: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_counts_answers_sources_and_errors() {
        let answered = |source: &str, latency_ns| Attempt {
            endpoint: Some("a".into()),
            source: Some(source.parse().unwrap()),
            peer: Some("10.96.0.1:80".parse().unwrap()),
            local: None,
            from: None,
            error: None,
            latency_ns,
        };
        let refused = Attempt {
            endpoint: None,
            error: Some("ECONNREFUSED".into()),
            ..answered("10.244.1.2:1", 1)
        };
        let attempts = vec![
            answered("10.244.1.2:1", 30),
            refused,
            answered("10.244.1.2:2", 10),
            answered("10.244.1.3:1", 20),
        ];
        let report = Report::of(attempts, false);
        assert_eq!((report.attempts, report.answered), (4, 3));
        assert_eq!(report.errors, Errors::from([("ECONNREFUSED".into(), 1)]));
        assert_eq!(report.peers, ["10.96.0.1:80".parse().unwrap()]);
        assert_eq!(
            report.latency_ns,
            Quantiles {
                min: 10,
                p50: 20,
                p90: 20,
                p99: 20,
                max: 30
            }
        );
        let a = &report.endpoints["a"];
        let sources = [("10.244.1.2", 2), ("10.244.1.3", 1)].map(|(s, n)| (s.parse().unwrap(), n));
        assert_eq!((a.answers, &a.sources), (3, &BTreeMap::from(sources)));
    }
}
