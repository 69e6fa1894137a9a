//! Decides how the server handles a query: it answers from the names that it has, or asks resolvers. Pure: no socket,
//! no clock.

use std::{cell::LazyCell, slice};

use hickory_proto::{op::ResponseCode, rr::Record};
use rand::{Rng, seq::SliceRandom as _};
use smallvec::SmallVec;

use super::{
    client::Client,
    compose::{self, Found},
    join::joined,
    name::LowerName,
    rule::Rule,
    wire::{Parsed, Query, Stored, Transport, refusal, types},
    zone::{Meaning, Zone},
};

/// How many names lead to each other, at most.
const CHAIN: usize = 8;
/// Maximum number of names that resolvers are asked for in one query of a client.
const ASKED: usize = 8;

/// The server's decision about a query.
#[derive(Clone, Debug)]
pub enum Decision {
    /// The answer is written.
    Answered(Rule),
    /// Resolvers are to be asked.
    Ask(Box<Ask>),
    /// Resolvers get the query as it is: nothing here understands it.
    Relay,
    /// There is nothing to answer to.
    Nothing,
}

/// A question for resolvers.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The rule that applies.
    pub rule: Rule,
    /// The names in this order: if resolvers answer that one name does not exist, the next name is asked for.
    pub candidates: SmallVec<[Candidate; 1]>,
    /// The answer if none of them exists; `None`: the resolvers' answer about the last.
    pub otherwise: Option<Stored>,
}

/// A name to ask resolvers for.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The records that lead to it.
    pub records: Vec<Record>,
    /// The name.
    pub name: LowerName,
    /// The last answer that the source gave before it was lost: the client gets it if the resolvers have none.
    pub known: Option<Stored>,
}

impl Candidate {
    /// A name of which nothing is known.
    fn new(name: &LowerName, records: Vec<Record>) -> Self {
        Self {
            records,
            name: name.clone(),
            known: None,
        }
    }
}

/// Decides how to handle a query, and writes the answer to `out` if it is known here. `client` is only called if the
/// answer depends on the client.
pub fn answer<C: AsRef<Client>>(
    zone: &Zone,
    query: &[u8],
    transport: Transport,
    client: impl FnOnce() -> C,
    random: &mut impl Rng,
    out: &mut Vec<u8>,
) -> Decision {
    let query = match Parsed::read(query) {
        Parsed::Query(query) => query,
        Parsed::Foreign => return Decision::Relay,
        Parsed::Nothing => return Decision::Nothing,
        Parsed::Refused(query, code) => {
            query.with_code(code, out);
            return Decision::Answered(Rule::Refused);
        }
        Parsed::Wrong(code) => {
            refusal(query, code, out);
            return Decision::Answered(Rule::Refused);
        }
    };
    let question = (&query.name, query.of_type);
    let client = LazyCell::new(client);
    let client = || (*client).as_ref();
    match zone.meaning(&query.name, || &client().namespace) {
        // The queries that most clients send most of the time.
        meaning @ (Meaning::Service(_)
        | Meaning::Headless(_)
        | Meaning::Endpoints(..)
        | Meaning::Pod(_)
        | Meaning::Host(..))
            if is_of_address(query.of_type) =>
        {
            let (rule, ttl) = (Rule::of(&meaning), zone.ttl(&meaning));
            if write_addresses(&query, transport, (&meaning, ttl), random, out) {
                return Decision::Answered(rule);
            }
            let found = compose::records(zone, &query.name, &meaning, query.of_type);
            write(zone, &query, transport, (found, true), rule, out)
        }
        meaning @ Meaning::Host(..) => {
            let candidate = Candidate::new(&query.name, Vec::new());
            Decision::Ask(ask_of_host(zone, question, &meaning, candidate))
        }
        Meaning::Doubtful(meaning) => {
            let candidate = doubtful(zone, question, (&query.name, &meaning), Vec::new());
            Decision::Ask(one(Rule::Forward, candidate))
        }
        Meaning::Missing => match search(zone, question, client()) {
            Some(Searched::Here(found)) => {
                write_stored(&query, transport, &found, Rule::Search, out)
            }
            Some(Searched::Ask(ask)) => Decision::Ask(ask),
            None => {
                let nothing = (Found::default(), false);
                write(zone, &query, transport, nothing, Rule::Missing, out)
            }
        },
        Meaning::Foreign | Meaning::Unsure => match search(zone, question, client()) {
            Some(Searched::Ask(ask)) => Decision::Ask(ask),
            // Whether the name itself exists is known to resolvers only.
            Some(Searched::Here(_)) | None => {
                Decision::Ask(one(Rule::Forward, Candidate::new(&query.name, Vec::new())))
            }
        },
        Meaning::Alias(..) if query.of_type != types::CNAME => {
            match chase(zone, question, client()) {
                Chased::Here(found) => write_stored(&query, transport, &found, Rule::Alias, out),
                Chased::Ask(ask) => Decision::Ask(ask),
            }
        }
        meaning => {
            let mut found = compose::records(zone, &query.name, &meaning, query.of_type);
            found.answers.shuffle(random);
            write(
                zone,
                &query,
                transport,
                (found, true),
                Rule::of(&meaning),
                out,
            )
        }
    }
}

