//! The addresses of a name, by the answers of resolvers: pure.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RData,
};
use model::{ADDRESSES_MAX, Resolved, can_be_endpoint};

use super::super::{name::LowerName, wire::Stored};

/// Maximum length of a chain of aliases.
const ALIASES: usize = 16;

/// The addresses of one family.
pub struct Answer {
    addresses: Vec<IpAddr>,
    ttl: Duration,
    /// The reason why an address was left out.
    refused: Option<String>,
}

/// Reads the addresses of a name from an answer.
pub fn answer(name: &LowerName, stored: &Stored) -> Result<Answer, String> {
    match stored.code() {
        ResponseCode::NoError | ResponseCode::NXDomain => {}
        code => return Err(format!("the resolvers answer {code}")),
    }
    let message = Message::from_vec(stored.bytes()).map_err(|error| error.to_string())?;
    let mut owner = name.to_name();
    let mut ttl = u32::MAX;
    for _ in 0..ALIASES {
        let alias = message
            .answers
            .iter()
            .find_map(|record| match &record.data {
                RData::CNAME(to) if record.name == owner => Some((to.0.clone(), record.ttl)),
                _ => None,
            });
        let Some((to, of_alias)) = alias else { break };
        owner = to;
        ttl = ttl.min(of_alias);
    }
    let mut found = BTreeSet::new();
    let mut refused = None;
    let records = message.answers.iter().filter(|record| record.name == owner);
    for record in records {
        let address: IpAddr = match &record.data {
            RData::A(address) => address.0.into(),
            RData::AAAA(address) => IpAddr::from(address.0).to_canonical(),
            _ => continue,
        };
        ttl = ttl.min(record.ttl);
        let kind = match can_be_endpoint(address) {
            Ok(()) => {
                found.insert(address);
                continue;
            }
            Err(kind) => kind,
        };
        refused = Some(format!(
            "{address}, which resolvers give, is {kind}, which cannot be an endpoint's"
        ));
    }
    Ok(Answer {
        addresses: found.into_iter().collect(),
        ttl: Duration::from_secs(ttl.into()),
        refused,
    })
}

