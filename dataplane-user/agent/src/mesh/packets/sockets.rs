//! The proxy's sockets for workloads that are captured by their packets, in the node's network namespace.

use std::{collections::BTreeSet, io, net::TcpListener, os::fd::AsFd, sync::Arc};

use dataplane_common::capture::ListenerKey;
use kernel::{Kernel, capture::Namespace, tc::Hook};
use model::{Egress, Workload, WorkloadName};
use plan::{Captured, enrol::Problem};
use proxy::handover::Named;
use relay::Attachment;
use socket2::{Domain, SockRef};
use tracing::info;

use super::{
    super::{Mesh, RELEASED},
    Guest,
};
use crate::foreign;

/// The prefix of listening sockets' names in a hand-over.
const PACKETS: &str = "packets";

/// A workload whose connections the agent's proxy takes.
pub struct Attached {
    number: u32,
    egress: Egress,
    /// For this agent's successor.
    pub sockets: Named,
}

impl Mesh {
    /// Makes the agent's proxy take a workload's connections.
    pub(super) fn listen_for_packets(
        &mut self,
        kernel: &Kernel,
        guest: &Guest<'_>,
    ) -> Result<(), Problem> {
        let member = guest.member;
        let name = &member.workload.name;
        let (number, egress) = (guest.entry.workload, member.policy.egress);
        let before = self.packets.attached.get(name);
        if before.is_some_and(|a| a.number == number && a.egress == egress) {
            return Ok(());
        }
        let is_new = before.is_none();
        let given = self.given_for_packets(name);
        let listeners = if given.is_empty() {
            kernel::capture::open_transparent_listeners().map_err(|error| {
                Problem::of_node(format!("cannot listen for it on the node: {error}"))
            })?
        } else {
            given
        };
        let sockets = named(name, &listeners).map_err(Problem::of_node)?;
        for socket in &listeners {
            let v4 = is_v4(socket);
            give(kernel, ListenerKey::of_packets(number, v4), socket)?;
        }
        let Some(proxy) = &self.proxy else {
            return Ok(());
        };
        if !is_new {
            // Its connections go on by the rules of their beginning.
            proxy.remove(name, RELEASED);
        }
        proxy
            .add(Attachment {
                workload: Arc::new(Workload {
                    capture: Some(Arc::new(member.policy.clone())),
                    ..(*member.workload).clone()
                }),
                namespace: None,
                outbound: listeners,
                inbound: Vec::new(),
                tunnels: Vec::new(),
                egress,
            })
            .map_err(Problem::of_node)?;
        if is_new {
            info!(workload = %name, "captured by its packets: the proxy listens for it on the node");
        }
        let attached = Attached {
            number,
            egress,
            sockets,
        };
        self.packets.attached.insert(name.clone(), attached);
        Ok(())
    }

    /// Returns an earlier agent's sockets for a workload.
    fn given_for_packets(&mut self, name: &WorkloadName) -> Vec<TcpListener> {
        let names = [true, false].map(|v4| socket_name(name, v4));
        let sockets = names.iter().filter_map(|name| self.given.remove(name));
        sockets.map(TcpListener::from).collect()
    }

    /// Takes the listening socket of a proxy that is not the agent's, in the node's network namespace.
    pub(super) fn adopt_for_packets(
        &self,
        kernel: &Kernel,
        own: &Namespace,
        workload: u32,
    ) -> Result<(), Problem> {
        let tables = kernel.capture().tables();
        let known = tables.listeners().map_err(Problem::of_node)?;
        let key = |v4| ListenerKey::of_packets(workload, v4);
        let port = self.options.outbound;
        let taken = foreign::listeners(own, port, |family| !known.contains(&key(family == 4)))?;
        let is_new = !taken.sockets.is_empty();
        for (family, socket) in taken.sockets {
            // `TPROXY` would need the option, too; few proxies' settings have it.
            let options = SockRef::from(&socket);
            match options.domain().map_err(Problem::of_node)? {
                Domain::IPV4 => options.set_ip_transparent_v4(true),
                _ => options.set_ip_transparent_v6(true),
            }
            .map_err(|error| {
                Problem::of_node(format!(
                    "cannot have the proxy's socket take connections to any address: {error}"
                ))
            })?;
            // Linux 6.6 added TCX, and the lookup of such sockets for programs.
            if options.reuse_port().unwrap_or(false) && Hook::of_kernel() != Hook::Tcx {
                return Err(Problem::of_workload(format!(
                    "the socket at the node's port {port} shares it (SO_REUSEPORT), and kernels \
                     before 6.6 give no packets to such a socket: tell the proxy not to (HAProxy: \
                     `noreuseport`)"
                )));
            }
            give(kernel, key(family == 4), &socket)?;
        }
        if let Some(problem) = taken.problem {
            return Err(problem);
        }
        if is_new || known.contains(&key(true)) || known.contains(&key(false)) {
            return Ok(());
        }
        Err(Problem::of_workload(format!(
            "nobody listens at port {port} in the node's network namespace"
        )))
    }
}

/// Removes listening sockets of workloads that are not in the present tables and not in the wanted ones.
pub fn forget_listeners(kernel: &Kernel, wanted: &Captured) -> Result<(), kernel::Error> {
    let capture = kernel.capture();
    let locals = capture.held().locals.values().chain(wanted.locals.values());
    let known: BTreeSet<u32> = locals.map(|local| local.workload).collect();
    for key in capture.tables().listeners()? {
        let of_namespace = [0, ListenerKey::OUTBOUND, ListenerKey::TUNNELS];
        if !of_namespace.contains(&key.workload) && !known.contains(&key.workload) {
            capture.listen_no_more(key)?;
        }
    }
    Ok(())
}

fn is_v4(socket: &TcpListener) -> bool {
    socket.local_addr().is_ok_and(|addr| addr.is_ipv4())
}

fn give(kernel: &Kernel, key: ListenerKey, socket: impl AsFd) -> Result<(), Problem> {
    let given = kernel.capture().listen(key, socket.as_fd());
    given.map_err(Problem::of_node)
}

/// The name of a listening socket in a hand-over.
fn socket_name(workload: &WorkloadName, v4: bool) -> String {
    format!("{PACKETS} {workload} {}", if v4 { "v4" } else { "v6" })
}

/// Copies of listening sockets, for a hand-over.
fn named(workload: &WorkloadName, listeners: &[TcpListener]) -> io::Result<Named> {
    let copy = |socket: &TcpListener| {
        let name = socket_name(workload, is_v4(socket));
        Ok((name, socket.try_clone()?.into()))
    };
    listeners.iter().map(copy).collect()
}
