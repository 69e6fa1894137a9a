//! Mesh capture: whose connections are captured now, the proxy's sockets in their network
//! namespaces, and the tables that say so.

mod members;
mod packets;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    net::{IpAddr, TcpListener},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    os::unix::fs::MetadataExt,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use dataplane_common::capture::{EXCLUDED, Enrolled, FROM_CLIENT, ListenerKey, Local, RuleKey};
use tracing::{debug, error, info, warn};

use self::{members::Member, packets::Packets};
use super::{foreign, handover::Given};
use crate::{
    admin::api,
    config,
    kernel::{self, Accelerator, CaptureOptions, Kernel, Listeners, Namespace, namespaces},
    model::{Acceleration, Egress, Place, Snapshot, Workload, WorkloadName},
    plan::{Captured, Policies},
    proxy::{
        self, Attachment, Observer, Proxy,
        handover::{self, Named},
    },
};

/// How long the connections of a workload that is gone may go on: it may be that nobody ends them.
const DRAIN: Duration = Duration::from_secs(30);
/// How long those of a workload may that is there and captured no more: as they like. (A time that is
/// never over, and that clocks can still count.)
const RELEASED: Duration = Duration::from_hours(365 * 24);

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
    problems: Vec<(WorkloadName, String)>,
    own_cookie: u64,
    /// The cgroup whose processes are captured.
    cgroup: PathBuf,
    /// Once a workload has asked for it.
    accelerator: Option<Arc<Accelerator>>,
}

/// A workload whose connections the agent's proxy takes.
struct Attached {
    name: WorkloadName,
    namespace: OwnedFd,
    egress: Egress,
    acceleration: Acceleration,
    /// Its listening sockets, for the agent that takes this one's place.
    sockets: Named,
}

