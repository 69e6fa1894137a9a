//! Mesh capture: whose connections are captured now, the proxy's sockets in their network
//! namespaces, and the tables that say so.

mod attach;
mod discover;
mod members;
mod packets;
mod problems;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    os::fd::{AsFd, OwnedFd},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use dataplane_common::capture::{EXCLUDED, Enrolled, FROM_CLIENT, Local, RuleKey};
use tracing::{debug, error};

use self::{
    attach::Attached,
    discover::{Found, Missing},
    members::Member,
    packets::Packets,
    problems::Problems,
};
use crate::{
    admin::api,
    config,
    kernel::{self, Accelerator, Capture, CaptureOptions, Kernel, Namespace, namespaces},
    model::{Acceleration, Egress, Place, Snapshot, Workload, WorkloadName},
    plan::{Captured, Policies},
    proxy::{
        self, Observer, Proxy,
        handover::{self, Named},
    },
};
pub use problems::Problem;

/// How long those of a workload may that is there and captured no more: as they like. (A time that is
/// never over, and that clocks can still count.)
const RELEASED: Duration = Duration::from_hours(365 * 24);

/// How long a workload may be announced before it is here, or after it has gone, without a problem
/// being made of it.
const ARRIVING: Duration = Duration::from_secs(5);

/// Of the time that an ending agent gives to what it relays, that in which it accepts nothing more.
const LAST: Duration = Duration::from_millis(500);
/// How often it looks whether it relays something.
const POLL: Duration = Duration::from_millis(20);

/// What is said of a workload that may be here.
const AS_BEFORE: &str = "if it was captured before, it still is, by the rules that it had then";

/// Where a workload may be that could not be looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unknown {
    Namespace,
    Cgroup,
    Packets,
}

/// Which entries of the tables stay because what they are about could not be looked at.
struct Kept<'a> {
    /// Network namespaces that could be read, but for the agent's own.
    seen: &'a BTreeSet<u64>,
    own_cookie: u64,
    /// As [`Mesh::earlier`].
    earlier: u32,
    /// Whether there is a guard, and namespaces that it has let go may not have been read.
    guarded_unread: bool,
    /// Workloads that were not found and may be here, by their numbers.
    unknown: &'a BTreeMap<u32, Unknown>,
}

impl Kept<'_> {
    /// `workload`: its number, 0 for a namespace that the guard has let go. `cookie`: of its network
    /// namespace, 0 if it has none of its own.
    fn has(&self, workload: u32, cookie: u64) -> bool {
        if self.seen.contains(&cookie) || cookie == self.own_cookie {
            return false;
        }
        match workload {
            0 => cookie != 0 && self.guarded_unread,
            // Nobody knows whose it is.
            number if number <= self.earlier => !self.unknown.is_empty(),
            number => self.unknown.contains_key(&number),
        }
    }
}

/// Who is to be captured, after [`Mesh::settle`].
pub struct Settled {
    /// The workloads, for those who ask.
    pub workloads: Vec<(Arc<Workload>, api::MeshWorkload)>,
    /// Why it may not be so of all of them: what could not be read.
    pub trouble: Option<String>,
    /// Why the proxy takes fewer connections than it was asked to.
    pub shortage: Option<String>,
}

/// What the kernel is told of a mesh.
pub fn options(mesh: &config::Mesh) -> CaptureOptions {
    CaptureOptions {
        outbound: mesh.outbound(),
        inbound: mesh.inbound(),
        mark: mesh.mark(),
        foreign: mesh.proxy.uid.is_some(),
        guard: mesh.guard,
    }
}

