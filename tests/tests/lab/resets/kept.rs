//! Connections that keep their endpoint: a SYN in the client's name moves none.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{Addr, Port, Protocol, packet::FlowKey};
use dataplane_proof::{
    campaign::Scene,
    wire::{Packet, flags},
    world::To,
};
use kernel::conntrack::{Flow, State};

use super::{
    super::crafted::{NEAR, OUTSIDE, ip, on, packet, vip},
    CLIENT, SERVER,
};

/// A service of two endpoints. Session affinity would keep a client's endpoint after any end of its flow.
const WITHOUT_AFFINITY: u16 = 2;

/// Two clients. The client in a pod of this node dials a cluster IP. The client outside dials a node port and is
/// masqueraded. For each: the interface at which its packets arrive, its addresses, and the kind of VIP that it dials.
const CLIENTS: [(&str, [&str; 2], &str); 2] =
    [("veth-near", NEAR, "cluster"), ("eth0", OUTSIDE, "node")];

/// A connection of a client to the service [`WITHOUT_AFFINITY`].
struct Dialled<'a> {
    scene: &'a Scene,
    at: &'static str,
    client: (IpAddr, u16),
    vip: (IpAddr, u16),
}

impl<'a> Dialled<'a> {
    fn new(
        scene: &'a Scene,
        v4: bool,
        (at, client, kind): (&'static str, [&str; 2], &str),
        port: u16,
    ) -> Self {
        Self {
            scene,
            at,
            client: (ip(v4, client[0], client[1]), port),
            vip: vip(v4, kind, WITHOUT_AFFINITY),
        }
    }

    /// Sends a segment, and returns the connection's flow.
    fn send(
        &self,
        at: &str,
        [from, to]: [(IpAddr, u16); 2],
        bits: u8,
        numbers: [u32; 2],
    ) -> Result<Flow> {
        let segment = Packet {
            numbers,
            ..packet(true, from, to, bits)
        };
        self.scene.throw(at, false, &segment.frame())?;
        let (client, vip) = (self.client, self.vip);
        let key = FlowKey::new(
            Addr::from(client.0),
            Port::new(client.1),
            Addr::from(vip.0),
            Port::new(vip.1),
            Protocol::TCP,
        );
        let to = self.scene.rig.conntrack.get(&key).context("no flow")?;
        Ok(Flow { key, to })
    }

    fn request(&self, bits: u8, numbers: [u32; 2]) -> Result<Flow> {
        self.send(self.at, [self.client, self.vip], bits, numbers)
    }

    /// Sends a segment of the endpoint of a flow.
    fn reply(&self, of: &Flow, bits: u8, numbers: [u32; 2]) -> Result<Flow> {
        // An endpoint that is the client itself sees an address of the node's.
        let client = match of.to.node_addr {
            0 => self.client,
            node => (
                self.scene.world.node_addr(node).ip(),
                of.to.node_port.host(),
            ),
        };
        let (endpoint, at) = (of.endpoint(), at_of(self.scene, of.endpoint().ip()));
        let endpoint = (endpoint.ip(), endpoint.port());
        self.send(at, [endpoint, client], bits, numbers)
    }
}

/// So a sender of a RST, or of both sides' FINs, and then of a SYN in a client's name, moves no connection to another
/// endpoint.
pub fn an_ended_connection_and_a_syn_keep_the_endpoint() -> Result<()> {
    on(Scene::new()?, |scene| {
        let kinds = || CLIENTS.into_iter().flat_map(|of| [(true, of), (false, of)]);
        for (number, (v4, client)) in kinds().cycle().take(480).enumerate() {
            let number = u16::try_from(number)?;
            // Both ends of each kind.
            let by_reset = number / 4 % 2 == 0;
            let dialled = Dialled::new(scene, v4, client, 20_000 + number);
            let before = dialled.request(flags::SYN, [CLIENT, 0])?;
            let ended = if by_reset {
                dialled.request(flags::RST, [CLIENT, 0])?
            } else {
                dialled.reply(&before, flags::SYN | flags::ACK, [SERVER, CLIENT + 1])?;
                let fin = flags::FIN | flags::ACK;
                dialled.request(fin, [CLIENT + 1, SERVER + 1])?;
                dialled.reply(&before, fin, [SERVER + 1, CLIENT + 2])?
            };
            let over = if by_reset {
                State::Close
            } else {
                State::LastAck
            };
            ensure!(ended.state() == over, "{ended:?} is {}", ended.state());
            let after = dialled.request(flags::SYN, [CLIENT + (1 << 30), 0])?;
            ensure!(
                after.state() == State::SynSent && after.endpoint() == before.endpoint(),
                "{before:?} became {after:?}"
            );
        }
        Ok(())
    })
}

/// Where the packets of an endpoint of a service arrive.
fn at_of(scene: &Scene, endpoint: IpAddr) -> &str {
    let here = scene.world.interface("veth-near").0;
    match scene
        .world
        .way(Addr::UNSPECIFIED, Addr::from(endpoint), here)
        .0
    {
        To::Onward(way) => &scene.world.interfaces[&way.ifindex].name,
        _ => "eth0",
    }
}

/// The server's side may send for hours: a SYN, which anybody can send in the client's name, does not move the
/// connection.
pub fn a_half_closed_connection_keeps_its_endpoint() -> Result<()> {
    on(Scene::new()?, |scene| {
        for number in 0..60 {
            let dialled = Dialled::new(scene, true, CLIENTS[0], 21_000 + number);
            let before = dialled.request(flags::SYN, [CLIENT, 0])?;
            dialled.reply(&before, flags::SYN | flags::ACK, [SERVER, CLIENT + 1])?;
            let closed = dialled.request(flags::FIN | flags::ACK, [CLIENT + 1, SERVER + 1])?;
            ensure!(closed.state() == State::FinWait, "{closed:?}");
            let after = dialled.request(flags::SYN, [CLIENT + (1 << 30), 0])?;
            ensure!(
                after.state() == State::FinWait && after.endpoint() == before.endpoint(),
                "{before:?} became {after:?}"
            );
        }
        Ok(())
    })
}
