//! The ways of a packet: whether it can go to an endpoint, by the kernel's routes.

use std::net::SocketAddr;

use anyhow::Context as _;
use dataplane_common::{
    Reason,
    first::{self, Way},
    packet::Iface,
    tables::Pool,
};
use kernel::{packet::PacketWays, tables::Tables};

use super::{
    Destination, decision,
    explanation::{Choice, Explanation, share},
};

/// Maximum number of endpoints that an explanation names one by one.
const NAMED: usize = 10;

/// The packet to explain.
pub struct Packet<'a> {
    pub iface: &'a str,
    pub source: SocketAddr,
    pub to: Destination,
    /// Its length in bytes, from the IP header on.
    pub length: usize,
}

/// The program that finds ways, and the interface at which the packet arrives.
pub struct Place<'a> {
    pub ways: PacketWays,
    pub packet: &'a Packet<'a>,
    pub ifindex: u32,
    pub iface: Iface,
    /// Whether it accepts the packet's source as that of a new flow.
    pub begins: bool,
    /// Whether new flows go through the stack.
    pub through_stack: bool,
}

impl Place<'_> {
    /// Returns the way of the packet to a destination. `None`: to the programs, it is no packet of TCP or UDP.
    pub fn way(&self, to: SocketAddr) -> anyhow::Result<Option<Way>> {
        let Packet {
            source,
            to: Destination { protocol, .. },
            length,
            ..
        } = *self.packet;
        let way = self.ways.of(self.ifindex, source, to, protocol, length);
        way.with_context(|| format!("cannot find the way from {source} to {to}"))
    }

    /// Refuses the packet of a known flow if it cannot go to its other end.
    pub fn follow(
        &self,
        to: SocketAddr,
        new_source: bool,
        told: &mut Explanation,
    ) -> anyhow::Result<()> {
        if let Some((text, reason)) = self.obstacle(to, new_source)? {
            told.steps.push(text);
            drop_packet(told, reason);
        }
        Ok(())
    }

    /// Leaves out endpoints whose interfaces have no programs yet: the programs try others of the pool.
    pub fn skip_unready(
        &self,
        tables: &Tables,
        pool: &Pool,
        told: &mut Explanation,
    ) -> anyhow::Result<()> {
        let chosen = told.endpoints.len();
        told.endpoints = self.ready(std::mem::take(&mut told.endpoints))?;
        let unready = chosen - told.endpoints.len();
        if unready == 0 {
            return Ok(());
        }
        told.steps.push(format!(
            "the interfaces towards {unready} of these endpoints have no programs yet: another endpoint is chosen"
        ));
        // The programs look at the whole pool, also for a client with session affinity.
        told.endpoints = self.ready(decision::choices(tables, pool.block))?;
        share(&mut told.endpoints);
        if told.endpoints.is_empty() {
            told.steps.push(Reason::NoRoute.text().to_owned());
            drop_packet(told, Reason::NoRoute);
        }
        Ok(())
    }

    /// Returns the endpoints whose interfaces have programs.
    pub fn ready(&self, choices: Vec<Choice>) -> anyhow::Result<Vec<Choice>> {
        let mut ready = Vec::new();
        for choice in choices {
            let way = match choice.endpoint.parse() {
                Ok(endpoint) => self.way(endpoint)?,
                // A backend of a route without endpoints has no address.
                Err(_) => None,
            };
            if way.is_none_or(|way| way.answer != first::UNREADY) {
                ready.push(choice);
            }
        }
        Ok(ready)
    }

    /// Says to which endpoints the packet cannot go, and refuses it if there is no other.
    pub fn reach(&self, masquerade: bool, told: &mut Explanation) -> anyhow::Result<()> {
        let mut found = Vec::new();
        for choice in &told.endpoints {
            let Ok(endpoint) = choice.endpoint.parse::<SocketAddr>() else {
                continue;
            };
            let new_source = masquerade || endpoint.ip() == self.packet.source.ip();
            let obstacle = self.obstacle(endpoint, new_source)?;
            found.extend(obstacle.map(|(text, reason)| (format!("to {endpoint}: {text}"), reason)));
        }
        let Some((_, first)) = found.first() else {
            return Ok(());
        };
        let (reason, stopped) = (*first, found.len());
        let named = found.into_iter().take(NAMED).map(|(text, _)| text);
        told.steps.extend(named);
        if stopped > NAMED {
            told.steps.push(format!(
                "the packet cannot go to {} more endpoints",
                stopped - NAMED
            ));
        }
        if stopped == told.endpoints.len() {
            drop_packet(told, reason);
        }
        Ok(())
    }

    /// Returns why the packet cannot go to a destination, with the MTU if it is too long.
    fn obstacle(
        &self,
        to: SocketAddr,
        new_source: bool,
    ) -> anyhow::Result<Option<(String, Reason)>> {
        let Some(way) = self.way(to)? else {
            return Ok(None);
        };
        // The program masquerades no packet to the node itself.
        let new_source = new_source && way.answer != first::LOCAL;
        let obstacle = if self.through_stack {
            first::obstacle_in_stack(way.answer, way.mtu, new_source)
        } else {
            first::obstacle(way.answer, way.mtu, new_source)
        };
        Ok(match obstacle {
            Reason::Translated => None,
            Reason::TooBig => {
                let text = Reason::TooBig.text();
                Some((format!("{text} ({} bytes)", way.mtu), Reason::TooBig))
            }
            reason => Some((reason.text().to_owned(), reason)),
        })
    }
}

/// Says that the packet is refused for a reason that a step has explained.
pub fn drop_packet(told: &mut Explanation, reason: Reason) {
    told.endpoints.clear();
    told.verdict = "refused";
    told.reason = reason.word();
}