/// Who is captured.
pub struct Mesh {
    config: config::Mesh,
    options: CaptureOptions,
    /// The agent's own proxy; none if it is another one.
    proxy: Option<Proxy>,
    policies: Policies,
    /// Workloads by their numbers in the tables.
    numbers: HashMap<WorkloadName, u32>,
    last: u32,
    /// Where the agent's proxy listens, by the namespace's cookie.
    attached: BTreeMap<u64, Attached>,
    /// Those that are captured by the packets that they send.
    packets: Packets,
    /// An earlier agent's listening sockets, until they were looked through.
    given: HashMap<String, OwnedFd>,
    /// And itself, which accepts from them until this one does.
    before: Option<UnixStream>,
    /// What is wrong, and with whom.
    problems: Problems,
    /// What is wrong, and no workload's fault.
    trouble: Option<String>,
    /// As [`Settled::shortage`].
    shortage: Option<String>,
    /// Numbers up to this one are an earlier agent's, and only that one knew whose.
    earlier: u32,
    /// Workloads that should be here and are not, and since when.
    absent: HashMap<WorkloadName, Instant>,
    own_cookie: u64,
    /// The cgroup whose processes the programs see.
    cgroup: PathBuf,
    /// Once a workload has asked for it.
    accelerator: Option<Arc<Accelerator>>,
}

impl Mesh {
    /// Starts the proxy, if it is ours. Nothing is captured yet that was not before. `given`: the listening sockets of
    /// an earlier agent; `before`: that agent, which accepts from them until this one does.
    ///
    /// # Errors
    /// If the proxy cannot be started, or the tables not be read.
    pub fn start(
        config: config::Mesh,
        capture: &Capture,
        cgroup: &Path,
        given: Named,
        before: Option<UnixStream>,
    ) -> Result<Self, super::Error> {
        let options = options(&config);
        let proxy = if options.foreign {
            None
        } else {
            let settings = proxy::Settings {
                mark: Some(options.mark),
                transparent_mark: Some(options.mark | FROM_CLIENT),
                transparent: config.proxy.keep_source.unwrap_or(true),
                access_log: config.proxy.access_log(),
                max_connections: config.proxy.max_connections.map(|max| max as usize),
                max_per_workload: config
                    .proxy
                    .max_connections_per_workload
                    .map(|max| max as usize),
                ..proxy::Settings::default()
            };
            Some(Proxy::start(settings).map_err(super::Error::Proxy)?)
        };
        let held = capture.held();
        let enrolled = || held.namespaces.values().chain(held.cgroups.values());
        let rules = held
            .rules
            .keys()
            .filter(|key| key.kind != RuleKey::INTERFACE);
        let locals = || held.locals.values();
        let policies = enrolled().map(|e| e.policy).chain(rules.map(|key| key.of));
        let policies = policies.chain(locals().map(|local| local.policy));
        let workloads = enrolled().map(|e| e.workload);
        let workloads = workloads.chain(locals().map(|local| local.workload));
        let last = workloads.max().unwrap_or_default();
        Ok(Self {
            options,
            proxy,
            policies: Policies::after(policies.max().unwrap_or_default()),
            numbers: HashMap::new(),
            last,
            attached: BTreeMap::new(),
            packets: Packets::after(held),
            given: given.into_iter().collect(),
            before,
            problems: Problems::default(),
            trouble: None,
            shortage: None,
            earlier: last,
            absent: HashMap::new(),
            own_cookie: kernel::netns_cookie()?,
            cgroup: cgroup.to_owned(),
            accelerator: None,
            config,
        })
    }

    /// Looks at the agent's own proxy, if there is one.
    pub fn observer(&self) -> Option<Observer> {
        self.proxy.as_ref().map(Proxy::observer)
    }

    /// Where an earlier agent's programs serve and its proxy is gone: takes the connections of workloads that they
    /// capture, before there are programs of this one's. Leaves to [`Mesh::settle`] what is not as it was, and what
    /// does not work.
    pub fn listen_early(&mut self, capture: &Capture, snapshot: &Snapshot) {
        let Some(proxy) = &self.proxy else { return };
        proxy.set_snapshot(snapshot.clone());
        let mut members = members::members(&self.config, snapshot);
        members.retain(|member| {
            member.workload.place == Place::Address
                && !member.is_by_packets()
                && member.policy.acceleration == Acceleration::Off
        });
        let addresses = members.iter().flat_map(|m| &m.workload.addresses);
        let found = Found::look(&addresses.copied().collect(), self.own_cookie);
        for member in &members {
            let Ok(namespace) = found.home(&member.workload.addresses) else {
                continue;
            };
            // Only to see what becomes of it: nothing of it is written.
            let entry = self.enrol(member, &mut Captured::default());
            let relevant = |flags: u32| flags & (Enrolled::PROXY | Enrolled::INBOUND);
            let held = capture.held().namespaces.get(&namespace.cookie);
            if entry.flags & Enrolled::PROXY == 0
                || held.is_none_or(|held| relevant(held.flags) != relevant(entry.flags))
                || self.attached.contains_key(&namespace.cookie)
            {
                continue;
            }
            let inbound = entry.flags & Enrolled::INBOUND != 0;
            if let Err(problem) = self.attach(capture, member, namespace, inbound) {
                debug!("{}: not yet: {}", member.workload.name, problem.text);
            }
        }
    }

