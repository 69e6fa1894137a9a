//! Interfaces of workloads by which the connections of virtual machines and containers inside come: routing rules bring these
//! connections to the proxy's listening socket for outbound ones.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    os::fd::{AsFd, OwnedFd},
};

use dataplane_common::capture::{Enrolled, ListenerKey};
use kernel::{
    Kernel,
    capture::{InterfaceRule, Machines, Marks, Namespace, Unrouted},
    namespaces,
};
use model::Policy;
use plan::{
    Captured,
    enrol::{Member, Problem},
};
use socket2::{Domain, SockRef};

use super::{Mesh, attach, found::Found, problems::Problems};
use crate::foreign;

/// The network namespaces that have routing rules for interfaces, by their cookies. `None`: an earlier agent wrote the rules.
/// Inside: the content that this agent wrote last without an error.
pub type Routed = BTreeMap<u64, Option<(OwnedFd, Option<Machines>)>>;

const NOBODY_JUDGES: &str = "connections from its virtual interfaces are refused: only the agent's own proxy can judge \
                             them by egress: deny. Set its mode to proxy, or to auto with mesh.identity, and unset mesh.proxy.uid";
const NO_EFFECT: &str = "connections from its virtual interfaces are not captured, because it has no proxy. With the \
                         agent's proxy, set its mode to proxy, or to auto with mesh.identity";

/// Returns the namespaces of an earlier agent, whose entries the tables hold.
pub fn after(held: &Captured) -> Routed {
    let namespaces = held.namespaces.iter();
    let routed = namespaces.filter(|(_, entry)| entry.flags & Enrolled::VIRTUAL != 0);
    routed.map(|(cookie, _)| (*cookie, None)).collect()
}

impl Mesh {
    /// Gives the programs the proxy's sockets, before connections come by the interfaces.
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
            if self.nobody_judges(*flags) {
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

    /// Whether the programs refuse connections from virtual interfaces for an entry with these flags.
    fn nobody_judges(&self, flags: u32) -> bool {
        let is_judged = !self.options.foreign && flags & Enrolled::PROXY != 0;
        flags & Enrolled::EGRESS_DENY != 0 && !is_judged
    }

    /// Returns the problem of a workload whose virtual interfaces exist and whose connections are not captured. `flags`: those of
    /// its entry.
    pub(super) fn trouble_of_interfaces(&self, flags: u32) -> Option<Problem> {
        let text = if flags & Enrolled::VIRTUAL == 0 {
            NO_EFFECT
        } else if self.nobody_judges(flags) {
            NOBODY_JUDGES
        } else {
            return None;
        };
        Some(Problem::of_workload(text))
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

    /// Adopts the listening sockets of a proxy that is not the agent's.
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

    /// Removes the routing rules from network namespaces that have to have none, before the tables change.
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
                // It is gone, if it is not among the namespaces that could not be read.
                return unread;
            };
            let removed = namespaces::within(there, kernel::capture::unroute_interfaces);
            if let Err(error) = &removed {
                tracing::warn!(
                    "mesh: cannot remove the routing rules for virtual interfaces: {error}"
                );
            }
            removed.is_err()
        });
    }

    /// Makes the connections of virtual interfaces come to the sockets of their network namespace, after the tables and
    /// programs are there. `indices`: the interfaces in the tables, by network namespace.
    pub(super) fn route_interfaces(
        &mut self,
        enrolled: &[(&Member, &Namespace, u32)],
        indices: &HashMap<u64, BTreeMap<String, u32>>,
        failed: impl Fn(u64) -> bool,
        problems: &mut Problems,
    ) {
        let none = BTreeMap::new();
        for (member, namespace, flags) in enrolled {
            if flags & Enrolled::VIRTUAL == 0 {
                continue;
            }
            let closed = flags & Enrolled::EGRESS_DENY != 0;
            let indices = match (failed(namespace.cookie), closed) {
                (false, _) => indices.get(&namespace.cookie).unwrap_or(&none),
                // Without the program, the workload's own sockets would get the connections. Without indices, the table drops them.
                (true, true) => &none,
                (true, false) => continue,
            };
            let machines = machines(&member.policy, self.options.mark, closed, indices);
            if let Err(Unrouted { error, are_held }) = self.write_machines(namespace, machines) {
                let what = match (closed, are_held) {
                    (_, true) => "the machines at its virtual interfaces are cut off",
                    (true, false) => {
                        "connections from its virtual interfaces are not captured, so its egress: deny does not apply to them"
                    }
                    (false, false) => "connections from its virtual interfaces are not captured",
                };
                let text = format!("{what}: cannot write rules in its network namespace: {error}");
                problems.add(&member.workload.name, Problem::of_node(text));
            }
        }
    }

    /// Writes the rules and the table if they are missing. This happens at each [`Mesh::settle`], because another program may
    /// have removed them.
    fn write_machines(&mut self, namespace: &Namespace, wanted: Machines) -> Result<(), Unrouted> {
        let unheld = |error| Unrouted {
            error,
            are_held: false,
        };
        let file = namespace.file.try_clone().map_err(unheld)?;
        let known = self.routed.remove(&namespace.cookie).flatten();
        let is_new = known.is_none_or(|(_, known)| known.as_ref() != Some(&wanted));
        let routed = namespaces::within(file.as_fd(), || {
            Ok(kernel::capture::route_interfaces(&wanted, is_new))
        });
        let routed = routed.map_err(unheld).and_then(|routed| routed);
        // Also after an error, so that a release removes the part that was written.
        let whole = routed.is_ok().then_some(wanted);
        self.routed.insert(namespace.cookie, Some((file, whole)));
        routed
    }
}

/// The rules and the table of a policy. `indices`: the interfaces that the programs' tables have. `closed`: see [`Marks::closed`].
fn machines(policy: &Policy, mark: u32, closed: bool, indices: &BTreeMap<String, u32>) -> Machines {
    let ranges = [true, false]
        .map(|v4| policy.ranges_of_interfaces(v4))
        .concat();
    // The highest bit of the dataplane's mark: Istio's bits are below 0x1000.
    let bit = 1 << mark.ilog2();
    let names = policy.virtual_interfaces.iter();
    let rules = names.clone().flat_map(|name| {
        ranges.iter().map(move |to| InterfaceRule {
            interface: name.to_string(),
            to: *to,
            bit,
        })
    });
    let interfaces = names.map(|name| (name.to_string(), indices.get(&**name).copied()));
    Machines {
        rules: rules.collect(),
        marks: Marks {
            interfaces: interfaces.collect(),
            bit,
            closed,
        },
    }
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

/// Makes a listening socket take connections to any address (`IP_TRANSPARENT`), and gives it to the programs.
fn give_as(kernel: &Kernel, key: ListenerKey, socket: &OwnedFd) -> io::Result<()> {
    let options = SockRef::from(socket);
    match options.domain()? {
        Domain::IPV4 => options.set_ip_transparent_v4(true)?,
        _ => options.set_ip_transparent_v6(true)?,
    }
    let given = kernel.capture().listen(key, socket.as_fd());
    given.map_err(io::Error::other)
}
