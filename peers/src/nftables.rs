//! Mode `nftables`: input for `nft -f`, written the way `nft list ruleset` prints rules.

use std::fmt::Write as _;

use model::{Endpoint, Snapshot};

use super::{
    Cluster, Family, LocalDetector, names,
    port::{Port, Refusal, ports},
};

/// The table of one family.
pub fn rules(snapshot: &Snapshot, cluster: &Cluster, family: Family) -> String {
    let mut table = Table::default();
    for port in ports(snapshot, family) {
        table.port(&port, cluster);
    }
    table.finish(snapshot, cluster, family)
}

const BASE_CHAINS: &str = r"
	chain filter-prerouting-pre-dnat {
		type filter hook prerouting priority dstnat - 10; policy accept;
		ct state new jump firewall-check
	}
	chain filter-output-pre-dnat {
		type filter hook output priority -110; policy accept;
		ct state new jump firewall-check
	}
	chain filter-input {
		type filter hook input priority filter; policy accept;
		ct state new jump nodeport-endpoints-check
		ct state new jump service-endpoints-check
	}
	chain filter-forward {
		type filter hook forward priority filter; policy accept;
		ct state new jump service-endpoints-check
		ct state new jump cluster-ips-check
	}
	chain filter-output {
		type filter hook output priority filter; policy accept;
		ct state new jump service-endpoints-check
		ct state new jump cluster-ips-check
	}
	chain nat-prerouting {
		type nat hook prerouting priority dstnat; policy accept;
		jump services
	}
	chain nat-output {
		type nat hook output priority -100; policy accept;
		jump services
	}
	chain nat-postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		jump masquerading
	}
";

const REJECT_CHAIN: &str = r#"
	chain reject-chain {
		comment "helper for @no-endpoint-services / @no-endpoint-nodeports"
		reject
	}
"#;

/// The parts of the table that grow with the number of services.
#[derive(Default)]
struct Table {
    hairpins: Elements,
    cluster_ips: Elements,
    no_endpoint_services: Elements,
    no_endpoint_node_ports: Elements,
    firewall_ips: Elements,
    service_ips: Elements,
    service_node_ports: Elements,
    affinity: String,
    chains: String,
}

impl Table {
    fn finish(self, snapshot: &Snapshot, cluster: &Cluster, family: Family) -> String {
        let (ip, addr) = match family {
            Family::V4 => ("ip", "ipv4_addr"),
            Family::V6 => ("ip6", "ipv6_addr"),
        };
        let mut node_ips = Elements::default();
        // By default, kube-proxy serves node ports on the node's primary address of each family.
        let given = (cluster.node_ports_on.iter()).filter(|ip| family.has(**ip));
        let primary = (snapshot.node.addresses.iter()).find(|ip| family.has(**ip));
        let primary = primary.filter(|_| cluster.node_ports_on.is_empty());
        for ip in given.chain(primary) {
            node_ips.push(&ip.to_string());
        }
        let node_match = match family {
            _ if !node_ips.0.is_empty() => format!("{ip} daddr @nodeport-ips"),
            Family::V4 => "fib daddr type local ip daddr != 127.0.0.0/8".into(),
            Family::V6 => "fib daddr type local ip6 daddr != ::1".into(),
        };

        let mut text = format!("table {ip} kube-proxy {{\n\tcomment \"rules for kube-proxy\"\n");
        self.sets(&mut text, addr, &node_ips);
        text.push_str(&self.affinity);
        text.push_str(BASE_CHAINS);
        let by_address = format!("{ip} daddr . meta l4proto . th dport");
        let by_port = "meta l4proto . th dport";
        let mut chain = |name, rules: &[String]| {
            let _ = write!(
                text,
                "\tchain {name} {{\n\t\t{}\n\t}}\n",
                rules.join("\n\t\t")
            );
        };
        chain(
            "nodeport-endpoints-check",
            &[match family {
                _ if !node_ips.0.is_empty() => {
                    format!("{node_match} {by_port} vmap @no-endpoint-nodeports")
                }
                Family::V4 => {
                    format!("ip daddr != 127.0.0.0/8 {by_port} vmap @no-endpoint-nodeports")
                }
                Family::V6 => format!("ip6 daddr != ::1 {by_port} vmap @no-endpoint-nodeports"),
            }],
        );
        chain(
            "service-endpoints-check",
            &[format!("{by_address} vmap @no-endpoint-services")],
        );
        chain(
            "firewall-check",
            &[format!("{by_address} vmap @firewall-ips")],
        );
        let mark = "meta mark set meta mark | 0x00004000 comment";
        let mut services = if cluster.masquerade_all {
            vec![format!(
                "{ip} daddr @cluster-ips {mark} \"masquerade clusterIP traffic\""
            )]
        } else {
            is_local(&cluster.local, family, "!= ")
                .iter()
                .map(|not_local| {
                    format!(
                        "{ip} daddr @cluster-ips {not_local} {mark} \"masquerade clusterIP traffic from outside cluster\""
                    )
                })
                .collect()
        };
        services.push(format!("{by_address} vmap @service-ips"));
        services.push(format!("{node_match} {by_port} vmap @service-nodeports"));
        chain("services", &services);
        chain(
            "masquerading",
            &[
                "meta mark & 0x00004000 != 0x00000000 meta mark set meta mark ^ 0x00004000 masquerade fully-random".into(),
                format!("ct status dnat {ip} saddr . {by_address} @hairpin-connections masquerade fully-random"),
            ],
        );
        let mut unused = vec![format!(
            "{ip} daddr @cluster-ips reject comment \"Reject traffic to invalid ports of ClusterIPs\""
        )];
        unused.extend(nets(&cluster.service_networks, family).map(|net| {
            format!("{ip} daddr {net} drop comment \"Drop traffic to unallocated ClusterIPs\"")
        }));
        chain("cluster-ips-check", &unused);
        text.push_str(REJECT_CHAIN);
        text.push_str(&self.chains);
        text.push_str("}\n");
        text
    }

