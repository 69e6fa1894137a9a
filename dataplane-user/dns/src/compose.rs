//! Answers with records of several types, put together record by record.

use std::{
    collections::HashSet,
    net::IpAddr,
    sync::atomic::{AtomicUsize, Ordering},
};

use hickory_proto::{
    op::{Message, OpCode, Query, ResponseCode},
    rr::{
        Name, RData, Record, RecordType,
        rdata::{A, AAAA, CNAME, NS, PTR, SOA, SRV, TXT},
    },
};
use model::{NamedProtocol, Published, PublishedPort, Service};

use super::{
    name::LowerName,
    wire::{Stored, types},
    zone::{Meaning, SCHEMA, Zone},
};

/// Number of seconds for which a client may cache a negative answer.
const NEGATIVE: u32 = 5;
/// The priority and weight of SRV records, which express no preference.
const PRIORITY: u16 = 0;
const WEIGHT: u16 = 100;

/// The maximum number of a service's endpoint addresses and ports in one answer. No message has room for more: an
/// address takes 16 of the 65 535 bytes, and an SRV record takes more.
const MOST: usize = 4096;
/// The maximum number of bytes of the records of type SRV and their addresses: the rest of a message is the question's.
const SRV_ROOM: usize = 64_000;

/// The records of a name.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The records that the question asks for.
    pub answers: Vec<Record>,
    /// Addresses of the names in them.
    pub additional: Vec<Record>,
    /// The zone whose SOA record a negative answer has; none: the cluster's.
    pub apex: Option<LowerName>,
}

/// The records of one type that a name has, whose meaning is known. A name that does not exist has none. No record is twice
/// in the answer (RFC 2181, 5).
pub fn records(zone: &Zone, owner: &LowerName, meaning: &Meaning, of_type: u16) -> Found {
    let ttl = zone.ttl(meaning);
    let mut found = Found {
        apex: match meaning {
            Meaning::Host(..) => Some(owner.clone()),
            // `in-addr.arpa` or `ip6.arpa`.
            Meaning::Pointer(_) => owner.last(2),
            _ => None,
        },
        ..Found::default()
    };
    let wants = |of: u16| of_type == of || of_type == types::ANY;
    let record = |data: RData| Record::from_rdata(owner.to_name(), ttl, data);
    match meaning {
        Meaning::Schema if wants(types::TXT) => {
            let text = TXT::new(vec![SCHEMA.to_owned()]);
            found.answers.push(record(RData::TXT(text)));
        }
        Meaning::Apex(server) => {
            if wants(types::SOA) {
                found.answers.push(soa(&zone.domain));
            }
            if wants(types::NS) {
                let name = server.and_then(|server| zone.of_service(server));
                let name = name.map_or_else(|| below(&zone.domain, SERVER), |name| name.to_name());
                let ips = server.map_or(&[][..], |server| server.named_ips());
                found.additional = ips
                    .iter()
                    .map(|ip| Record::from_rdata(name.clone(), ttl, address(*ip)))
                    .collect();
                found.answers.push(record(RData::NS(NS(name))));
            }
        }
        Meaning::Alias(_, to) => {
            if let Ok(to) = LowerName::parse(to) {
                found
                    .answers
                    .push(record(RData::CNAME(CNAME(to.to_name()))));
            }
        }
        Meaning::Pointer(addr) if wants(types::PTR) => {
            let names = pointers(zone, *addr).into_iter();
            found.answers = names
                .map(|name| record(RData::PTR(PTR(name.to_name()))))
                .collect();
        }
        _ if of_type == types::SRV => {
            let mut targets = targets(zone, meaning);
            targets.sort_unstable_by(|a, b| (a.0.bytes(), a.1).cmp(&(b.0.bytes(), b.1)));
            let (mut last, mut room) = (None, SRV_ROOM);
            for (target, number, addresses) in targets {
                // The name is in the record and before each address; 10 bytes are type, class, TTL and length.
                let length = target.bytes().len();
                let takes = 18 + length + addresses.len() * (26 + length);
                if takes > room {
                    break;
                }
                room -= takes;
                let name = target.to_name();
                if last.as_ref() != Some(&(target.clone(), number)) {
                    let srv = SRV::new(PRIORITY, WEIGHT, number, name.clone());
                    found.answers.push(record(RData::SRV(srv)));
                }
                let more = addresses
                    .into_iter()
                    .map(|ip| Record::from_rdata(name.clone(), ttl, address(ip)));
                found.additional.extend(more);
                last = Some((target, number));
            }
            let mut seen = HashSet::new();
            found
                .additional
                .retain(|of| seen.insert((of.name.clone(), of.data.clone())));
        }
        meaning => {
            let fits = |addr: &IpAddr| wants(family(*addr));
            let addresses = addresses(meaning, of_type).into_iter().filter(fits);
            found
                .answers
                .extend(addresses.map(|addr| record(address(addr))));
        }
    }
    found
}

