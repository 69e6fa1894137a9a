//! Connections between two workloads of this node without a tunnel. The relay attests the identities of both: it knows each
//! workload by the network namespace of its sockets.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Instant,
};

use model::{Identity, RefusedInbound};

use super::{
    Relay,
    attachment::Attached,
    direction::Direction,
    index::{Index, Way},
    labels::Principals,
    outcome::Flag,
    permit::Permit,
    session::{Refusal, Session},
};

/// A workload of this node at which a connection of another one may arrive without a tunnel.
#[derive(Debug)]
pub struct Neighbour {
    /// The workload.
    pub attached: Arc<Attached>,
    /// The workload's identity.
    pub own: Identity,
    /// The identity of the client.
    pub peer: Identity,
    /// The client's address, as the source has it: the client's own sockets may have any other.
    client: IpAddr,
}

impl Relay {
    /// Returns the workload with the address `to`, if it accepts tunnels here, and connections of `from` may arrive there without
    /// one. `domain`: the trust domain of the identities.
    ///
    /// The kernel refuses tunnels to a workload if it refuses connections to some of its ports, so that a connection to such a
    /// workload needs a tunnel. So does a connection to a Pod of a Gateway with a binding, which says how the Pod takes streams.
    pub fn neighbour(
        &self,
        from: &Attached,
        to: IpAddr,
        index: &Index,
        domain: &str,
    ) -> Option<Neighbour> {
        let Way::Tunnel(workload) = index.way(to) else {
            return None;
        };
        // The workloads in the node's network namespace are not known by it.
        from.namespace.as_ref()?;
        let mut addresses = from.workload.addresses.iter();
        let client = *addresses.find(|addr| addr.is_ipv4() == to.is_ipv4())?;
        let attachments = self.lock_attachments();
        let entry = attachments
            .iter()
            .find(|entry| entry.is_served(&workload.name))?;
        let mut listeners = entry.listeners.iter().flat_map(|all| all.iter());
        let accepts = listeners.any(|listener| listener.is_tunnel);
        let attached = Arc::clone(&entry.attached);
        drop(attachments);
        let here = &attached.workload;
        let is_it = here.uid == workload.uid && here.addresses.contains(&to);
        let policy = here.capture.as_deref();
        let refused = policy.and_then(|policy| policy.refused.as_deref());
        let is_refused = refused.is_some_and(RefusedInbound::is_any);
        if !accepts || !is_it || is_refused || index.bound(here).is_some() {
            return None;
        }
        Some(Neighbour {
            own: here.identity(domain)?,
            peer: from.workload.identity(domain)?,
            client,
            attached,
        })
    }
}

impl Session {
    /// Begins the arrival of an outbound connection at the workload of this node that has the chosen endpoint. From then on, events
    /// of this session are events of the arrival, too.
    ///
    /// # Errors
    /// The policies or limits of the workload refuse the connection: the attempt has failed.
    pub fn arrive(&mut self, at: Neighbour, index: &Index) -> Result<(), Refusal> {
        self.has_tried_here = true;
        let name = &at.attached.workload.name;
        let Some(permit) = Permit::acquire(&at.attached, Direction::Inbound) else {
            let text = format!("a limit of connections to {name} is reached");
            self.failed(io::Error::other(text));
            return Err(Flag::Tunnel.into());
        };
        let (client, to) = (
            SocketAddr::new(at.client, self.client().port()),
            self.endpoint(),
        );
        let mut arrival = Self::begin(permit, Direction::Inbound, client, to, 1, Instant::now());
        arrival.principals = Some(Box::new(Principals {
            own: at.own,
            peer: Some(at.peer),
            is_attested: true,
            baggage: None,
        }));
        if let Err(refusal) = arrival.route(index) {
            arrival.end(refusal.flag);
            let text = format!(
                "{name} refuses the connection: the access log has the reason in a line of {name}"
            );
            self.failed(io::Error::other(text));
            return Err(refusal);
        }
        // Returns the one destination, because no attempt was made before.
        arrival.next_endpoint();
        self.arrival = Some(Box::new(arrival));
        Ok(())
    }

