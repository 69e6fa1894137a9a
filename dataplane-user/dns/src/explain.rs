//! Answers to queries, as steps that people read.

use std::net::{IpAddr, SocketAddr};

use hickory_proto::{
    op::{Message, ResponseCode},
    rr::{RData, Record, RecordType},
};
use serde::{Deserialize, Serialize};

use super::{
    answer::{Ask, Decision, answer},
    client::Client,
    name::LowerName,
    rule::Rule,
    wire::{Transport, question},
    zone::{Meaning, Zone},
};

/// A query for one name, and its answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The name, with a dot at its end.
    pub name: String,
    /// The word of the [`Rule`].
    pub rule: String,
    /// The object that the answer is from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// The answer's code; none if resolvers would be asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// The records, in the format of zone files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub records: Vec<String>,
    /// The addresses in them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// The resolvers and names that the agent would ask, if it does not know the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ask: Option<Questions>,
    /// Whether the answer is from the cache.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cached: bool,
}

/// The resolvers and names that the agent would ask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Questions {
    /// The resolvers, in their order; none: the query is refused.
    pub resolvers: Vec<SocketAddr>,
    /// The names, in their order.
    pub names: Vec<String>,
}

/// The reason why a query cannot be explained.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// The text is no name.
    #[error("`{0}` is not a name in DNS")]
    Name(String),
    /// Queries of this type go to resolvers as they are.
    #[error("cannot answer a query of this type")]
    Type,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde asks for a reference"
)]
const fn is_false(value: &bool) -> bool {
    !*value
}

impl Step {
    /// Returns true if the name does not exist: the client's resolver asks for the next name then.
    pub fn is_missing(&self) -> bool {
        self.ask.is_none() && self.code.as_deref() == Some(ResponseCode::NXDomain.to_str())
    }
}

/// Returns the steps by which a client looks up a name, until a name exists or the agent would ask resolvers. Completes a
/// name without a dot at its end as the client's own resolver does. `known` returns a cached answer.
///
/// # Errors
///
/// The text is no name, or queries of this type go to resolvers as they are.
pub fn steps(
    zone: &Zone,
    client: &Client,
    name: &str,
    of_type: RecordType,
    known: impl Fn(&LowerName, &Ask) -> Option<Vec<u8>>,
) -> Result<Vec<Step>, ExplainError> {
    let mut steps = Vec::new();
    for name in names(client, name)? {
        let step = step(zone, client, &name, of_type, &known)?;
        let goes_on = step.is_missing();
        steps.push(step);
        if !goes_on {
            break;
        }
    }
    Ok(steps)
}

/// The names that the client's resolver would ask for, in its order.
fn names(client: &Client, text: &str) -> Result<Vec<LowerName>, ExplainError> {
    let name = LowerName::parse(text).map_err(|_| ExplainError::Name(text.to_owned()))?;
    if text.ends_with('.') {
        return Ok(vec![name]);
    }
    let searched = client.search.iter();
    let searched = searched.filter_map(|end| name.with_end(name.count(), end).ok());
    let mut names: Vec<_> = searched.collect();
    let at = if name.count() > usize::from(client.ndots) {
        0
    } else {
        names.len()
    };
    names.insert(at, name);
    Ok(names)
}

fn step(
    zone: &Zone,
    client: &Client,
    name: &LowerName,
    of_type: RecordType,
    known: impl Fn(&LowerName, &Ask) -> Option<Vec<u8>>,
) -> Result<Step, ExplainError> {
    let query = question(0, name, of_type.into(), 0, true);
    let mut out = Vec::new();
    let random = &mut rand::rng();
    let decision = answer(
        zone,
        &query,
        Transport::Tcp,
        || Box::new(client.clone()),
        random,
        &mut out,
    );
    let mut step = Step {
        name: name.to_string(),
        rule: String::new(),
        object: object(zone, name, &client.namespace),
        code: None,
        records: Vec::new(),
        addresses: Vec::new(),
        ask: None,
        cached: false,
    };
    match decision {
        Decision::Answered(rule) => {
            rule.word().clone_into(&mut step.rule);
            let alias = step.answered(&out);
            if rule == Rule::Search {
                step.object = alias.and_then(|name| object(zone, &name, &client.namespace));
            }
        }
        Decision::Ask(ask) => {
            ask.rule.word().clone_into(&mut step.rule);
            if let Some(answer) = known(name, &ask) {
                step.cached = true;
                step.answered(&answer);
                return Ok(step);
            }
            step.add(ask.candidates.iter().flat_map(|of| &of.records));
            step.ask = Some(Questions {
                resolvers: client.resolvers.clone(),
                names: ask
                    .candidates
                    .iter()
                    .map(|of| of.name.to_string())
                    .collect(),
            });
        }
        Decision::Relay | Decision::Nothing => return Err(ExplainError::Type),
    }
    Ok(step)
}

impl Step {
    /// Adds an answer of the agent, or of a resolver. Addresses in its additional section, such as those of name servers,
    /// are no addresses of the name. Returns the name that the first record leads to, if that is an alias.
    fn answered(&mut self, answer: &[u8]) -> Option<LowerName> {
        let message = Message::from_vec(answer).ok()?;
        self.code = Some(message.metadata.response_code.to_str().to_owned());
        self.add(&message.answers);
        let more = message.additionals.iter().map(ToString::to_string);
        self.records.extend(more);
        match &message.answers.first()?.data {
            RData::CNAME(to) => LowerName::of_labels(to.0.iter()).ok(),
            _ => None,
        }
    }

    fn add<'a>(&mut self, records: impl IntoIterator<Item = &'a Record>) {
        for record in records {
            self.records.push(record.to_string());
            match &record.data {
                RData::A(address) => self.addresses.push(address.0.into()),
                RData::AAAA(address) => self.addresses.push(address.0.into()),
                _ => {}
            }
        }
    }
}

/// The object that decides about a name.
fn object(zone: &Zone, name: &LowerName, namespace: &str) -> Option<String> {
    let meaning = match zone.meaning(name, || namespace) {
        Meaning::Doubtful(meaning) => *meaning,
        meaning => meaning,
    };
    match meaning {
        Meaning::Service(service)
        | Meaning::Headless(service)
        | Meaning::Endpoints(service, _)
        | Meaning::Port(service, ..)
        | Meaning::Alias(service, _) => Some(format!("Service {}", service.name)),
        Meaning::Host(entry, host) => {
            Some(format!("ServiceEntry {}, host {}", entry.name, host.name))
        }
        Meaning::Foreign | Meaning::Unsure | Meaning::Missing => {
            let (entry, host) = zone.host(name, namespace)?;
            Some(format!(
                "ServiceEntry {}, whose host {} has no address",
                entry.name, host.name
            ))
        }
        _ => None,
    }
}
