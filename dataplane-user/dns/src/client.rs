//! A client's `resolv.conf`, as the kubelet or an administrator wrote it.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use model::{DnsPolicy, Resolution, Workload, WorkloadName};

use super::name::LowerName;

/// The port of resolvers.
pub(super) const PORT: u16 = 53;
/// How many dots a name has that a pod first asks for as it is: the kubelet's value.
const NDOTS: u8 = 5;
/// The C library's.
const NDOTS_DEFAULT: u8 = 1;
/// The kubelet's limits.
const SERVERS: usize = 3;
const SEARCHES: usize = 32;

/// The client of a query, as far as answers depend on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// The ends that the client's own resolver appends to names, in its order.
    pub search: Vec<LowerName>,
    /// How many dots a name has that it asks for as it is at first.
    pub ndots: u8,
    /// The resolvers that it would ask, in its order.
    pub resolvers: Vec<SocketAddr>,
    /// The pod; `None` for a client that the server does not know.
    pub workload: Option<WorkloadName>,
    /// The Kubernetes namespace: its clients share the part of the common room that the namespace may use. Empty for a
    /// client without one.
    pub namespace: Arc<str>,
}

impl Client {
    /// Returns a client of which the server knows only the resolvers.
    pub fn unknown(resolvers: Vec<SocketAddr>) -> Self {
        Self {
            search: Vec::new(),
            ndots: NDOTS_DEFAULT,
            resolvers,
            workload: None,
            namespace: "".into(),
        }
    }

    /// A pod whose queries are captured. The resolvers are those that the kubelet chooses; those of the pod's own
    /// `dnsConfig` get its queries directly, so that no pod chooses where the node sends queries.
    pub fn of_captured(
        workload: &Workload,
        domain: &LowerName,
        cluster: &[SocketAddr],
        node: &ResolvConf,
    ) -> Self {
        let own = workload.resolution.as_deref();
        let own = own.map(|said| Resolution {
            nameservers: Box::default(),
            ..said.clone()
        });
        let workload = Workload {
            resolution: own.map(Box::new),
            ..workload.clone()
        };
        let mut client = Self::of_workload(&workload, domain, cluster, node);
        // Loopback is the pod's own there, and the node's here.
        client
            .resolvers
            .retain(|at| !at.ip().to_canonical().is_loopback());
        client
    }

    /// A pod of a cluster, with the `resolv.conf` that the kubelet writes. `cluster`: the addresses of the cluster's
    /// DNS; `node`: the node's own file.
    pub fn of_workload(
        workload: &Workload,
        domain: &LowerName,
        cluster: &[SocketAddr],
        node: &ResolvConf,
    ) -> Self {
        let said = Resolution::default();
        let said = workload.resolution.as_deref().unwrap_or(&said);
        let namespace = workload.name.namespace().as_bytes();
        let of_cluster = |labels: &[&[u8]]| {
            let labels = labels.iter().copied();
            LowerName::of_labels(labels.chain(domain.labels())).ok()
        };
        let (mut search, mut resolvers, ndots) = match said.policy {
            DnsPolicy::Cluster => {
                let own = [
                    of_cluster(&[namespace, b"svc"]),
                    of_cluster(&[b"svc"]),
                    of_cluster(&[]),
                ];
                let own = own.into_iter().flatten();
                let search = own.chain(node.search.iter().cloned()).collect();
                (search, cluster.to_vec(), NDOTS)
            }
            DnsPolicy::Node => (node.search.clone(), node.resolvers.clone(), node.ndots),
            DnsPolicy::Own => (Vec::new(), Vec::new(), NDOTS_DEFAULT),
        };
        for name in &said.searches {
            if let Ok(name) = LowerName::parse(name)
                && !search.contains(&name)
            {
                search.push(name);
            }
        }
        for server in &said.nameservers {
            let server = SocketAddr::new(*server, PORT);
            // Loopback is the pod's own there, and the node's here.
            let ip = server.ip().to_canonical();
            let is_own = ip.is_loopback() || ip.is_unspecified() || ip.is_multicast();
            if !is_own && !resolvers.contains(&server) {
                resolvers.push(server);
            }
        }
        search.truncate(SEARCHES);
        resolvers.truncate(SERVERS);
        Self {
            search,
            ndots: said.ndots.unwrap_or(ndots),
            resolvers,
            workload: Some(workload.name.clone()),
            namespace: workload.name.namespace().into(),
        }
    }
}

/// A `resolv.conf`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvConf {
    /// `search`, or `domain`: the last of them counts.
    pub search: Vec<LowerName>,
    /// Option `ndots`.
    pub ndots: u8,
    /// `nameserver`.
    pub resolvers: Vec<SocketAddr>,
}

impl Default for ResolvConf {
    fn default() -> Self {
        Self::parse("")
    }
}

impl ResolvConf {
    /// Reads a file's text. Lines that make no sense are left out, as the C library does.
    pub fn parse(text: &str) -> Self {
        let mut conf = Self {
            search: Vec::new(),
            ndots: NDOTS_DEFAULT,
            resolvers: Vec::new(),
        };
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => {
                    let server = words.next().and_then(|text| text.parse::<IpAddr>().ok());
                    let server = server.map(|server| SocketAddr::new(server, PORT));
                    conf.resolvers.extend(server);
                }
                Some("search" | "domain") => {
                    let names = words.filter_map(|text| LowerName::parse(text).ok());
                    conf.search = names.filter(|name| name.count() > 0).collect();
                }
                Some("options") => {
                    for option in words {
                        let ndots = option.strip_prefix("ndots:").and_then(|n| n.parse().ok());
                        conf.ndots = ndots.map_or(conf.ndots, |ndots: u8| ndots.min(15));
                    }
                }
                _ => {}
            }
        }
        conf
    }
}