    /// Writes the sets and maps of the table.
    fn sets(&self, text: &mut String, addr: &str, node_ips: &Elements) {
        let service = format!("{addr} . inet_proto . inet_service");
        let node_port = "inet_proto . inet_service";
        let mut set = |kind, name, of: &str, comment, elements: &Elements| {
            let _ = write!(
                text,
                "\t{kind} {name} {{\n\t\ttype {of}\n\t\tcomment \"{comment}\"\n"
            );
            elements.write(text);
            text.push_str("\t}\n");
        };
        set(
            "set",
            "hairpin-connections",
            &format!("{addr} . {service}"),
            "service hairpin connections",
            &self.hairpins,
        );
        set(
            "set",
            "cluster-ips",
            addr,
            "Active ClusterIPs",
            &self.cluster_ips,
        );
        if !node_ips.0.is_empty() {
            set(
                "set",
                "nodeport-ips",
                addr,
                "IPs that accept NodePort traffic",
                node_ips,
            );
        }
        let verdict = |key: &str| format!("{key} : verdict");
        set(
            "map",
            "no-endpoint-services",
            &verdict(&service),
            "vmap to drop or reject packets to services with no endpoints",
            &self.no_endpoint_services,
        );
        set(
            "map",
            "no-endpoint-nodeports",
            &verdict(node_port),
            "vmap to drop or reject packets to service nodeports with no endpoints",
            &self.no_endpoint_node_ports,
        );
        set(
            "map",
            "firewall-ips",
            &verdict(&service),
            "destinations that are subject to LoadBalancerSourceRanges",
            &self.firewall_ips,
        );
        set(
            "map",
            "service-ips",
            &verdict(&service),
            "ClusterIP, ExternalIP and LoadBalancer IP traffic",
            &self.service_ips,
        );
        set(
            "map",
            "service-nodeports",
            &verdict(node_port),
            "NodePort traffic",
            &self.service_node_ports,
        );
    }

    fn chain(&mut self, name: &str, rules: &[String]) {
        let _ = write!(
            self.chains,
            "\tchain {name} {{\n\t\t{}\n\t}}\n",
            rules.join("\n\t\t")
        );
    }

