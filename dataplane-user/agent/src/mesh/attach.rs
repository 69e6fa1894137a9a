//! The proxy's sockets in workloads' network namespaces: opened, taken over, handed over and closed.

use std::{
    io,
    net::TcpListener,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
    time::Duration,
};

use dataplane_common::capture::{Enrolled, FROM_CLIENT, ListenerKey};
use kernel::{
    Kernel,
    capture::{Capture, CaptureOptions, Listeners, Namespace},
    namespaces,
};
use model::{Egress, Workload, WorkloadName};
use plan::enrol::{Member, Problem};
use proxy::handover::Named;
use relay::Attachment;
use tracing::{debug, info};

use super::{Mesh, RELEASED, dns::Dns, found::Found, problems::Problems};
use crate::foreign;

/// How long the connections of a workload that is gone may go on, because it may be that neither side ends them.
pub(super) const DRAIN: Duration = Duration::from_secs(30);

/// A workload whose connections the agent's proxy takes.
pub(super) struct Attached {
    pub name: WorkloadName,
    pub namespace: OwnedFd,
    egress: Egress,
    takes_inbound: bool,
    /// Whether the proxy accepts tunnels to it.
    takes_tunnels: bool,
    /// Whether the kernel refuses some of its inbound connections: the proxy then lets none arrive without a tunnel.
    refuses: bool,
    /// Its listening sockets, for this agent's successor.
    sockets: Named,
}

impl Attached {
    /// Its listening sockets for outbound connections.
    pub fn outbound(&self) -> impl Iterator<Item = &OwnedFd> {
        let sockets = self.sockets.iter();
        let outbound = sockets.filter(|(name, _)| name.starts_with(OUTBOUND));
        outbound.map(|(_, socket)| socket)
    }
}

/// Whether the proxy listens for inbound connections of a workload with these flags of its entry. For a workload that accepts
/// tunnels it always does: then one write makes the workload's plain connections go to the proxy, or direct.
pub(super) const fn takes_inbound(flags: u32) -> bool {
    flags & (Enrolled::INBOUND | Enrolled::TUNNELS) != 0
}

impl Mesh {
    /// Opens listening sockets for workloads, before their connections are captured.
    pub(super) fn listen(
        &mut self,
        kernel: &Kernel,
        enrolled: &[(&Member, &Namespace, u32)],
        problems: &mut Problems,
    ) {
        for (member, namespace, flags) in enrolled {
            if flags & Enrolled::PROXY == 0 {
                continue;
            }
            let problem = if self.options.foreign {
                self.adopt(kernel, namespace).unwrap_or_else(Some)
            } else if self.is_attached(member, namespace.cookie, *flags) {
                None
            } else {
                self.take_back(namespace.cookie);
                self.attach(kernel.capture(), member, namespace, *flags)
                    .err()
            };
            if let Some(problem) = problem {
                problems.add(&member.workload.name, problem);
            }
        }
    }

    /// Whether the proxy takes a workload's connections already, by its present rules. `flags`: those of its entry.
    fn is_attached(&self, member: &Member, cookie: u64, flags: u32) -> bool {
        self.attached.get(&cookie).is_some_and(|attached| {
            member.workload.name == attached.name
                && member.policy.egress == attached.egress
                && takes_inbound(flags) == attached.takes_inbound
                && (flags & Enrolled::TUNNELS != 0) == attached.takes_tunnels
                && (flags & Enrolled::REFUSES_INBOUND != 0) == attached.refuses
        })
    }

    /// Takes no more connections by earlier rules, or of an earlier pod, in a network namespace. The listening sockets
    /// stay, for the next attachment: no connection is refused in between.
    fn take_back(&mut self, cookie: u64) {
        if let Some(attached) = self.attached.get_mut(&cookie) {
            let sockets = std::mem::take(&mut attached.sockets);
            self.given.extend(sockets);
            self.let_go(cookie, RELEASED);
        }
    }

    /// Returns an earlier agent's sockets for a namespace, if they have the right ports. It may have had none for tunnels.
    fn given(&mut self, cookie: u64, inbound: bool) -> Option<Listeners> {
        let mut take = |direction: &str, port: u16| -> Vec<TcpListener> {
            let names = ["v4", "v6"].map(|family| socket_name(direction, cookie, family));
            let sockets = names.iter().filter_map(|name| self.given.remove(name));
            sockets
                .map(TcpListener::from)
                .filter(|socket| socket.local_addr().is_ok_and(|addr| addr.port() == port))
                .collect()
        };
        let listeners = Listeners {
            outbound: take(OUTBOUND, self.options.outbound),
            inbound: take(INBOUND, self.options.inbound),
            tunnels: take(TUNNELS, self.options.inbound),
        };
        let complete = !listeners.outbound.is_empty() && inbound != listeners.inbound.is_empty();
        complete.then_some(listeners)
    }

