//! Workloads that are captured by the packets that they send: the interfaces of these packets.

mod sockets;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
    time::Instant,
};

use dataplane_common::capture::{Enrolled, FROM_CLIENT, Local};
use kernel::{
    Kernel,
    capture::{CaptureTables, Namespace},
    interfaces::Interface,
};
use model::WorkloadName;
use plan::{
    Captured,
    enrol::{Member, Problem, Unknown},
};
use tracing::{debug, info};

use self::sockets::{Attached, forget_listeners};
use super::{AS_BEFORE, Mesh, RELEASED, attach::DRAIN, found::Found, problems::Problems};
use crate::roles::Role;

/// Flags of a workload's entry that its packets cannot show, or that do not apply to packets.
const NOT_THERE: u32 = Enrolled::INBOUND
    | Enrolled::INBOUND_OTHERS
    | Enrolled::HAS_INBOUND_PORTS
    | Enrolled::REFUSES_INBOUND
    | Enrolled::REFUSES_OTHER_PORTS
    | Enrolled::HAS_INTERFACES
    | Enrolled::TUNNELS
    | Enrolled::ONLY_HBONE
    | Enrolled::VIRTUAL
    | Enrolled::HAS_USERS
    | Enrolled::ONLY_USERS;

/// The workloads that are captured now, and those that were.
#[derive(Default)]
pub struct Packets {
    attached: BTreeMap<WorkloadName, Attached>,
    /// Addresses whose new connections are no longer captured, and since when: existing connections go on.
    released: BTreeMap<IpAddr, (WorkloadName, Instant)>,
    /// The interfaces by which the packets of each workload come, from the last search.
    ways: BTreeMap<WorkloadName, BTreeSet<u32>>,
    /// Whether the rule and the route are there; `None` until it is known.
    routed: Option<bool>,
}

/// A workload, and the interfaces by which its packets come.
struct Guest<'a> {
    member: &'a Member,
    entry: Enrolled,
    interfaces: BTreeSet<u32>,
}

/// The failures of [`Mesh::capture_packets`].
#[derive(Default)]
pub struct Failures {
    /// Workloads that may be here, and could not be looked for, by their numbers.
    pub unknown: BTreeMap<u32, Unknown>,
    /// A problem that no workload has caused.
    pub trouble: Option<String>,
}

impl Packets {
    /// After an earlier agent: connections that it had captured may go on for a while.
    pub fn after(held: &Captured) -> Self {
        let by_packets = held.locals.iter().filter(|(_, local)| local.has_packets());
        // Only the earlier agent knew the workload.
        let nobody = WorkloadName::new("", "");
        let released = by_packets.map(|(addr, _)| (addr.ip(), (nobody.clone(), Instant::now())));
        Self {
            released: released.collect(),
            ..Self::default()
        }
    }

    /// Listening sockets, for this agent's successor.
    pub fn sockets(&self) -> impl Iterator<Item = (String, BorrowedFd<'_>)> {
        let sockets = self.attached.values().flat_map(|a| &a.sockets);
        sockets.map(|(name, socket)| (name.clone(), socket.as_fd()))
    }
}

