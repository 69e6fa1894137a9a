//! Mesh capture: the workloads whose connections are captured, the proxy's sockets in their network namespaces, and the
//! kernel's tables.

mod annotate;
mod attach;
mod boot;
mod cni_requests;
mod cni_results;
mod discover;
mod dns;
mod encryption;
mod forbidden;
mod found;
mod guard;
mod guest_queries;
mod packets;
mod places;
mod probes;
mod problems;
mod published;
mod settle;
mod statements;
mod virtual_interfaces;

use std::{
    collections::{BTreeMap, HashMap},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::{Arc, mpsc::Sender},
    thread,
    time::{Duration, Instant},
};

use ::dns::Room;
use admin::Certificates;
use dataplane_common::capture::{Enrolled, FROM_CLIENT};
use kernel::{
    capture::{Capture, CaptureOptions},
    namespaces,
};
use model::{Place, Snapshot, WorkloadName};
use plan::{
    Captured,
    enrol::{Enroller, Judge, Member, MeshStatements, members},
};
use proxy::{Observer, Proxy, handover::Named};
use relay::raise_open_files;
use settings::Settings;
use source::kubernetes::Announcer;
use threads::Deaths;
use tracing::debug;

use self::{
    attach::{Attached, takes_inbound},
    boot::BootGuard,
    cni_requests::CniRequests,
    dns::Dns,
    encryption::Encryption,
    forbidden::Judged,
    found::Found,
    guard::Closed,
    packets::Packets,
    problems::Problems,
};
pub use self::{places::namespace_with, published::Published, settle::Settled};
use crate::accepting::Accepting;

/// How long the connections of a workload may go on that is still there and no longer captured: without a limit.
/// (Clocks can still represent this time.)
const RELEASED: Duration = Duration::from_hours(365 * 24);

/// How long a workload may be announced before it is here, or after it has gone, before this counts as a problem.
const ARRIVING: Duration = Duration::from_secs(5);

/// How long the proxy holds a connection to a destination that the agent does not know yet.
const HOLD: Duration = Duration::from_secs(5);

/// The part of an ending agent's time for its connections in which it accepts no more.
const LAST: Duration = Duration::from_millis(500);
/// How long an agent that removes everything of its own waits until its annotations are removed from Pods.
const WITHDRAWAL: Duration = Duration::from_secs(3);
/// How often an ending agent checks whether it still relays connections.
const POLL: Duration = Duration::from_millis(20);

/// The problem of a workload that may be here.
const AS_BEFORE: &str = "if it was captured before, it still is, by the rules that it had then";

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

/// The settings of the agent's proxy.
fn proxy_settings(config: &settings::Mesh, options: &CaptureOptions) -> proxy::Settings {
    let proxy = &config.proxy;
    let time = |time: settings::Timeout| Duration::from_secs(time.seconds().into());
    let without = proxy::Settings::default();
    proxy::Settings {
        mark: Some(options.mark),
        transparent_mark: Some(options.mark | FROM_CLIENT),
        transparent: proxy.keep_source.unwrap_or(true),
        idle_timeout: proxy.idle_timeout.map(time),
        patience: relay::socket::Patience {
            keepalive: proxy.keepalive.map(time).or(without.patience.keepalive),
            user_timeout: proxy.user_timeout.map(time),
        },
        hold: proxy.hold_timeout.map_or(HOLD, time),
        access_log: proxy.access_log.unwrap_or_default(),
        max_connections: proxy.max_connections.map(|max| max as usize),
        max_per_workload: proxy.max_connections_per_workload.map(|max| max as usize),
        attests: config.attests().map(Into::into),
        ..without
    }
}

/// The settings of tunnels: connections through them are as those of the proxy.
fn tunnel_settings(
    identity: &settings::MeshIdentity,
    proxy: &proxy::Settings,
) -> (tunnel::Manner, tunnel::Settings) {
    let manner = tunnel::Manner {
        trust_domain: identity.trust_domain().into(),
        mark: proxy.mark,
        transparent_mark: proxy.transparent_mark.filter(|_| proxy.transparent),
        connect_timeout: proxy.connect_timeout,
        idle_timeout: proxy.idle_timeout,
        patience: proxy.patience,
    };
    let settings = tunnel::Settings {
        connect: proxy.connect_timeout,
        ..tunnel::Settings::default()
    };
    (manner, settings)
}

