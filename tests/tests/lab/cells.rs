//! Cells of flows (`dataplane_common::cells`), when several CPUs and the agent need the same ones.

use std::{
    collections::HashSet,
    net::{IpAddr, Ipv4Addr},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use dataplane_common::{
    Addr, Port, Protocol, Reason,
    cells::{Entry, HEAD, Head, Line as _, Memory as _},
    packet::FlowKey,
};
use dataplane_proof::{
    campaign::Scene,
    wire::{Packet, flags},
};
use kernel::{
    conntrack::Flow,
    rig::{SkbContext, Table},
    tc::Direction,
};
use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};

use super::crafted::{NEAR, OUTSIDE, ip, on, packet, vip};

scenarios! {
    Dataplane:
    many_at_once_leave_whole_flows,
    a_flood_of_answered_datagrams_evicts_no_connection,
    a_flood_that_nobody_answers_evicts_no_connection,
}

/// How many flows there is room for: twice as many cells.
const ROOM: u32 = 128;
/// How many ports each client has: with four kinds of clients, flows for more than all cells. So some are evicted.
const PORTS: u16 = 66;

/// A client of a service, and where its packets arrive.
#[derive(Clone, Copy)]
struct Client {
    v4: bool,
    /// From outside to a node port: the flow is masqueraded. Otherwise from a pod to a cluster IP: it is not.
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
        send(scene, at, &packet)
    }
}

/// Sends a packet. [`Scene::throw`] also reads every counter, before and after: that takes ten times as long.
fn send(scene: &Scene, at: &str, packet: &Packet) -> Result<()> {
    let (ifindex, mac) = scene.world.interface(at);
    let mut frame = packet.frame();
    frame[..6].copy_from_slice(&mac);
    let context = SkbContext::new(ifindex, 0);
    let mut out = vec![0; frame.len() + 256];
    let ran = scene
        .rig
        .run(Direction::Ingress, &context, &frame, &mut out);
    ran.with_context(|| format!("run the program on {} bytes", frame.len()))?;
    Ok(())
}

/// Clients begin and end connections on all CPUs at once, and another thread removes flows meanwhile: each present flow
/// is there once and found from both ends, and so is every client's flow when it then begins a new one. Evicted flows
/// are gone as a whole.
fn many_at_once_leave_whole_flows() -> Result<()> {
    on(Scene::with_flows(ROOM)?, |scene| {
        let mut pushed_out = 0;
        for round in 0..4_u64 {
            fight(scene, round)?;
            is_sound(&scene.rig.conntrack)?;
            let mut all = 0;
            for client in Client::all() {
                client.send(scene, flags::SYN)?;
                let key = client.key();
                let to = scene.rig.conntrack.get(&key);
                let to = to.with_context(|| format!("round {round}: {key:?} has no flow"))?;
                let whole = leads_to_itself(&scene.rig.conntrack, &Flow { key, to });
                ensure!(whole, "round {round}: {key:?}: {to:?}");
                all += 1;
            }
            let left = is_sound(&scene.rig.conntrack)?;
            ensure!(left <= all, "{left} flows of {all} clients");
            pushed_out += all - left;
        }
        ensure!(pushed_out > 0, "there was room for all");
        scene.forget()?;
        is_empty(&scene.rig.conntrack)
    })
}

fn a_flood_of_answered_datagrams_evicts_no_connection() -> Result<()> {
    a_flood_evicts_no_connection(true)
}

fn a_flood_that_nobody_answers_evicts_no_connection() -> Result<()> {
    a_flood_evicts_no_connection(false)
}