impl Mesh {
    /// Captures the connections of these workloads by the packets that they send. The programs for the packets are
    /// attached before the tables name the workloads.
    pub(super) fn capture_packets(
        &mut self,
        kernel: &Kernel,
        guests: &[&Member],
        found: &Found,
        wanted: &mut Captured,
        problems: &mut Problems,
    ) -> Failures {
        let mut failures = Failures::default();
        if guests.is_empty()
            && self.packets.released.is_empty()
            && self.packets.routed == Some(false)
        {
            self.answer_guests(&mut [], &[], wanted, problems);
            return failures;
        }
        let places = self.find(guests, found, wanted, problems, &mut failures);
        let (mut here, own, mut on) = match places {
            Ok(places) => places,
            Err(error) => {
                for member in guests {
                    let name = &member.workload.name;
                    problems.add(name, Problem::of_node(format!("{error}; {AS_BEFORE}")));
                    failures
                        .unknown
                        .insert(self.enroller.number(name), Unknown::Packets);
                }
                failures.trouble = Some(error);
                return failures;
            }
        };
        on.extend(here.iter().flat_map(|g| &g.interfaces));
        let routed = self.route(!on.is_empty()).map_err(|error| {
            format!("cannot route captured packets to the proxy's sockets: {error}")
        });
        let attached = kernel
            .attach_capture(&on)
            .map_err(|error| error.to_string());
        let common = routed
            .err()
            .into_iter()
            .chain(attached.as_ref().err().cloned());
        let common: Vec<String> = common.collect();
        failures.trouble = common.first().cloned();
        let failed = attached.unwrap_or_default();
        // These addresses recognise a connection to the proxy's own port.
        let addresses = if here.is_empty() {
            Ok(Vec::new())
        } else {
            kernel::capture::addresses()
        };
        match &addresses {
            Ok(addresses) if !kernel.waits() => {
                self.answer_guests(&mut here, addresses, wanted, problems);
            }
            Ok(_) => {}
            Err(error) => {
                failures.trouble = Some(format!("cannot read the node's addresses: {error}"));
            }
        }
        let addresses = addresses.unwrap_or_default();
        for guest in &here {
            let name = &guest.member.workload.name;
            let unattached = guest.interfaces.iter().filter_map(|i| failed.get(i));
            let mut said: Vec<Problem> = unattached.chain(&common).map(Problem::of_node).collect();
            if guest.entry.flags & Enrolled::PROXY != 0 {
                let listening = if self.options.foreign {
                    self.adopt_for_packets(kernel, own, guest.entry.workload)
                } else {
                    self.listen_for_packets(kernel, guest)
                };
                said.extend(listening.err());
            }
            if guest.entry.flags & Enrolled::PROXY != 0 || guest.entry.resolvers != 0 {
                said.extend(unroutable());
            }
            for problem in said {
                problems.add(name, problem);
            }
            for addr in &guest.member.workload.addresses {
                wanted.locals.insert((*addr).into(), local(0, &guest.entry));
            }
        }
        for addr in addresses {
            let node = local(own.cookie, &Enrolled::default());
            wanted.locals.entry(addr.into()).or_insert(node);
        }
        self.release_packets(&here, guests);
        if let Err(error) = forget_listeners(kernel, wanted) {
            failures.trouble = Some(error.to_string());
        }
        failures
    }

    /// Why the packets of a workload with this number do not go to its rules yet; `None` if they do, as the kernel says.
    /// [`Mesh::capture_packets`] has listed the programs at its interfaces, and attached those that were missing.
    pub(super) fn lacks_packets(
        &self,
        tables: &CaptureTables,
        member: &Member,
        number: Option<u32>,
    ) -> Option<String> {
        let name = &member.workload.name;
        if !self.packets.ways.contains_key(name) {
            return Some("no interface of the node leads only to the pod's addresses".to_owned());
        }
        for addr in &member.workload.addresses {
            let entry = match tables.local((*addr).into()) {
                Ok(entry) => entry.filter(|entry| Some(entry.workload) == number),
                Err(error) => return Some(error.to_string()),
            };
            let Some(entry) = entry.filter(Local::is_by_packets) else {
                return Some(format!(
                    "table LOCALS does not have the pod's address {addr}"
                ));
            };
            let is_proxied = entry.flags & Enrolled::PROXY != 0 && self.proxy.is_some();
            if is_proxied && !self.packets.attached.contains_key(name) {
                return Some("the agent's proxy does not listen for the pod's packets".to_owned());
            }
        }
        None
    }

