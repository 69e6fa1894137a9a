//! Mesh capture: the workloads whose connections are captured, the proxy's sockets in their network namespaces, and the
//! kernel's tables.

mod attach;
mod cni;
mod discover;
mod dns;
mod found;
mod guard;
mod guest_queries;
mod packets;
mod places;
mod problems;
mod publish;
mod published;
mod statements;
mod virtual_interfaces;

use std::{
    collections::{BTreeMap, HashMap},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use ::dns::Room;
use dataplane_common::capture::{Enrolled, FROM_CLIENT};
use kernel::{Capture, CaptureOptions, Kernel, Namespace, namespaces};
use model::{Place, ServiceName, Snapshot, Workload, WorkloadName};
use plan::{
    Captured,
    enrol::{
        Enroller, Enrolment, Member, MeshStatements, Problem, Retained, Unknown, fit_addresses,
        known, members,
    },
};
use proxy::{
    Observer, Proxy,
    handover::{self, Named},
};
use relay::raise_open_files;
use settings::Settings;
use threads::Deaths;
use tracing::{debug, error};

use self::{
    attach::Attached,
    discover::{Placed, is_to_be_denied},
    dns::Dns,
    found::Found,
    guard::Closed,
    packets::Packets,
    problems::Problems,
};
pub use self::{places::namespace_with, published::Published};

/// How long the connections of a workload may go on that is still there and no longer captured: without a limit.
/// (Clocks can still represent this time.)
const RELEASED: Duration = Duration::from_hours(365 * 24);

/// How long a workload may be announced before it is here, or after it has gone, before this counts as a problem.
const ARRIVING: Duration = Duration::from_secs(5);

/// The part of an ending agent's time for its connections in which it accepts no more.
const LAST: Duration = Duration::from_millis(500);
/// How often an ending agent checks whether it still relays connections.
const POLL: Duration = Duration::from_millis(20);

/// The problem of a workload whose rules do not fit.
const OVER_BUDGET: &str = "its rules name more ports, ranges, users, groups and interfaces than its namespace's budget \
     in tables RULES and RANGES has room for, so these lists have no effect: all of its connections are captured that \
     the configuration does not exclude. Use shorter lists";

/// The problem of a workload that may be here.
const AS_BEFORE: &str = "if it was captured before, it still is, by the rules that it had then";

/// The state of capture after [`Mesh::settle`].
pub struct Settled {
    /// The workloads, for `status` and metrics.
    pub workloads: Vec<Enrolment>,
    /// Why some of it may be wrong: facts that could not be read.
    pub trouble: Option<String>,
    /// Why the proxy takes fewer connections than configured.
    pub shortage: Option<String>,
    /// Entries that the tables have no room for, and that no captured workload has asked for.
    pub left_out: Vec<String>,
}

/// Whether workloads are captured, or their DNS queries.
pub fn is_wanted(settings: &Settings) -> bool {
    settings.mesh.is_some() || settings.dns.as_ref().is_some_and(settings::Dns::is_for_all)
}

/// Returns the options of the capture programs.
pub fn options(settings: &Settings) -> CaptureOptions {
    let without = settings::Mesh::default();
    let mesh = settings.mesh.as_ref().unwrap_or(&without);
    let dns = settings.dns.as_ref();
    CaptureOptions {
        outbound: mesh.outbound(),
        inbound: mesh.inbound(),
        mark: mesh.mark(),
        foreign: mesh.proxy.uid.is_some(),
        denies: mesh.denies(),
        dns: dns.filter(|dns| dns.is_on()).map(settings::Dns::port),
    }
}

/// The captured workloads, with the proxy and the DNS server.
pub struct Mesh {
    config: settings::Mesh,
    options: CaptureOptions,
    /// The agent's own proxy; `None` if the proxy is another program, or if only queries are captured.
    proxy: Option<Proxy>,
    /// The agent's DNS server; `None` if it has no clients.
    dns: Option<Dns>,
    /// The snapshots that both use.
    published: Published,
    /// The configuration's rules of capture.
    said: MeshStatements,
    enroller: Enroller,
    /// The workloads for which the agent's proxy listens, by the namespace's cookie.
    attached: BTreeMap<u64, Attached>,
    /// The workloads that are captured by the packets that they send.
    packets: Packets,
    /// The namespaces in which connections are routed to the proxy by their interfaces.
    routed: virtual_interfaces::Routed,
    /// An earlier agent's listening sockets that are not adopted yet.
    given: HashMap<String, OwnedFd>,
    /// The earlier agent, which accepts from these sockets until this one does.
    before: Option<UnixStream>,
    /// The problems of workloads.
    problems: Problems,
    /// A problem that no workload has caused.
    trouble: Option<String>,
    /// As [`Settled::shortage`].
    shortage: Option<String>,
    /// Workloads that should be here and are not, and since when.
    absent: HashMap<WorkloadName, Instant>,
    /// The network namespaces of workloads, the last one last, as long as both exist.
    homes: HashMap<WorkloadName, Vec<u64>>,
    /// Whether connections are refused from unknown network namespaces, since the last settle.
    guarded: bool,
    /// Network namespaces that the guard keeps closed.
    closed: Closed,
    own_cookie: u64,
    /// The cgroup whose processes the programs see.
    cgroup: PathBuf,
    /// Why connections to the proxy are reset, if the programs do not see the agent's own sockets.
    unseen: Option<String>,
}

impl Mesh {
    /// Starts the proxy, if it is the agent's. Capture stays as it was. `given`: the listening sockets of an earlier
    /// agent; `before`: that agent, which accepts from them until this one does. `deaths`: of the proxy's threads.
    ///
    /// # Errors
    /// If the proxy cannot be started, or the tables cannot be read.
    pub fn start(
        settings: &Settings,
        capture: &Capture,
        cgroup: &Path,
        given: Named,
        before: Option<UnixStream>,
        deaths: &Deaths,
    ) -> Result<Self, super::Error> {
        let options = options(settings);
        let config = settings.mesh.clone().unwrap_or_default();
        let dns = settings.dns.as_ref().filter(|dns| dns.is_on());
        let files = raise_open_files().map_err(super::Error::Thread)?;
        let room = Room::of(files);
        let proxy = if options.foreign || settings.mesh.is_none() {
            None
        } else {
            let settings = proxy::Settings {
                mark: Some(options.mark),
                transparent_mark: Some(options.mark | FROM_CLIENT),
                dns_files: dns.map(|_| dns::files(room)).unwrap_or_default(),
                transparent: config.proxy.keep_source.unwrap_or(true),
                idle_timeout: config
                    .proxy
                    .idle_timeout
                    .map(|time| Duration::from_secs(time.seconds().into())),
                access_log: config.proxy.access_log.unwrap_or_default(),
                max_connections: config.proxy.max_connections.map(|max| max as usize),
                max_per_workload: config
                    .proxy
                    .max_connections_per_workload
                    .map(|max| max as usize),
                ..proxy::Settings::default()
            };
            Some(Proxy::start(settings, deaths).map_err(super::Error::Proxy)?)
        };
        let dns = dns.map(|dns| {
            let lease = capture.query_lease();
            Dns::start(dns, config.reachable(), lease, room, deaths)
        });
        let dns = dns.transpose().map_err(super::Error::Thread)?;
        let published = Published::new(
            proxy.as_ref().map(Proxy::routes),
            dns.as_ref().map(Dns::zones),
        );
        let unseen = proxy.as_ref().and_then(|_| attach::unseen(cgroup));
        let held = capture.held();
        Ok(Self {
            options,
            proxy,
            dns,
            published,
            said: MeshStatements {
                without_mesh: settings.mesh.is_none(),
                all_queries: settings.dns.as_ref().is_some_and(settings::Dns::is_for_all),
                ..statements::said(&config)
            },
            enroller: Enroller::after(held, options.foreign),
            attached: BTreeMap::new(),
            packets: Packets::after(held),
            routed: virtual_interfaces::after(held),
            given: given.into_iter().collect(),
            before,
            problems: Problems::default(),
            trouble: None,
            shortage: None,
            absent: HashMap::new(),
            homes: HashMap::new(),
            guarded: held.namespaces.values().any(Enrolled::is_let_go),
            closed: Closed::new(),
            own_cookie: kernel::netns_cookie()?,
            cgroup: cgroup.to_owned(),
            unseen,
            config,
        })
    }

    /// Looks at the agent's own proxy, if there is one.
    pub fn observer(&self) -> Option<Observer> {
        self.proxy.as_ref().map(Proxy::observer)
    }

    /// Publishes snapshots to the proxy and to the DNS server.
    pub fn published(&self) -> &Published {
        &self.published
    }

    /// Looks at the agent's DNS server, if there is one.
    pub fn dns(&self) -> Option<::dns::Observer> {
        self.dns.as_ref().map(Dns::observer)
    }

    /// Listens early if an earlier agent's programs serve and its proxy is gone: takes the connections of workloads
    /// that these programs capture, before this agent's programs are there. Leaves changes and failures to
    /// [`Mesh::settle`].
    pub fn listen_early(&mut self, capture: &Capture, snapshot: &Snapshot) {
        if self.proxy.is_none() {
            return;
        }
        self.published.publish(snapshot, false);
        let mut members = members(&self.said, snapshot);
        members.retain(|member| member.workload.place == Place::Address && !member.is_by_packets());
        let wanted = self.wanted(&members, &[], capture.held());
        let found = Found::look(&wanted, self.own_cookie);
        for member in &members {
            let mut there = found.homes(&member.workload, &[]).into_iter().flatten();
            let Some(namespace) = there.next() else {
                continue;
            };
            // Only to see the resulting entry: nothing is written.
            let entry = self.enroller.enrol(member, &mut Captured::default());
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

    /// How soon to look again at facts that change without an event.
    pub fn patience(&self) -> Duration {
        if self.config.guard || !self.problems.is_empty() || !self.absent.is_empty() {
            Duration::from_secs(1)
        } else {
            Duration::from_secs(10)
        }
    }

    /// Brings everything in line with a snapshot and with the present network namespaces. A workload that cannot be
    /// found or attached delays no other: it has a problem. If a fact cannot be read, the earlier state stays.
    ///
    /// # Errors
    /// The kernel refuses tables or programs; the workloads that were captured before still are.
    pub fn settle(
        &mut self,
        kernel: &mut Kernel,
        snapshot: &Snapshot,
    ) -> Result<Settled, kernel::Error> {
        let mut problems = Problems::default();
        let members = members(&self.said, snapshot);
        let by_packets: Vec<&Member> = members.iter().filter(|m| m.is_by_packets()).collect();
        let held = kernel.capture().held();
        // If the guard may have to let other namespaces go, their workloads have to be known.
        let careful = self.config.guard || self.guarded || members.iter().any(is_to_be_denied);
        let others = guard::others(snapshot, &members).filter(|_| careful);
        let others: Vec<&Workload> = others.collect();
        let look = self.wanted(&members, &others, held);
        let found = Found::look(&look, self.own_cookie);
        let mut wanted = Captured::default();
        let Placed {
            mut enrolled,
            machines,
            mut levels,
            mut unknown,
            sought,
        } = self.enrol_all(&members, &found, held, &mut wanted, &mut problems);
        // The kernel distinguishes workloads in the node's own namespace, but the proxy does not: it treats them as the
        // node.
        let of_node = Member::of_node(snapshot);
        let by_cgroup = |wanted: &Captured| {
            let mut entries = wanted.cgroups.values();
            entries.any(|e| e.flags & Enrolled::PROXY != 0)
        };
        if let Ok(own) = &found.own
            && by_cgroup(&wanted)
        {
            enrolled.push((&of_node, own, Enrolled::CAPTURED | Enrolled::PROXY));
        }
        for member in members.iter().filter(|member| member.over_budget) {
            problems.add(&member.workload.name, Problem::of_workload(OVER_BUDGET));
        }
        for member in &members {
            for text in &member.ineffective {
                problems.add(&member.workload.name, Problem::of_workload(text));
            }
        }
        let mut left_out = Vec::new();
        let mut trouble = found.trouble();
        let everybody = self.config.guard || sought.by_operator;
        let some = !sought.uids.is_empty() && namespaces::sees_all_processes().unwrap_or(false);
        let guard = everybody || some;
        // Namespaces that the guard let go are in the table until there is no guard any more.
        if guard || self.guarded {
            let only = (guard && !everybody).then_some(&sought.uids);
            let others = self.let_go_of_others(&others, &found, held, only, &mut wanted);
            left_out.extend(others.said);
            trouble = trouble.or(others.trouble);
        }
        self.change_over(&enrolled, &by_packets);
        // While another layout's programs serve, the earlier proxy serves, too: its programs would not recognise this
        // proxy's connections.
        let waits = kernel.waits();
        if !waits {
            self.listen(kernel, &enrolled, &mut problems);
            self.listen_for_interfaces(kernel, &enrolled, &mut problems);
            if let Some(dns) = &mut self.dns {
                let given = &mut self.given;
                for (cookie, to) in
                    dns.settle(snapshot, &self.published, &enrolled, given, &mut problems)
                {
                    self.enroller.capture_queries(cookie, &to, &mut wanted);
                }
            }
        }
        left_out.extend(self.dns.as_ref().and_then(Dns::unread).cloned());
        self.remember_packets(kernel.capture().held(), &members);
        let packets = self.settle_packets(kernel, &by_packets, &found, &mut wanted, &mut problems);
        unknown.extend(packets.unknown);
        trouble = trouble.or(packets.trouble);
        let kept = Retained {
            seen: &found.told(),
            own_cookie: self.own_cookie,
            earlier: self.enroller.earlier(),
            guarded_unread: guard && found.trouble().is_some(),
            unknown: &unknown,
        };
        wanted.keep(kernel.capture().held(), |workload, cookie| {
            kept.has(workload, cookie)
        });
        if unknown.values().any(|place| *place == Unknown::Cgroup) {
            levels |= kernel.capture().tables().config().levels;
        }
        if !members.is_empty() {
            let unknown = known(snapshot, &members, &mut wanted);
            left_out.extend(unknown_endpoints(&unknown));
        }
        let names: HashMap<u32, &WorkloadName> = self
            .enroller
            .numbers()
            .map(|(name, number)| (number, name))
            .collect();
        for (number, count) in fit_addresses(&mut wanted) {
            if let Some(name) = names.get(&number) {
                problems.add(name, too_many_addresses(count));
            }
        }
        let inbound: Vec<&Namespace> = enrolled
            .iter()
            .filter(|(_, _, flags)| flags & Enrolled::LOOKED_UP != 0)
            .map(|(_, namespace, _)| *namespace)
            .collect();
        self.unroute_interfaces(&found, &wanted);
        let failed = kernel.set_captured(&wanted, levels, &inbound, guard)?;
        self.guarded = guard;
        if !waits {
            let failed = |cookie| failed.contains_key(&cookie);
            self.route_interfaces(&enrolled, &machines, failed, &mut problems);
        }
        for (member, namespace, _) in &enrolled {
            if let Some(error) = failed.get(&namespace.cookie) {
                problems.add(&member.workload.name, Problem::of_node(error));
            }
        }
        let mut flags = enrolled.iter().map(|(_, _, flags)| flags);
        let by_sockets = flags.any(|flags| flags & Enrolled::PROXY != 0);
        let own_unread = found.own.is_err() && by_cgroup(&wanted);
        let own_cookie = self.own_cookie;
        self.release(&enrolled, &found, |cookie| {
            let is_kept =
                !found.seen.contains_key(&cookie) && wanted.namespaces.contains_key(&cookie);
            is_kept || cookie == own_cookie && own_unread
        });
        if !waits {
            if trouble.is_none() {
                // The workloads of these sockets are no longer captured.
                self.given.clear();
            }
            if let Some(before) = self.before.take() {
                handover::serves(before);
            }
        }
        self.enroller.keep_policies(&wanted);
        problems.tell(&self.problems);
        self.problems = problems;
        let publish = |member| self.publish(member);
        let workloads: Vec<_> = members.into_iter().map(publish).collect();
        let shortage = self.proxy.as_ref().and_then(Proxy::shortage);
        let unseen = self.unseen.clone().filter(|_| by_sockets);
        let trouble = unseen.into_iter().chain(trouble);
        let trouble = trouble.reduce(|first, second| format!("{first}; {second}"));
        for (text, before) in [(&trouble, &self.trouble), (&shortage, &self.shortage)] {
            if let Some(text) = text
                && before.as_ref() != Some(text)
            {
                error!("mesh: {text}");
            }
        }
        self.trouble.clone_from(&trouble);
        self.shortage.clone_from(&shortage);
        let numbers = workloads.iter().map(|enrolment| enrolment.number);
        self.enroller.keep_numbers(&numbers.collect());
        Ok(Settled {
            workloads,
            trouble,
            shortage,
            left_out,
        })
    }

    /// Stops when the agent ends without a successor: no other process accepts connections, so the proxy accepts as
    /// long as it relays some, for so long at most.
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

    /// Stops when the agent ends: relayed connections may go on until the deadline. `detach`: removes everything of the
    /// agent's.
    pub fn stop(self, deadline: Duration, detach: bool) {
        let Self {
            proxy,
            attached,
            routed,
            options,
            config,
            dns,
            ..
        } = self;
        // A successor that has its sockets now answers from its own data. Waits at the end only, when this is dropped.
        let _dns = dns.map(Dns::end);
        let namespaces: Vec<_> = attached
            .into_values()
            .map(|attached| (attached.name, attached.namespace))
            .collect();
        if let Some(proxy) = proxy {
            proxy.drain(deadline);
        }
        if !detach {
            return;
        }
        for (namespace, _) in routed.into_values().flatten() {
            let unrouted = namespaces::within(namespace.as_fd(), kernel::unroute_interfaces);
            if let Err(error) = unrouted {
                debug!("cannot remove the routing rules for virtual interfaces: {error}");
            }
        }
        if !config.proxy.keep_source.unwrap_or(true) {
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

/// Names the services and pods whose endpoints are not known to workloads with `egress: deny`.
fn unknown_endpoints(services: &[ServiceName]) -> Option<String> {
    let (first, more) = services.split_first()?;
    let others = match more.len() {
        0 => String::new(),
        more => format!(" and of {more} more services and pods"),
    };
    Some(format!(
        "table KNOWN has no room for the endpoints of {first}{others}, whose namespaces have too many: workloads \
         with egress: deny cannot connect to these endpoints. Use fewer endpoints and ports"
    ))
}

fn too_many_addresses(left_out: usize) -> Problem {
    Problem::of_workload(format!(
        "it has too many addresses: table LOCALS has no room for {left_out} of them, and connections to these are not \
         captured. Name fewer addresses"
    ))
}