    /// Returns the session at the side of the endpoint's socket: the arrival, if the connection arrives at a workload of this node,
    /// or else this session.
    pub fn last(&self) -> &Self {
        self.arrival.as_deref().unwrap_or(self)
    }

    /// Whether the connection belongs to an attachment: at the side of the client or of the endpoint.
    pub fn is_of(&self, attachment: u64) -> bool {
        self.attached().id == attachment || self.last().attached().id == attachment
    }

    /// Whether the workload of this node at which the connection arrives is no longer in the snapshot.
    pub fn is_gone(&self, index: &Index) -> bool {
        let arrival = self.arrival.as_ref();
        arrival.is_some_and(|arrival| !index.has(arrival.attached().own()))
    }

    /// Notes that the arrival has failed, by the error of the attempt.
    pub(super) fn fail_arrival(&mut self, error: &io::Error) {
        if let Some(mut arrival) = self.arrival.take() {
            arrival.failed(io::Error::new(error.kind(), error.to_string()));
            arrival.end(Flag::ConnectFailure);
        }
    }

    /// Notes that the application has taken the connection. Both sides have proven their identities to the relay.
    pub(super) fn reach_arrival(&mut self, index: &Index) {
        if let Some(arrival) = &mut self.arrival {
            arrival.reached(index);
            let principals = arrival.principals.as_deref().cloned();
            self.principals = principals.and_then(|of| {
                Some(Box::new(Principals {
                    own: of.peer?,
                    peer: Some(of.own),
                    is_attested: true,
                    baggage: None,
                }))
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use model::{
        Binding, Egress, Gateway, GatewayAddress, Istio, Place, Policy, ServiceName, Snapshot, Uid,
        Workload, WorkloadName,
    };
    use threads::none_dies;

    use super::*;
    use crate::{AccessLog, Attachment, Engine, Limits, Listener, Log, Namespace};

    const TO: &str = "10.0.0.2";

    struct Nothing;

    impl Engine for Nothing {
        fn take(&self, _: &Arc<Attached>, _: &Arc<[Listener]>) {}

        fn shut(&self, _: &Attached, _: Instant) {}

        fn drain(&mut self, _: Instant) {}
    }

    /// The world of a test case.
    struct Case {
        client: Workload,
        server: Workload,
        /// The workloads of the snapshot, in place of `server`.
        known: Option<Vec<Workload>>,
        own_namespace: bool,
        tunnels: usize,
        is_served: bool,
    }

    type Change = Box<dyn FnOnce(&mut Case)>;

    fn workload(name: &str, addresses: &[&str]) -> Workload {
        Workload {
            addresses: addresses.iter().map(|addr| addr.parse().unwrap()).collect(),
            account: name.into(),
            uid: Uid::parse("8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60"),
            speaks_hbone: true,
            ..Workload::new(WorkloadName::new("shop", name), Place::Address)
        }
    }

    fn attachment(workload: Workload, own_namespace: bool, tunnels: usize) -> Attachment {
        let socket = |_| TcpListener::bind("127.0.0.1:0").unwrap();
        let namespace = own_namespace.then(|| Namespace {
            open: Arc::new(|_, _| Ok(Vec::new())),
            interface: None,
        });
        Attachment {
            workload: Arc::new(workload),
            namespace,
            outbound: vec![],
            inbound: vec![],
            tunnels: (0..tunnels).map(socket).collect(),
            egress: Egress::Allow,
        }
    }

    /// Returns the neighbour's name, with the client's identity and address.
    fn found(change: impl FnOnce(&mut Case)) -> Option<String> {
        let mut case = Case {
            client: workload("client", &["10.0.0.1"]),
            server: workload("server", &[TO]),
            known: None,
            own_namespace: true,
            tunnels: 1,
            is_served: true,
        };
        change(&mut case);
        let mut istio = Istio::default();
        let gateway = Gateway {
            addresses: [GatewayAddress::Ip(TO.parse().unwrap())].into(),
            binding: Some(Binding {
                has_header: true,
                port: Some(15088),
            }),
            ..Gateway::default()
        };
        let name = ServiceName::new("shop", "gate");
        istio.gateways.insert(name, Arc::new(gateway));
        let (log, _) = Log::start(AccessLog::Off, io::sink(), none_dies()).unwrap();
        let relay = Relay::new(Limits::new(Some(8), None, 1024), log);
        let known = case.known.unwrap_or_else(|| vec![case.server.clone()]);
        let named = known.into_iter().map(|of| (of.name.clone(), Arc::new(of)));
        relay.set_snapshot(Snapshot {
            workloads: named.collect(),
            istio,
            ..Snapshot::default()
        });
        let name = case.server.name.clone();
        let client = attachment(case.client, case.own_namespace, 0);
        let server = attachment(case.server, true, case.tunnels);
        relay.add(client, &Nothing).unwrap();
        relay.add(server, &Nothing).unwrap();
        let from = relay.entries()[0].attached.clone();
        if !case.is_served {
            relay.remove(&name, std::time::Duration::ZERO, &Nothing);
        }
        let index = relay.index().1;
        let to = TO.parse().unwrap();
        let neighbour = relay.neighbour(&from, to, &index, "cluster.local")?;
        let name = &neighbour.attached.workload.name;
        Some(format!("{name} {} {}", neighbour.peer, neighbour.client))
    }

    /// Everything else needs a tunnel.
    #[test]
    fn only_a_workload_of_this_node_that_accepts_tunnels_is_a_neighbour() {
        let wanted = "shop/server spiffe://cluster.local/ns/shop/sa/client 10.0.0.1";
        assert_eq!(found(|_| {}).as_deref(), Some(wanted));
        let refuses = |others| {
            let refused = RefusedInbound {
                others,
                ..RefusedInbound::default()
            };
            Some(Arc::new(Policy {
                refused: Some(Box::new(refused)),
                ..Policy::default()
            }))
        };
        let policy = found(|case| case.server.capture = refuses(false));
        assert_eq!(policy.as_deref(), Some(wanted));
        let other = |name| workload(name, &[TO]);
        let of_gate: Box<[model::Label]> = [(
            "gateway.networking.k8s.io/gateway-name".into(),
            "gate".into(),
        )]
        .into();
        let cases: [(&str, Change); 11] = [
            (
                "the Pod of a Gateway with a binding",
                Box::new(move |case| case.server.labels = of_gate),
            ),
            ("by packets", Box::new(|case| case.own_namespace = false)),
            ("without tunnels", Box::new(|case| case.tunnels = 0)),
            ("released", Box::new(|case| case.is_served = false)),
            (
                "refused ports",
                Box::new(move |case| case.server.capture = refuses(true)),
            ),
            (
                "no HBONE",
                Box::new(|case| case.server.speaks_hbone = false),
            ),
            (
                "no address of the family",
                Box::new(|case| case.client.addresses = workload("", &["fd00::1"]).addresses),
            ),
            (
                "no account",
                Box::new(|case| case.client.account = "".into()),
            ),
            (
                "not here",
                Box::new(move |case| case.known = Some(vec![other("far")])),
            ),
            (
                "two with the address",
                Box::new(move |case| case.known = Some(vec![other("server"), other("twin")])),
            ),
            (
                "a later one with the name",
                Box::new(move |case| {
                    let later = Uid::parse("11111111-6b0f-4f61-9d1c-2f5d3c8a7b60");
                    let later = Workload {
                        uid: later,
                        ..other("server")
                    };
                    case.known = Some(vec![later]);
                }),
            ),
        ];
        for (name, change) in cases {
            assert_eq!(found(change), None, "{name}");
        }
    }
}