    /// How soon to look again at what nobody tells us of.
    pub fn patience(&self) -> Duration {
        if self.options.guard || !self.problems.is_empty() || !self.absent.is_empty() {
            Duration::from_secs(1)
        } else {
            Duration::from_secs(10)
        }
    }

    /// Brings everything in line with a snapshot and with the network namespaces that there are. A
    /// workload that cannot be found or attached holds up no other: it has a problem. What cannot be
    /// read leaves what was.
    ///
    /// # Errors
    /// The kernel's refusal of tables or programs; what was captured before is.
    pub fn settle(
        &mut self,
        kernel: &mut Kernel,
        snapshot: &Snapshot,
    ) -> Result<Settled, kernel::Error> {
        let mut problems = Problems::default();
        if let Some(proxy) = &self.proxy {
            proxy.set_snapshot(snapshot.clone());
        }
        let members = members::members(&self.config, snapshot);
        let by_packets: Vec<&Member> = members.iter().filter(|m| m.is_by_packets()).collect();
        let addresses = members.iter().flat_map(|m| &m.workload.addresses);
        let found = Found::look(&addresses.copied().collect(), self.own_cookie);
        let mut wanted = Captured::default();
        let (mut enrolled, mut levels, mut unknown) =
            self.enrol_all(&members, &found, &mut wanted, &mut problems);
        // Of those in the node's own namespace the kernel tells whose is whose, and the proxy does
        // not: to it they are the node.
        let of_node = members::of_node(snapshot);
        let by_cgroup = |wanted: &Captured| {
            let mut entries = wanted.cgroups.values();
            entries.any(|e| e.flags & Enrolled::PROXY != 0)
        };
        if let Ok(own) = &found.own
            && by_cgroup(&wanted)
        {
            enrolled.push((&of_node, own, Enrolled::CAPTURED | Enrolled::PROXY));
        }
        if self.options.guard {
            for cookie in &found.seen {
                wanted.namespaces.entry(*cookie).or_default();
            }
        }
        self.change_over(&enrolled, &by_packets);
        // While another layout's programs serve, so does the proxy before this one: for those, connections of this one
        // would be anybody's.
        let waits = kernel.waits();
        if !waits {
            self.listen(kernel, &enrolled, &mut problems);
        }
        self.remember_packets(kernel.capture().held(), &members);
        let mut trouble = found.trouble();
        let packets = self.settle_packets(kernel, &by_packets, &found, &mut wanted, &mut problems);
        unknown.extend(packets.unknown);
        trouble = trouble.or(packets.trouble);
        let kept = Kept {
            seen: &found.seen,
            own_cookie: self.own_cookie,
            earlier: self.earlier,
            guarded_unread: self.options.guard && found.trouble().is_some(),
            unknown: &unknown,
        };
        wanted.keep(kernel.capture().held(), |workload, cookie| {
            kept.has(workload, cookie)
        });
        if unknown.values().any(|place| *place == Unknown::Cgroup) {
            levels |= kernel.capture().tables().config().levels;
        }
        if !members.is_empty() {
            known(snapshot, &members, &mut wanted);
        }
        let inbound: Vec<&Namespace> = enrolled
            .iter()
            .filter(|(_, _, flags)| flags & Enrolled::INBOUND != 0)
            .map(|(_, namespace, _)| *namespace)
            .collect();
        let failed = kernel.set_captured(&wanted, levels, &inbound)?;
        for (member, namespace, _) in &enrolled {
            if let Some(error) = failed.get(&namespace.cookie) {
                problems.add(&member.workload.name, Problem::of_node(error));
            }
        }
        let own_unread = found.own.is_err() && by_cgroup(&wanted);
        let own_cookie = self.own_cookie;
        self.release(&enrolled, &found, |cookie| {
            let is_kept = !found.seen.contains(&cookie) && wanted.namespaces.contains_key(&cookie);
            is_kept || cookie == own_cookie && own_unread
        });
        if !waits {
            if trouble.is_none() {
                // Whose they were is captured no more.
                self.given.clear();
            }
            if let Some(before) = self.before.take() {
                handover::serves(before);
            }
        }
        let used: BTreeSet<u32> = wanted
            .namespaces
            .values()
            .chain(wanted.cgroups.values())
            .map(|entry| entry.policy)
            .chain(wanted.locals.values().map(|local| local.policy))
            .collect();
        self.policies.keep(|number| used.contains(&number));
        problems.tell(&self.problems);
        self.problems = problems;
        let shown = |member: Member| {
            let shown = self.shown(&member);
            (member.workload, shown)
        };
        let workloads: Vec<_> = members.into_iter().map(shown).collect();
        let shortage = self.proxy.as_ref().and_then(Proxy::shortage);
        for (text, before) in [(&trouble, &self.trouble), (&shortage, &self.shortage)] {
            if let Some(text) = text
                && before.as_ref() != Some(text)
            {
                error!("mesh: {text}");
            }
        }
        self.trouble.clone_from(&trouble);
        self.shortage.clone_from(&shortage);
        self.forget_numbers(&workloads);
        Ok(Settled {
            workloads,
            trouble,
            shortage,
        })
    }

