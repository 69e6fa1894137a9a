//! Joins the views of a source with the node's own facts.

use std::{
    collections::BTreeSet,
    io,
    net::IpAddr,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use imbl::OrdMap;
use model::{Node, Problem, Protocol, Snapshot, VipPort, Workload, WorkloadName};
use plan::{
    entries::Entries,
    routes::{Routes, Sources},
};
use settings::WithoutWaypoint;
use source::{
    Admitted, Feed, Health, Notice, OpenError, Paced, Source, View, kubernetes, objects::NodeFacts,
};
use tracing::{info, warn};

use super::{
    accepting::Accepting, kept_addresses::KeptAddresses, lookups::Lookups, node, problems,
    remembered::Remembered,
};

/// Why a source cannot be read on this node.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// The kernel does not return the node's name or addresses.
    #[error("cannot find out this node's name and addresses: {0}")]
    Node(#[source] io::Error),
    /// The source cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// Returns the configured source. Of the API, it reads no more than `scope` and `policies`, with `waypoints` also Gateways, and
/// with `names` also the parts that DNS needs.
pub fn source(
    settings: &settings::Source,
    scope: kubernetes::Scope,
    policies: kubernetes::WantedPolicies,
    waypoints: bool,
    names: bool,
) -> Source {
    let Some(api) = &settings.kubernetes else {
        return Source::Manifests(settings.manifests.clone());
    };
    Source::Kubernetes(kubernetes::Settings {
        target: kubernetes::Target {
            kubeconfig: api.kubeconfig.clone(),
            server: api.api_server.clone(),
            ..kubernetes::Target::default()
        },
        wanted: kubernetes::WantedKinds {
            scope,
            entries: api.service_entries && scope >= kubernetes::Scope::HostPorts,
            routes: api.routes,
            waypoints,
            policies,
            names,
        },
        patience: kubernetes::Patience::default(),
    })
}

/// The parts of an [`Input`] that only an agent has: files for the next agent, and lookups of names.
#[derive(Clone, Copy, Debug)]
pub struct Keeping<'a> {
    /// The directory of its files, which it writes from [`Input::own_files`] on.
    pub directory: &'a Path,
    /// The configuration of DNS: the file with the node's resolvers, and the cluster's domain.
    pub dns: Option<&'a settings::Dns>,
}

/// The source of this node's services and workloads, and its last view.
#[derive(Debug)]
pub struct Input {
    feed: Box<dyn Feed>,
    settings: settings::Node,
    /// The facts about this node in the last view.
    facts: Option<NodeFacts>,
    snapshot: Snapshot,
    /// The services and entries of the last view, as far as they were taken in.
    paced: Paced,
    /// When the oldest of the changes arrived that were not, if that is known.
    behind_since: Option<Instant>,
    /// The namespaces of the last view in which something cannot be read.
    unread: imbl::OrdSet<Arc<str>>,
    /// The problems of the last view.
    problems: Arc<[Problem]>,
    admitted: Admitted,
    /// The workloads of the last view.
    workloads: OrdMap<WorkloadName, Arc<Workload>>,
    accepting: Accepting,
    entries: Entries,
    /// The routes and grants of the last view, for the snapshot.
    routes: Routes,
    /// The addresses of the entries' hosts; `None`: they are not remembered for the next agent.
    remembered: Option<Remembered>,
    /// The addresses of the endpoints' names; `None`: the names are not looked up.
    lookups: Option<Lookups>,
    /// The addresses that the node had a moment ago.
    kept: KeptAddresses,
    /// Whether there was a view.
    known: bool,
}

/// A view has been taken into the snapshot.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// When the oldest of its changes arrived; `None` if the time says nothing, as for a list.
    pub since: Option<Instant>,
}

impl Input {
    /// Begins to read a source. Manifests are read before this returns. `keeping`: the parts that only an agent has.
    ///
    /// # Errors
    ///
    /// The source cannot be used, or the kernel does not return the node's name or addresses.
    pub fn open(
        source: &Source,
        settings: &settings::Node,
        keeping: Option<Keeping<'_>>,
        notify: impl Fn(Notice) + Clone + Send + Sync + 'static,
    ) -> Result<Self, InputError> {
        let tell = notify.clone();
        let feed = |node: &Arc<Node>| source.open(node, tell);
        Self::with(feed, settings, keeping, notify)
    }