impl Mesh {
    /// Starts the proxy, if it is ours. Nothing is captured yet that was not before. `given`: what an
    /// earlier agent left.
    ///
    /// # Errors
    /// If the proxy cannot be started, or the tables not be read.
    pub fn start(
        config: config::Mesh,
        kernel: &Kernel,
        cgroup: &Path,
        given: Given,
    ) -> Result<Self, super::Error> {
        let options = options(&config);
        let proxy = if options.foreign {
            None
        } else {
            let settings = proxy::Settings {
                mark: Some(options.mark),
                transparent_mark: Some(options.mark | FROM_CLIENT),
                transparent: config.proxy.keep_source.unwrap_or(true),
                max_connections: config.proxy.max_connections.map(|max| max as usize),
                max_per_workload: config
                    .proxy
                    .max_connections_per_workload
                    .map(|max| max as usize),
                ..proxy::Settings::default()
            };
            Some(Proxy::start(settings).map_err(super::Error::Proxy)?)
        };
        let held = kernel.capture().held();
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
        Ok(Self {
            options,
            proxy,
            policies: Policies::after(policies.max().unwrap_or_default()),
            numbers: HashMap::new(),
            last: workloads.max().unwrap_or_default(),
            attached: BTreeMap::new(),
            packets: Packets::after(held),
            given: given.sockets.into_iter().collect(),
            before: given.before,
            problems: Vec::new(),
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

    /// How soon to look again at what nobody tells us of.
    pub fn patience(&self) -> Duration {
        if self.options.guard || !self.problems.is_empty() {
            Duration::from_secs(1)
        } else {
            Duration::from_secs(10)
        }
    }

    /// Brings everything in line with a snapshot and with the network namespaces that there are.
    ///
    /// Answers who is to be captured, for those who ask.
    ///
    /// # Errors
    /// The kernel's refusal; what was captured before is.
    pub fn settle(
        &mut self,
        kernel: &mut Kernel,
        snapshot: &Snapshot,
    ) -> Result<Vec<(Arc<Workload>, api::MeshWorkload)>, kernel::Error> {
        let mut problems = Vec::new();
        if let Some(proxy) = &self.proxy {
            proxy.set_snapshot(snapshot.clone());
        }
        let members = members::members(&self.config, snapshot);
        let found = self.namespaces();
        let mut wanted = Captured::default();
        let mut levels = 0;
        let mut enrolled: Vec<(&Member, &Namespace, u32)> = Vec::new();
        let by_packets: Vec<&Member> = members.iter().filter(|m| m.is_by_packets()).collect();
        for member in &members {
            match &member.workload.place {
                Place::Elsewhere => {}
                Place::Address if member.is_by_packets() => {}
                Place::Cgroup(path) => match cgroup(path) {
                    Ok((id, level)) => {
                        levels |= 1 << level;
                        let entry = self.enrol(member, &mut wanted);
                        wanted.cgroups.insert(id, entry);
                    }
                    Err(error) => problems.push((
                        member.workload.name.clone(),
                        format!("cannot look at cgroup {}: {error}", path.display()),
                    )),
                },
                Place::Address => {
                    let addresses = &member.workload.addresses;
                    let Some(namespace) = home(&found, addresses) else {
                        debug!(workload = %member.workload.name, "no network namespace here has its address");
                        continue;
                    };
                    if let Some((other, ..)) = enrolled
                        .iter()
                        .find(|(_, n, _)| n.cookie == namespace.cookie)
                    {
                        problems.push((
                            member.workload.name.clone(),
                            format!(
                                "is in the network namespace of {}, and captured as that",
                                other.workload.name
                            ),
                        ));
                        continue;
                    }
                    let entry = self.enrol_namespace(member, namespace, &mut wanted);
                    enrolled.push((member, namespace, entry.flags));
                }
            }
        }
        // Of those in the node's own namespace the kernel tells whose is whose, and the proxy does
        // not: to it they are the node.
        let of_node = members::of_node(snapshot);
        let node_namespace = kernel::this_namespace().ok();
        if let Some(own) = &node_namespace
            && wanted
                .cgroups
                .values()
                .any(|e| e.flags & Enrolled::PROXY != 0)
        {
            enrolled.push((&of_node, own, Enrolled::CAPTURED | Enrolled::PROXY));
        }
        if self.options.guard {
            for namespace in &found {
                wanted.namespaces.entry(namespace.cookie).or_default();
            }
        }
        if !members.is_empty() {
            known(snapshot, &members, &mut wanted);
        }
        self.change_over(&enrolled, &by_packets);
        // While another layout's programs serve, so does the proxy before this one: for those, connections of this one
        // would be anybody's.
        let waits = kernel.waits();
        if !waits {
            self.listen(kernel, &enrolled, &mut problems);
        }
        self.remember_packets(kernel.capture().held(), &members);
        self.settle_packets(kernel, &by_packets, &mut wanted, &mut problems)?;
        let inbound: Vec<&Namespace> = enrolled
            .iter()
            .filter(|(_, _, flags)| flags & Enrolled::INBOUND != 0)
            .map(|(_, namespace, _)| *namespace)
            .collect();
        kernel.set_captured(&wanted, levels, &inbound)?;
        self.release(&enrolled, &found);
        if !waits {
            // Whose they were is captured no more.
            self.given.clear();
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
        self.tell(problems);
        let shown = |member: Member| {
            let shown = self.shown(&member);
            (member.workload, shown)
        };
        Ok(members.into_iter().map(shown).collect())
    }

    fn tell(&mut self, problems: Vec<(WorkloadName, String)>) {
        for problem in &problems {
            if !self.problems.contains(problem) {
                error!("mesh: {}: {}", problem.0, problem.1);
            }
        }
        self.problems = problems;
    }

    fn shown(&mut self, member: &Member) -> api::MeshWorkload {
        let name = &member.workload.name;
        let problem = self.problems.iter().find(|(whose, _)| whose == name);
        let (acceleration, not_accelerated) = match self.accelerated(member) {
            Ok(acceleration) => (acceleration, None),
            Err(why) => (Acceleration::Off, Some(why.to_owned())),
        };
        api::MeshWorkload {
            problem: problem.map(|(_, text)| text.clone()),
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
    fn accelerated(&self, member: &Member) -> Result<Acceleration, &'static str> {
        let mut attached = self.attached.values();
        let (policy, name) = (&member.policy, &member.workload.name);
        if policy.acceleration == Acceleration::Off {
            Ok(Acceleration::Off)
        } else if !policy.mode.is_proxied(self.options.foreign) {
            Err("its connections go direct")
        } else if self.options.foreign {
            Err("its proxy is not the agent's")
        } else if member.is_by_packets() {
            Err("it is captured by its packets, and its sockets are elsewhere")
        } else if matches!(member.workload.place, Place::Cgroup(_)) {
            Err("it has no network namespace of its own")
        } else if attached.any(|a| a.name == *name && a.acceleration == policy.acceleration) {
            Ok(policy.acceleration)
        } else {
            Err("the proxy does not listen for it")
        }
    }

    /// Every network namespace but our own.
    fn namespaces(&self) -> Vec<Namespace> {
        let paths = namespaces::all();
        let look = |path: &Path, entered: io::Result<()>| {
            let found = entered.and_then(|()| kernel::this_namespace());
            found
                .inspect_err(|error| debug!("cannot look into {}: {error}", path.display()))
                .ok()
        };
        match namespaces::visit(&paths, look) {
            Ok(found) => found
                .into_iter()
                .flatten()
                .filter(|namespace| namespace.cookie != self.own_cookie)
                .collect(),
            Err(error) => {
                warn!("cannot look into network namespaces: {error}");
                Vec::new()
            }
        }
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

    /// Before a workload's connections are captured: has somebody take them.
    fn listen(
        &mut self,
        kernel: &Kernel,
        enrolled: &[(&Member, &Namespace, u32)],
        problems: &mut Vec<(WorkloadName, String)>,
    ) {
        for (member, namespace, flags) in enrolled {
            if flags & Enrolled::PROXY == 0 {
                continue;
            }
            let result = if self.options.foreign {
                self.adopt(kernel, namespace)
            } else if self.attached.contains_key(&namespace.cookie) {
                Ok(())
            } else {
                let inbound = flags & Enrolled::INBOUND != 0;
                self.attach(kernel, member, namespace, inbound)
            };
            if let Err(error) = result {
                problems.push((member.workload.name.clone(), error));
            }
        }
    }

    /// An earlier agent's sockets for a namespace, if they are at the ports where they should be.
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
        };
        let complete = !listeners.outbound.is_empty() && inbound != listeners.inbound.is_empty();
        complete.then_some(listeners)
    }

    /// The proxy's listening sockets, for an agent that takes this one's place.
    pub fn sockets(&self) -> impl Iterator<Item = (String, BorrowedFd<'_>)> {
        let sockets = self
            .attached
            .values()
            .flat_map(|attached| &attached.sockets);
        let sockets = sockets.map(|(name, socket)| (name.clone(), socket.as_fd()));
        sockets.chain(self.packets.sockets())
    }

    fn attach(
        &mut self,
        kernel: &Kernel,
        member: &Member,
        namespace: &Namespace,
        inbound: bool,
    ) -> Result<(), String> {
        let transparent = self.config.proxy.keep_source.unwrap_or(true);
        let options = self.options;
        let given = self.given(namespace.cookie, inbound);
        let listeners = namespaces::within(namespace.file.as_fd(), move || {
            if transparent && inbound {
                kernel::route_answers(options.mark | FROM_CLIENT)?;
            }
            match given {
                Some(listeners) => Ok(listeners),
                None => kernel::open_listeners(&options, inbound),
            }
        })
        .map_err(|error| {
            let (a, b) = (options.outbound, options.inbound);
            format!("cannot listen at ports {a} and {b} in its network namespace: {error}")
        })?;
        hand_over(kernel, namespace.cookie, &listeners.inbound)?;
        let acceleration = self.accelerate(member, namespace)?;
        let clone = || {
            namespace
                .file
                .try_clone()
                .map_err(|error| error.to_string())
        };
        let sockets = named(namespace.cookie, &listeners).map_err(|error| error.to_string())?;
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
                namespace: Some(clone()?),
                outbound: listeners.outbound,
                inbound: listeners.inbound,
                egress: member.policy.egress,
                acceleration,
            })
            .map_err(|error| error.to_string())?;
        info!(workload = %name, "captured: the proxy listens in its network namespace");
        let attached = Attached {
            name,
            namespace: clone()?,
            egress: member.policy.egress,
            acceleration: member.policy.acceleration,
            sockets,
        };
        self.attached.insert(namespace.cookie, attached);
        Ok(())
    }

    /// Has what a workload says to the proxy go past the TCP stack, if that is wanted.
    fn accelerate(
        &mut self,
        member: &Member,
        namespace: &Namespace,
    ) -> Result<Option<proxy::Acceleration>, String> {
        if member.policy.acceleration == Acceleration::Off {
            return Ok(None);
        }
        let told = |error: kernel::Error| format!("cannot accelerate it: {error}");
        let accelerator = if let Some(accelerator) = &self.accelerator {
            Arc::clone(accelerator)
        } else {
            let started = Arc::new(Accelerator::start(&self.cgroup).map_err(told)?);
            Arc::clone(self.accelerator.insert(started))
        };
        let CaptureOptions { outbound, mark, .. } = self.options;
        accelerator
            .add(namespace.cookie, &[outbound], Some(mark))
            .map_err(told)?;
        Ok(Some(proxy::Acceleration {
            netns: namespace.cookie,
            grant: Arc::new(move |connection, bytes| accelerator.grant(connection, bytes)),
        }))
    }

    /// Takes the listening socket of a proxy that is not ours: one that began to listen before it
    /// was captured. Others are noticed by the kernel.
    fn adopt(&self, kernel: &Kernel, namespace: &Namespace) -> Result<(), String> {
        let known = kernel
            .capture()
            .tables()
            .listeners()
            .map_err(|error| error.to_string())?;
        let sockets = foreign::listeners(namespace, self.options.inbound, |family| {
            !known.contains(&ListenerKey::of_namespace(namespace.cookie, family == 4))
        });
        for (family, socket) in sockets {
            kernel
                .capture()
                .listen(
                    ListenerKey::of_namespace(namespace.cookie, family == 4),
                    socket.as_fd(),
                )
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// After workloads are captured no more: the connections that the proxy has go on.
    fn release(&mut self, enrolled: &[(&Member, &Namespace, u32)], found: &[Namespace]) {
        let kept = |cookie: u64, attached: &Attached| {
            enrolled.iter().any(|(member, namespace, flags)| {
                namespace.cookie == cookie
                    && flags & Enrolled::PROXY != 0
                    && member.workload.name == attached.name
                    && member.policy.egress == attached.egress
                    && member.policy.acceleration == attached.acceleration
            })
        };
        let gone: Vec<u64> = self
            .attached
            .iter()
            .filter(|(cookie, attached)| !kept(**cookie, attached))
            .map(|(cookie, _)| *cookie)
            .collect();
        for cookie in gone {
            let is_there = found.iter().any(|namespace| namespace.cookie == cookie);
            self.let_go(cookie, if is_there { RELEASED } else { DRAIN });
        }
    }

    /// Whoever is to be captured otherwise than before is released first: the proxy tells workloads by
    /// their names.
    fn change_over(&mut self, enrolled: &[(&Member, &Namespace, u32)], by_packets: &[&Member]) {
        for (member, ..) in enrolled {
            self.let_go_of_packets(&member.workload.name);
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
        if attached.acceleration != Acceleration::Off
            && let Some(accelerator) = &self.accelerator
            && let Err(error) = accelerator.remove(cookie, &[self.options.outbound])
        {
            debug!("{}: {error}", attached.name);
        }
        if let Some(proxy) = &self.proxy {
            proxy.remove(&attached.name, deadline);
        }
        info!(workload = %attached.name, "released");
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

const OUTBOUND: &str = "outbound";
const INBOUND: &str = "inbound";

/// What a listening socket is called when it is handed over.
fn socket_name(direction: &str, cookie: u64, family: &str) -> String {
    format!("{direction} {cookie} {family}")
}

/// Copies of listening sockets, to be handed over.
fn named(cookie: u64, listeners: &Listeners) -> io::Result<Named> {
    let outbound = listeners.outbound.iter().map(|socket| (OUTBOUND, socket));
    let inbound = listeners.inbound.iter().map(|socket| (INBOUND, socket));
    let copy = |(direction, socket): (&str, &TcpListener)| {
        let v4 = socket.local_addr()?.is_ipv4();
        let name = socket_name(direction, cookie, if v4 { "v4" } else { "v6" });
        Ok((name, socket.try_clone()?.into()))
    };
    outbound.chain(inbound).map(copy).collect()
}

/// The network namespace that has one of these addresses: of several, one that is linked with ours.
/// (There may be other nodes' on this machine, which have the same.)
fn home<'a>(found: &'a [Namespace], addresses: &[IpAddr]) -> Option<&'a Namespace> {
    let mut there = found
        .iter()
        .filter(|namespace| addresses.iter().any(|a| namespace.addresses.contains(a)));
    let first = there.next()?;
    let Some(second) = there.next() else {
        return Some(first);
    };
    [first, second]
        .into_iter()
        .chain(there)
        .find(|namespace| kernel::is_linked(namespace).unwrap_or(false))
}

/// Says where a namespace's inbound connections go.
fn hand_over(kernel: &Kernel, cookie: u64, sockets: &[TcpListener]) -> Result<(), String> {
    for socket in sockets {
        let v4 = socket.local_addr().is_ok_and(|addr| addr.is_ipv4());
        kernel
            .capture()
            .listen(ListenerKey::of_namespace(cookie, v4), socket.as_fd())
            .map_err(|error| error.to_string())?;
    }
    Ok(())
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

/// A cgroup's id and its level in the hierarchy.
fn cgroup(path: &Path) -> Result<(u64, usize), String> {
    let root = kernel::cgroup2_root().map_err(|error| error.to_string())?;
    let relative = path.strip_prefix("/").unwrap_or(path);
    let level = relative.components().count();
    if level > 15 {
        return Err("it is more than 15 levels deep".into());
    }
    let found = fs::metadata(root.join(relative)).map_err(|error| error.to_string())?;
    Ok((found.ino(), level))
}