    /// Enrols all workloads that are found, but for those that are captured by their packets. Answers
    /// where they are, at which levels of the hierarchy there are cgroups, and which workloads nobody
    /// can tell of whether they are here: by their numbers.
    #[expect(
        clippy::type_complexity,
        reason = "the three parts are taken apart where it is called"
    )]
    fn enrol_all<'a>(
        &mut self,
        members: &'a [Member],
        found: &'a Found,
        wanted: &mut Captured,
        problems: &mut Problems,
    ) -> (
        Vec<(&'a Member, &'a Namespace, u32)>,
        u32,
        BTreeMap<u32, Unknown>,
    ) {
        let mut enrolled: Vec<(&Member, &Namespace, u32)> = Vec::new();
        let (mut levels, mut unknown) = (0, BTreeMap::new());
        let mut absent = HashMap::new();
        for member in members {
            let name = &member.workload.name;
            let result = match &member.workload.place {
                Place::Elsewhere => Ok(()),
                Place::Exempt(why) => Err(Missing::Wrong(why.text().to_owned())),
                Place::Address if member.is_by_packets() => Ok(()),
                Place::Cgroup(path) => discover::cgroup(&self.cgroup, path).map(|(id, level)| {
                    levels |= 1 << level;
                    let entry = self.enrol(member, wanted);
                    wanted.cgroups.insert(id, entry);
                }),
                Place::Address => found.home(&member.workload.addresses).map(|namespace| {
                    let mut others = enrolled.iter();
                    if let Some((other, ..)) = others.find(|(_, n, _)| n.cookie == namespace.cookie)
                    {
                        let other = &other.workload.name;
                        let text =
                            format!("is in the network namespace of {other}, and captured as that");
                        problems.add(name, Problem::of_workload(text));
                        return;
                    }
                    let entry = self.enrol_namespace(member, namespace, wanted);
                    enrolled.push((member, namespace, entry.flags));
                }),
            };
            match result {
                Ok(()) => {}
                Err(Missing::Absent { hidden }) => {
                    if hidden {
                        unknown.insert(self.number(name), Unknown::Namespace);
                    }
                    let since = self.absent.get(name).copied().unwrap_or_else(Instant::now);
                    absent.insert(name.clone(), since);
                    if since.elapsed() > ARRIVING {
                        problems.add(name, Problem::of_workload(not_found(member, hidden)));
                    }
                }
                Err(Missing::Wrong(text)) => problems.add(name, Problem::of_workload(text)),
                Err(Missing::Unknown(text)) => {
                    let place = match member.workload.place {
                        Place::Cgroup(_) => Unknown::Cgroup,
                        _ => Unknown::Namespace,
                    };
                    unknown.insert(self.number(name), place);
                    problems.add(name, Problem::of_node(format!("{text}; {AS_BEFORE}")));
                }
            }
        }
        self.absent = absent;
        (enrolled, levels, unknown)
    }

    fn shown(&mut self, member: &Member) -> api::MeshWorkload {
        let name = &member.workload.name;
        let problem = self.problems.of(name);
        let (problem, of_node) = (
            problem.map(|problem| problem.text.clone()),
            problem.is_some_and(|problem| problem.of_node),
        );
        let (acceleration, not_accelerated) = match self.accelerated(member) {
            Ok(acceleration) => (acceleration, None),
            Err(why) => (Acceleration::Off, Some(why)),
        };
        api::MeshWorkload {
            problem,
            problem_of_node: of_node,
            acceleration: Some(acceleration.word().to_owned()),
            not_accelerated,
            number: self.number(name),
            namespace: name.namespace().to_owned(),
            name: name.name().to_owned(),
            rules: member.rules.clone(),
        }
    }

    /// Whether what a workload says to the proxy goes past the TCP stack; or why it does not, though it
    /// is to.
    fn accelerated(&self, member: &Member) -> Result<Acceleration, String> {
        let (policy, name) = (&member.policy, &member.workload.name);
        let why = if policy.acceleration == Acceleration::Off {
            return Ok(Acceleration::Off);
        } else if !policy.mode.is_proxied(self.options.foreign) {
            "its connections go direct"
        } else if self.options.foreign {
            "its proxy is not the agent's"
        } else if member.is_by_packets() {
            "it is captured by its packets, and its sockets are elsewhere"
        } else if matches!(member.workload.place, Place::Cgroup(_)) {
            "it has no network namespace of its own"
        } else if let Some(attached) = self.attached.values().find(|a| a.name == *name) {
            let why = attached.not_accelerated.clone();
            return why.map_or(Ok(policy.acceleration), Err);
        } else {
            "the proxy does not listen for it"
        };
        Err(why.to_owned())
    }

    /// Forgets the numbers of those that are wanted no more. Where entries of the tables have them still,
    /// they are those of connections that go on.
    fn forget_numbers(&mut self, workloads: &[(Arc<Workload>, api::MeshWorkload)]) {
        let wanted: BTreeSet<u32> = workloads.iter().map(|(_, shown)| shown.number).collect();
        self.numbers.retain(|_, number| wanted.contains(number));
    }

    fn number(&mut self, name: &WorkloadName) -> u32 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        self.last += 1;
        self.numbers.insert(name.clone(), self.last);
        self.last
    }

    fn enrol(&mut self, member: &Member, wanted: &mut Captured) -> Enrolled {
        let (policy, flags) = self
            .policies
            .add(&member.policy, self.options.foreign, wanted);
        Enrolled {
            policy,
            flags,
            workload: self.number(&member.workload.name),
            reserved: 0,
        }
    }

    fn enrol_namespace(
        &mut self,
        member: &Member,
        namespace: &Namespace,
        wanted: &mut Captured,
    ) -> Enrolled {
        let mut entry = self.enrol(member, wanted);
        for name in &member.policy.excluded_interfaces {
            let Some(index) = namespace.interfaces.get(&**name) else {
                continue;
            };
            entry.flags |= Enrolled::HAS_INTERFACES;
            let key = RuleKey {
                of: entry.workload,
                kind: RuleKey::INTERFACE,
                id: *index,
            };
            wanted.rules.insert(key, EXCLUDED);
        }
        wanted.namespaces.insert(namespace.cookie, entry);
        for addr in &namespace.addresses {
            let local = Local {
                netns: namespace.cookie,
                policy: entry.policy,
                flags: entry.flags,
                workload: entry.workload,
                reserved: 0,
            };
            wanted.locals.insert((*addr).into(), local);
        }
        entry
    }

    /// When the agent ends and no other has its sockets: nobody else accepts connections, so the proxy does as long as
    /// it relays some, for so long at most.
    pub fn stop_last(self, at_most: Duration) {
        let deadline = Instant::now() + at_most.saturating_sub(LAST);
        let relays = || {
            self.proxy
                .as_ref()
                .is_some_and(|proxy| proxy.connections() > 0)
        };
        while relays() && Instant::now() < deadline {
            thread::sleep(POLL);
        }
        self.stop(LAST, false);
    }

    /// When the agent ends: what the proxy relays may go on until then. `detach`: everything of ours
    /// goes.
    pub fn stop(self, deadline: Duration, detach: bool) {
        let Self {
            proxy,
            attached,
            options,
            config,
            ..
        } = self;
        let namespaces: Vec<_> = attached
            .into_values()
            .map(|attached| (attached.name, attached.namespace))
            .collect();
        if let Some(proxy) = proxy {
            proxy.drain(deadline);
        }
        if !detach || !config.proxy.keep_source.unwrap_or(true) {
            return;
        }
        let mark = options.mark | FROM_CLIENT;
        for (name, namespace) in namespaces {
            let routed = namespaces::within(namespace.as_fd(), move || {
                kernel::route_answers_no_more(mark)
            });
            if let Err(error) = routed {
                debug!("{name}: cannot remove its rule and route: {error}");
            }
        }
    }
}

