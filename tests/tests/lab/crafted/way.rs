//! Flows through services of every kind, and how their endpoints see them.

use anyhow::Result;
use dataplane_common::Reason;
use dataplane_proof::{
    campaign::Scene,
    wire::{Packet, flags},
};

use super::{
    End, FAR, GATEWAY, NEAR, NODE, OUTSIDE, SENDER, SMALL, Then, check, ip, packet, passed, sent,
    vip,
};

/// A flow of a client through a service with one endpoint, and the endpoint's view of it.
pub struct Way {
    pub service: u16,
    pub kind: &'static str,
    /// The client's interface and address.
    pub at: &'static str,
    pub client: [&'static str; 2],
    /// The endpoint's interface (`""`: the host itself), address and port.
    pub out: &'static str,
    pub endpoint: ([&'static str; 2], u16),
    /// The node's address that the endpoint sees, of each family; `None`: the flow is not masqueraded.
    pub masqueraded: Option<[&'static str; 2]>,
}

pub const fn way(
    (service, kind): (u16, &'static str),
    (at, client): (&'static str, [&'static str; 2]),
    (out, endpoint, port): (&'static str, [&'static str; 2], u16),
    masqueraded: Option<[&'static str; 2]>,
) -> Way {
    Way {
        service,
        kind,
        at,
        client,
        out,
        endpoint: (endpoint, port),
        masqueraded,
    }
}

pub const WAYS: &[Way] = &[
    // A local endpoint that anybody may use, from outside: masqueraded.
    way(
        (13, "node"),
        ("eth0", OUTSIDE),
        ("veth-small", SMALL, 80),
        Some(GATEWAY),
    ),
    way(
        (13, "balancer"),
        ("eth0", OUTSIDE),
        ("veth-small", SMALL, 80),
        Some(GATEWAY),
    ),
    way(
        (13, "external"),
        ("eth0", OUTSIDE),
        ("veth-small", SMALL, 80),
        Some(GATEWAY),
    ),
    way(
        (13, "cluster"),
        ("eth0", OUTSIDE),
        ("veth-small", SMALL, 80),
        Some(GATEWAY),
    ),
    // From a pod, to the cluster IP: not masqueraded; to the other addresses it is.
    way(
        (13, "cluster"),
        ("veth-near", NEAR),
        ("veth-small", SMALL, 80),
        None,
    ),
    way(
        (13, "node"),
        ("veth-near", NEAR),
        ("veth-small", SMALL, 80),
        Some(GATEWAY),
    ),
    // Local policy: from outside, the endpoint here sees the client; a pod reaches another endpoint.
    way((4, "node"), ("veth-near", NEAR), ("eth0", FAR, 8080), None),
    way(
        (4, "balancer"),
        ("veth-near", NEAR),
        ("eth0", FAR, 8080),
        None,
    ),
    way(
        (4, "external"),
        ("veth-near", NEAR),
        ("eth0", FAR, 8080),
        None,
    ),
    way(
        (4, "cluster"),
        ("veth-near", NEAR),
        ("eth0", FAR, 8080),
        None,
    ),
    way(
        (4, "cluster"),
        ("eth0", OUTSIDE),
        ("eth0", FAR, 8080),
        Some(NODE),
    ),
    way(
        (2, "node"),
        ("eth0", OUTSIDE),
        ("veth-near", NEAR, 8080),
        None,
    ),
    way(
        (2, "external"),
        ("eth0", OUTSIDE),
        ("veth-near", NEAR, 8080),
        None,
    ),
    // On the host itself: never masqueraded, and up the stack.
    way((8, "node"), ("eth0", OUTSIDE), ("", NODE, 9090), None),
    way((8, "cluster"), ("veth-near", NEAR), ("", NODE, 9090), None),
    way((8, "balancer"), ("eth0", OUTSIDE), ("", NODE, 9090), None),
];

impl Way {
    pub fn ends(&self, v4: bool) -> (End, End, End, End) {
        let client = (ip(v4, self.client[0], self.client[1]), 20_000);
        let ([a, b], port) = self.endpoint;
        let seen = self.masqueraded.map_or(client.0, |[a, b]| ip(v4, a, b));
        // The client's own port: it is free, and outside of the host's range.
        let seen = (seen, client.1);
        (
            client,
            vip(v4, self.kind, self.service),
            seen,
            (ip(v4, a, b), port),
        )
    }

    /// Begins the flow.
    pub fn begin(&self, scene: &Scene, v4: bool, tcp: bool) -> Result<()> {
        let (client, vip, seen, endpoint) = self.ends(v4);
        let what = format!(
            "{} {} from {:?} to {:?}",
            self.kind, self.service, client, endpoint
        );
        let request = packet(tcp, client, vip, flags::SYN);
        let reason = if self.masqueraded.is_some() {
            Reason::Masqueraded
        } else {
            Reason::Translated
        };
        let then = self.toward_endpoint(scene, &request, seen, endpoint);
        check(
            scene,
            &what,
            (self.at, false),
            &request.frame(),
            &then,
            &[reason],
        )
    }

    pub fn toward_endpoint(
        &self,
        scene: &Scene,
        request: &Packet,
        seen: End,
        endpoint: End,
    ) -> Then {
        let mut there = passed(request, seen, endpoint);
        if self.out.is_empty() {
            there.hops += 1;
            there.link = [scene.world.interface(self.at).1, SENDER];
            Then::Up(there.frame())
        } else {
            sent(scene, self.at, self.out, &there)
        }
    }

    /// An answer of the endpoint: at its interface, or, of the host's own, at the client's.
    pub fn answer(&self, scene: &Scene, v4: bool, tcp: bool, tcp_flags: u8) -> Result<()> {
        let (client, vip, seen, endpoint) = self.ends(v4);
        let what = format!(
            "the answer of {:?} of {} {}",
            endpoint, self.kind, self.service
        );
        let answer = packet(tcp, endpoint, seen, tcp_flags);
        let mut back = passed(&answer, vip, client);
        if self.out.is_empty() {
            back.hops += 1;
            back.link = [scene.world.interface(self.at).1, SENDER];
            let then = Then::Up(back.frame());
            return check(scene, &what, (self.at, true), &answer.frame(), &then, &[]);
        }
        let then = sent(scene, self.out, self.at, &back);
        check(scene, &what, (self.out, false), &answer.frame(), &then, &[])
    }
}

/// The way of the flows to which the odd packets below belong: masqueraded, to a pod.
pub const PLAIN: &Way = &WAYS[0];

/// Wants a packet of a new flow to `PLAIN` to be translated as any other.
pub fn is_passed(scene: &Scene, what: &str, request: &Packet) -> Result<()> {
    let v4 = request.src.is_ipv4();
    scene.forget()?;
    let (_, _, seen, endpoint) = PLAIN.ends(v4);
    let then = PLAIN.toward_endpoint(scene, request, seen, endpoint);
    let at = (PLAIN.at, false);
    check(
        scene,
        what,
        at,
        &request.frame(),
        &then,
        &[Reason::Masqueraded],
    )
}

pub fn request(v4: bool, tcp: bool) -> Packet {
    let (client, vip, ..) = PLAIN.ends(v4);
    packet(tcp, client, vip, flags::SYN)
}