    /// Likewise, with this feed.
    pub(crate) fn with(
        feed: impl FnOnce(&Arc<Node>) -> Result<Box<dyn Feed>, OpenError>,
        settings: &settings::Node,
        keeping: Option<Keeping<'_>>,
        notify: impl Fn(Notice) + Clone + Send + Sync + 'static,
    ) -> Result<Self, InputError> {
        let mut entries = Entries::new([]);
        let (mut remembered, mut lookups) = (None, None);
        if let Some(Keeping { directory, dns }) = keeping {
            let (vips, records) = Remembered::read(directory.join("vips"), admin::now());
            let (own, known) = Lookups::new(dns, directory.join("names"), notify.clone());
            entries = Entries::new(records).with_names(known).with_control_plane();
            (remembered, lookups) = (Some(vips), Some(own));
        }
        let entries = entries.with_stated_addresses(!settings.external_ips.is_empty());
        let node = Arc::new(node::of(settings, None).map_err(InputError::Node)?);
        let mut input = Self {
            feed: feed(&node)?,
            settings: settings.clone(),
            facts: None,
            snapshot: Snapshot {
                node,
                ..Snapshot::default()
            },
            paced: Paced::default(),
            behind_since: None,
            unread: imbl::OrdSet::new(),
            problems: Arc::default(),
            admitted: Admitted::new(node::external_ips(settings))
                .with_reserved_ports(settings.reserved_ports.clone()),
            workloads: OrdMap::new(),
            accepting: Accepting::default(),
            entries,
            routes: Routes::default(),
            remembered,
            lookups,
            kept: KeptAddresses::default(),
            known: false,
        };
        if let Some(view) = input.feed.take() {
            input.snapshot.node =
                Arc::new(node::of(settings, view.node.as_ref()).map_err(InputError::Node)?);
            input.put(view);
        }
        Ok(input)
    }

    /// Sets the destinations that workloads with `egress: deny` may reach besides Services of Pods, the settings for
    /// Istio's objects, and the names of the cluster.
    #[must_use]
    pub fn with_mesh(mut self, settings: &settings::Settings) -> Self {
        let mesh = settings.mesh.as_ref();
        self.snapshot.cluster = Arc::new(settings.cluster());
        self.snapshot.reachable = mesh.map(|mesh| Arc::new(mesh.reachable()));
        if let Some(mesh) = mesh {
            self.snapshot.istio.denies = mesh.denies_unsupported();
            self.snapshot.istio.waypoints = mesh.identity.is_some();
            self.snapshot.istio.passes = mesh.without_waypoint == Some(WithoutWaypoint::Pass);
            self.snapshot.istio.root = mesh.root_namespace().into();
        }
        self
    }

    /// Writes the agent's files from now on. Other agents have stopped writing them.
    pub fn own_files(&mut self) {
        if let Some(remembered) = &mut self.remembered {
            remembered.own(&self.entries.records());
        }
        if let Some(lookups) = &mut self.lookups {
            lookups.own(&self.entries);
        }
    }

    /// Returns the health of the source.
    pub fn health(&self) -> Health {
        self.feed.health()
    }

    /// Returns the objects to serve, as far as they are [known](Self::is_known).
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Whether the source has had a view.
    pub fn is_known(&self) -> bool {
        self.known
    }

    /// Makes the next [`Input::take`] read everything anew.
    pub fn refresh(&mut self) {
        self.feed.refresh();
    }