    /// Answers the DNS queries of these workloads, and of no others that are captured by their packets.
    fn answer_guests(
        &mut self,
        here: &mut [Guest<'_>],
        addresses: &[IpAddr],
        wanted: &mut Captured,
        problems: &mut Problems,
    ) {
        let Some(dns) = &mut self.dns else { return };
        let members: Vec<&Member> = here.iter().map(|guest| guest.member).collect();
        let own = addresses.iter().copied().collect();
        let (mark, given) = (self.options.mark, &mut self.given);
        let resolvers = dns.answer_guests(&members, mark, &own, given, problems);
        for (guest, to) in here.iter_mut().zip(resolvers) {
            guest.entry.resolvers = self.enroller.resolvers(&to, wanted);
        }
    }

    /// Returns the workloads that are here, with their interfaces; the node's network namespace; and further interfaces
    /// that need programs.
    ///
    /// # Errors
    /// If the kernel does not return them: then everything has to stay as it is.
    fn find<'a>(
        &mut self,
        guests: &[&'a Member],
        found: &'a Found,
        wanted: &mut Captured,
        problems: &mut Problems,
        failures: &mut Failures,
    ) -> Result<(Vec<Guest<'a>>, &'a Namespace, BTreeSet<u32>), String> {
        let own = found
            .own
            .as_ref()
            .map_err(|error| format!("cannot look at the node's network namespace: {error}"))?;
        let interfaces = kernel::interfaces::interfaces().map_err(|error| error.to_string())?;
        let ways: Vec<_> = guests
            .iter()
            .map(|member| ways(&member.workload.addresses, &interfaces))
            .collect();
        let mut on = self.go_on(guests, &interfaces, wanted)?;
        let mut here = Vec::new();
        let mut known = BTreeMap::new();
        for (member, ways) in guests.iter().zip(ways) {
            let name = &member.workload.name;
            match ways {
                Ok(ways) if ways.is_empty() => {
                    debug!(workload = %name, "no interface here leads to it");
                }
                Ok(interfaces) => {
                    known.insert(name.clone(), interfaces.clone());
                    let mut entry = self.enroller.enrol(member, wanted);
                    entry.flags = entry.flags & !NOT_THERE | Enrolled::PACKETS;
                    here.push(Guest {
                        member,
                        entry,
                        interfaces,
                    });
                }
                Err(NoWay::Bridge(text)) => problems.add(name, Problem::of_workload(text)),
                Err(NoWay::Unknown(text)) => {
                    // From the last search.
                    let Some(before) = self.packets.ways.get(name) else {
                        return Err(text);
                    };
                    on.extend(before);
                    known.insert(name.clone(), before.clone());
                    failures
                        .unknown
                        .insert(self.enroller.number(name), Unknown::Packets);
                    problems.add(name, Problem::of_node(format!("{text}; {AS_BEFORE}")));
                }
            }
        }
        self.packets.ways = known;
        Ok((here, own, on))
    }

    /// Returns the interfaces that still need programs for workloads that are no longer captured.
    fn go_on(
        &mut self,
        guests: &[&Member],
        interfaces: &[Interface],
        wanted: &mut Captured,
    ) -> Result<BTreeSet<u32>, String> {
        let Self { packets, proxy, .. } = self;
        for addr in guests.iter().flat_map(|member| &member.workload.addresses) {
            packets.released.remove(addr);
        }
        let mut on = BTreeSet::new();
        let mut ways_of = BTreeMap::new();
        for addr in packets.released.keys() {
            let ways = match ways(&[*addr], interfaces) {
                Ok(ways) => ways,
                // A workload that has moved to a bridge counts as new.
                Err(NoWay::Bridge(_)) => BTreeSet::new(),
                Err(NoWay::Unknown(text)) => return Err(text),
            };
            ways_of.insert(*addr, ways);
        }
        packets.released.retain(|addr, (name, since)| {
            let mut has_ended = since.elapsed() > DRAIN;
            // For another proxy this is unknown.
            has_ended &= proxy.as_ref().is_none_or(|proxy| !proxy.drains(name));
            has_ended &= proxy.is_some();
            let ways = ways_of.remove(addr).unwrap_or_default();
            if has_ended || ways.is_empty() {
                return false;
            }
            on.extend(ways);
            let entry = Enrolled {
                flags: Enrolled::PACKETS,
                ..Enrolled::default()
            };
            // The address may belong to a workload that is captured in another way, now or later.
            let found = wanted.locals.entry((*addr).into());
            found
                .and_modify(|local| local.flags |= Enrolled::PACKETS_BEFORE)
                .or_insert(local(0, &entry));
            true
        });
        Ok(on)
    }

    /// Makes marked packets go to sockets, or no longer.
    fn route(&mut self, wanted: bool) -> io::Result<()> {
        if self.packets.routed == Some(wanted) && !wanted {
            return Ok(());
        }
        let mark = self.options.mark | FROM_CLIENT;
        // Again each time, because another program may have removed them.
        if wanted {
            kernel::capture::route_to_sockets(mark)?;
        } else {
            kernel::capture::route_answers_no_more(mark)?;
        }
        self.packets.routed = Some(wanted);
        Ok(())
    }

    /// Detaches workloads that are no longer captured by their packets: the connections that the proxy has go on.
    /// Workloads that may be here stay: their interfaces are known from before.
    fn release_packets(&mut self, here: &[Guest<'_>], guests: &[&Member]) {
        let kept = |name: &WorkloadName| {
            let mut found = here.iter().filter(|g| g.member.workload.name == *name);
            match found.next() {
                Some(guest) => guest.entry.flags & Enrolled::PROXY != 0,
                None => {
                    self.packets.ways.contains_key(name)
                        && guests.iter().any(|member| member.workload.name == *name)
                }
            }
        };
        let gone: Vec<WorkloadName> = self
            .packets
            .attached
            .keys()
            .filter(|name| !kept(name))
            .cloned()
            .collect();
        for name in gone {
            self.let_go_of_packets(&name);
        }
    }

    /// Takes no more connections of a workload, if it is captured by its packets.
    pub(super) fn let_go_of_packets(&mut self, name: &WorkloadName) {
        if self.packets.attached.remove(name).is_none() {
            return;
        }
        if let Some(proxy) = &self.proxy {
            proxy.remove(name, RELEASED);
        }
        info!(workload = %name, "released");
    }

    /// Remembers the workloads whose connections may go on when they are no longer captured; `held`: the present
    /// contents of the tables.
    pub(super) fn remember_packets(&mut self, held: &Captured, members: &[Member]) {
        let numbers = self.enroller.numbers();
        let names: BTreeMap<u32, &WorkloadName> =
            numbers.map(|(name, number)| (number, name)).collect();
        let still = |name: &WorkloadName| {
            let mut members = members.iter();
            members.any(|member| member.workload.name == *name && member.is_by_packets())
        };
        let now = Instant::now();
        for (addr, local) in &held.locals {
            if !local.is_by_packets() || local.flags & Enrolled::CAPTURED == 0 {
                continue;
            }
            let Some(name) = names.get(&local.workload) else {
                continue;
            };
            if !still(name) {
                let released = &mut self.packets.released;
                released
                    .entry(addr.ip())
                    .or_insert_with(|| ((*name).clone(), now));
            }
        }
    }
}

/// Why the interfaces of a workload's packets are not known.
enum NoWay {
    /// The packets pass a bridge.
    Bridge(String),
    /// The kernel does not return them.
    Unknown(String),
}

/// Returns the interfaces by which the packets of a workload with these addresses come; none if it is not on this node.
fn ways(addresses: &[IpAddr], interfaces: &[Interface]) -> Result<BTreeSet<u32>, NoWay> {
    let mut found = BTreeSet::new();
    for addr in addresses {
        let way = kernel::interfaces::way_to(*addr).map_err(|error| {
            NoWay::Unknown(format!(
                "cannot find out which interface leads to {addr}: {error}"
            ))
        })?;
        let Some(interface) = interfaces.iter().find(|i| Some(i.index) == way) else {
            continue;
        };
        match (interface.kind.as_str(), Role::of(interface)) {
            (_, Role::Pod) | ("tun", _) => {
                found.insert(interface.index);
            }
            ("bridge", _) => {
                return Err(NoWay::Bridge(format!(
                    "is at the bridge {}, and its packets to others there are seen by nobody else: \
                     only what has an interface of its own is captured by its packets",
                    interface.name
                )));
            }
            _ => {}
        }
    }
    Ok(found)
}

fn local(netns: u64, entry: &Enrolled) -> Local {
    Local {
        netns,
        policy: entry.policy,
        flags: entry.flags,
        workload: entry.workload,
        resolvers: entry.resolvers,
    }
}

/// The settings that keep packets from a socket that they were assigned to, or its answers from leaving.
fn unroutable() -> Option<Problem> {
    let settings = [
        ("net.ipv4.tcp_fwmark_accept", "tcp_fwmark_accept"),
        (
            "net.ipv4.conf.all.src_valid_mark",
            "conf/all/src_valid_mark",
        ),
    ];
    let problem = |(name, file)| match fs::read_to_string(format!("/proc/sys/net/ipv4/{file}")) {
        Ok(text) if text.trim() == "0" => None,
        Ok(_) => Some(format!(
            "{name} is set on the node: with it, packets that have a mark of ours are lost; set it to 0"
        )),
        Err(error) => Some(format!(
            "cannot read {name} of the node, with which packets that have a mark of ours are lost: {error}"
        )),
    };
    settings.into_iter().find_map(problem).map(Problem::of_node)
}
