//! The results of the practice node, for people and for programs.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
};

use dataplane_tests::report::{Attempt, Errors, Quantiles};
use serde::Serialize;

use super::{CLIENT, SERVICE, Seen};
use crate::style;

/// The document of `--output json`.
#[derive(Debug, Serialize)]
pub struct Practice {
    /// Requests sent to the service.
    requests: usize,
    /// How many of them an endpoint answered.
    answered: usize,
    /// All endpoints of the service, also endpoints without requests.
    endpoints: Vec<Endpoint>,
    connect_p50_us: ConnectTime,
    #[serde(skip)]
    errors: Errors,
    /// Direct requests that failed, which is a fault of the lab.
    #[serde(skip)]
    direct_failed: usize,
}

#[derive(Debug, Serialize)]
struct Endpoint {
    address: IpAddr,
    answers: usize,
    /// The client's address as the endpoint saw it. Several addresses are separated by commas.
    source: String,
}

/// Median durations of connect(2) in microseconds; `null` without an answered request.
///
/// Half of the endpoints are on the client's node and answer sooner. The plain median of all
/// connections would lie in the gap between the two groups and depend on the random choice of
/// endpoints. So this is the mean of the endpoints' medians.
#[derive(Debug, Serialize)]
struct ConnectTime {
    vip: Option<f64>,
    direct: Option<f64>,
}

impl Practice {
    pub fn of(seen: &Seen, endpoints: &[(String, Ipv4Addr)]) -> Self {
        let mut errors = Errors::new();
        for error in seen.vip.iter().filter_map(|attempt| attempt.error.clone()) {
            *errors.entry(error).or_default() += 1;
        }
        let endpoints = endpoints
            .iter()
            .map(|(name, address)| {
                let answers = || {
                    let attempts = seen.vip.iter().filter(|attempt| attempt.error.is_none());
                    attempts.filter(|attempt| attempt.endpoint.as_ref() == Some(name))
                };
                let sources: BTreeSet<IpAddr> = answers()
                    .filter_map(|answer| answer.source)
                    .map(|s| s.ip())
                    .collect();
                let sources: Vec<String> = sources.iter().map(ToString::to_string).collect();
                Endpoint {
                    address: (*address).into(),
                    answers: answers().count(),
                    source: sources.join(","),
                }
            })
            .collect();
        Self {
            requests: seen.vip.len(),
            answered: seen
                .vip
                .iter()
                .filter(|attempt| attempt.error.is_none())
                .count(),
            endpoints,
            connect_p50_us: ConnectTime {
                vip: median_us(&seen.vip),
                direct: median_us(&seen.direct),
            },
            errors,
            direct_failed: seen
                .direct
                .iter()
                .filter(|attempt| attempt.error.is_some())
                .count(),
        }
    }

    /// Returns whether an endpoint of the service answered every request to it.
    pub fn all_answered(&self) -> bool {
        let by_endpoints: usize = self.endpoints.iter().map(|endpoint| endpoint.answers).sum();
        self.requests > 0 && self.answered == self.requests && by_endpoints == self.requests
    }

    /// Prints the table for people.
    pub fn print(&self, node: &str) {
        let (bold, reset) = (style::BOLD, style::RESET);
        anstream::println!(
            "\n{} of {} requests from {CLIENT} ({node}) to {SERVICE} answered\n",
            self.answered,
            self.requests
        );
        anstream::println!(
            "{bold}{:<15} {:>7} {:>6}   {}{reset}",
            "ENDPOINT",
            "ANSWERS",
            "SHARE",
            "SOURCE ADDRESS SEEN"
        );
        for endpoint in &self.endpoints {
            anstream::println!(
                "{:<15} {:>7} {:>5.1}%   {}",
                endpoint.address.to_string(),
                endpoint.answers,
                percent(endpoint.answers, self.answered),
                if endpoint.source.is_empty() {
                    "-"
                } else {
                    &endpoint.source
                },
            );
        }
        for (error, count) in &self.errors {
            anstream::println!("{}{error}{reset}: {count} requests", style::ERROR);
        }
        if self.direct_failed > 0 {
            anstream::println!(
                "{}{} requests sent directly failed too{reset}: the lab itself is not well",
                style::ERROR,
                self.direct_failed
            );
        }
        if let ConnectTime {
            vip: Some(vip),
            direct: Some(direct),
        } = self.connect_p50_us
        {
            anstream::println!(
                "\nconnect(), median: {vip:.1} µs through the VIP, {direct:.1} µs direct \
                 ({:.2}×)",
                vip / direct
            );
        }
    }
}

