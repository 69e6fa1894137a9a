//! Interfaces of workloads by which the connections of virtual machines and containers inside come: routing rules bring these
//! connections to the proxy's listening socket for outbound ones.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, OwnedFd},
};

use dataplane_common::capture::{Enrolled, ListenerKey};
use socket2::{Domain, SockRef};

use super::{Mesh, attach, found::Found, problems::Problems};
use crate::{
    agent::foreign,
    kernel::{self, InterfaceRule, Kernel, Namespace, namespaces},
    model::{Egress, Place, Policy},
    plan::{
        Captured,
        enrol::{Member, Problem},
    },
};

/// The network namespaces that have routing rules for interfaces, by their cookies: with the rules. `None`: of an earlier agent.
pub type Routed = BTreeMap<u64, Option<(OwnedFd, BTreeSet<InterfaceRule>)>>;

const NOBODY_JUDGES: &str = "connections that come by its virtual interfaces are refused: only the agent's own proxy can judge \
                             them by egress: deny. Set its mode to proxy and unset mesh.proxy.uid, or unset its virtualInterfaces";
const NO_EFFECT: &str = "its virtualInterfaces have no effect: without a proxy, or if it is captured by packets or a cgroup, \
                         connections that come by them are not captured. Set its mode to proxy and its capturedBy to sockets";

/// Those of an earlier agent, of which the tables hold this.
pub fn after(held: &Captured) -> Routed {
    let namespaces = held.namespaces.iter();
    let routed = namespaces.filter(|(_, entry)| entry.flags & Enrolled::VIRTUAL != 0);
    routed.map(|(cookie, _)| (*cookie, None)).collect()
}

impl Mesh {
    /// Before connections come by the interfaces: gives the programs the proxy's sockets.
    pub(super) fn listen_for_interfaces(
        &self,
        kernel: &Kernel,
        enrolled: &[(&Member, &Namespace, u32)],
        problems: &mut Problems,
    ) {
        for (member, namespace, flags) in enrolled {
            if flags & Enrolled::VIRTUAL == 0 {
                continue;
            }
            let name = &member.workload.name;
            let Some(number) = self.enroller.numbers().find(|(of, _)| *of == name) else {
                continue;
            };
            if member.policy.egress == Egress::Deny
                && (self.options.foreign || flags & Enrolled::PROXY == 0)
            {
                problems.add(name, Problem::of_workload(NOBODY_JUDGES));
                continue;
            }
            let given = if self.options.foreign {
                self.adopt_for_interfaces(kernel, namespace, number.1)
            } else {
                self.give_for_interfaces(kernel, namespace.cookie, number.1)
            };
            if let Err(problem) = given {
                problems.add(name, problem);
            }
        }
    }

    /// Says of whom virtual interfaces are named without effect.
    pub(super) fn without_effect(&self, members: &[Member], problems: &mut Problems) {
        for member in members {
            let Member {
                workload, policy, ..
            } = member;
            let proxied = policy.mode.is_proxied(self.options.foreign);
            let is_used = workload.place == Place::Address
                && !member.is_by_packets()
                && (proxied || policy.egress == Egress::Deny);
            let is_here = workload.place != Place::Elsewhere;
            if is_here && !is_used && !policy.virtual_interfaces.is_empty() {
                problems.add(&workload.name, Problem::of_workload(NO_EFFECT));
            }
        }
    }

    fn give_for_interfaces(
        &self,
        kernel: &Kernel,
        cookie: u64,
        number: u32,
    ) -> Result<(), Problem> {
        let sockets = self.attached.get(&cookie).into_iter();
        for socket in sockets.flat_map(attach::Attached::outbound) {
            give(kernel, cookie, number, socket).map_err(Problem::of_node)?;
        }
        Ok(())
    }

    /// Takes the listening sockets of a proxy that is not the agent's.
    fn adopt_for_interfaces(
        &self,
        kernel: &Kernel,
        namespace: &Namespace,
        number: u32,
    ) -> Result<(), Problem> {
        let known = kernel
            .capture()
            .tables()
            .listeners()
            .map_err(Problem::of_node)?;
        let key = |family| ListenerKey::of_interfaces(namespace.cookie, number, family == 4);
        let port = self.options.outbound;
        let taken = foreign::listeners(namespace, port, |family| !known.contains(&key(family)))?;
        for (family, socket) in taken.sockets {
            give_as(kernel, key(family), &socket).map_err(Problem::of_node)?;
        }
        taken.problem.map_or(Ok(()), Err)
    }