/// Whom connections may reach whose egress policy is deny; and whose addresses are worth a label.
fn known(snapshot: &Snapshot, members: &[Member], wanted: &mut Captured) {
    let workloads = snapshot.workloads.values().map(|w| &w.addresses);
    let named = members.iter().map(|member| &member.workload.addresses);
    for addr in workloads.chain(named).flatten() {
        wanted.known.insert((*addr).into(), 1);
    }
    if members.iter().any(|m| m.policy.egress == Egress::Deny) {
        let ports = snapshot.services.values().flat_map(|s| &s.ports);
        for endpoint in ports.flat_map(|port| &port.endpoints) {
            wanted.known.insert(endpoint.addr.into(), 1);
        }
    }
}

/// What is said of a workload that no network namespace has the addresses of. `hidden`: there are
/// network namespaces that this agent is not permitted to see.
fn not_found(member: &Member, hidden: bool) -> String {
    let addresses = member.workload.addresses.iter();
    let addresses: Vec<_> = addresses.map(ToString::to_string).collect();
    let mut text = format!(
        "is not captured: no network namespace on this node has its address {}",
        addresses.join(" or ")
    );
    if hidden {
        text += ", of those that the agent is permitted to see (CAP_SYS_PTRACE shows all)";
    }
    if member.policy.egress == Egress::Deny {
        text += "; `egress: deny` is not in force for it (`mesh.guard: true` refuses it until it is found)";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_could_look_at_is_kept_and_nothing_else() {
        let seen = BTreeSet::from([11, 12]);
        let mut unknown = BTreeMap::from([(7, Unknown::Namespace), (8, Unknown::Cgroup)]);
        let kept = |guarded_unread, unknown: &BTreeMap<u32, Unknown>, workload, cookie| {
            let kept = Kept {
                seen: &seen,
                own_cookie: 1,
                earlier: 5,
                guarded_unread,
                unknown,
            };
            kept.has(workload, cookie)
        };
        // Those that were not found, where they may be.
        assert!(kept(false, &unknown, 7, 13));
        assert!(kept(false, &unknown, 8, 0));
        assert!(!kept(false, &unknown, 7, 11), "it was read");
        assert!(
            !kept(false, &unknown, 9, 13),
            "it was found, or is wanted no more"
        );
        // An earlier agent's, which may be any of those.
        assert!(kept(false, &unknown, 5, 13));
        assert!(!kept(false, &unknown, 5, 12));
        // What the guard has let go, and the node's own addresses.
        assert!(kept(true, &unknown, 0, 13));
        assert!(!kept(false, &unknown, 0, 13));
        assert!(!kept(true, &unknown, 0, 0) && !kept(true, &unknown, 0, 1));
        unknown.clear();
        assert!(!kept(false, &unknown, 5, 13));
    }
}