    /// Takes the newest view into the snapshot, and new results of lookups, if there are any. If the changes are too many
    /// for one step, takes the next part of them: [`Input::is_behind`].
    pub fn take(&mut self) -> Option<Update> {
        let learnt = self.lookups.as_mut();
        let learnt = learnt.and_then(|lookups| lookups.tell(&mut self.entries));
        let Some(view) = self.feed.take() else {
            if self.is_behind() {
                let waited = self.behind_since;
                self.step();
                return Some(self.update(waited, learnt));
            }
            // The agent looks up names of objects in the last view only, so there is a view.
            learnt?;
            self.serve();
            return Some(Update { since: learnt });
        };
        if self.facts != view.node || !self.known {
            match node::of(&self.settings, view.node.as_ref()) {
                Ok(mut node) => {
                    let known = &self.snapshot.node;
                    self.kept.keep(&mut node, known, Instant::now());
                    self.snapshot.node = Arc::new(node);
                }
                Err(error) => {
                    warn!("cannot find out the node's addresses, keeping the last ones: {error}");
                }
            }
        }
        Some(self.put(view))
    }

    /// Sets the Pods of this node to which the agent's proxy accepts tunnels. Returns whether they have changed.
    pub(crate) fn accept(&mut self, accepting: Accepting) -> bool {
        let others = self.accepting != accepting;
        if others {
            self.snapshot.workloads = accepting.mark(&self.workloads);
            self.accepting = accepting;
        }
        others
    }

    /// Whether changes of the last view wait for the next [`Input::take`], which is to come soon.
    pub fn is_behind(&self) -> bool {
        self.paced.is_behind()
    }

    /// The last [`Input::take`], with all that followed from it, took so long.
    pub fn took(&mut self, time: Duration) {
        self.paced.took(time);
    }

    /// When the addresses that the node had a moment ago must no longer be served, if there are any.
    pub fn addresses_kept_until(&self) -> Option<Instant> {
        self.kept.until()
    }

    /// Whether hosts of entries wait for the addresses of a control plane: then call [`Input::look`] every second.
    pub fn defers(&self) -> bool {
        self.entries.defers()
    }

    /// Looks at the node's addresses. Returns whether they have changed, or hosts that waited for addresses may have
    /// them now.
    pub fn look(&mut self) -> bool {
        if let Some(lookups) = &mut self.lookups {
            lookups.write(&self.entries);
        }
        let waited = self.entries.is_waiting();
        if waited {
            self.serve();
        }
        waited | self.look_at_node()
    }

    fn look_at_node(&mut self) -> bool {
        match node::of(&self.settings, self.facts.as_ref()) {
            Ok(mut node) => {
                let known = &self.snapshot.node;
                self.kept.keep(&mut node, known, Instant::now());
                let moved = node.addresses != known.addresses;
                let same = node.own == known.own
                    && node.ephemeral == known.ephemeral
                    && self.listens() == known.listens;
                if !moved && same {
                    return false;
                }
                if moved {
                    info!(addresses = ?node.addresses, "the node's addresses changed");
                }
                self.snapshot.node = Arc::new(Node {
                    addresses: node.addresses,
                    addresses_from: node.addresses_from,
                    own: node.own,
                    ephemeral: node.ephemeral,
                    ..(**known).clone()
                });
                self.serve();
                true
            }
            Err(error) => {
                warn!("cannot find out the node's addresses, keeping the last ones: {error}");
                false
            }
        }
    }

    /// Whether the node has cluster IPs on its interfaces: then its listening sockets matter.
    pub fn owns_cluster_ips(&self) -> bool {
        self.admitted.owned().next().is_some()
    }

    /// Returns the cluster IPs on the node's interfaces at which its processes listen. If the kernel does not return
    /// them, the earlier ones.
    fn listens(&self) -> BTreeSet<VipPort> {
        let owned: BTreeSet<IpAddr> = self.admitted.owned().collect();
        if owned.is_empty() {
            return BTreeSet::new();
        }
        match kernel::listening::listeners() {
            Ok(listeners) => listeners
                .into_iter()
                .filter_map(|listener| {
                    let protocol = match listener.protocol {
                        dataplane_common::Protocol::TCP => Protocol::Tcp,
                        dataplane_common::Protocol::UDP => Protocol::Udp,
                        _ => return None,
                    };
                    Some((listener.socket.addr.to_canonical(), protocol, listener.port))
                })
                .filter(|(ip, ..)| owned.contains(ip))
                .collect(),
            Err(error) => {
                warn!("cannot find out who listens at cluster IPs of this node: {error}");
                self.snapshot.node.listens.clone()
            }
        }
    }

