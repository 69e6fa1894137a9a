//! A TCP flow ends by segments of its own connection, and not by a stranger's segments (`dataplane_common::tcp`).

mod kept;

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{
    Addr, Port, Protocol,
    packet::{FlowKey, Tick},
    tables::{self, Block},
};
use dataplane_proof::{
    Numbers, Verdict,
    campaign::{Scene, plain_config},
    wire::{Packet, flags},
};
use kernel::conntrack::{Flow, State};
use plan::Write;

use self::kept::{
    a_half_closed_connection_keeps_its_endpoint, an_ended_connection_and_a_syn_keep_the_endpoint,
};
use super::{
    cluster::{Cluster, HTTP, TCP, eventually, reaches, refused},
    crafted::{NEAR, OUTSIDE, ip, on, packet, vip},
    manifest::Service,
};

scenarios! {
    Dataplane:
    strangers_end_no_flow,
    each_side_ends_its_flow,
    a_reset_that_the_connection_outlives_ends_nothing,
    a_syn_moves_no_connection_that_lives,
    a_refused_connection_is_over,
    an_ended_connection_and_a_syn_keep_the_endpoint,
    a_half_closed_connection_keeps_its_endpoint,
    a_half_closed_flow_begins_anew_once_the_endpoint_says_so,
    real_connections_end_as_they_do,
}

const CLIENT: u32 = 0x1000_0000;
const SERVER: u32 = 0xffff_ff00;
const SMALL: [&str; 2] = ["10.244.1.12", "fd00:10:244:1::12"];
const GATEWAY: [&str; 2] = ["10.244.1.1", "fd00:10:244:1::1"];

