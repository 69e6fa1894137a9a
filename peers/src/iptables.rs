//! Mode `iptables`: input for `iptables-restore`, written the way `iptables-save` prints rules.

use std::{fmt::Write as _, net::IpAddr};

use model::{Endpoint, Snapshot};

use super::{
    Cluster, Family, LocalDetector, names,
    port::{Port, Refusal, ports},
};

/// The three tables of one family.
pub fn rules(snapshot: &Snapshot, cluster: &Cluster, family: Family) -> String {
    let mut tables = Tables::default();
    for port in ports(snapshot, family) {
        tables.port(&port, cluster);
    }
    tables.finish(cluster, family)
}

const MANGLE: &str = "\
*mangle
:KUBE-PROXY-CANARY - [0:0]
COMMIT
";

const FILTER_CHAINS: &str = "\
*filter
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SERVICES - [0:0]
";

const FILTER_HOOKS: &str = r#"-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
"#;

const FILTER_OUTPUT: &str = r#"-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
"#;

/// The first rule has no counter because kube-proxy writes an `nfacct` match only if the kernel
/// supports it.
const FILTER_FORWARD: &str = r#"-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
"#;

/// Only IPv4 has node ports on loopback. They need `route_localnet`, and `route_localnet` needs
/// this guard.
const LOCALNET_GUARD: &str = r#"-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
"#;

const NAT_CHAINS: &str = "\
*nat
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-SERVICES - [0:0]
";

const NAT_HOOKS: &str = r#"-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
"#;

/// The last rules of `KUBE-SERVICES`: they jump to `KUBE-NODEPORTS`, for each address that serves
/// node ports.
fn node_ports_last(cluster: &Cluster, family: Family) -> String {
    const WHAT: &str = r#"-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain""#;
    let mut addresses: Vec<_> = cluster
        .node_ports_on
        .iter()
        .filter(|ip| family.has(**ip))
        .map(|ip| format!("-d {}", host(*ip)))
        .collect();
    if cluster.node_ports_on.is_empty() {
        // Node ports on `::1` never work.
        addresses.push(match family {
            Family::V4 => "-m addrtype --dst-type LOCAL".into(),
            Family::V6 => "-m addrtype --dst-type LOCAL ! -d ::1/128".into(),
        });
    }
    let rule = |to| format!("{WHAT} {to} -j KUBE-NODEPORTS\n");
    addresses.into_iter().map(rule).collect()
}

/// The parts of the tables that grow with the number of services.
#[derive(Default)]
struct Tables {
    filter: String,
    nat_chains: String,
    nat: String,
}

impl Tables {
    fn finish(self, cluster: &Cluster, family: Family) -> String {
        let Self {
            filter,
            nat_chains,
            nat,
        } = self;
        let (kubelet, output, guard) = match family {
            Family::V4 => (
                "-A INPUT -j KUBE-FIREWALL\n",
                "-A OUTPUT -j KUBE-FIREWALL\n",
                LOCALNET_GUARD,
            ),
            Family::V6 => ("", "", ""),
        };
        [
            MANGLE,
            FILTER_CHAINS,
            kubelet,
            FILTER_HOOKS,
            output,
            FILTER_OUTPUT,
            guard,
            FILTER_FORWARD,
            &filter,
            "COMMIT\n",
            NAT_CHAINS,
            &nat_chains,
            NAT_HOOKS,
            &nat,
            &node_ports_last(cluster, family),
            "COMMIT\n",
        ]
        .concat()
    }

    fn filter(&mut self, chain: &str, rule: &str) {
        let _ = writeln!(self.filter, "-A {chain} {rule}");
    }

    fn nat(&mut self, chain: &str, rule: &str) {
        let _ = writeln!(self.nat, "-A {chain} {rule}");
    }

    fn new_chain(&mut self, chain: &str) {
        let _ = writeln!(self.nat_chains, ":{chain} - [0:0]");
    }