#[cfg(test)]
mod tests {
    use model::{Place, WorkloadName};

    use super::*;

    fn names(texts: &[&str]) -> Vec<LowerName> {
        let names = texts.iter().map(|text| LowerName::parse(text).unwrap());
        names.collect()
    }

    fn servers(texts: &[&str]) -> Vec<SocketAddr> {
        let servers = texts
            .iter()
            .map(|text| SocketAddr::new(text.parse().unwrap(), 53));
        servers.collect()
    }

    /// A client that is a pod of `shop`.
    fn shops() -> Client {
        Client {
            workload: Some(WorkloadName::new("shop", "web")),
            namespace: "shop".into(),
            ..Client::unknown(Vec::new())
        }
    }

    fn node() -> ResolvConf {
        ResolvConf::parse(
            "# by hand\nnameserver 192.0.2.53\nnameserver nonsense\nnameserver 2001:db8::53\ndomain old.example\n\
             search Corp.Example. .\noptions timeout:1 ndots:2 rotate",
        )
    }

    #[test]
    fn a_resolv_conf_is_read_as_the_c_library_does() {
        let conf = node();
        assert_eq!(conf.search, names(&["corp.example"]));
        assert_eq!(conf.ndots, 2);
        assert_eq!(conf.resolvers, servers(&["192.0.2.53", "2001:db8::53"]));
    }

    #[test]
    fn a_pod_names_no_resolver_on_the_nodes_loopback() {
        let addresses = [
            "127.0.0.53",
            "::1",
            "::ffff:127.0.0.1",
            "0.0.0.0",
            "192.0.2.1",
        ];
        let resolution = Resolution {
            policy: DnsPolicy::Own,
            nameservers: addresses.map(|addr| addr.parse().unwrap()).into(),
            ..Resolution::default()
        };
        let workload = Workload {
            resolution: Some(Box::new(resolution)),
            ..Workload::new(WorkloadName::new("shop", "web"), Place::Elsewhere)
        };
        let domain = LowerName::parse("cluster.local").unwrap();
        let client = Client::of_workload(&workload, &domain, &[], &node());
        assert_eq!(client.resolvers, servers(&["192.0.2.1"]));
    }

    #[test]
    fn a_captured_pod_does_not_choose_where_the_node_sends_queries() {
        let domain = LowerName::parse("cluster.local").unwrap();
        let resolvers = |policy, node: &str| {
            let resolution = Resolution {
                policy,
                nameservers: ["192.0.2.1".parse().unwrap()].into(),
                ..Resolution::default()
            };
            let workload = Workload {
                resolution: Some(Box::new(resolution)),
                ..Workload::new(WorkloadName::new("shop", "web"), Place::Elsewhere)
            };
            let node = ResolvConf::parse(node);
            Client::of_captured(&workload, &domain, &servers(&["10.96.0.10"]), &node).resolvers
        };
        let node = "nameserver 127.0.0.53\nnameserver 192.0.2.53";
        assert_eq!(
            resolvers(DnsPolicy::Cluster, node),
            servers(&["10.96.0.10"])
        );
        assert_eq!(resolvers(DnsPolicy::Node, node), servers(&["192.0.2.53"]));
        assert_eq!(resolvers(DnsPolicy::Own, node), []);
    }

    #[test]
    fn a_pod_has_the_resolv_conf_of_its_policy() {
        let pod = |resolution: Option<Resolution>| {
            let name = WorkloadName::new("shop", "web");
            let workload = Workload {
                resolution: resolution.map(Box::new),
                ..Workload::new(name, Place::Elsewhere)
            };
            let domain = LowerName::parse("cluster.local").unwrap();
            Client::of_workload(&workload, &domain, &servers(&["10.96.0.10"]), &node())
        };
        let own = [
            "shop.svc.cluster.local",
            "svc.cluster.local",
            "cluster.local",
            "corp.example",
        ];
        assert_eq!(
            pod(None),
            Client {
                search: names(&own),
                ndots: 5,
                resolvers: servers(&["10.96.0.10"]),
                ..shops()
            }
        );
        let more = Resolution {
            nameservers: ["192.0.2.1".parse().unwrap(), "10.96.0.10".parse().unwrap()].into(),
            searches: ["svc.cluster.local".into(), "more.example".into()].into(),
            ndots: Some(1),
            ..Resolution::default()
        };
        assert_eq!(
            pod(Some(more.clone())),
            Client {
                search: names(&[&own[..], &["more.example"]].concat()),
                ndots: 1,
                resolvers: servers(&["10.96.0.10", "192.0.2.1"]),
                ..shops()
            }
        );
        let node = Resolution {
            policy: DnsPolicy::Node,
            ..Resolution::default()
        };
        assert_eq!(
            pod(Some(node)),
            Client {
                search: names(&["corp.example"]),
                ndots: 2,
                resolvers: servers(&["192.0.2.53", "2001:db8::53"]),
                ..shops()
            }
        );
        let own = Resolution {
            policy: DnsPolicy::Own,
            ndots: None,
            ..more
        };
        assert_eq!(
            pod(Some(own)),
            Client {
                search: names(&["svc.cluster.local", "more.example"]),
                ndots: 1,
                resolvers: servers(&["192.0.2.1", "10.96.0.10"]),
                ..shops()
            }
        );
    }
}
