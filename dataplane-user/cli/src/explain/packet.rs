//! Explanation of the packet path's decision about a packet, step by step, from the live tables.

use std::{
    cell::{Cell, RefCell},
    net::SocketAddr,
};

use anyhow::Context as _;
use dataplane_common::{
    Addr, Port, Protocol, Reason, VipWords, decide,
    first::{self, Fact},
    packet::{FlowKey, Iface, SourceKey},
    tables::{Endpoint, Pool},
};
use kernel::{
    conntrack::{Flow, now},
    packet::PacketWays,
};
use nix::net::if_::if_nametoindex;
use terminal::output::duration;

use super::{
    capture::Mesh,
    decision::{self, Recorded, affinity, holds, lookup},
    explanation::{Choice, Explanation},
    live::Live,
    room::NewFlow,
    ways::{Packet, Place, drop_packet},
};

/// Returns the steps that the programs take. `owner` returns the service of a pool, if it is known.
///
/// # Errors
///
/// If the interface does not exist, or a table cannot be read.
pub fn explain(
    live: &Live<'_>,
    owner: impl Fn(u32) -> Option<String>,
    packet: &Packet<'_>,
) -> anyhow::Result<Explanation> {
    let index = if_nametoindex(packet.iface)
        .with_context(|| format!("there is no interface `{}` here", packet.iface))?;
    let to = packet.to;
    let mut told = Explanation::of(packet.source.to_string(), to.to_string());
    let Some(iface) = live
        .packet
        .iface(index)?
        .filter(|i| i.flags & Iface::ATTACHED != 0)
    else {
        told.steps.push(format!(
            "dataplane has no programs on {}: the packet is left alone",
            packet.iface
        ));
        return Ok(told);
    };
    let side = if iface.flags & Iface::LOCAL != 0 {
        "a pod's side"
    } else {
        "an uplink"
    };
    told.steps.push(format!(
        "dataplane has programs on {}, as {side}",
        packet.iface
    ));
    if live.packet.is_through_stack() {
        let because = live.stack_because.as_deref();
        told.steps.push(format!(
            "packets of services go through the stack{}: netfilter, routing rules and IPsec may refuse them",
            because.map_or_else(String::new, |why| format!(" because of {why}"))
        ));
    }

    let mut place = Place {
        ways: PacketWays::open(live.bpffs)
            .context("cannot load the program that finds the packet's routes")?,
        packet,
        ifindex: index,
        iface,
        begins: false,
        through_stack: live.packet.is_through_stack(),
    };
    let Some(way) = place.way(SocketAddr::new(to.addr, to.port))? else {
        told.steps
            .push("the programs leave packets with such addresses alone".to_owned());
        return Ok(told);
    };
    place.begins = way.begins != 0;

    let key = FlowKey::new(
        Addr::from(packet.source.ip()),
        Port::new(packet.source.port()),
        Addr::from(to.addr),
        Port::new(to.port),
        to.protocol,
    );
    if let Some(flow) = live.conntrack.find(&key) {
        known(live, &owner, &flow, &mut told);
        if !flow.is_foreign() {
            place.follow(flow.endpoint(), flow.is_masqueraded(), &mut told)?;
        }
        return Ok(told);
    }
    if let Some(flow) = live.conntrack.find_by_reply(&key) {
        told.steps.push(format!(
            "CONNTRACK has the flow of this reply: client {}, VIP {}, {}, last used {} ago",
            flow.client(),
            flow.vip(),
            flow.state(),
            duration(flow.idle(now()).into())
        ));
        told.verdict = "translated";
        told.reason = Reason::ReplyTranslated.word();
        told.steps.push(format!(
            "its source becomes {}, its destination {}",
            flow.vip(),
            flow.client()
        ));
        place.follow(flow.client(), true, &mut told)?;
        return Ok(told);
    }
    told.steps.push(if to.protocol == Protocol::TCP {
        "CONNTRACK has no flow for the packet: a SYN begins a flow, and other TCP packets are left alone".to_owned()
    } else {
        "CONNTRACK has no flow for the packet: the packet begins a flow".to_owned()
    });
    begin(live, &owner, &place, &key, &mut told)?;
    Ok(told)
}

