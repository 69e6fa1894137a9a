//! The explanation of a decision, as the command prints it.

use admin::api::DnsLookup;
use dataplane_common::Reason;
use serde::Serialize;

use super::capture::Outcome;

/// The explanation of a decision.
#[derive(Debug, Serialize)]
pub struct Explanation {
    pub source: String,
    pub destination: String,
    /// `translated`, `refused` or `left-alone`. Also the verdicts of [`Outcome`] for a connection of a workload, and
    /// `no-address` if the name has no address that is known here.
    pub verdict: &'static str,
    /// The word of the [`Reason`]. For a name without an address `not-found`, or `resolvers` if the agent would ask
    /// them.
    pub reason: &'static str,
    pub steps: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<u32>,
    /// The route that splits the connections to the port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    pub endpoints: Vec<Choice>,
    /// The lookup of the address, if the destination is a name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lookup: Option<DnsLookup>,
    /// The decisions of capture if there is a mesh: outbound and inbound.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub capture: Vec<Outcome>,
}

impl Explanation {
    /// Returns an explanation without steps: the connection is left alone.
    pub fn of(source: String, destination: String) -> Self {
        Self {
            source,
            destination,
            verdict: "left-alone",
            reason: Reason::NotService.word(),
            steps: Vec::new(),
            service: None,
            kind: None,
            pool: None,
            route: None,
            endpoints: Vec::new(),
            lookup: None,
            capture: Vec::new(),
        }
    }

    /// Adds the endpoints from which the programs choose.
    pub fn choose(&mut self, endpoints: Vec<Choice>) {
        let equal = endpoints
            .windows(2)
            .all(|pair| (pair[0].probability - pair[1].probability).abs() < f64::EPSILON);
        self.steps.push(if equal {
            "one endpoint is chosen at random, each with the same probability".to_owned()
        } else {
            "one endpoint is chosen at random, by the weights of a route or a ServiceEntry"
                .to_owned()
        });
        self.endpoints = endpoints;
    }

    /// Adds the decisions of capture. The outbound decision comes before services, the inbound decision after.
    pub fn capture(&mut self, outbound: Option<Outcome>, inbound: Option<Outcome>) {
        let went_on = self.verdict == "left-alone";
        if let Some(mut told) = outbound {
            let stays = matches!(told.verdict, "captured" | "refused");
            if stays {
                // Only the step about the client's place stays.
                self.steps.truncate(1);
                self.endpoints.clear();
                (self.service, self.kind, self.pool) = (None, None, None);
            }
            if stays || went_on {
                (self.verdict, self.reason) = (told.verdict, told.reason);
            }
            let steps = std::mem::take(&mut told.steps);
            self.steps.splice(1..1, steps);
            self.capture.push(told);
            if stays {
                return;
            }
        }
        if let Some(mut told) = inbound.filter(|_| went_on) {
            (self.verdict, self.reason) = (told.verdict, told.reason);
            self.steps.append(&mut told.steps);
            self.capture.push(told);
        }
    }
}

/// An endpoint that the programs may choose.
#[derive(Debug, Serialize)]
pub struct Choice {
    pub endpoint: String,
    /// A probability from 0 to 1.
    pub probability: f64,
}

/// Makes the probabilities of the endpoints that are left add up to one.
pub fn share(choices: &mut [Choice]) {
    let sum: f64 = choices.iter().map(|choice| choice.probability).sum();
    for choice in choices {
        choice.probability /= sum;
    }
}