/// The addresses of a name, for a question of this type: at most [`MOST`] of a service's endpoints, and others each time.
pub fn addresses(meaning: &Meaning, of_type: u16) -> Vec<IpAddr> {
    match meaning {
        Meaning::Service(service) => service.named_ips().to_vec(),
        Meaning::Headless(service) => {
            let all = service.records.published();
            let (v4, v6) = all.split_at(all.partition_point(|of| of.addr.is_ipv4()));
            let all = match of_type {
                types::A => v4,
                types::AAAA => v6,
                _ => all,
            };
            let skipped = match all.len() {
                0..=MOST => 0,
                count => NEXT.fetch_add(MOST, Ordering::Relaxed) % count,
            };
            let (before, after) = all.split_at(skipped);
            once_each(after.iter().chain(before).take(MOST))
        }
        Meaning::Endpoints(_, endpoints) => once_each(endpoints.iter().copied()),
        Meaning::Pod(addr) => vec![*addr],
        Meaning::Host(_, host) => host.vips.to_vec(),
        _ => Vec::new(),
    }
}

/// The first endpoint of the next answer, for services with too many endpoints for one answer.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// The addresses of endpoints that are sorted by them.
fn once_each<'a>(endpoints: impl Iterator<Item = &'a Published>) -> Vec<IpAddr> {
    let mut addresses: Vec<_> = endpoints.map(|endpoint| endpoint.addr).collect();
    addresses.dedup();
    addresses
}

/// The type of a record with an address.
pub fn family(addr: IpAddr) -> u16 {
    match addr {
        IpAddr::V4(_) => types::A,
        IpAddr::V6(_) => types::AAAA,
    }
}

fn address(addr: IpAddr) -> RData {
    match addr {
        IpAddr::V4(v4) => RData::A(A(v4)),
        IpAddr::V6(v6) => RData::AAAA(AAAA(v6)),
    }
}

/// The names that an address leads to: those of the services with this cluster IP, or else of endpoints.
fn pointers(zone: &Zone, addr: IpAddr) -> Vec<LowerName> {
    let services = || zone.names.of_address(addr);
    let of_ip = services().filter(|service| service.named_ips().contains(&addr));
    let mut names: Vec<_> = of_ip
        .filter_map(|service| zone.of_service(service))
        .collect();
    if names.is_empty() {
        let endpoints = services().flat_map(|service| {
            let all = service.records.published();
            let (from, to) = (
                all.partition_point(|e| e.addr < addr),
                all.partition_point(|e| e.addr <= addr),
            );
            all[from..to]
                .iter()
                .map(move |endpoint| (service, endpoint))
        });
        names.extend(endpoints.filter_map(|(service, e)| zone.of_endpoint(service, e)));
    }
    names.sort_unstable_by(|a, b| a.bytes().cmp(b.bytes()));
    names.dedup();
    names
}