/// Explains a packet from the client of an existing flow.
fn known(
    live: &Live<'_>,
    owner: &impl Fn(u32) -> Option<String>,
    flow: &Flow,
    told: &mut Explanation,
) {
    told.steps.push(format!(
        "CONNTRACK has the flow: endpoint {}, {}, last used {} ago, kept for {} after its last packet",
        flow.endpoint(),
        flow.state(),
        duration(flow.idle(now()).into()),
        duration(flow.keep(&live.conntrack.timeouts()).into()),
    ));
    let frontend = decide::find_frontend(
        live.tables,
        flow.key.dst,
        flow.key.dst_port,
        flow.key.protocol,
        false,
    );
    told.service = owner(frontend.pool());
    if flow.is_foreign() {
        told.reason = Reason::ForeignFlow.word();
        told.steps.push(Reason::ForeignFlow.text().to_owned());
        return;
    }
    told.steps.push(if flow.is_masqueraded() {
        let node = live.conntrack.node_addr(flow.to.node_addr).map_or_else(
            || "an address that the node no longer has".to_owned(),
            |addr| SocketAddr::new(addr.ip(), flow.to.node_port.host()).to_string(),
        );
        format!("the endpoint sees {node}")
    } else if flow.has_another_port() {
        let seen = SocketAddr::new(flow.key.src.ip(), flow.to.seen_port(&flow.key).host());
        format!(
            "the endpoint sees {seen} and not the client's own port, because another flow from that port reaches the \
             endpoint through another VIP"
        )
    } else {
        "the endpoint sees the client's own address".to_owned()
    });
    told.verdict = "translated";
    told.reason = Reason::Kept.word();
    told.endpoints.push(Choice {
        endpoint: flow.endpoint().to_string(),
        probability: 1.0,
    });
}

/// Explains a packet that does not belong to a service. The egress policy of its workload may refuse it. A direct
/// connection to an endpoint gets another source port if a flow through a VIP from the same port already reaches the
/// endpoint.
fn beside(
    live: &Live<'_>,
    place: &Place<'_>,
    key: &FlowKey,
    told: &mut Explanation,
) -> anyhow::Result<()> {
    let is_tcp = key.protocol == Protocol::TCP;
    let denies = |mesh: &Mesh| !first::admits_itself(mesh, key);
    if is_tcp && live.mesh.is_some_and(denies) {
        refuse(told, Reason::EgressDenied);
        return Ok(());
    }
    let back = FlowKey::new(key.dst, key.dst_port, key.src, key.src_port, key.protocol);
    let rival = live.conntrack.find_by_reply(&back);
    let rival = rival.filter(|flow| {
        let is_live = !flow.is_ended() && !flow.is_foreign();
        is_live && !flow.is_masqueraded() && !flow.is_over(now(), &live.conntrack.timeouts())
    });
    let Some(flow) = rival.filter(|_| is_tcp) else {
        told.steps.push(Reason::NotService.text().to_owned());
        if live.packet.is_bypassed() {
            told.steps.push(
                "its flow bypasses the stack, unless a rule of NAT applies to its first packet (packets.bypass)"
                    .to_owned(),
            );
        }
        return Ok(());
    };
    if !place.begins {
        refuse(told, Reason::SourceForged);
        return Ok(());
    }
    told.steps.push(format!(
        "a flow from the same port reaches this endpoint through {}, {}: the endpoint's replies could belong to \
         either, so the endpoint has to see another port of the client",
        flow.vip(),
        flow.state(),
    ));
    told.verdict = "translated";
    told.reason = Reason::Translated.word();
    told.endpoints.push(Choice {
        endpoint: SocketAddr::new(key.dst.ip(), key.dst_port.host()).to_string(),
        probability: 1.0,
    });
    let new = NewFlow {
        live,
        place,
        key,
        masquerade: false,
        pool: None,
    };
    new.enter(told)
}