    /// The proxy's listening sockets, for this agent's successor.
    pub fn sockets(&self) -> impl Iterator<Item = (String, BorrowedFd<'_>)> {
        let sockets = self
            .attached
            .values()
            .flat_map(|attached| &attached.sockets);
        let sockets = sockets.map(|(name, socket)| (name.clone(), socket.as_fd()));
        let of_dns = self.dns.iter().flat_map(Dns::sockets);
        sockets.chain(self.packets.sockets()).chain(of_dns)
    }

    /// Opens or takes over a workload's listening sockets, and makes the proxy take its connections. `flags`: those of its
    /// entry.
    pub(super) fn attach(
        &mut self,
        capture: &Capture,
        member: &Member,
        namespace: &Namespace,
        flags: u32,
    ) -> Result<(), Problem> {
        let (inbound, tunnels) = (takes_inbound(flags), flags & Enrolled::TUNNELS != 0);
        let transparent = self.config.proxy.keep_source.unwrap_or(true);
        let options = self.options;
        let given = self.given(namespace.cookie, inbound);
        let sockets = kernel::capture::sockets_of_listeners(inbound, tunnels);
        let work = move || {
            if transparent && inbound {
                let routed = kernel::capture::route_answers(options.mark | FROM_CLIENT);
                if let Err(error) = routed {
                    return Ok(Err(unrouted(&error)));
                }
            }
            let interface = only_interface();
            let listeners = listeners(given, &options, inbound, tunnels);
            let listeners = listeners.map_err(|error| not_listening(&options, &error));
            Ok(listeners.map(|listeners| (listeners, interface)))
        };
        let opened = namespaces::within_with(namespace.file.as_fd(), &sockets, work);
        let (listeners, interface) = opened.map_err(|error| {
            Problem::of_node(format!("cannot enter its network namespace: {error}"))
        })??;
        hand_over(capture, namespace.cookie, &listeners).map_err(Problem::of_node)?;
        let clone = || namespace.file.try_clone().map_err(Problem::of_node);
        let sockets = named(namespace.cookie, &listeners).map_err(Problem::of_node)?;
        let name = member.workload.name.clone();
        let Some(proxy) = &self.proxy else {
            return Ok(());
        };
        proxy
            .add(Attachment {
                workload: Arc::new(Workload {
                    capture: Some(Arc::new(member.policy.clone())),
                    ..(*member.workload).clone()
                }),
                namespace: Some(sockets_in(clone()?, interface)),
                outbound: listeners.outbound,
                inbound: listeners.inbound,
                tunnels: listeners.tunnels,
                egress: member.policy.egress,
            })
            .map_err(Problem::of_node)?;
        info!(workload = %name, "captured: the proxy listens in its network namespace");
        let attached = Attached {
            name,
            namespace: clone()?,
            egress: member.policy.egress,
            takes_inbound: inbound,
            takes_tunnels: tunnels,
            refuses: flags & Enrolled::REFUSES_INBOUND != 0,
            sockets,
        };
        self.attached.insert(namespace.cookie, attached);
        Ok(())
    }

    /// Takes the listening socket of a proxy that is not the agent's, if it began to listen before the workload was
    /// captured. Later sockets are noticed by the programs. Returns the problem with sockets that cannot be taken.
    fn adopt(&self, kernel: &Kernel, namespace: &Namespace) -> Result<Option<Problem>, Problem> {
        let tables = kernel.capture().tables();
        let known = tables.listeners().map_err(Problem::of_node)?;
        let key = |family| ListenerKey::of_namespace(namespace.cookie, family == 4);
        let port = self.options.inbound;
        let taken = foreign::listeners(namespace, port, |family| !known.contains(&key(family)))?;
        for (family, socket) in taken.sockets {
            let given = kernel.capture().listen(key(family), socket.as_fd());
            given.map_err(Problem::of_node)?;
        }
        Ok(taken.problem)
    }

    /// Detaches workloads that are no longer captured: the connections that the proxy has go on. `unread`: whether a
    /// network namespace was captured before and could not be read now.
    pub(super) fn release(
        &mut self,
        enrolled: &[(&Member, &Namespace, u32)],
        found: &Found,
        unread: impl Fn(u64) -> bool,
    ) {
        let kept = |cookie: u64| {
            unread(cookie)
                || enrolled.iter().any(|(member, namespace, flags)| {
                    namespace.cookie == cookie
                        && flags & Enrolled::PROXY != 0
                        && self.is_attached(member, cookie, *flags)
                })
        };
        let attached = self.attached.keys().copied();
        let gone: Vec<u64> = attached.filter(|cookie| !kept(*cookie)).collect();
        for cookie in gone {
            let is_there = found.seen.contains_key(&cookie) || cookie == self.own_cookie;
            self.let_go(cookie, if is_there { RELEASED } else { DRAIN });
        }
    }

