//! Cells of flows (`dataplane_common::cells`), where several CPUs and the agent want the same ones.

use std::{
    collections::HashSet,
    fmt,
    hash::Hash,
    net::IpAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use dataplane::kernel::rig::{Plain, Table};
use dataplane_common::{Addr, Port, Protocol, cells::CellKey, packet::FlowKey};
use dataplane_proof::{campaign::Scene, port_key, reply_key, wire::flags};
use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};

use super::crafted::{NEAR, OUTSIDE, ip, packet, scene, vip};

scenarios! {
    Dataplane:
    many_at_once_leave_whole_flows,
}

/// How many ports each client has: with four kinds of clients, twice as many flows as there are cells.
const PORTS: u16 = 64;

/// A client of a service, and where its packets arrive.
#[derive(Clone, Copy)]
struct Client {
    v4: bool,
    /// From outside to a node port: the flow is masqueraded. Else a pod's, to a cluster IP: it is not.
    outside: bool,
    port: u16,
}

impl Client {
    fn any(random: &mut SmallRng) -> Self {
        Self {
            v4: random.random(),
            outside: random.random(),
            port: 20_000 + random.random_range(0..PORTS),
        }
    }

    fn all() -> impl Iterator<Item = Self> {
        let kinds = [(true, true), (true, false), (false, true), (false, false)];
        kinds.into_iter().flat_map(|(v4, outside)| {
            (20_000..20_000 + PORTS).map(move |port| Self { v4, outside, port })
        })
    }

    /// Its address and port, and those that it dials.
    fn ends(self) -> [(IpAddr, u16); 2] {
        let ([a, b], kind) = if self.outside {
            (OUTSIDE, "node")
        } else {
            (NEAR, "cluster")
        };
        [(ip(self.v4, a, b), self.port), vip(self.v4, kind, 13)]
    }

    fn key(self) -> FlowKey {
        let [client, vip] = self.ends();
        FlowKey::new(
            Addr::from(client.0),
            Port::new(client.1),
            Addr::from(vip.0),
            Port::new(vip.1),
            Protocol::TCP,
        )
    }

    fn send(self, scene: &Scene, tcp_flags: u8) -> Result<()> {
        let [client, vip] = self.ends();
        let packet = packet(true, client, vip, tcp_flags);
        let at = if self.outside { "eth0" } else { "veth-near" };
        scene.throw(at, false, &packet.frame())?;
        Ok(())
    }
}

/// Clients begin and end connections on all CPUs at once, and somebody removes entries meanwhile: no entry is there
/// twice or not found, and afterwards every client has a flow again whose halves lead to each other.
fn many_at_once_leave_whole_flows() -> Result<()> {
    scene(|scene| {
        for round in 0..4_u64 {
            fight(scene, round)?;
            is_sound(&scene.rig.forward)?;
            is_sound(&scene.rig.reply)?;
            is_sound(&scene.rig.masquerade)?;
            for client in Client::all() {
                client.send(scene, flags::SYN)?;
                let entry = scene.rig.forward.get(&client.key())?;
                let whole = leads_back(scene, client)?;
                ensure!(whole, "round {round}: {:?}: {entry:?}", client.key());
            }
        }
        scene.forget()?;
        let left = scene.rig.forward.entries()?.len()
            + scene.rig.reply.entries()?.len()
            + scene.rig.masquerade.entries()?.len();
        ensure!(left == 0, "{left} entries are left of none");
        Ok(())
    })
}

fn fight(scene: &Scene, round: u64) -> Result<()> {
    let random = |number: u64| SmallRng::seed_from_u64(round * 100 + number);
    let sending = AtomicBool::new(true);
    thread::scope(|scope| {
        let senders: Vec<_> = (0..3)
            .map(|number| {
                scope.spawn(move || -> Result<()> {
                    let mut random = random(number);
                    for _ in 0..4_000 {
                        let ends = [flags::SYN, flags::SYN, flags::RST, flags::FIN | flags::ACK];
                        let tcp_flags = ends[random.random_range(0..ends.len())];
                        Client::any(&mut random).send(scene, tcp_flags)?;
                    }
                    Ok(())
                })
            })
            .collect();
        let remover = scope.spawn(|| -> Result<()> {
            let mut random = random(3);
            while sending.load(Ordering::Relaxed) {
                remove_some(&scene.rig.forward, &mut random)?;
                remove_some(&scene.rig.reply, &mut random)?;
                remove_some(&scene.rig.masquerade, &mut random)?;
            }
            Ok(())
        });
        let end = |thread: thread::ScopedJoinHandle<'_, Result<()>>| {
            thread
                .join()
                .unwrap_or_else(|_| Err(anyhow!("it panicked")))
        };
        let sent: Vec<_> = senders.into_iter().map(end).collect();
        sending.store(false, Ordering::Relaxed);
        end(remover)?;
        sent.into_iter().collect()
    })
}

fn remove_some<K: CellKey + Plain, V: Plain>(
    table: &Table<K, V>,
    random: &mut SmallRng,
) -> Result<()> {
    for (key, _) in table.entries()? {
        if random.random_range(0..8) == 0 {
            table.remove(&key)?;
        }
    }
    Ok(())
}

/// Every entry is there once, and found.
fn is_sound<K, V>(table: &Table<K, V>) -> Result<()>
where
    K: CellKey + Plain + Eq + Hash + fmt::Debug,
    V: Plain,
{
    let mut seen = HashSet::new();
    for (key, _) in table.entries()? {
        ensure!(
            table.get(&key)?.is_some(),
            "{}: {key:?} is there, and not found",
            table.name()
        );
        ensure!(seen.insert(key), "{}: {key:?} is there twice", table.name());
    }
    ensure!(!seen.is_empty(), "{} is empty", table.name());
    Ok(())
}

/// Whether the client's flow has an entry for replies, which says that it is this client's.
fn leads_back(scene: &Scene, client: Client) -> Result<bool> {
    let key = client.key();
    let entry = scene.rig.forward.get(&key)?.context("no flow")?;
    if entry.node_addr == 0 {
        let reply = scene.rig.reply.get(&reply_key(&key, &entry))?;
        return Ok(
            reply.is_some_and(|reply| (reply.vip, reply.vip_port) == (key.dst, key.dst_port))
        );
    }
    let back = scene.rig.masquerade.get(&port_key(&key, &entry))?;
    Ok(back.is_some_and(|back| {
        (back.client, back.client_port, back.vip, back.vip_port)
            == (key.src, key.src_port, key.dst, key.dst_port)
    }))
}