/// Explains the first packet of a flow.
fn begin(
    live: &Live<'_>,
    owner: &impl Fn(u32) -> Option<String>,
    place: &Place<'_>,
    key: &FlowKey,
    told: &mut Explanation,
) -> anyhow::Result<()> {
    let recorded = Recorded {
        tables: live.tables,
        filter: Cell::new(VipWords::ALL),
        lookups: RefCell::default(),
    };
    let frontend = decide::find_frontend(&recorded, key.dst, key.dst_port, key.protocol, false);
    let lookups = recorded.lookups.into_inner();
    told.steps
        .extend(lookups.iter().map(|(key, found)| lookup(key, *found)));
    if frontend.is_none() {
        return beside(live, place, key, told);
    }
    if key.src.is_nobody() {
        told.steps.push(format!(
            "no single host has the address {}: the packet is left alone",
            key.src
        ));
        return Ok(());
    }
    let kind = frontend.kind();
    told.kind = Some(kind.word());
    told.service = owner(frontend.pool());
    let mut asked = Asked {
        live,
        place,
        key,
        pool: Pool::default(),
        steps: Vec::new(),
        fault: Cell::new(None),
    };
    let decision = first::decide(&mut asked, frontend);
    let Asked {
        pool, steps, fault, ..
    } = asked;
    if let Some(fault) = fault.into_inner() {
        return Err(fault);
    }
    told.steps.extend(steps);
    let index = decision.pool;
    told.pool = Some(index);
    let without_pool = [Reason::SourceForged, Reason::SourceDenied, Reason::Dangling];
    if without_pool.contains(&decision.reason) {
        refuse(told, decision.reason);
        return Ok(());
    }
    let whose = told.service.as_deref().map_or_else(
        || "a service (name unknown without a running agent)".to_owned(),
        |name| format!("service {name}"),
    );
    told.steps.push(format!(
        "pool {index} of {whose} {}",
        holds(live.tables, pool.block)
    ));
    if decision.reason != Reason::Translated {
        refuse(told, decision.reason);
        return Ok(());
    }
    choose(live, key, &pool, told);
    told.verdict = "translated";
    if let Some(reason) = barred(live, key, &pool, told)? {
        drop_packet(told, reason);
        return Ok(());
    }
    let new = NewFlow {
        live,
        place,
        key,
        masquerade: decision.masquerade,
        pool: Some(&pool),
    };
    new.seen_as(told)?;
    place.skip_unready(live.tables, &pool, told)?;
    new.enter(told)
}

/// Says to which endpoints the packet may not go, by the egress policy of its workload or by IPsec policies, and returns a
/// reason if it may go to no endpoint.
fn barred(
    live: &Live<'_>,
    key: &FlowKey,
    pool: &Pool,
    told: &mut Explanation,
) -> anyhow::Result<Option<Reason>> {
    let mut found = Vec::new();
    for choice in &told.endpoints {
        let Ok(to) = choice.endpoint.parse::<SocketAddr>() else {
            continue;
        };
        let endpoint = Endpoint::new(to.ip().into(), Port::new(to.port()));
        let denies = |mesh: &Mesh| !first::admits_service(mesh, key, pool.block, &endpoint);
        if live.mesh.is_some_and(denies) {
            found.push(Reason::EgressDenied);
        } else if is_protected(live, key, &endpoint.addr)? {
            found.push(Reason::IpsecPolicy);
        }
    }
    for reason in [Reason::EgressDenied, Reason::IpsecPolicy] {
        let count = found.iter().filter(|of| **of == reason).count();
        if count > 0 {
            let step = format!("to {count} of these endpoints: {}", reason.text());
            told.steps.push(step);
        }
    }
    let is_all = found.len() == told.endpoints.len();
    Ok(found.first().copied().filter(|_| is_all))
}