    fn put(&mut self, view: View) -> Update {
        self.known = true;
        self.facts = view.node;
        self.paced.want(&view.services, &view.entries, &view.routes);
        self.snapshot.grants = view.grants;
        self.snapshot.istio.namespaces = view.istio.namespaces;
        self.snapshot.istio.gateways = view.istio.gateways;
        self.snapshot.istio.classes = view.istio.classes;
        self.snapshot.istio.unread = view.istio.unread;
        self.snapshot.workloads = self.accepting.mark(&view.workloads);
        self.workloads = view.workloads;
        self.snapshot.pods = view.pods;
        self.snapshot.whole = view.whole;
        self.unread = view.unread;
        self.snapshot.namespaces.clone_from(&view.namespaces);
        let others = !Arc::ptr_eq(&self.problems, &view.problems);
        self.problems = view.problems;
        let waited = self.behind_since;
        self.behind_since = waited.or(view.since);
        if !self.step() && others {
            self.note();
        }
        self.update(waited, view.since)
    }

    /// After a step: the changes that waited since then take effect, as a whole, with the last of them.
    fn update(&self, waited: Option<Instant>, since: Option<Instant>) -> Update {
        let caught_up = waited.filter(|_| !self.is_behind());
        Update {
            since: [caught_up, since].into_iter().flatten().min(),
        }
    }

    /// Takes in the next changes of the view, and serves the result; returns whether others are left out than before.
    fn step(&mut self) -> bool {
        let others = self.paced.step(Instant::now());
        if !self.is_behind() {
            self.behind_since = None;
        }
        let mut unread = self.unread.clone();
        unread.extend(self.paced.behind().map(Arc::from));
        self.snapshot.unread = unread;
        self.snapshot.routes.clone_from(self.paced.routes());
        let noted = self.serve();
        if others && !noted {
            self.note();
        }
        others | noted
    }

    /// Serves the objects that can be served on this node now; returns whether others are left out than before.
    fn serve(&mut self) -> bool {
        let (mut services, mut changed) = self
            .admitted
            .take(self.paced.services(), &self.snapshot.node);
        let listens = self.listens();
        if listens != self.snapshot.node.listens {
            let node = Node {
                listens,
                ..(*self.snapshot.node).clone()
            };
            self.snapshot.node = Arc::new(node);
            let others;
            (services, others) = self
                .admitted
                .take(self.paced.services(), &self.snapshot.node);
            changed |= others;
        }
        let (entries, others) = self.admitted.take_entries(self.paced.entries());
        changed |= others;
        let now = admin::now();
        let taken = self.entries.take(&entries, &services, &self.snapshot, now);
        if let Some(remembered) = &mut self.remembered {
            let before = remembered.problem().is_some();
            remembered.note(&taken.records, || self.entries.records());
            changed |= remembered.problem().is_some() != before;
        }
        let routed = self.routes.take(Sources {
            routes: &self.snapshot.routes,
            grants: &self.snapshot.grants,
            services: &taken.services,
            entries: &taken.entries,
        });
        self.snapshot.services = routed.services;
        self.snapshot.entries = taken.entries;
        if let Some(lookups) = &mut self.lookups {
            lookups.follow(&mut self.entries);
        }
        changed |= taken.other_problems | routed.other_problems;
        if changed {
            self.note();
        }
        changed
    }

    /// Records the objects that are left out.
    fn note(&mut self) {
        let remembered = self.remembered.as_ref();
        let remembered = remembered.and_then(Remembered::problem);
        let here = self.paced.problems().chain(self.admitted.problems());
        let here = here.chain(self.entries.problems());
        let here = here.chain(self.routes.problems());
        let lookups = self.lookups.as_ref().and_then(Lookups::problem);
        let mut here = here.chain(remembered).chain(lookups).peekable();
        let problems: Arc<[Problem]> = if here.peek().is_none() {
            Arc::clone(&self.problems)
        } else {
            self.problems.iter().chain(here).cloned().collect()
        };
        problems::log(&problems, &self.snapshot.problems);
        self.snapshot.problems = problems;
    }
}
