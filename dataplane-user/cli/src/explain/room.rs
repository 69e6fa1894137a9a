//! The ports and the room of a new flow: whether the tables of flows take it.

use std::net::SocketAddr;

use anyhow::Context as _;
use dataplane_common::{
    Addr, Port, Protocol, Reason, decide, first,
    packet::{FlowKey, PortKey},
    tables::{FrontendKey, Pool},
};

use super::{
    decision,
    explanation::{Choice, Explanation, share},
    live::Live,
    ways::{Place, drop_packet},
};

/// How many flows the programs try to evict for a new one.
const EVICTIONS: i32 = 3;

/// A flow that a packet begins.
pub struct NewFlow<'a> {
    pub live: &'a Live<'a>,
    pub place: &'a Place<'a>,
    pub key: &'a FlowKey,
    /// Whether the endpoint has to see an address of the node's.
    pub masquerade: bool,
    /// `None`: the destination itself is the endpoint.
    pub pool: Option<&'a Pool>,
}

/// The tables' answer for the flow to an endpoint.
struct Entry {
    /// `None`: the tables take it.
    refusal: Option<Reason>,
    is_masqueraded: bool,
}

impl NewFlow<'_> {
    /// Explains which client address the endpoint sees.
    pub fn seen_as(&self, told: &mut Explanation) -> anyhow::Result<()> {
        let hairpin = told.endpoints.iter().any(|choice| {
            let endpoint = choice.endpoint.parse::<SocketAddr>();
            endpoint.is_ok_and(|endpoint| endpoint.ip() == self.key.src.ip())
        });
        if !self.masquerade && !hairpin {
            told.steps
                .push("the endpoint sees the client's own address".to_owned());
            return Ok(());
        }
        let mut ways = Vec::new();
        for (index, iface) in self.live.packet.ifaces()? {
            let slot = if self.key.src.is_v4() {
                iface.masquerade_v4
            } else {
                iface.masquerade_v6
            };
            if let Some(addr) = self.live.packet.node_addr(slot) {
                ways.push(format!("{addr} by {}", kernel::tc::name(index)));
            }
        }
        if self.masquerade {
            told.steps.push(format!(
                "the endpoint sees the address of the interface towards it ({}), and the client's own \
                 port if that is free; an endpoint on the node itself sees the client's own address",
                ways.join(", ")
            ));
        } else {
            told.steps.push(format!(
                "an endpoint that reaches itself sees the address of the interface towards it ({})",
                ways.join(", ")
            ));
        }
        Ok(())
    }

    /// Says to which endpoints the packet cannot go and the flow cannot be entered, and refuses the packet if there is no
    /// other.
    pub fn enter(&self, told: &mut Explanation) -> anyhow::Result<()> {
        self.place.reach(self.masquerade, told)?;
        if told.verdict != "translated" || told.endpoints.is_empty() {
            return Ok(());
        }
        let chosen = std::mem::take(&mut told.endpoints);
        let mut judged = self.judge(chosen)?;
        if count(&judged, Reason::PortsExhausted) == judged.len() {
            let Some(pool) = self.pool else {
                told.steps.push(Reason::PortTaken.text().to_owned());
                drop_packet(told, Reason::PortTaken);
                return Ok(());
            };
            // The programs look at the whole pool, also for a client with session affinity.
            let all = decision::choices(self.live.tables, pool.block);
            judged = self.judge(self.place.ready(all)?)?;
            told.reason = Reason::Translated.word();
        }
        for reason in [
            Reason::NoNodeAddress,
            Reason::PortsExhausted,
            Reason::ConntrackFull,
        ] {
            let count = count(&judged, reason);
            if count > 0 {
                let step = format!("to {count} of these endpoints: {}", reason.text());
                told.steps.push(step);
            }
        }
        let refusals = judged.iter().filter_map(|(_, entry)| entry.refusal);
        let refusals: Vec<Reason> = refusals.collect();
        if refusals.len() < judged.len() {
            self.name_reason(&judged, told);
            judged.retain(|(_, entry)| entry.refusal != Some(Reason::PortsExhausted));
            told.endpoints = judged.into_iter().map(|(choice, _)| choice).collect();
            if refusals.contains(&Reason::PortsExhausted) {
                share(&mut told.endpoints);
            }
            return Ok(());
        }
        // Another endpoint is tried only if this one has no free port.
        let other = refusals.iter().find(|of| **of != Reason::PortsExhausted);
        match other {
            Some(reason) => drop_packet(told, *reason),
            None => self.evict(judged, told),
        }
        Ok(())
    }

    /// Sets the reason by which the programs count the flow.
    fn name_reason(&self, judged: &[(Choice, Entry)], told: &mut Explanation) {
        let mut entered = judged.iter().filter(|(_, entry)| entry.refusal.is_none());
        let is_masqueraded = if self.masquerade {
            entered.any(|(_, entry)| entry.is_masqueraded)
        } else {
            entered.all(|(_, entry)| entry.is_masqueraded)
        };
        if is_masqueraded {
            told.reason = Reason::Masqueraded.word();
        }
    }

    /// Refuses the packet, unless the programs can evict a flow for its port.
    fn evict(&self, judged: Vec<(Choice, Entry)>, told: &mut Explanation) {
        let mut most: f64 = 0.0;
        for (choice, entry) in judged {
            let Some(endpoint) = socket(&choice).filter(|_| entry.is_masqueraded) else {
                continue;
            };
            let probability = self.live.conntrack.evicts_port(&self.port_key(endpoint));
            if probability > 0.0 {
                most = most.max(probability);
                told.endpoints.push(choice);
            }
        }
        if told.endpoints.is_empty() {
            drop_packet(told, Reason::PortsExhausted);
            return;
        }
        if !self.live.conntrack.has_room(self.key) {
            told.steps.push(Reason::ConntrackFull.text().to_owned());
            drop_packet(told, Reason::ConntrackFull);
            return;
        }
        told.reason = Reason::Masqueraded.word();
        told.steps.push(format!(
            "flows there may be evicted: with a probability of {:.0} % the packet gets a port of one of them",
            (1.0 - (1.0 - most).powi(EVICTIONS)) * 100.0
        ));
        share(&mut told.endpoints);
    }

    fn judge(&self, choices: Vec<Choice>) -> anyhow::Result<Vec<(Choice, Entry)>> {
        let judged = choices.into_iter().map(|choice| {
            let entry = match socket(&choice) {
                Some(endpoint) => self.entry(endpoint)?,
                // A backend of a route without endpoints has no address.
                None => Entry {
                    refusal: None,
                    is_masqueraded: false,
                },
            };
            anyhow::Ok((choice, entry))
        });
        judged.collect()
    }

    /// Takes the steps of `enter.rs` of the programs.
    fn entry(&self, endpoint: SocketAddr) -> anyhow::Result<Entry> {
        let way = self.place.way(endpoint)?;
        let is_local = way.is_some_and(|way| way.answer == first::LOCAL);
        let is_itself = endpoint.ip() == self.place.packet.source.ip();
        let is_masqueraded = !is_local && (self.masquerade || is_itself);
        let mut refusal = if is_masqueraded {
            self.masqueraded(endpoint)?
        } else {
            self.as_client(endpoint)
        };
        if refusal.is_none() && !self.live.conntrack.has_room(self.key) {
            refusal = Some(Reason::ConntrackFull);
        }
        Ok(Entry {
            refusal,
            is_masqueraded,
        })
    }

    /// Looks for an address and a port of the node's.
    fn masqueraded(&self, endpoint: SocketAddr) -> anyhow::Result<Option<Reason>> {
        let live = self.live;
        let by = kernel::interfaces::leaves_by(endpoint.ip());
        let by = by.with_context(|| format!("cannot look up the route to {endpoint}"))?;
        let iface = by.map(|index| live.packet.iface(index)).transpose()?;
        let index = iface.flatten().map(|iface| {
            if endpoint.is_ipv4() {
                iface.masquerade_v4
            } else {
                iface.masquerade_v6
            }
        });
        let addr = index.and_then(|index| live.packet.node_addr(index));
        if index.is_some() && addr.is_none() {
            return Ok(Some(Reason::NoNodeAddress));
        }
        let is_in_use = |port| self.is_services(addr, endpoint.is_ipv4(), port);
        let key = self.port_key(endpoint);
        let is_free = live.conntrack.has_free_port(&key, is_in_use);
        Ok((!is_free).then_some(Reason::PortsExhausted))
    }

    /// Looks for a port of the client's, and a slot for the replies to it.
    fn as_client(&self, endpoint: SocketAddr) -> Option<Reason> {
        let (key, conntrack) = (self.key, self.live.conntrack);
        let mut reply = FlowKey::new(
            endpoint.ip().into(),
            Port::new(endpoint.port()),
            key.src,
            key.src_port,
            key.protocol,
        );
        let Some(port) = conntrack.client_port(&reply) else {
            return Some(Reason::PortsExhausted);
        };
        reply.dst_port = port;
        (!conntrack.has_slot(&reply)).then_some(Reason::ConntrackFull)
    }

    /// Whether a service has a port of the node's, by UDP: no flow gets this port.
    fn is_services(&self, addr: Option<Addr>, v4: bool, port: Port) -> bool {
        let protocol = self.key.protocol;
        let has = |key| !decide::Tables::frontend(self.live.tables, &key).is_none();
        protocol != Protocol::TCP
            && (has(FrontendKey::node_port(v4, port, protocol))
                || addr.is_some_and(|addr| has(FrontendKey::new(addr, port, protocol))))
    }

    fn port_key(&self, endpoint: SocketAddr) -> PortKey {
        PortKey::new(
            endpoint.ip().into(),
            Port::new(endpoint.port()),
            Port::ANY,
            self.key.protocol,
        )
    }
}

fn count(judged: &[(Choice, Entry)], reason: Reason) -> usize {
    let refused = judged.iter().filter(|(_, of)| of.refusal == Some(reason));
    refused.count()
}

fn socket(choice: &Choice) -> Option<SocketAddr> {
    choice.endpoint.parse().ok()
}