/// Returns whether the programs refuse the flow to an endpoint because of IPsec policies.
fn is_protected(live: &Live<'_>, key: &FlowKey, endpoint: &Addr) -> anyhow::Result<bool> {
    let mut fault = None;
    let mut protection = |src: &Addr, dst: &Addr| {
        let said = live.packet.protection(*src, *dst);
        said.unwrap_or_else(|error| {
            fault = Some(error);
            SourceKey::PROTECTED
        })
    };
    let found = if live.packet.is_through_stack() {
        first::escapes(key, endpoint, protection)
    } else {
        first::is_protected(key, endpoint, |src, dst| {
            protection(src, dst) & SourceKey::PROTECTED != 0
        })
    };
    fault.map_or(Ok(found), |error| Err(error.into()))
}

/// The packet, as the shared decision sees it. Each answer of a table becomes a step.
struct Asked<'a> {
    live: &'a Live<'a>,
    place: &'a Place<'a>,
    key: &'a FlowKey,
    pool: Pool,
    steps: Vec<String>,
    /// A table that could not be read.
    fault: Cell<Option<anyhow::Error>>,
}

impl first::Packet for Asked<'_> {
    fn config(&self) -> u32 {
        self.live.packet.config().flags
    }

    fn is_of_node(&self) -> bool {
        false
    }

    fn has_right_source(&mut self) -> bool {
        self.place.begins
    }

    fn is_by_pods_interface(&self) -> bool {
        self.place.iface.flags & Iface::LOCAL != 0
    }

    fn is_source_in(&self, set: u32) -> bool {
        let found = self.live.packet.sources().contains(set, self.key.src);
        found.unwrap_or_else(|fault| {
            self.fault.set(Some(fault.into()));
            false
        })
    }

    fn read_pool(&mut self, index: u32) -> bool {
        let found = decide::Tables::pool(self.live.tables, index);
        self.pool = found.unwrap_or_default();
        found.is_some()
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn note(&mut self, fact: Fact) {
        let src = self.key.src;
        self.steps.push(match fact {
            Fact::InRanges => format!("loadBalancerSourceRanges contain {src}"),
            Fact::AnyEndpoint => {
                "externalTrafficPolicy is Cluster: the packet may go to any endpoint, and the client is masqueraded".into()
            }
            Fact::LocalForPod => {
                "externalTrafficPolicy is Local, but the client is a pod: the packet may go to any endpoint".into()
            }
            Fact::LocalEndpoint => "externalTrafficPolicy is Local: the packet goes to an endpoint on this node, which \
                                    sees the client's own address"
                .into(),
            Fact::MasqueradeAll => "every client of a cluster IP is masqueraded (packets.masqueradeAll)".into(),
            Fact::PodByInterface => format!("packets that arrive at {} come from pods", self.place.packet.iface),
            Fact::PodByAddress => format!("{src} is a pod's address"),
            Fact::NoPod => format!("{src} is not a pod's address"),
            Fact::Outsider => {
                "the client of a cluster IP is not a pod: it is masqueraded".into()
            }
            Fact::PodsUnknown => {
                "neither packets.podCidrs nor packets.podsByInterface is set: no client counts as a pod".into()
            }
        });
    }
}

/// Adds the endpoints that the programs could choose.
fn choose(live: &Live<'_>, key: &FlowKey, pool: &Pool, told: &mut Explanation) {
    told.reason = Reason::Translated.word();
    if pool.affinity_seconds > 0 {
        let (endpoint, step) = affinity(live.tables, Some(key.src), pool);
        told.steps.push(step);
        if let Some(endpoint) = endpoint {
            told.reason = Reason::Kept.word();
            told.endpoints.push(Choice {
                endpoint: decision::socket(&endpoint),
                probability: 1.0,
            });
            return;
        }
    }
    told.choose(decision::choices(live.tables, pool.block));
}

fn refuse(told: &mut Explanation, reason: Reason) {
    told.verdict = "refused";
    told.reason = reason.word();
    let how = match reason {
        Reason::NoEndpoints | Reason::PortNotServed | Reason::PortTaken | Reason::EgressDenied => {
            ", by a TCP reset or an ICMP port unreachable"
        }
        _ => "",
    };
    told.steps.push(format!("{}{how}", reason.text()));
}