/// Returns the targets of SRV records: names of services and endpoints, their port numbers, and the names' addresses. A
/// name of a service or an endpoint has all ports, also unnamed ones, because peers of a database query them.
fn targets(zone: &Zone, meaning: &Meaning) -> Vec<(LowerName, u16, Vec<IpAddr>)> {
    let of_endpoints = |service: &Service,
                        endpoints: &mut dyn Iterator<Item = &Published>,
                        fits: &dyn Fn(&str, NamedProtocol) -> bool| {
        let mut targets = Vec::new();
        for endpoint in endpoints {
            if targets.len() >= MOST {
                break;
            }
            let ports = endpoint
                .ports
                .iter()
                .filter(|port| fits(&port.name, port.protocol));
            let name = zone.of_endpoint(service, endpoint);
            let target =
                |port: &PublishedPort| Some((name.clone()?, port.number, vec![endpoint.addr]));
            targets.extend(ports.filter_map(target).take(MOST));
        }
        targets
    };
    let of_service = |service: &Service, fits: &dyn Fn(&str, NamedProtocol) -> bool| {
        if service.records.is_headless() {
            return of_endpoints(service, &mut service.records.published().iter(), fits);
        }
        let ports = service
            .named_ports()
            .filter(|(name, protocol, _)| fits(name, *protocol));
        let own = zone.of_service(service);
        let target = |(_, _, number)| Some((own.clone()?, number, service.named_ips().to_vec()));
        ports.filter_map(target).collect()
    };
    match meaning {
        Meaning::Service(service) | Meaning::Headless(service) => of_service(service, &|_, _| true),
        Meaning::Endpoints(service, endpoints) => {
            of_endpoints(service, &mut endpoints.iter().copied(), &|_, _| true)
        }
        Meaning::Port(service, port, protocol) => of_service(service, &|name, of| {
            of == *protocol && name.eq_ignore_ascii_case(port)
        }),
        _ => Vec::new(),
    }
}

/// The name of the server of a zone, below the zone.
const SERVER: &[&[u8]] = &[b"ns", b"dns"];

fn below(domain: &LowerName, labels: &[&[u8]]) -> Name {
    let name = LowerName::of_labels(labels.iter().copied().chain(domain.labels()));
    name.map_or_else(|_| Name::root(), |name| name.to_name())
}

/// The record that begins a zone: it limits how long clients cache a negative answer.
fn soa(domain: &LowerName) -> Record {
    let (server, person) = (below(domain, SERVER), below(domain, &[b"hostmaster"]));
    let soa = SOA::new(server, person, 1, 7200, 1800, 86_400, NEGATIVE);
    Record::from_rdata(domain.to_name(), NEGATIVE, RData::SOA(soa))
}

/// An answer of our own to a question.
pub fn own(
    zone: &Zone,
    (name, of_type): (&LowerName, u16),
    found: Found,
    exists: bool,
) -> Option<Stored> {
    let mut message = to_question(name, of_type);
    if !exists {
        message.metadata.response_code = ResponseCode::NXDomain;
    }
    let is_answer = |record: &Record| {
        record.record_type() != RecordType::CNAME || [types::CNAME, types::ANY].contains(&of_type)
    };
    if !found.answers.iter().any(is_answer) {
        message.add_authority(soa(found.apex.as_ref().unwrap_or(&zone.domain)));
    }
    message.add_answers(found.answers);
    message.add_additionals(found.additional);
    let bytes = message.to_vec().ok()?;
    Stored::read(&bytes, name, of_type, true).ok()
}

/// An answer with a code and no record, which no client caches.
pub fn bare((name, of_type): (&LowerName, u16), code: ResponseCode) -> Stored {
    Stored::bare(
        name,
        of_type,
        u8::try_from(u16::from(code)).unwrap_or_default(),
    )
}

/// A response that has only its question.
pub fn to_question(name: &LowerName, of_type: u16) -> Message {
    let mut message = Message::response(0, OpCode::Query);
    message.add_query(Query::query(name.to_name(), RecordType::from(of_type)));
    message
}

/// A record that says that a name is another.
pub fn alias(from: &LowerName, to: &LowerName, ttl: u32) -> Record {
    Record::from_rdata(from.to_name(), ttl, RData::CNAME(CNAME(to.to_name())))
}
