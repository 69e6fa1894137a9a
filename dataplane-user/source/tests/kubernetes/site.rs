//! An API server, and a reader of it.

use std::{
    cell::RefCell,
    net::{IpAddr, Ipv4Addr},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use dataplane_source::{
    Feed as _, Notice, View,
    kubernetes::{Api, Health, Kind, Patience, Scope, Settings, Target, WantedKinds},
    objects::NodeFacts,
};
use dataplane_tests::api::{ApiServer, Cluster, Options, Resource, objects};
use model::{Node, Service, ServiceName};
use serde_json::Value;
use tempfile::TempDir;

/// The name of the reader's node.
pub const NODE: &str = "node1";
/// Time after which a condition counts as failed.
const LIMIT: Duration = Duration::from_secs(20);

/// A reader of an API server, with the objects that it has read.
pub struct Site {
    pub server: ApiServer,
    pub health: Arc<Health>,
    pub directory: TempDir,
    changed: mpsc::Receiver<()>,
    feed: RefCell<Api>,
}

/// Returns a server with this node and these objects. It sends bookmarks often.
pub fn server(objects: impl IntoIterator<Item = Value>) -> ApiServer {
    server_with(objects, Options::default())
}

/// Returns a server with this node and these objects, and with options.
pub fn server_with(objects: impl IntoIterator<Item = Value>, options: Options) -> ApiServer {
    let cluster = Cluster::default();
    cluster.apply(objects::node(NODE, "zone-a", &[]));
    cluster.apply_all(objects);
    let server = ApiServer::start(cluster, options).unwrap();
    server.faults().bookmarks_every(Duration::from_millis(50));
    server
}

/// Returns short time limits for tests.
pub fn patience() -> Patience {
    Patience {
        answer: Duration::from_secs(5),
        idle: Duration::from_secs(10),
        retry: Duration::from_millis(5),
        retry_max: Duration::from_millis(50),
        forbidden: Duration::from_millis(100),
        missing: Duration::from_millis(50),
        orphan: Duration::from_millis(50),
    }
}

impl Site {
    /// Reads a server, using its kubeconfig.
    pub fn new(server: ApiServer) -> Self {
        Self::of(server, Scope::Services)
    }

    /// Reads the objects in this scope, using the server's kubeconfig.
    pub fn of(server: ApiServer, wanted: impl Into<WantedKinds>) -> Self {
        Self::patient(server, wanted, patience())
    }

    /// Reads the objects in this scope with other time limits.
    pub fn patient(server: ApiServer, wanted: impl Into<WantedKinds>, patience: Patience) -> Self {
        Self::start(
            server,
            wanted.into(),
            patience,
            |target, directory, server| {
                target.kubeconfig = Some(server.kubeconfig(directory.path()).unwrap());
            },
        )
    }

    /// Reads a server, using `target`.
    pub fn with(
        server: ApiServer,
        patience: Patience,
        target: impl FnOnce(&mut Target, &TempDir, &ApiServer),
    ) -> Self {
        Self::start(server, Scope::Services.into(), patience, target)
    }

    fn start(
        server: ApiServer,
        wanted: WantedKinds,
        patience: Patience,
        target: impl FnOnce(&mut Target, &TempDir, &ApiServer),
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut settings = Settings {
            target: Target::default(),
            wanted,
            patience,
        };
        target(&mut settings.target, &directory, &server);
        let (sender, changed) = mpsc::channel();
        let node = Node {
            name: NODE.into(),
            ..Node::default()
        };
        let notify = move |notice| match notice {
            Notice::Changed => sender.send(()).unwrap_or_default(),
            Notice::Died { why, .. } => panic!("{why}"),
        };
        let feed = Api::open(settings, &Arc::new(node), notify).unwrap();
        let dataplane_source::Health::Kubernetes { kinds, .. } = feed.health() else {
            panic!("{:?}", feed.health());
        };
        Self {
            server,
            health: kinds,
            directory,
            changed,
            feed: RefCell::new(feed),
        }
    }

    /// Returns the objects of the server.
    pub fn cluster(&self) -> &Cluster {
        self.server.cluster()
    }

    /// Returns the first view that fulfils the condition.
    #[track_caller]
    pub fn view(&self, wanted: impl Fn(&View) -> bool) -> View {
        let limit = Instant::now() + LIMIT;
        let mut last = None;
        while Instant::now() < limit {
            if let Some(view) = self.feed.borrow_mut().take() {
                if wanted(&view) {
                    return view;
                }
                last = Some(view);
            }
            let _ = self.changed.recv_timeout(Duration::from_millis(20));
        }
        panic!(
            "no such view; the last is {last:#?}, and {:?}",
            self.health.failure()
        );
    }

    /// Returns the view that was not taken yet, if there is one.
    pub fn untaken(&self) -> Option<View> {
        self.feed.borrow_mut().take()
    }

    /// Waits until a condition holds.
    #[track_caller]
    pub fn wait(&self, what: &str, so: impl Fn(&Self) -> bool) {
        let limit = Instant::now() + LIMIT;
        while !so(self) {
            let failure = self.health.failure();
            assert!(Instant::now() < limit, "not so: {what}; {failure:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until every kind is being watched.
    #[track_caller]
    pub fn watching(&self) {
        self.wait("every kind is watched", |site| site.health.is_watching());
    }

    /// Returns the number of lists of services, slices and nodes.
    pub fn lists(&self) -> [u64; 3] {
        [Kind::Service, Kind::Slice, Kind::Node].map(|kind| self.health.of(kind).lists())
    }

    /// Returns the versions at which watches of a resource were started.
    pub fn watched_from(&self, resource: Resource) -> Vec<u64> {
        let asked = self.server.faults().asked().into_iter();
        asked
            .filter(|asked| asked.watch && asked.resource == Some(resource))
            .filter_map(|asked| asked.version?.parse().ok())
            .collect()
    }
}

/// Returns `10.96.x.y`.
pub fn vip(number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    Ipv4Addr::new(10, 96, high, low).into()
}

/// Returns `10.244.x.y`.
pub fn pod(number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    Ipv4Addr::new(10, 244, high, low).into()
}

/// Returns a service by number, and its slice with endpoints by number.
pub fn web(number: u16, endpoints: &[u16]) -> [Value; 2] {
    let name = format!("web-{number}");
    [
        objects::service(&name, vip(number)),
        slice_of(&name, &format!("{name}-a"), endpoints),
    ]
}

/// Returns a slice with endpoints by number. Endpoints with even numbers are on this node.
pub fn slice_of(service: &str, name: &str, endpoints: &[u16]) -> Value {
    let endpoints: Vec<Value> = endpoints
        .iter()
        .map(|&number| {
            let node = if number % 2 == 0 { NODE } else { "node2" };
            objects::endpoint(pod(number), node)
        })
        .collect();
    objects::slice(service, name, 8080, &endpoints)
}

/// Returns a view's facts about the reader's node.
pub fn facts(view: &View) -> &NodeFacts {
    view.node.as_ref().unwrap()
}

/// Returns the last two bytes of the address of each endpoint of a service's first port.
pub fn endpoints(view: &View, name: &str) -> Vec<u16> {
    let service = view.services.get(&ServiceName::new("default", name));
    service.map_or_else(Vec::new, |service| endpoints_of(service))
}

pub fn endpoints_of(service: &Service) -> Vec<u16> {
    let endpoints = service
        .ports
        .iter()
        .take(1)
        .flat_map(|port| &port.endpoints);
    endpoints
        .map(|endpoint| match endpoint.addr {
            IpAddr::V4(v4) => u16::from_be_bytes([v4.octets()[2], v4.octets()[3]]),
            IpAddr::V6(_) => 0,
        })
        .collect()
}

/// Returns whether a view has a service.
pub fn has(view: &View, name: &str) -> bool {
    let name = ServiceName::new("default", name);
    view.services.contains_key(&name)
}