/// A connection to a service with one endpoint.
struct Connection<'a> {
    scene: &'a Scene,
    /// Where requests arrive, from whom, to whom.
    request: (&'static str, [(IpAddr, u16); 2]),
    /// Where replies arrive, from whom, to whom.
    reply: (&'static str, [(IpAddr, u16); 2]),
}

impl<'a> Connection<'a> {
    /// Of a pod, or, masqueraded, from outside. Nothing is sent yet.
    fn new(scene: &'a Scene, v4: bool, outside: bool) -> Self {
        let of = |[a, b]: [&str; 2], port| (ip(v4, a, b), port);
        let endpoint = of(SMALL, 80);
        let (at, client, kind, seen) = if outside {
            ("eth0", OUTSIDE, "node", GATEWAY)
        } else {
            ("veth-near", NEAR, "cluster", NEAR)
        };
        Self {
            scene,
            request: (at, [of(client, 20_000), vip(v4, kind, 13)]),
            reply: ("veth-small", [endpoint, of(seen, 20_000)]),
        }
    }

    /// Sends a segment. The programs must translate and forward it, with any flags and numbers.
    fn send(&self, replies: bool, flags: u8, [sequence, ack]: [u32; 2]) -> Result<()> {
        let (at, [from, to]) = if replies { self.reply } else { self.request };
        let segment = Packet {
            numbers: [sequence, ack],
            ..packet(true, from, to, flags)
        };
        let (output, counted) = self.scene.throw(at, false, &segment.frame())?;
        ensure!(
            output.verdict == Verdict::Redirect,
            "{segment:?} became {output:?}, {counted:?}"
        );
        Ok(())
    }

    /// Opens it, and has some bytes sent both ways.
    fn open(&self) -> Result<()> {
        self.scene.forget()?;
        self.send(false, flags::SYN, [CLIENT, 0])?;
        self.send(true, flags::SYN | flags::ACK, [SERVER, CLIENT + 1])?;
        let (client, server) = (CLIENT + 1, SERVER + 1);
        self.send(false, flags::ACK, [client, server])?;
        for byte in [0, 200, 5000] {
            let numbers = [client + byte, server.wrapping_add(byte)];
            self.send(false, flags::ACK, numbers)?;
            self.send(true, flags::ACK, [numbers[1], numbers[0]])?;
        }
        ensure!(self.state()? == State::Established);
        Ok(())
    }

    fn key(&self) -> FlowKey {
        let [client, vip] = self.request.1;
        FlowKey::new(
            Addr::from(client.0),
            Port::new(client.1),
            Addr::from(vip.0),
            Port::new(vip.1),
            Protocol::TCP,
        )
    }

    fn flow(&self) -> Result<Flow> {
        let key = self.key();
        let to = self.scene.rig.conntrack.get(&key).context("no flow")?;
        Ok(Flow { key, to })
    }

    fn state(&self) -> Result<State> {
        Ok(self.flow()?.state())
    }

    /// Sets the time of the last liveness question to the endpoint back by so many ticks, as if no answer had come
    /// since.
    fn age(&self, ticks: u16) -> Result<()> {
        let (key, conntrack) = (self.key(), &self.scene.rig.conntrack);
        let mut numbers = Numbers::read(conntrack.sequences(&key).context("no flow")?);
        let since = numbers.asked.1.number().wrapping_sub(ticks);
        numbers.asked.1 = Tick::from_number(since);
        ensure!(conntrack.set_sequences(&key, numbers.write()));
        Ok(())
    }
}

fn connections(work: impl Fn(&Connection) -> Result<()> + Send + Sync) -> Result<()> {
    on(Scene::new()?, |scene| {
        for v4 in [true, false] {
            for outside in [true, false] {
                work(&Connection::new(scene, v4, outside))?;
            }
        }
        Ok(())
    })
}

/// An attacker that guesses addresses and ports, but not the numbers.
fn strangers_end_no_flow() -> Result<()> {
    connections(|connection| {
        connection.open()?;
        for guess in 1..60_u32 {
            let (number, other) = (guess << 26, guess.wrapping_mul(0x0303_0303) ^ 0x5000_0000);
            // One of the guesses is the connection's position.
            if number.abs_diff(CLIENT) < 1 << 25 || number.abs_diff(SERVER) < 1 << 25 {
                continue;
            }
            for replies in [false, true] {
                for bits in [
                    flags::RST,
                    flags::RST | flags::ACK,
                    flags::FIN | flags::ACK,
                    // A segment, or a SYN, by which the next guess would be right.
                    flags::ACK,
                    flags::SYN,
                    flags::RST,
                    flags::FIN | flags::ACK,
                ] {
                    // A SYN from the endpoint's address begins a connection of its own.
                    if !(replies && bits == flags::SYN) {
                        connection.send(replies, bits, [number, other])?;
                    }
                    let state = connection.state()?;
                    ensure!(
                        state == State::Established,
                        "{state} by {bits} at {number:#x}, {other:#x}; replies: {replies}"
                    );
                }
            }
        }
        Ok(())
    })
}

fn each_side_ends_its_flow() -> Result<()> {
    connections(|connection| {
        let (client, server) = (CLIENT + 5008, SERVER.wrapping_add(5008));
        for (replies, bits, numbers) in [
            (false, flags::RST | flags::ACK, [client, server]),
            (true, flags::RST | flags::ACK, [server, client]),
            // From a host that no longer knows the connection.
            (false, flags::RST, [client, 0]),
            (true, flags::RST, [server, 0]),
            // With data that this node has not seen.
            (
                true,
                flags::RST | flags::ACK,
                [server.wrapping_add(20_000), client],
            ),
        ] {
            connection.open()?;
            connection.send(replies, bits, numbers)?;
            let state = connection.state()?;
            ensure!(state == State::Close, "{state} by {bits} {numbers:#x?}");
        }
        connection.open()?;
        connection.send(false, flags::FIN | flags::ACK, [client, server])?;
        ensure!(connection.state()? == State::FinWait);
        connection.send(true, flags::ACK, [server, client + 1])?;
        ensure!(connection.state()? == State::CloseWait);
        // A retransmission is not a second FIN.
        connection.send(false, flags::FIN | flags::ACK, [client, server])?;
        ensure!(connection.state()? == State::CloseWait);
        connection.send(true, flags::FIN | flags::ACK, [server, client + 1])?;
        ensure!(connection.state()? == State::LastAck);
        connection.send(false, flags::ACK, [client + 1, server.wrapping_add(1)])?;
        ensure!(connection.state()? == State::TimeWait);
        Ok(())
    })
}

/// A RST that lies near its direction's position is taken back by the next segment of either side: its receiver challenges
/// it, unless it has the exact number.
fn a_reset_that_the_connection_outlives_ends_nothing() -> Result<()> {
    connections(|connection| {
        let (client, server) = (CLIENT + 5008, SERVER.wrapping_add(5008));
        for closed in [false, true] {
            connection.open()?;
            if closed {
                connection.send(true, flags::FIN | flags::ACK, [server, client])?;
                connection.send(false, flags::ACK, [client, server])?;
            }
            let before = connection.state()?;
            for (reset, goes_on) in [(false, true), (false, false), (true, false), (true, true)] {
                let number = if reset { server } else { client };
                connection.send(reset, flags::RST, [number.wrapping_add(1000), 0])?;
                let state = connection.state()?;
                ensure!(state == State::Close, "{state} by a RST");
                let mut numbers = [client, server];
                if goes_on {
                    numbers.reverse();
                }
                connection.send(goes_on, flags::ACK, numbers)?;
                let state = connection.state()?;
                ensure!(state == before, "{state}, not {before}, as it goes on");
            }
        }
        Ok(())
    })
}

/// While the endpoint of a connection takes no new ones, a SYN in the client's name, which anybody may send, goes to
/// that endpoint, which answers as it likes. Once it has been silent for some seconds, twice, the programs take it for
/// gone; one that has never answered, at once.
fn a_syn_moves_no_connection_that_lives() -> Result<()> {
    Scene::new()?.inside(|scene| {
        scene.world.configure(&mut scene.rig, plain_config())?;
        for (v4, outside) in [(true, true), (true, false), (false, true), (false, false)] {
            let (small, far) = if v4 { (13, 4) } else { (64 + 13, 64 + 4) };
            let syn = [CLIENT + (1 << 30), 0];
            lend(scene, small, small)?;
            let connection = Connection::new(scene, v4, outside);
            connection.open()?;
            let before = connection.flow()?.endpoint();
            lend(scene, small, far)?;
            let connection = Connection::new(scene, v4, outside);
            let kept = |what: &str| -> Result<()> {
                connection.send(false, flags::SYN, syn)?;
                let flow = connection.flow()?;
                let lives = flow.state() == State::Established && flow.endpoint() == before;
                ensure!(lives, "{what}: {flow:?}");
                Ok(())
            };
            let challenge = [SERVER.wrapping_add(5008), CLIENT + 5008];
            for _ in 0..5 {
                kept("a SYN")?;
                kept("and another, which is not challenged so soon")?;
                connection.age(5)?;
                kept("a SYN after a while")?;
                connection.send(true, flags::ACK, challenge)?;
                kept("once more")?;
                connection.send(true, flags::ACK, challenge)?;
            }
            kept("nobody answers any more")?;
            connection.age(5)?;
            kept("twice")?;
            connection.age(5)?;
            connection.send(false, flags::SYN, syn)?;
            let flow = connection.flow()?;
            let moved = flow.state() == State::SynSent && flow.endpoint() != before;
            ensure!(moved, "nobody answers: {flow:?}");

            connection.scene.forget()?;
            lend(scene, small, small)?;
            let connection = Connection::new(scene, v4, outside);
            connection.send(false, flags::SYN, syn)?;
            lend(scene, small, far)?;
            let connection = Connection::new(scene, v4, outside);
            connection.send(false, flags::SYN, syn)?;
            let flow = connection.flow()?;
            ensure!(flow.endpoint() != before, "it has never answered: {flow:?}");
        }
        Ok(())
    })
}

/// Gives a pool the endpoints of another.
fn lend(scene: &mut Scene, to: u32, from: u32) -> Result<()> {
    let pools = &scene.world.pools;
    let len = |pool: &dataplane_proof::world::Pool| u32::try_from(pool.endpoints.len());
    let mut base = 0;
    for (_, pool) in pools.range(..from) {
        base += len(pool)?;
    }
    let pool = tables::Pool {
        block: Block::new(base, u16::try_from(len(&pools[&from])?)?, 0),
        affinity_seconds: 0,
        affinity_group: to,
        external: 0,
        ranged: 0,
    };
    let index = to;
    let fresh = false;
    scene.rig.apply(&[Write::Pool { index, pool, fresh }])?;
    Ok(())
}

fn a_refused_connection_is_over() -> Result<()> {
    connections(|connection| {
        connection.scene.forget()?;
        connection.send(false, flags::SYN, [CLIENT, 0])?;
        let refusal = flags::RST | flags::ACK;
        connection.send(true, refusal, [0, CLIENT + 0x10_0000])?;
        ensure!(
            connection.state()? == State::SynSent,
            "another SYN was refused"
        );
        // `packet` has seven bytes, and a host without a listener acknowledges none of them.
        connection.send(true, refusal, [0, CLIENT + 1])?;
        ensure!(connection.state()? == State::Close);
        Ok(())
    })
}

/// The client opens another connection from the same port, and the endpoint, which has lost the one before, agrees:
/// half-closed state of the old one no longer counts.
fn a_half_closed_flow_begins_anew_once_the_endpoint_says_so() -> Result<()> {
    connections(|connection| {
        for by_client in [true, false] {
            connection.open()?;
            let (client, server) = (CLIENT + 5008, SERVER.wrapping_add(5008));
            let numbers = if by_client {
                [client, server]
            } else {
                [server, client]
            };
            connection.send(!by_client, flags::FIN | flags::ACK, numbers)?;
            let (client, server) = (client + (1 << 29), server.wrapping_add(1 << 29));
            connection.send(false, flags::SYN, [client, 0])?;
            ensure!(connection.state()? == State::FinWait);
            connection.send(true, flags::SYN | flags::ACK, [server, client + 1])?;
            let state = connection.state()?;
            ensure!(state == State::SynReceived, "{state}");
            let numbers = [client + 1, server.wrapping_add(1)];
            connection.send(false, flags::FIN | flags::ACK, numbers)?;
            ensure!(connection.state()? == State::FinWait);
            // The endpoint's answer again, as the client's acknowledgement was lost.
            connection.send(true, flags::SYN | flags::ACK, [server, client + 1])?;
            ensure!(connection.state()? == State::FinWait);
        }
        Ok(())
    })
}

/// By sockets: clients that reset and that close, and a port without a listener.
fn real_connections_end_as_they_do() -> Result<()> {
    const NOBODY: u16 = 9;
    let cluster = Cluster::start(|lab| {
        let service = Service::new("web", &["10.96.0.50"])
            .node_port("tcp", 80, TCP, 30_080)
            .node_port("http", 81, HTTP, 30_081)
            .node_port("shut", 82, NOBODY, 30_082)
            .endpoints(&[lab.pod("near")]);
        vec![service]
    })?;
    let ext = cluster.lab.external("ext");
    let node = cluster.lab.node("node2").ipv4();
    let all = |vip: &str, state: &str, flows: usize| {
        eventually(|| {
            let list = [
                "conntrack",
                "list",
                "-o",
                "json",
                "--vip",
                vip,
                "--state",
                state,
            ];
            let list: serde_json::Value = cluster.agent.dataplane(list).json()?;
            let found = list.as_array().context("an array")?.len();
            ensure!(found == flows, "{found} {state}, not {flows}");
            Ok(())
        })
    };
    let [open, http, shut] = [30_080, 30_081, 30_082].map(|port| format!("{node}:{port}"));
    reaches(ext, &open, "connect --count 5", &["near"])?;
    all(&open, "close", 5)?;
    reaches(ext, &http, "http --count 3", &["near"])?;
    all(&http, "time-wait", 3)?;
    refused(ext, &shut, "connect --count 2")?;
    all(&shut, "close", 2)
}