    /// Writes the rules of one port, as `writeServiceToEndpointRules` and the loop around it in
    /// kube-proxy's `proxier.go` do.
    fn port(&mut self, port: &Port<'_>, cluster: &Cluster) {
        let name = port.name();
        let proto = port.spec.protocol.word();
        let hashed = format!("{name}{proto}");
        let svc = names::chain("SVC", &hashed);
        let svl = names::chain("SVL", &hashed);
        let ext = names::chain("EXT", &hashed);
        let fw = names::chain("FW", &hashed);
        let internal = if port.internal_local() { &svl } else { &svc };
        let external = if port.external_local() { &svl } else { &svc };
        let reject = |refusal| reject(refusal, port.family);

        let to_vip = destination(port.cluster_ip, port, &format!("{name} cluster IP"));
        match port.internal_refusal() {
            None => self.nat("KUBE-SERVICES", &format!("{to_vip} -j {internal}")),
            Some(refusal) => {
                let what = format!("{name} {}", refusal.comment());
                let to = destination(port.cluster_ip, port, &what);
                self.filter("KUBE-SERVICES", &format!("{to} -j {}", reject(refusal)));
            }
        }

        let firewalled = port.firewalled();
        let lb_chain = if firewalled { &fw } else { &ext };
        let outside = port
            .external_ips()
            .map(|ip| (ip, "external IP", &ext))
            .chain(
                port.load_balancer_ips()
                    .map(|ip| (ip, "loadbalancer IP", lb_chain)),
            );
        for (ip, kind, chain) in outside {
            if port.served {
                let to = destination(ip, port, &format!("{name} {kind}"));
                self.nat("KUBE-SERVICES", &format!("{to} -j {chain}"));
            }
            if let Some(refusal) = port.external_refusal() {
                let to = destination(ip, port, &format!("{name} {}", refusal.comment()));
                self.filter(
                    "KUBE-EXTERNAL-SERVICES",
                    &format!("{to} -j {}", reject(refusal)),
                );
            }
        }
        if firewalled && port.served {
            for ip in port.load_balancer_ips() {
                let to = destination(ip, port, &format!("{name} traffic not accepted by {fw}"));
                self.filter("KUBE-PROXY-FIREWALL", &format!("{to} -j DROP"));
            }
        }
        self.node_port(port, &name, &ext);
        if let Some(check) = port.service.health_check_node_port {
            let what = comment(&format!("{name} health check node port"));
            self.filter(
                "KUBE-NODEPORTS",
                &format!("-p tcp {what} -m tcp --dport {check} -j ACCEPT"),
            );
        }

        if port.internal_refusal().is_none() {
            if cluster.masquerade_all {
                self.nat(internal, &format!("{to_vip} -j KUBE-MARK-MASQ"));
            } else {
                for local in is_local(&cluster.local, port.family) {
                    self.nat(internal, &format!("! {local} {to_vip} -j KUBE-MARK-MASQ"));
                }
            }
        }
        if port.served && port.externally_accessible() {
            self.new_chain(&ext);
            self.external(port, cluster, &name, &ext, &svc);
            if port.external_refusal().is_none() {
                self.nat(&ext, &format!("-j {external}"));
            }
            if firewalled {
                self.new_chain(&fw);
                let what = comment(&format!("{name} loadbalancer IP"));
                for net in port.source_ranges() {
                    self.nat(&fw, &format!("-s {net} {what} -j {ext}"));
                }
                let what =
                    format!("other traffic to {name} will be dropped by KUBE-PROXY-FIREWALL");
                self.nat(&fw, &comment(&what));
            }
        }

        for (chain, endpoints) in [(&svc, &port.cluster), (&svl, &port.local)] {
            if !endpoints.is_empty() {
                self.new_chain(chain);
                self.choice(port, &name, chain, endpoints);
            }
        }
        for endpoint in port.endpoints() {
            self.endpoint(port, &name, endpoint);
        }
    }

    /// Writes the rules of the port's node port.
    fn node_port(&mut self, port: &Port<'_>, name: &str, ext: &str) {
        let Some(node_port) = port.spec.node_port else {
            return;
        };
        let proto = port.spec.protocol.word();
        if port.served {
            self.nat(
                "KUBE-NODEPORTS",
                &format!(
                    "-p {proto} {} -m {proto} --dport {node_port} -j {ext}",
                    comment(name)
                ),
            );
        }
        if let Some(refusal) = port.external_refusal() {
            let what = comment(&format!("{name} {}", refusal.comment()));
            self.filter(
                "KUBE-EXTERNAL-SERVICES",
                &format!(
                    "-p {proto} {what} -m addrtype --dst-type LOCAL -m {proto} --dport {node_port} -j {}",
                    reject(refusal, port.family)
                ),
            );
        }
    }

    /// Writes the chain of one endpoint.
    fn endpoint(&mut self, port: &Port<'_>, name: &str, endpoint: &Endpoint) {
        let proto = port.spec.protocol.word();
        let sep = endpoint_chain(&format!("{name}{proto}"), endpoint);
        self.new_chain(&sep);
        let what = comment(name);
        self.nat(
            &sep,
            &format!("-s {} {what} -j KUBE-MARK-MASQ", host(endpoint.addr)),
        );
        let remember = if port.service.affinity.is_some() {
            let mask = mask(port.family);
            format!(" -m recent --set --name {sep} --mask {mask} --rsource")
        } else {
            String::new()
        };
        self.nat(
            &sep,
            &format!(
                "-p {proto} {what}{remember} -m {proto} -j DNAT --to-destination {}",
                socket(endpoint)
            ),
        );
    }