    /// Removes the routing rules from network namespaces that are to have none, before the tables say so.
    pub(super) fn unroute_interfaces(&mut self, found: &Found, wanted: &Captured) {
        let is_wanted = |cookie: &u64| {
            let entry = wanted.namespaces.get(cookie);
            entry.is_some_and(|entry| entry.flags & Enrolled::VIRTUAL != 0)
        };
        let unread = found.trouble().is_some();
        self.routed.retain(|cookie, file| {
            if is_wanted(cookie) {
                return true;
            }
            let file = file.as_ref().map(|(file, _)| file.as_fd());
            let there = file.or_else(|| found.at(*cookie).map(|namespace| namespace.file.as_fd()));
            let Some(there) = there else {
                // It has gone, unless it may be among those that could not be read.
                return unread;
            };
            let removed =
                namespaces::within(there, || kernel::route_interfaces(&BTreeSet::new(), true));
            if let Err(error) = &removed {
                tracing::warn!(
                    "mesh: cannot remove the routing rules for virtual interfaces: {error}"
                );
            }
            removed.is_err()
        });
    }

    /// Has the connections of virtual interfaces come to the sockets of their network namespace, once the tables and programs
    /// are there.
    pub(super) fn route_interfaces(
        &mut self,
        enrolled: &[(&Member, &Namespace, u32)],
        failed: impl Fn(u64) -> bool,
        problems: &mut Problems,
    ) {
        for (member, namespace, flags) in enrolled {
            let denies = flags & Enrolled::EGRESS_DENY != 0;
            // Without the program, packets that come to the sockets are refused: what the egress policy wants.
            if flags & Enrolled::VIRTUAL == 0 || failed(namespace.cookie) && !denies {
                continue;
            }
            let mut route = |mark| -> io::Result<()> {
                let rules = rules(&member.policy, mark);
                let known = self.routed.get(&namespace.cookie);
                let is_new = !matches!(known, Some(Some((_, known))) if *known == rules);
                let file = namespace.file.try_clone()?;
                // Again each time: somebody else may have removed them.
                namespaces::within(file.as_fd(), || kernel::route_interfaces(&rules, is_new))?;
                self.routed.insert(namespace.cookie, Some((file, rules)));
                Ok(())
            };
            let name = &member.workload.name;
            let Err(error) = route(self.options.mark) else {
                continue;
            };
            // Without marks, answers are taken for connections, and are refused. For the egress policy this is better than none.
            let text = match denies.then(|| route(0)) {
                Some(Ok(())) => {
                    format!(
                        "connections to the machines at its virtual interfaces fail, because conntrack cannot be asked which \
                         packets are answers: {error}"
                    )
                }
                _ => format!(
                    "connections that come by its virtual interfaces are not captured: cannot write rules in its network \
                     namespace: {error}"
                ),
            };
            problems.add(name, Problem::of_node(text));
        }
    }
}

/// The routing rules of a policy, for packets with these bits in their mark.
fn rules(policy: &Policy, mark: u32) -> BTreeSet<InterfaceRule> {
    let ranges = [true, false]
        .map(|v4| policy.ranges_of_interfaces(v4))
        .concat();
    let interfaces = policy.virtual_interfaces.iter();
    let rules = interfaces.flat_map(|interface| {
        ranges.iter().map(|to| InterfaceRule {
            interface: interface.to_string(),
            to: *to,
            mark,
        })
    });
    rules.collect()
}

/// Gives the programs a listening socket of the agent's proxy.
fn give(kernel: &Kernel, cookie: u64, number: u32, socket: &OwnedFd) -> io::Result<()> {
    let v4 = SockRef::from(socket).domain()? == Domain::IPV4;
    give_as(
        kernel,
        ListenerKey::of_interfaces(cookie, number, v4),
        socket,
    )
}

/// Has a listening socket take connections to any address (`IP_TRANSPARENT`), and gives it to the programs.
fn give_as(kernel: &Kernel, key: ListenerKey, socket: &OwnedFd) -> io::Result<()> {
    let options = SockRef::from(socket);
    match options.domain()? {
        Domain::IPV4 => options.set_ip_transparent_v4(true)?,
        _ => options.set_ip_transparent_v6(true)?,
    }
    let given = kernel.capture().listen(key, socket.as_fd());
    given.map_err(io::Error::other)
}