    /// Releases workloads that have to be captured in another way than before: the proxy distinguishes workloads by
    /// their names.
    pub(super) fn change_over(
        &mut self,
        enrolled: &[(&Member, &Namespace, u32)],
        by_packets: &[&Member],
    ) {
        for (member, namespace, _) in enrolled {
            let name = &member.workload.name;
            self.let_go_of_packets(name);
            // The workload has moved.
            let mut attached = self.attached.iter();
            let before = attached
                .find(|(cookie, attached)| **cookie != namespace.cookie && attached.name == *name);
            if let Some(cookie) = before.map(|(cookie, _)| *cookie) {
                self.let_go(cookie, RELEASED);
            }
        }
        for member in by_packets {
            let mut attached = self.attached.iter();
            let before = attached.find(|(_, attached)| attached.name == member.workload.name);
            if let Some(cookie) = before.map(|(cookie, _)| *cookie) {
                self.let_go(cookie, RELEASED);
            }
        }
    }

    /// Takes no more connections of the workload in a network namespace.
    fn let_go(&mut self, cookie: u64, deadline: Duration) {
        let Some(attached) = self.attached.remove(&cookie) else {
            return;
        };
        if let Some(proxy) = &self.proxy {
            proxy.remove(&attached.name, deadline);
        }
        info!(workload = %attached.name, "released");
    }
}

/// Makes a workload's connections from its network namespace.
fn sockets_in(namespace: OwnedFd, interface: Option<String>) -> relay::Namespace {
    relay::Namespace {
        open: Arc::new(move |v4, count| namespaces::tcp_sockets(namespace.as_fd(), v4, count)),
        interface,
    }
}

/// The only interface of this network namespace that is up, besides the loopback interface; `None` if there are
/// several.
fn only_interface() -> Option<String> {
    let all = kernel::interfaces::links().inspect_err(|error| debug!("mesh: {error}"));
    let all = all.ok()?.into_iter();
    let mut up = all.filter(|interface| interface.up && !interface.loopback);
    let first = up.next()?;
    up.next().is_none().then_some(first.name)
}

fn unrouted(error: &io::Error) -> Problem {
    Problem::of_node(format!(
        "cannot have its answers to clients' addresses come back to the proxy: {error}"
    ))
}

/// Completes the sockets of an earlier agent in this network namespace. Closes its sockets for tunnels if the workload accepts
/// none.
fn listeners(
    given: Option<Listeners>,
    options: &CaptureOptions,
    inbound: bool,
    tunnels: bool,
) -> io::Result<Listeners> {
    let mut listeners = match given {
        Some(listeners) => listeners,
        None => kernel::capture::open_listeners(options, inbound)?,
    };
    if !tunnels {
        listeners.tunnels.clear();
    } else if listeners.tunnels.is_empty() {
        listeners.tunnels = kernel::capture::open_tunnel_listeners(options)?;
    }
    Ok(listeners)
}

/// If a port is taken in a workload's network namespace, one of the workload's processes has taken it.
fn not_listening(options: &CaptureOptions, error: &io::Error) -> Problem {
    let (a, b) = (options.outbound, options.inbound);
    let text = format!("cannot listen at ports {a} and {b} in its network namespace: {error}");
    match error.kind() {
        io::ErrorKind::AddrInUse => Problem::of_workload(text),
        _ => Problem::of_node(text),
    }
}

/// Why connections of captured workloads are reset, if the kernel programs do not see the proxy accept: its sockets are
/// in a cgroup that the programs are not attached to.
pub(super) fn unseen(cgroup: &Path) -> Option<String> {
    match kernel::sockets::own_elsewhere(cgroup) {
        Ok(elsewhere) => elsewhere.map(|elsewhere| {
            let own = elsewhere.own.as_ref().map_or_else(
                || "a cgroup that is mounted nowhere that the agent sees".into(),
                |own| format!("the cgroup {}", own.display()),
            );
            let root = elsewhere.root.as_ref().map_or_else(
                || "the root of the cgroup v2 hierarchy".into(),
                |root| format!("{}, the root of the hierarchy", root.display()),
            );
            format!(
                "the agent's sockets are in {own}, which is outside of kernel.cgroup, {}: the proxy resets the \
                 connections that captured workloads open (LOOP in the access log), because no kernel program tells it \
                 where they were to go; set kernel.cgroup (--cgroup, DATAPLANE_CGROUP) to {root}, or to a cgroup that \
                 holds the agent and all pods, and restart the agent",
                cgroup.display()
            )
        }),
        Err(error) => {
            debug!("mesh: {error}");
            None
        }
    }
}