/// Asks resolvers for one name.
fn one(rule: Rule, candidate: Candidate) -> Box<Ask> {
    Box::new(Ask {
        rule,
        candidates: [candidate].into_iter().collect(),
        otherwise: None,
    })
}

/// A name to ask resolvers for, with the records that the zone has for it; `aliases` lead to it.
fn doubtful(
    zone: &Zone,
    question: (&LowerName, u16),
    (name, meaning): (&LowerName, &Meaning),
    aliases: Vec<Record>,
) -> Candidate {
    let mut found = compose::records(zone, name, meaning, question.1);
    found.answers.splice(..0, aliases.iter().cloned());
    Candidate {
        known: compose::own(zone, question, found, true),
        ..Candidate::new(name, aliases)
    }
}

/// Whether records of a type are addresses.
const fn is_of_address(of_type: u16) -> bool {
    matches!(of_type, types::A | types::AAAA)
}

/// Asks resolvers for other records of a host than addresses. If they do not know the host, the answer still says that
/// it exists: a client that learns otherwise stops asking for addresses.
fn ask_of_host(
    zone: &Zone,
    question: (&LowerName, u16),
    meaning: &Meaning,
    candidate: Candidate,
) -> Box<Ask> {
    let mut found = compose::records(zone, &candidate.name, meaning, question.1);
    found.answers.splice(..0, candidate.records.iter().cloned());
    Box::new(Ask {
        rule: Rule::Host,
        otherwise: compose::own(zone, question, found, true),
        candidates: [candidate].into_iter().collect(),
    })
}

/// Writes the addresses of one family in random order; false if there are none.
fn write_addresses(
    query: &Query,
    transport: Transport,
    (meaning, ttl): (&Meaning, u32),
    random: &mut impl Rng,
    out: &mut Vec<u8>,
) -> bool {
    let mut v4 = SmallVec::<[[u8; 4]; 8]>::new();
    let mut v6 = SmallVec::<[[u8; 16]; 4]>::new();
    for addr in compose::addresses(meaning, query.of_type) {
        match addr {
            std::net::IpAddr::V4(addr) if query.of_type == types::A => v4.push(addr.octets()),
            std::net::IpAddr::V6(addr) if query.of_type == types::AAAA => v6.push(addr.octets()),
            _ => {}
        }
    }
    if v4.len() > 1 {
        v4.shuffle(random);
    }
    if v6.len() > 1 {
        v6.shuffle(random);
    }
    let all = v4.iter().map(|addr| &addr[..]);
    let all = all.chain(v6.iter().map(|addr| &addr[..]));
    if v4.is_empty() && v6.is_empty() {
        return false;
    }
    query.with_addresses(transport, ttl, all, out);
    true
}

/// Writes an answer with these records; the name exists, or not.
fn write(
    zone: &Zone,
    query: &Query,
    transport: Transport,
    (found, exists): (Found, bool),
    rule: Rule,
    out: &mut Vec<u8>,
) -> Decision {
    let question = (&query.name, query.of_type);
    if let Some(stored) = compose::own(zone, question, found, exists) {
        return write_stored(query, transport, &stored, rule, out);
    }
    query.with_code(ResponseCode::ServFail, out);
    Decision::Answered(rule)
}

fn write_stored(
    query: &Query,
    transport: Transport,
    stored: &Stored,
    rule: Rule,
    out: &mut Vec<u8>,
) -> Decision {
    query.with_stored(transport, stored, 0, out);
    Decision::Answered(rule)
}

/// The result of searching the rest of a client's search list.
enum Searched {
    /// To a name that exists here.
    Here(Stored),
    /// To names that resolvers know.
    Ask(Box<Ask>),
}