fn percent(part: usize, whole: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "hundreds of requests")]
    let share = part as f64 / whole.max(1) as f64;
    share * 100.0
}

/// Returns the mean of the endpoints' median durations of connect(2), in microseconds, rounded to a
/// tenth.
fn median_us(attempts: &[Attempt]) -> Option<f64> {
    let mut by_endpoint: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for attempt in attempts.iter().filter(|attempt| attempt.error.is_none()) {
        let endpoint = attempt.endpoint.as_deref().unwrap_or_default();
        by_endpoint
            .entry(endpoint)
            .or_default()
            .push(attempt.latency_ns);
    }
    let medians: Vec<u64> = by_endpoint
        .into_values()
        .map(|mut samples| Quantiles::of(&mut samples).p50)
        .collect();
    #[expect(
        clippy::cast_precision_loss,
        reason = "nanoseconds of one connect, few endpoints"
    )]
    let mean = |sum: u64, count: usize| sum as f64 / count as f64 / 1000.0;
    (!medians.is_empty()).then(|| (mean(medians.iter().sum(), medians.len()) * 10.0).round() / 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(endpoint: &str, error: Option<&str>, latency_ns: u64) -> Attempt {
        Attempt {
            endpoint: error.is_none().then(|| endpoint.to_owned()),
            source: error.is_none().then(|| "10.244.2.8:4711".parse().unwrap()),
            peer: None,
            local: None,
            from: None,
            error: error.map(str::to_owned),
            latency_ns,
        }
    }

    fn endpoints() -> Vec<(String, Ipv4Addr)> {
        [("a", [10, 244, 1, 5]), ("b", [10, 244, 1, 6])]
            .map(|(name, address)| (name.to_owned(), Ipv4Addr::from(address)))
            .into()
    }

    #[test]
    fn the_document_has_the_promised_fields() {
        let seen = Seen {
            vip: vec![attempt("a", None, 10_000), attempt("b", None, 30_040)],
            direct: vec![attempt("a", None, 20_000)],
        };
        let practice = Practice::of(&seen, &endpoints());
        assert!(practice.all_answered());
        assert_eq!(
            serde_json::to_value(&practice).unwrap(),
            serde_json::json!({
                "requests": 2,
                "answered": 2,
                "endpoints": [
                    {"address": "10.244.1.5", "answers": 1, "source": "10.244.2.8"},
                    {"address": "10.244.1.6", "answers": 1, "source": "10.244.2.8"},
                ],
                "connect_p50_us": {"vip": 20.0, "direct": 20.0},
            })
        );
    }

    #[test]
    fn a_failed_request_or_a_foreign_answer_is_no_success() {
        for other in [
            attempt("", Some("ECONNREFUSED"), 1),
            attempt("stranger", None, 1),
        ] {
            let seen = Seen {
                vip: vec![attempt("a", None, 1), other],
                direct: vec![],
            };
            let practice = Practice::of(&seen, &endpoints());
            assert!(!practice.all_answered(), "{practice:?}");
            assert_eq!(practice.connect_p50_us.direct, None);
        }
        let nothing = Seen {
            vip: vec![],
            direct: vec![],
        };
        assert!(!Practice::of(&nothing, &endpoints()).all_answered());
    }
}