    /// Writes the rules of one port, as the loop over services in kube-proxy's nftables
    /// `proxier.go` does.
    fn port(&mut self, port: &Port<'_>, cluster: &Cluster) {
        let proto = port.spec.protocol.word();
        let (number, vip) = (port.spec.port, port.cluster_ip);
        let base = format!("{}/{proto}/{}", port.service.name, port.spec.name);
        let name = names::readable(&base);
        let service = format!("service-{name}");
        let local = format!("local-{name}");
        let external = format!("external-{name}");
        let firewall = format!("firewall-{name}");
        let comment = port.name();

        self.cluster_ips.push_once(&vip.to_string());
        let internal = if port.internal_local() {
            &local
        } else {
            &service
        };
        match port.internal_refusal() {
            None => self
                .service_ips
                .push(&format!("{vip} . {proto} . {number} : goto {internal}")),
            Some(refusal) => self.no_endpoint_services.push(&format!(
                "{vip} . {proto} . {number} comment \"{comment}\" : {}",
                verdict(refusal)
            )),
        }
        for ip in port.external_ips().chain(port.load_balancer_ips()) {
            if port.served {
                self.service_ips
                    .push(&format!("{ip} . {proto} . {number} : goto {external}"));
            }
            if let Some(refusal) = port.external_refusal() {
                self.no_endpoint_services.push(&format!(
                    "{ip} . {proto} . {number} comment \"{comment}\" : {}",
                    verdict(refusal)
                ));
            }
        }
        if let Some(node_port) = port.spec.node_port {
            if port.served {
                self.service_node_ports
                    .push(&format!("{proto} . {node_port} : goto {external}"));
            }
            if let Some(refusal) = port.external_refusal() {
                self.no_endpoint_node_ports.push(&format!(
                    "{proto} . {node_port} comment \"{comment}\" : {}",
                    verdict(refusal)
                ));
            }
        }
        if port.firewalled() {
            for ip in port.load_balancer_ips() {
                self.firewall_ips
                    .push(&format!("{ip} . {proto} . {number} : goto {firewall}"));
            }
            let ranges: Vec<_> = port.source_ranges().map(|net| network(*net)).collect();
            let ranges = match &*ranges {
                [one] => one.clone(),
                several => format!("{{ {} }}", several.join(", ")),
            };
            self.chain(
                &firewall,
                &[format!("{} saddr != {ranges} drop", ip(port.family))],
            );
        }

        for (chain, endpoints) in [(&service, &port.cluster), (&local, &port.local)] {
            if !endpoints.is_empty() {
                let rules = choice(port, &base, endpoints);
                self.chain(chain, &rules);
            }
        }
        if port.served && port.externally_accessible() {
            let rules = external_rules(port, cluster, &service, &local);
            self.chain(&external, &rules);
        }
        for endpoint in port.endpoints() {
            let (addr, target) = (endpoint.addr, endpoint.port);
            if endpoint.local {
                self.hairpins
                    .push_once(&format!("{addr} . {addr} . {proto} . {target}"));
            }
            if let Some(timeout) = port.service.affinity {
                self.affinity(port, &base, endpoint, timeout.as_secs());
            }
        }
    }

    /// Writes an endpoint's chain, and the set that remembers the endpoint's clients.
    fn affinity(&mut self, port: &Port<'_>, base: &str, endpoint: &Endpoint, seconds: u64) {
        let name = names::readable(&endpoint_base(base, endpoint));
        let (ip, addr) = match port.family {
            Family::V4 => ("ip", "ipv4_addr"),
            Family::V6 => ("ip6", "ipv6_addr"),
        };
        let _ = write!(
            self.affinity,
            "\tset affinity-{name} {{\n\t\ttype {addr}\n\t\tsize 65535\n\t\tflags dynamic,timeout\n\t\ttimeout {seconds}s\n\t}}\n",
        );
        let proto = port.spec.protocol.word();
        let to = std::net::SocketAddr::new(endpoint.addr, endpoint.port);
        self.chain(
            &format!("endpoint-{name}"),
            &[
                format!("update @affinity-{name} {{ {ip} saddr }}"),
                format!("meta l4proto {proto} dnat to {to}"),
            ],
        );
    }
}