/// Returns the addresses after a lookup, and the TTL; no TTL if the lookup failed in part.
///
/// If no answer has an address, the known addresses stay. Otherwise a family without an answer keeps its known addresses.
pub fn next(
    known: &Arc<[IpAddr]>,
    answers: [Result<Answer, String>; 2],
) -> (Resolved, Option<Duration>) {
    let (mut new, mut kept) = (Vec::new(), Vec::new());
    let (mut ttl, mut failed, mut refused) = (Duration::MAX, None, None);
    for (answer, v4) in answers.into_iter().zip([true, false]) {
        match answer {
            Ok(answer) => {
                if !answer.addresses.is_empty() {
                    ttl = ttl.min(answer.ttl);
                }
                new.extend(answer.addresses);
                refused = refused.or(answer.refused);
            }
            Err(error) => {
                kept.extend(known.iter().filter(|address| address.is_ipv4() == v4));
                failed = failed.or(Some(error));
            }
        }
    }
    let last = if known.is_empty() {
        "nothing is known of it, so it has no endpoints"
    } else {
        "its last addresses stay endpoints"
    };
    if new.is_empty() {
        let nothing = || "resolvers know no address of it".to_owned();
        let why = failed.or(refused).unwrap_or_else(nothing);
        let resolved = Resolved {
            addresses: Arc::clone(known),
            problem: Some(format!("{why}; {last}").into()),
        };
        return (resolved, None);
    }
    // Some resolvers never answer for one family. This is no problem if the other family has addresses.
    let problem = match &failed {
        Some(error) if !kept.is_empty() => Some(format!(
            "{error}; its last addresses of that family stay endpoints"
        )),
        _ => refused,
    };
    let mut addresses = [new, kept].concat();
    addresses.sort_unstable();
    addresses.dedup();
    addresses.truncate(ADDRESSES_MAX);
    let resolved = Resolved {
        addresses: addresses.into(),
        problem: problem.map(Into::into),
    };
    (resolved, failed.is_none().then_some(ttl))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use hickory_proto::rr::{Record, rdata};

    use super::*;
    use crate::wire::types;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn ips(texts: &[&str]) -> Arc<[IpAddr]> {
        texts.iter().map(|text| ip(text)).collect()
    }

    type Answered = Result<Answer, String>;

    #[expect(clippy::unnecessary_wraps, reason = "beside those that failed")]
    fn of(addresses: &[&str], ttl: u64) -> Answered {
        Ok(Answer {
            addresses: ips(addresses).to_vec(),
            ttl: Duration::from_secs(ttl),
            refused: None,
        })
    }

    fn failed() -> Answered {
        Err("no".to_owned())
    }

    #[test]
    fn old_addresses_count_until_there_are_new_ones() {
        let old = ips(&["192.0.2.1", "2001:db8::1"]);
        let none = ips(&[]);
        for (known, answers, addresses, ttl, problem) in [
            (
                &none,
                [of(&["192.0.2.2"], 9), of(&[], 1)],
                &["192.0.2.2"][..],
                Some(9),
                None,
            ),
            (
                &none,
                [of(&["192.0.2.2"], 9), of(&["2001:db8::2"], 7)],
                &["192.0.2.2", "2001:db8::2"],
                Some(7),
                None,
            ),
            (
                &old,
                [of(&["192.0.2.2"], 9), of(&[], 1)],
                &["192.0.2.2"],
                Some(9),
                None,
            ),
            // A family of which nothing is heard stays.
            (
                &old,
                [of(&["192.0.2.2"], 9), failed()],
                &["192.0.2.2", "2001:db8::1"],
                None,
                Some("no; its last addresses of that family stay endpoints"),
            ),
            (
                &none,
                [of(&["192.0.2.2"], 9), failed()],
                &["192.0.2.2"],
                None,
                None,
            ),
            (
                &old,
                [of(&[], 9), failed()],
                &["192.0.2.1", "2001:db8::1"],
                None,
                Some("no; its last addresses stay endpoints"),
            ),
            (
                &old,
                [failed(), failed()],
                &["192.0.2.1", "2001:db8::1"],
                None,
                Some("no; its last addresses stay endpoints"),
            ),
            (
                &old,
                [of(&[], 9), of(&[], 9)],
                &["192.0.2.1", "2001:db8::1"],
                None,
                Some("resolvers know no address of it; its last addresses stay endpoints"),
            ),
            (
                &none,
                [of(&[], 9), failed()],
                &[],
                None,
                Some("no; nothing is known of it, so it has no endpoints"),
            ),
        ] {
            let (resolved, found_ttl) = next(known, answers);
            assert_eq!(resolved.addresses, ips(addresses));
            assert_eq!(resolved.problem.as_deref(), problem, "{addresses:?}");
            assert_eq!(found_ttl, ttl.map(Duration::from_secs), "{addresses:?}");
        }
    }

    fn stored(name: &str, records: &[(&str, u32, RData)]) -> Stored {
        let name = LowerName::parse(name).unwrap();
        let mut message = Message::response(0, hickory_proto::op::OpCode::Query);
        message.add_query(hickory_proto::op::Query::query(
            name.to_name(),
            hickory_proto::rr::RecordType::A,
        ));
        for (owner, ttl, data) in records {
            let owner = LowerName::parse(owner).unwrap().to_name();
            message.add_answer(Record::from_rdata(owner, *ttl, data.clone()));
        }
        Stored::read(&message.to_vec().unwrap(), &name, types::A, false).unwrap()
    }

    #[test]
    fn an_answer_is_read_along_its_aliases() {
        let alias = |to: &str| RData::CNAME(rdata::CNAME(LowerName::parse(to).unwrap().to_name()));
        let a = |last| RData::A(rdata::A::new(192, 0, 2, last));
        let v6 = RData::AAAA(rdata::AAAA(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)));
        let name = LowerName::parse("db.example.com").unwrap();
        let answered = stored(
            "db.example.com",
            &[
                ("b.example.net", 60, a(2)),
                ("db.example.com", 300, alias("A.example.net")),
                ("a.example.net", 20, alias("b.example.net")),
                ("b.example.net", 90, a(1)),
                ("b.example.net", 90, v6),
                ("other.example.net", 1, a(66)),
            ],
        );
        let found = answer(&name, &answered).unwrap();
        let addresses = ["192.0.2.1", "192.0.2.2", "2001:db8::1"];
        assert_eq!(found.addresses, *ips(&addresses));
        assert_eq!(found.ttl, Duration::from_secs(20));
        // Names that lead round end.
        let round = stored(
            "db.example.com",
            &[
                ("db.example.com", 60, alias("a.example.com")),
                ("a.example.com", 60, alias("db.example.com")),
            ],
        );
        assert!(answer(&name, &round).unwrap().addresses.is_empty());
        // A server must not lead the node to addresses that only the node may reach.
        let metadata = RData::A(rdata::A::new(169, 254, 169, 254));
        let found = stored("db.example.com", &[("db.example.com", 60, metadata)]);
        let found = answer(&name, &found).unwrap();
        assert!(found.addresses.is_empty());
        let (resolved, _) = next(&ips(&[]), [Ok(found), of(&[], 1)]);
        let problem = resolved.problem.unwrap();
        assert!(problem.contains("a link-local address"), "{problem}");
        assert!(problem.ends_with("it has no endpoints"), "{problem}");
        // A server must not lead connections round either.
        let vip = RData::A(rdata::A::new(240, 240, 1, 2));
        let found = stored("db.example.com", &[("db.example.com", 60, vip)]);
        assert!(answer(&name, &found).unwrap().addresses.is_empty());
    }
}