/// Whether the agent's proxy accepts tunnels (HBONE) to captured workloads.
fn tunnels_are_on(settings: &Settings) -> bool {
    let mesh = settings.mesh.as_ref();
    mesh.is_some_and(|mesh| mesh.identity.is_some())
}

/// The captured workloads, with the proxy and the DNS server.
pub struct Mesh {
    config: settings::Mesh,
    options: CaptureOptions,
    /// The agent's own proxy; `None` if the proxy is another program, or if only queries are captured.
    proxy: Option<Proxy>,
    /// The certificates of the captured workloads; `None`: connections are not encrypted.
    encryption: Option<Encryption>,
    /// The agent's DNS server; `None` if it has no clients.
    dns: Option<Dns>,
    /// Writes on Pods that they are captured; `None` if the configuration does not ask for it.
    announcer: Option<Announcer>,
    /// The Pods to which the agent's proxy accepts tunnels.
    accepting: Accepting,
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
    /// Requests of the CNI plug-in, and the pods that it registered.
    cni: CniRequests,
    /// A problem that no workload has caused.
    trouble: Option<String>,
    /// As [`Settled::shortage`].
    shortage: Option<String>,
    /// The namespaces whose objects of Istio's the log has named, and when each last had some.
    limited: HashMap<Arc<str>, Instant>,
    /// Decides about the clients of workloads without a proxy.
    judge: Judge,
    /// The policies by which direct connections were judged.
    judged: Judged,
    /// Workloads that should be here and are not, and since when.
    absent: HashMap<WorkloadName, Instant>,
    /// The network namespaces of workloads, the last one last, as long as both exist.
    homes: HashMap<WorkloadName, Vec<u64>>,
    /// Whether connections are refused from unknown network namespaces, since the last [`Mesh::settle`].
    guarded: bool,
    /// The guard of `dataplane guard`, or a startup taint, until this agent has taken over.
    boot: Option<BootGuard>,
    /// Told when this agent has taken over.
    verified: Option<Sender<()>>,
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
            let settings = proxy_settings(&config, &options);
            let settings = proxy::Settings {
                dns_files: dns.map(|_| dns::files(room)).unwrap_or_default(),
                ..settings
            };
            Some(Proxy::start(settings, deaths).map_err(super::Error::Proxy)?)
        };
        let encryption = proxy.as_ref().zip(config.identity.as_ref());
        let encryption = encryption.map(|(proxy, identity)| {
            let how = tunnel_settings(identity, &proxy_settings(&config, &options));
            Encryption::start(identity, proxy, how, deaths)
        });
        let encryption = encryption.transpose().map_err(super::Error::Thread)?;
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
        let accepting = encryption.as_ref().map(|_| Accepting::after(held));
        let directory = settings.listen.socket().parent();
        let directory = directory.unwrap_or(Path::new("/"));
        Ok(Self {
            options,
            proxy,
            encryption,
            dns,
            announcer: None,
            accepting: accepting.unwrap_or_default(),
            published,
            said: MeshStatements {
                without_mesh: settings.mesh.is_none(),
                tunnels: tunnels_are_on(settings) && !options.foreign,
                all_queries: settings.dns.as_ref().is_some_and(settings::Dns::is_for_all),
                ..statements::said(&config)
            },
            enroller: Enroller::after(held, options.foreign, tunnels_are_on(settings)),
            attached: BTreeMap::new(),
            packets: Packets::after(held),
            routed: virtual_interfaces::after(held),
            given: given.into_iter().collect(),
            before,
            problems: Problems::default(),
            cni: CniRequests::read(directory),
            trouble: None,
            shortage: None,
            limited: HashMap::new(),
            judge: Judge::default(),
            judged: Judged::new(),
            absent: HashMap::new(),
            homes: HashMap::new(),
            guarded: held.namespaces.values().any(Enrolled::is_let_go),
            boot: BootGuard::new(capture.has_boot_guard(), config.startup_taint.as_deref()),
            verified: None,
            closed: Closed::new(),
            own_cookie: namespaces::netns_cookie()?,
            cgroup: cgroup.to_owned(),
            unseen,
            config,
        })
    }

    /// Looks at the agent's own proxy, if there is one.
    pub fn observer(&self) -> Option<Observer> {
        self.proxy.as_ref().map(Proxy::observer)
    }

    /// Has a message sent when all workloads are captured that were there before the agent.
    pub fn tell_when_verified(&mut self, to: Option<Sender<()>>) {
        self.verified = to;
    }

    /// Looks at the certificates of workloads, if connections are encrypted.
    pub fn certificates(&self) -> Option<Certificates> {
        let encryption = self.encryption.as_ref()?;
        Some(Certificates::new(Arc::clone(encryption.store())))
    }

    /// Gets certificates for the captured workloads of this node.
    fn certify(&self, members: &[Member]) {
        if let Some(encryption) = &self.encryption {
            let here = members.iter().map(|member| &*member.workload);
            encryption.want(here.filter(|workload| workload.place == Place::Address));
        }
    }

    /// The Pods of this node to which the agent's proxy accepts tunnels: the snapshots of [`Mesh::settle`] have to say that they speak
    /// HBONE.
    pub fn accepting(&self) -> &Accepting {
        &self.accepting
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
        let mut members = members(&self.said, &self.cni.complete(snapshot));
        self.certify(&members);
        members.retain(|member| member.workload.place == Place::Address && !member.is_by_packets());
        let wanted = self.wanted(&members, &[], capture.held());
        let found = Found::look(&wanted, self.own_cookie);
        for member in &members {
            let registered = self.cni.cookie(&member.workload);
            let registered = registered.as_slice();
            let mut there = found
                .homes(&member.workload, registered)
                .into_iter()
                .flatten();
            let Some(namespace) = there.next() else {
                continue;
            };
            // Only to see the resulting entry: nothing is written.
            let entry = self.enroller.enrol(member, &mut Captured::default());
            let relevant = |flags: u32| (flags & Enrolled::PROXY, takes_inbound(flags));
            let held = capture.held().namespaces.get(&namespace.cookie);
            if entry.flags & Enrolled::PROXY == 0
                || held.is_none_or(|held| relevant(held.flags) != relevant(entry.flags))
                || self.attached.contains_key(&namespace.cookie)
            {
                continue;
            }
            if let Err(problem) = self.attach(capture, member, namespace, entry.flags) {
                debug!("{}: not yet: {}", member.workload.name, problem.text);
            }
        }
    }

    /// As [`BootGuard::lacks_cni`].
    pub fn lacks_cni(&mut self, lacks: bool) {
        if let Some(guard) = &mut self.boot {
            guard.lacks_cni(lacks);
        }
    }

    /// How soon to look again at facts that change without an event.
    pub fn patience(&self) -> Duration {
        let is_asked = self.cni.is_awaited() || !self.absent.is_empty();
        let is_guarded = self.config.guard || self.guarded || self.boot.is_some();
        if is_guarded || is_asked || !self.problems.is_empty() {
            Duration::from_secs(1)
        } else {
            Duration::from_secs(10)
        }
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
            announcer,
            ..
        } = self;
        // A successor writes now.
        let announcer = announcer.filter(|_| detach);
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
        if let Some(announcer) = announcer {
            announcer.withdraw(WITHDRAWAL);
        }
        for (namespace, _) in routed.into_values().flatten() {
            let unrouted =
                namespaces::within(namespace.as_fd(), kernel::capture::unroute_interfaces);
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
                kernel::capture::route_answers_no_more(mark)
            });
            if let Err(error) = routed {
                debug!("{name}: cannot remove its rule and route: {error}");
            }
        }
    }
}