/// Continues the client's search list, as the client's own resolver would after a negative answer for a name that ends
/// in the list's first entry. Returns `None` for any other name.
fn search(zone: &Zone, (name, of_type): (&LowerName, u16), client: &Client) -> Option<Searched> {
    let (first, rest) = client.search.split_first()?;
    // Only for a zone of ours does this server know that the name does not exist.
    first.before(&zone.domain)?;
    let count = name.before(first).filter(|count| *count > 0)?;
    let mut names: SmallVec<[LowerName; 6]> = SmallVec::new();
    for end in rest {
        names.extend(name.with_end(count, end).ok());
    }
    // The client asks for a name with that many dots as it is before it asks for others.
    if count <= usize::from(client.ndots) {
        names.extend(name.with_end(count, &LowerName::root()).ok());
    }
    let mut candidates = SmallVec::<[Candidate; 1]>::new();
    let meaning_of = |name: &LowerName| zone.meaning(name, || &client.namespace);
    // Only resolvers know whether it exists itself.
    if matches!(meaning_of(name), Meaning::Unsure | Meaning::Foreign) {
        candidates.push(Candidate::new(name, Vec::new()));
    }
    let alias = |other: &LowerName| compose::alias(name, other, zone.ttls.services);
    let mut here = None;
    let mut is_host = false;
    for other in names {
        match meaning_of(&other) {
            Meaning::Missing => {}
            Meaning::Foreign | Meaning::Unsure => {
                candidates.push(Candidate::new(&other, vec![alias(&other)]));
            }
            Meaning::Doubtful(meaning) => {
                let aliases = vec![alias(&other)];
                candidates.push(doubtful(zone, (name, of_type), (&other, &meaning), aliases));
                break;
            }
            meaning @ Meaning::Host(..) if !is_of_address(of_type) => {
                let candidate = Candidate::new(&other, vec![alias(&other)]);
                let ask = ask_of_host(zone, (name, of_type), &meaning, candidate);
                candidates.extend(ask.candidates);
                here = ask.otherwise;
                is_host = true;
                break;
            }
            meaning => {
                is_host = matches!(meaning, Meaning::Host(..));
                let (question, alias) = ((name, of_type), alias(&other));
                here = match &meaning {
                    Meaning::Alias(..) if of_type != types::CNAME => {
                        let chased = chase(zone, (&other, of_type), client);
                        chased.through(question, &alias, &mut candidates)
                    }
                    meaning => {
                        let mut found = compose::records(zone, &other, meaning, of_type);
                        found.answers.insert(0, alias);
                        compose::own(zone, question, found, true)
                    }
                };
                break;
            }
        }
    }
    // By Kubernetes' specification, the cluster has no names that consist of a host followed by the cluster's domain.
    if is_host && zone.names.is_whole() {
        candidates.retain(|candidate| {
            candidate.records.is_empty() || candidate.name.before(&zone.domain).is_none()
        });
    }
    if candidates.is_empty() {
        return here.map(Searched::Here);
    }
    // One query of a client must not cause many: with a long list, the client's own resolver continues.
    if candidates.len() > ASKED {
        return None;
    }
    let otherwise = match here {
        Some(here) => Some(here),
        None => compose::own(zone, (name, of_type), Found::default(), false),
    };
    Some(Searched::Ask(Box::new(Ask {
        rule: Rule::Search,
        candidates,
        otherwise,
    })))
}

/// The result of following an alias.
enum Chased {
    /// To a name that exists here, or to one that does not.
    Here(Stored),
    /// To a name that resolvers know.
    Ask(Box<Ask>),
}

impl Chased {
    /// Puts an alias that leads to the chased name before the records. Returns the answer that is known here, or adds the
    /// names for resolvers to `candidates`.
    fn through(
        self,
        question: (&LowerName, u16),
        alias: &Record,
        candidates: &mut SmallVec<[Candidate; 1]>,
    ) -> Option<Stored> {
        let with_alias = |stored: &Stored| joined(question, slice::from_ref(alias), stored, 0);
        match self {
            Self::Here(found) => Some(with_alias(&found)),
            Self::Ask(ask) => {
                for mut candidate in ask.candidates {
                    candidate.records.insert(0, alias.clone());
                    candidate.known = candidate.known.as_ref().map(with_alias);
                    candidates.push(candidate);
                }
                None
            }
        }
    }
}

/// Follows a service that is an alias for another name, and further aliases. If the aliases form a loop or are too
/// many, the answer has only the aliases so far.
fn chase(zone: &Zone, (name, of_type): (&LowerName, u16), client: &Client) -> Chased {
    let mut records = Vec::new();
    let mut at = name.clone();
    let mut exists = true;
    let mut found = Found::default();
    for _ in 0..CHAIN {
        let meaning = zone.meaning(&at, || &client.namespace);
        match &meaning {
            Meaning::Alias(_, to) => {
                let Ok(to) = LowerName::parse(to) else {
                    break;
                };
                records.push(compose::alias(&at, &to, zone.ttls.services));
                at = to;
                continue;
            }
            Meaning::Foreign | Meaning::Unsure => {
                return Chased::Ask(one(Rule::Alias, Candidate::new(&at, records)));
            }
            Meaning::Doubtful(meaning) => {
                let candidate = doubtful(zone, (name, of_type), (&at, meaning), records);
                return Chased::Ask(one(Rule::Alias, candidate));
            }
            Meaning::Host(..) if !is_of_address(of_type) => {
                let candidate = Candidate::new(&at, records);
                return Chased::Ask(ask_of_host(zone, (name, of_type), &meaning, candidate));
            }
            meaning => {
                exists = !matches!(meaning, Meaning::Missing);
                found = compose::records(zone, &at, meaning, of_type);
            }
        }
        break;
    }
    found.answers.splice(..0, records);
    let stored = compose::own(zone, (name, of_type), found, exists);
    Chased::Here(stored.unwrap_or_else(|| compose::bare((name, of_type), ResponseCode::ServFail)))
}