/// Returns the rules of a chain that chooses an endpoint.
fn choice(port: &Port<'_>, base: &str, endpoints: &[&Endpoint]) -> Vec<String> {
    let (ip, proto) = (ip(port.family), port.spec.protocol.word());
    let count = endpoints.len();
    let numbered = |text: &dyn Fn(&Endpoint) -> String| {
        let all: Vec<_> = endpoints
            .iter()
            .enumerate()
            .map(|(i, e)| format!("{i} : {}", text(e)))
            .collect();
        format!("{{ {} }}", all.join(", "))
    };
    if let ([endpoint], None) = (endpoints, port.service.affinity) {
        let to = std::net::SocketAddr::new(endpoint.addr, endpoint.port);
        return vec![format!("meta l4proto {proto} dnat to {to}")];
    }
    if port.service.affinity.is_none() {
        let map = numbered(&|e| format!("{} . {}", e.addr, e.port));
        return vec![format!(
            "meta l4proto {proto} dnat {ip} to numgen random mod {count} map {map}"
        )];
    }
    let name = |e: &Endpoint| names::readable(&endpoint_base(base, e));
    let mut rules: Vec<_> = endpoints
        .iter()
        .map(|e| format!("{ip} saddr @affinity-{0} goto endpoint-{0}", name(e)))
        .collect();
    let map = numbered(&|e| format!("goto endpoint-{}", name(e)));
    rules.push(format!("numgen random mod {count} vmap {map}"));
    rules
}

/// Returns the rules of the chain for traffic from outside.
fn external_rules(port: &Port<'_>, cluster: &Cluster, service: &str, local: &str) -> Vec<String> {
    if !port.external_local() {
        return vec![
            "meta mark set meta mark | 0x00004000 comment \"masquerade\"".into(),
            format!("goto {service}"),
        ];
    }
    let mut rules: Vec<_> = is_local(&cluster.local, port.family, "")
        .iter()
        .map(|local| format!("{local} goto {service} comment \"short-circuit pod traffic\""))
        .collect();
    rules.push("fib saddr type local meta mark set meta mark | 0x00004000 comment \"masquerade local traffic\"".into());
    rules.push(format!(
        "fib saddr type local goto {service} comment \"short-circuit local traffic\""
    ));
    if port.external_refusal().is_none() {
        rules.push(format!("goto {local}"));
    }
    rules
}

/// Matches for traffic that comes from a pod of the cluster. If `operator` is `!= `, they match all
/// other traffic.
fn is_local(detector: &LocalDetector, family: Family, operator: &str) -> Vec<String> {
    let ip = ip(family);
    match detector {
        LocalDetector::None => vec![],
        LocalDetector::Networks(all) => nets(all, family)
            .map(|net| format!("{ip} saddr {operator}{net}"))
            .collect(),
        LocalDetector::Interface(name) => vec![format!("iifname {operator}\"{name}\"")],
        LocalDetector::InterfacePrefix(prefix) => vec![format!("iifname {operator}\"{prefix}*\"")],
    }
}

fn endpoint_base(base: &str, endpoint: &Endpoint) -> String {
    // nftables allows no colons in names.
    let addr = endpoint.addr.to_string().replace(':', ".");
    format!("{base}__{addr}/{}", endpoint.port)
}

const fn ip(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

const fn verdict(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::NoEndpoints => "goto reject-chain",
        Refusal::NoLocalEndpoints => "drop",
    }
}

fn nets(all: &[ipnet::IpNet], family: Family) -> impl Iterator<Item = String> + '_ {
    all.iter()
        .filter(move |net| family.has_net(net))
        .map(|net| network(*net))
}

/// Prints a network as nft does: a network of one host is only its address.
fn network(net: ipnet::IpNet) -> String {
    if net.prefix_len() == net.max_prefix_len() {
        net.addr().to_string()
    } else {
        net.to_string()
    }
}

/// Elements of a set or map.
#[derive(Default)]
struct Elements(String, std::collections::HashSet<Box<str>>);

impl Elements {
    fn push(&mut self, element: &str) {
        if !self.0.is_empty() {
            self.0.push_str(",\n\t\t\t     ");
        }
        self.0.push_str(element);
    }

    fn push_once(&mut self, element: &str) {
        if self.1.insert(element.into()) {
            self.push(element);
        }
    }

    fn write(&self, to: &mut String) {
        if !self.0.is_empty() {
            let _ = writeln!(to, "\t\telements = {{ {} }}", self.0);
        }
    }
}