/// A pod sends a datagram from each of its ports, and so do many clients outside: twelve times as many as there is room
/// for. These datagrams and SYNs evict no connection of others, which may be quiet; and others still make connections.
/// `DATAPLANE_DATAGRAMS` sets their number.
fn a_flood_evicts_no_connection(is_answered: bool) -> Result<()> {
    const FLOWS: u32 = 2048;
    const ENDPOINT: (&str, [&str; 2]) = ("veth-small", ["10.244.1.12", "fd00:10:244:1::12"]);
    const NUMBERS: [u32; 2] = [1 << 20, 1 << 30];
    // How many packets of each exchange there are.
    let packets = if is_answered { 2 } else { 1 };
    let asked = std::env::var("DATAPLANE_DATAGRAMS").ok();
    let asked = asked.and_then(|count| count.parse().ok());
    let datagrams: u32 = asked.unwrap_or(12 * FLOWS);
    on(Scene::with_flows(FLOWS)?, |scene| {
        let endpoint = ip(true, ENDPOINT.1[0], ENDPOINT.1[1]);
        let exchange =
            |tcp: bool, client: (IpAddr, u16), outside: bool, until: u8| -> Result<FlowKey> {
                let (at, kind) = if outside {
                    ("eth0", "node")
                } else {
                    ("veth-near", "cluster")
                };
                let vip = vip(true, kind, 13);
                let protocol = if tcp { Protocol::TCP } else { Protocol::UDP };
                let key = FlowKey::new(
                    Addr::from(client.0),
                    Port::new(client.1),
                    Addr::from(vip.0),
                    Port::new(vip.1),
                    protocol,
                );
                let [own, other] = NUMBERS;
                let send = |at, from, to, flags, numbers| {
                    let packet = Packet {
                        numbers,
                        ..packet(tcp, from, to, flags)
                    };
                    send(scene, at, &packet)
                };
                send(at, client, vip, flags::SYN, [own, 0])?;
                if until == 1 {
                    return Ok(key);
                }
                // In a full table one in 130 000 finds no slot; callers that need the flow check for it.
                let Some(to) = scene.rig.conntrack.get(&key) else {
                    return Ok(key);
                };
                let seen = match to.node_addr {
                    0 => client,
                    node => (scene.world.node_addr(node).ip(), to.node_port.host()),
                };
                let answer = flags::SYN | flags::ACK;
                send(ENDPOINT.0, (endpoint, 80), seen, answer, [other, own + 1])?;
                if until > 2 {
                    send(at, client, vip, flags::ACK, [own + 1, other + 1])?;
                }
                Ok(key)
            };
        let clients =
            |from: u16| (from..from + 200).map(|port| (ip(true, OUTSIDE[0], OUTSIDE[1]), port));
        let mut live = Vec::new();
        for client in clients(20_000) {
            live.push(exchange(true, client, true, 3)?);
        }
        let there = |live: &[FlowKey]| {
            let gone = live
                .iter()
                .filter(|key| scene.rig.conntrack.get(key).is_none());
            let gone = gone.count();
            ensure!(gone == 0, "{gone} of {} connections are gone", live.len());
            Ok(())
        };
        let before = scene.rig.reasons()?[Reason::FlowPushedOut as usize];
        for nth in 0..datagrams {
            let port = 1024 + u16::try_from(nth % 60_000)?;
            // A client with most of the room pays for its own flows; of many, each has few.
            let outside = nth % 2 == 1;
            let client = if outside {
                Ipv4Addr::new(192, 0, 2, 10 + u8::try_from(nth % 240)?).into()
            } else {
                ip(true, NEAR[0], NEAR[1])
            };
            exchange(nth % 8 < 2, (client, port), outside, packets)?;
        }
        let evicted = scene.rig.reasons()?[Reason::FlowPushedOut as usize] - before;
        println!("{datagrams} datagrams and SYNs, {evicted} flows evicted");
        ensure!(evicted > u64::from(datagrams / 2), "{evicted} were evicted");
        there(&live)?;
        for client in clients(30_000) {
            live.push(exchange(true, client, true, 3)?);
        }
        there(&live)
    })
}

fn fight(scene: &Scene, round: u64) -> Result<()> {
    let random = |number: u64| SmallRng::seed_from_u64(round * 100 + number);
    let sending = AtomicBool::new(true);
    thread::scope(|scope| {
        let senders: Vec<_> = (0..3)
            .map(|number| {
                let sending = &sending;
                scope.spawn(move || -> Result<()> {
                    let mut random = random(number);
                    for sent in 0..4_000 {
                        // On a busy machine the remover would go on alone for a while, and leave nothing.
                        if sent == 3_900 {
                            sending.store(false, Ordering::Relaxed);
                        }
                        let ends = [flags::SYN, flags::SYN, flags::RST, flags::FIN | flags::ACK];
                        let tcp_flags = ends[random.random_range(0..ends.len())];
                        Client::any(&mut random).send(scene, tcp_flags)?;
                    }
                    Ok(())
                })
            })
            .collect();
        let remover = scope.spawn(|| {
            let mut random = random(3);
            while sending.load(Ordering::Relaxed) {
                for (key, _) in scene.rig.conntrack.entries() {
                    if random.random_range(0..8) == 0 {
                        scene.rig.conntrack.remove(&key);
                    }
                }
                // Else hardly any is there: to send a packet takes much longer.
                thread::sleep(Duration::from_micros(100));
            }
        });
        let panicked = |_| anyhow!("it panicked");
        let end = |thread: thread::ScopedJoinHandle<'_, Result<()>>| {
            thread.join().map_err(panicked).flatten()
        };
        let sent: Vec<_> = senders.into_iter().map(end).collect();
        sending.store(false, Ordering::Relaxed);
        remover.join().map_err(panicked)?;
        sent.into_iter().collect()
    })
}

/// Every flow is there once, and found from both ends; how many there are.
fn is_sound(table: &Table) -> Result<usize> {
    let mut seen = HashSet::new();
    for (key, to) in table.entries() {
        let found = table.get(&key);
        ensure!(
            found == Some(to),
            "{key:?} is {to:?}, and found as {found:?}"
        );
        ensure!(
            leads_to_itself(table, &Flow { key, to }),
            "{key:?} is not found by its replies: {to:?}"
        );
        ensure!(seen.insert(key), "{key:?} is there twice");
    }
    ensure!(!seen.is_empty(), "nothing is there");
    Ok(seen.len())
}

/// Whether the flow is found by what its replies carry.
fn leads_to_itself(table: &Table, flow: &Flow) -> bool {
    let found = if flow.is_masqueraded() {
        table.by_node(&flow.port_key())
    } else {
        table.by_client(&flow.reply_key())
    };
    found == Some(flow.key)
}

/// No flow is there, no cell is held, and no slot leads anywhere.
fn is_empty(table: &Table) -> Result<()> {
    for index in 0..=table.mask() {
        let head = table.cell(index).map(|line| Head(line.load(HEAD)));
        ensure!(head.is_some_and(Head::is_free), "cell {index}: {head:?}");
    }
    for index in 0..=table.slots() {
        let slot = table.slot(index).map(Entry::load);
        ensure!(
            slot.is_some_and(|slot| slot.cell().is_none()),
            "slot {index}: {slot:?}"
        );
    }
    Ok(())
}