    /// Writes the chain of traffic from outside, without its last rule.
    fn external(&mut self, port: &Port<'_>, cluster: &Cluster, name: &str, ext: &str, svc: &str) {
        if !port.external_local() {
            let what = comment(&format!(
                "masquerade traffic for {name} external destinations"
            ));
            return self.nat(ext, &format!("{what} -j KUBE-MARK-MASQ"));
        }
        let what = comment(&format!("pod traffic for {name} external destinations"));
        for local in is_local(&cluster.local, port.family) {
            self.nat(ext, &format!("{local} {what} -j {svc}"));
        }
        for (verb, target) in [("masquerade", "KUBE-MARK-MASQ"), ("route", svc)] {
            let what = comment(&format!(
                "{verb} LOCAL traffic for {name} external destinations"
            ));
            self.nat(
                ext,
                &format!("{what} -m addrtype --src-type LOCAL -j {target}"),
            );
        }
    }

    /// Writes the rules that jump from a service's chain to the chains of its endpoints.
    fn choice(&mut self, port: &Port<'_>, name: &str, chain: &str, endpoints: &[&Endpoint]) {
        let hashed = format!("{name}{}", port.spec.protocol.word());
        let what = |e: &Endpoint| comment(&format!("{name} -> {}", socket(e)));
        if let Some(timeout) = port.service.affinity {
            let (seconds, mask) = (timeout.as_secs(), mask(port.family));
            for endpoint in endpoints {
                let sep = endpoint_chain(&hashed, endpoint);
                let what = what(endpoint);
                self.nat(
                    chain,
                    &format!(
                        "{what} -m recent --rcheck --seconds {seconds} --reap --name {sep} --mask {mask} --rsource -j {sep}"
                    ),
                );
            }
        }
        for (index, endpoint) in endpoints.iter().enumerate() {
            let sep = endpoint_chain(&hashed, endpoint);
            let what = what(endpoint);
            let left = endpoints.len() - index;
            if left == 1 {
                self.nat(chain, &format!("{what} -j {sep}"));
            } else {
                #[expect(clippy::cast_precision_loss, reason = "endpoints of one service")]
                let share = 1.0 / left as f64;
                self.nat(
                    chain,
                    &format!(
                        "{what} -m statistic --mode random --probability {share:.11} -j {sep}"
                    ),
                );
            }
        }
    }
}

/// Matches for traffic that comes from a pod of the cluster.
fn is_local(detector: &LocalDetector, family: Family) -> Vec<String> {
    match detector {
        LocalDetector::None => vec![],
        LocalDetector::Networks(nets) => nets
            .iter()
            .filter(|net| family.has_net(net))
            .map(|net| format!("-s {net}"))
            .collect(),
        LocalDetector::Interface(name) => vec![format!("-i {name}")],
        LocalDetector::InterfacePrefix(prefix) => vec![format!("-i {prefix}+")],
    }
}

/// Match for a destination address and the service's port.
fn destination(ip: IpAddr, port: &Port<'_>, what: &str) -> String {
    let proto = port.spec.protocol.word();
    let (to, what, dport) = (host(ip), comment(what), port.spec.port);
    format!("-d {to} -p {proto} {what} -m {proto} --dport {dport}")
}

fn endpoint_chain(hashed: &str, endpoint: &Endpoint) -> String {
    names::chain("SEP", &format!("{hashed}{}", socket(endpoint)))
}

fn comment(text: &str) -> String {
    // `iptables-save` quotes a text only if it must.
    if text
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b))
    {
        format!("-m comment --comment {text}")
    } else {
        format!("-m comment --comment \"{text}\"")
    }
}

fn host(ip: IpAddr) -> String {
    format!("{ip}/{}", if ip.is_ipv4() { 32 } else { 128 })
}

fn socket(endpoint: &Endpoint) -> String {
    std::net::SocketAddr::new(endpoint.addr, endpoint.port).to_string()
}

const fn mask(family: Family) -> &'static str {
    match family {
        Family::V4 => "255.255.255.255",
        Family::V6 => "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
    }
}

const fn reject(refusal: Refusal, family: Family) -> &'static str {
    match (refusal, family) {
        (Refusal::NoLocalEndpoints, _) => "DROP",
        (Refusal::NoEndpoints, Family::V4) => "REJECT --reject-with icmp-port-unreachable",
        (Refusal::NoEndpoints, Family::V6) => "REJECT --reject-with icmp6-port-unreachable",
    }
}