const OUTBOUND: &str = "outbound";
const INBOUND: &str = "inbound";
const TUNNELS: &str = "tunnels";

/// The name of a listening socket in a hand-over.
fn socket_name(direction: &str, cookie: u64, family: &str) -> String {
    format!("{direction} {cookie} {family}")
}

/// Copies of listening sockets, for a hand-over.
fn named(cookie: u64, listeners: &Listeners) -> io::Result<Named> {
    let outbound = listeners.outbound.iter().map(|socket| (OUTBOUND, socket));
    let inbound = listeners.inbound.iter().map(|socket| (INBOUND, socket));
    let tunnels = listeners.tunnels.iter().map(|socket| (TUNNELS, socket));
    let copy = |(direction, socket): (&str, &TcpListener)| {
        let v4 = socket.local_addr()?.is_ipv4();
        let name = socket_name(direction, cookie, if v4 { "v4" } else { "v6" });
        Ok((name, socket.try_clone()?.into()))
    };
    let all = outbound.chain(inbound).chain(tunnels);
    all.map(copy).collect()
}

/// Gives the programs the sockets for a namespace's inbound connections, for tunnels to it, and for outbound connections to
/// any address of loopback.
fn hand_over(capture: &Capture, cookie: u64, listeners: &Listeners) -> Result<(), String> {
    let is_v4 = |socket: &TcpListener| socket.local_addr().is_ok_and(|addr| addr.is_ipv4());
    let inbound = listeners.inbound.iter();
    let inbound = inbound.map(|socket| (ListenerKey::of_namespace(cookie, is_v4(socket)), socket));
    let outbound = listeners.outbound.iter().filter(|socket| is_v4(socket));
    let outbound = outbound.map(|socket| (ListenerKey::of_outbound(cookie), socket));
    let tunnels = listeners.tunnels.iter();
    let tunnels = tunnels.map(|socket| (ListenerKey::of_tunnels(cookie, is_v4(socket)), socket));
    for (key, socket) in inbound.chain(outbound).chain(tunnels) {
        capture
            .listen(key, socket.as_fd())
            .map_err(|error| error.to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOPBACK: &str = "127.0.0.1:0";

    fn socket() -> TcpListener {
        TcpListener::bind(LOOPBACK).unwrap()
    }

    fn options() -> CaptureOptions {
        let free = [socket(), socket()].map(|socket| socket.local_addr().unwrap().port());
        CaptureOptions {
            outbound: free[0],
            inbound: free[1],
            mark: 1,
            foreign: false,
            denies: false,
            dns: None,
        }
    }

    /// As an earlier agent hands them over, which accepts tunnels or not.
    #[test]
    fn the_sockets_of_an_earlier_agent_are_completed() {
        let options = options();
        let given = |tunnels| Listeners {
            outbound: vec![socket()],
            inbound: vec![socket()],
            tunnels,
        };
        let at = |sockets: &[TcpListener]| sockets[0].local_addr().unwrap();
        let before = given(vec![socket()]);
        let (outbound, tunnels) = (at(&before.outbound), at(&before.tunnels));
        let kept = listeners(Some(before), &options, true, true).unwrap();
        assert_eq!((at(&kept.outbound), at(&kept.tunnels)), (outbound, tunnels));
        let kept = listeners(Some(given(vec![])), &options, true, true).unwrap();
        assert_eq!(at(&kept.tunnels).port(), options.inbound);
        let kept = listeners(Some(given(vec![socket()])), &options, true, false).unwrap();
        assert!(kept.tunnels.is_empty());
        // Another test may have taken the ports meanwhile.
        let options = self::options();
        let opened = listeners(None, &options, true, false).unwrap();
        assert!(opened.tunnels.is_empty() && at(&opened.inbound).port() == options.inbound);
    }

    #[test]
    fn all_sockets_of_a_workload_are_handed_over() {
        let listeners = Listeners {
            outbound: vec![socket()],
            inbound: vec![socket()],
            tunnels: vec![socket()],
        };
        let sockets = named(7, &listeners).unwrap();
        let names: Vec<&str> = sockets.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["outbound 7 v4", "inbound 7 v4", "tunnels 7 v4"]);
    }
}
