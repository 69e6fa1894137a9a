//! `dataplane services`.

mod frontends;

use std::{
    io::Write,
    net::{IpAddr, SocketAddr},
    process::ExitCode,
};

use admin::{api, client};
use clap::{Args, ValueEnum};
use kernel::tables::Tables;
use terminal::{
    PathArgs, SocketArgs,
    output::{self, BAD, Cell, DIM, GOOD, Table, WARN},
};

use self::frontends::{frontends, print};

/// List the services that this node serves.
///
/// One line for each port of a service. CONNECTIONS counts connections, datagrams of unconnected
/// sockets, and flows of packets that the programs have sent to an endpoint since the tables were
/// made.
///
/// Without a running agent, lists the kernel's tables, which have no names: one line for each
/// address and port.
#[derive(Debug, Args)]
pub struct ServicesArgs {
    /// Only these services: NAME or NAMESPACE/NAME
    #[arg(value_name = "NAME")]
    names: Vec<String>,

    /// Only services of this namespace
    #[arg(short, long)]
    namespace: Option<String>,

    /// Only ports without a ready endpoint
    #[arg(long)]
    not_ready: bool,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,

    #[command(flatten)]
    pub(super) paths: PathArgs,

    #[command(flatten)]
    pub(super) socket: SocketArgs,
}

/// How to print services.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people
    #[default]
    Text,
    /// For people with wide screens: also other addresses, endpoints and refusals
    Wide,
    /// For programs
    Json,
}

impl ServicesArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let path = match &self.namespace {
            None => "/services".to_owned(),
            Some(namespace) => {
                anyhow::ensure!(
                    !namespace.is_empty()
                        && namespace
                            .bytes()
                            .all(|b| b.is_ascii_alphanumeric() || b == b'-'),
                    "`{namespace}` is not a namespace's name; expected letters, digits and hyphens"
                );
                format!("/services?namespace={namespace}")
            }
        };
        match self.socket.client().list::<api::Service>(&path) {
            Ok(mut services) => {
                if self.not_ready {
                    for service in &mut services {
                        service.ports.retain(|port| port.ready == 0);
                    }
                    services.retain(|service| !service.ports.is_empty());
                }
                services.retain(|service| self.names(service));
                anyhow::ensure!(
                    self.names.is_empty() || !services.is_empty(),
                    "no such service: {}; `dataplane services` lists all",
                    self.names.join(", ")
                );
                self.print(&services)
            }
            Err(error @ client::Error::Denied { .. }) => Err(error.into()),
            Err(error) => {
                anyhow::ensure!(
                    self.names.is_empty() && self.namespace.is_none(),
                    "{error}, and the kernel's tables hold no names: list all, without NAME and --namespace"
                );
                eprintln!("note: {error}; listing the kernel's tables, which hold no names");
                let mut frontends = frontends(&Tables::open(&self.paths.bpffs())?)?;
                frontends.retain(|f| !self.not_ready || f.endpoints.is_empty());
                print(&frontends, self.output)
            }
        }
    }

    /// Returns whether the command line names this service, or no service.
    fn names(&self, service: &api::Service) -> bool {
        self.names.is_empty()
            || self.names.iter().any(|name| match name.split_once('/') {
                Some((namespace, name)) => namespace == service.namespace && name == service.name,
                None => *name == service.name,
            })
    }

    fn print(&self, services: &[api::Service]) -> anyhow::Result<ExitCode> {
        let mut out = output::stdout();
        match self.output {
            Format::Json => output::json(&mut out, &services)?,
            Format::Text | Format::Wide => {
                let wide = self.output == Format::Wide;
                let table = table(services, wide);
                if table.is_empty() {
                    writeln!(out, "No services.")?;
                } else {
                    table.write(&mut out)?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn table(services: &[api::Service], wide: bool) -> Table {
    let narrow_columns = [
        "NAME",
        "VIP",
        "TYPE",
        "ENDPOINTS",
        "POLICY",
        "AFFINITY",
        "CONNECTIONS",
    ];
    let wide_columns = ["PORT", "REFUSED", "OTHER ADDRESSES", "ENDPOINT ADDRESSES"];
    let mut table = if wide {
        Table::new(&[&narrow_columns[..], &wide_columns[..]].concat())
    } else {
        Table::new(&narrow_columns)
    };
    for service in services {
        for port in &service.ports {
            let mut cells = row(service, port).to_vec();
            if wide {
                cells.extend(wide_row(service, port));
            }
            table.row(cells);
        }
    }
    table
}

fn row(service: &api::Service, port: &api::ServicePort) -> [Cell; 7] {
    let (ready, total) = endpoints(service, port);
    let style = match ready {
        0 => BAD,
        ready if ready < total => WARN,
        _ => GOOD,
    };
    let vip = match service.cluster_ips.first() {
        Some(ip) => {
            let vip = vip(ip, port);
            match dispute(service, &vip) {
                Some(dispute) => Cell::new(format!("{vip} {dispute}"), BAD),
                None => Cell::from(vip),
            }
        }
        None => without_vip(service, port),
    };
    [
        Cell::from(format!("{}/{}", service.namespace, service.name)),
        vip,
        service.kind.as_str().into(),
        Cell::new(format!("{ready}/{total}"), style),
        policy(service).into(),
        affinity(service.affinity_seconds).into(),
        port.connections.to_string().into(),
    ]
}

/// Returns the VIP column's text for a service without a cluster IP.
fn without_vip(service: &api::Service, port: &api::ServicePort) -> Cell {
    match (service.external_ips.first(), port.node_port) {
        // A pod's host port, at one of the node's addresses or at all of them.
        (Some(ip), _) => disputed(service, vip(ip, port)).into(),
        (None, Some(host)) => format!("host:{host}/{}", port.protocol).into(),
        (None, None) => Cell::new(format!("headless:{}/{}", port.port, port.protocol), DIM),
    }
}

/// Returns the numbers of ready and of all endpoints in one address family, so that a pod of a dual-stack cluster counts
/// once. The family is that of the first cluster IP. Without a cluster IP, it is the family with more endpoints.
fn endpoints(service: &api::Service, port: &api::ServicePort) -> (usize, usize) {
    let is_v4 = |text: &str| text.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv4());
    let of = |v4: bool| {
        let all = port.endpoints.iter().filter(|e| is_v4(&e.address) == v4);
        let (ready, total) = (all.clone().filter(|e| e.ready).count(), all.count());
        (ready, total)
    };
    match service.cluster_ips.first() {
        Some(ip) => of(is_v4(ip)),
        None => [of(true), of(false)]
            .into_iter()
            .max_by_key(|(_, total)| *total)
            .unwrap_or_default(),
    }
}

fn wide_row(service: &api::Service, port: &api::ServicePort) -> [Cell; 4] {
    let refused: Vec<String> = port
        .refused
        .iter()
        .map(|(reason, count)| format!("{reason} {count}"))
        .collect();
    let more = service.cluster_ips.iter().skip(1);
    let mut others: Vec<String> = more
        .chain(&service.external_ips)
        .chain(&service.load_balancer_ips)
        .map(|ip| disputed(service, vip(ip, port)))
        .collect();
    others.extend(port.node_port.map(|port| format!("node port {port}")));
    let endpoints: Vec<String> = port.endpoints.iter().map(endpoint).collect();
    let or_none = |list: Vec<String>| {
        if list.is_empty() {
            Cell::new("-", DIM)
        } else {
            Cell::from(list.join(", "))
        }
    };
    [
        if port.name.is_empty() {
            Cell::new("-", DIM)
        } else {
            port.name.as_str().into()
        },
        or_none(refused),
        or_none(others),
        or_none(endpoints),
    ]
}

/// Returns the competitors for a frontend of a service: the service that serves it, or those that claim it without
/// success.
fn dispute(service: &api::Service, frontend: &str) -> Option<String> {
    let all = &service.conflicts;
    let conflict = all.iter().find(|of| of.frontend == frontend)?;
    let name = format!("{}/{}", service.namespace, service.name);
    Some(if conflict.winner == name {
        format!("(not of {})", conflict.losers.join(", "))
    } else {
        format!("(of {})", conflict.winner)
    })
}

/// Returns a frontend with its competitors.
fn disputed(service: &api::Service, frontend: String) -> String {
    match dispute(service, &frontend) {
        Some(dispute) => format!("{frontend} {dispute}"),
        None => frontend,
    }
}

fn vip(ip: &str, port: &api::ServicePort) -> String {
    match ip.parse::<IpAddr>() {
        Ok(ip) => format!("{}/{}", SocketAddr::new(ip, port.port), port.protocol),
        Err(_) => format!("{ip}:{}/{}", port.port, port.protocol),
    }
}

fn endpoint(endpoint: &api::Endpoint) -> String {
    let socket = match endpoint.address.parse::<IpAddr>() {
        Ok(ip) => SocketAddr::new(ip, endpoint.port).to_string(),
        Err(_) => format!("{}:{}", endpoint.address, endpoint.port),
    };
    let mut marks = Vec::new();
    if endpoint.local {
        marks.push("local");
    }
    if endpoint.terminating {
        marks.push(if endpoint.serving {
            "terminating, serving"
        } else {
            "terminating"
        });
    } else if !endpoint.ready {
        marks.push("not ready");
    }
    if endpoint.hinted_away {
        marks.push("hinted to others");
    }
    if marks.is_empty() {
        socket
    } else {
        format!("{socket} ({})", marks.join(", "))
    }
}

fn policy(service: &api::Service) -> String {
    let (internal, external) = (
        &service.internal_traffic_policy,
        &service.external_traffic_policy,
    );
    // A cluster IP is not reachable from outside.
    if internal == external || service.kind == "ClusterIP" {
        internal.clone()
    } else {
        format!("{internal}, external {external}")
    }
}

fn affinity(seconds: Option<u64>) -> String {
    seconds.map_or_else(
        || "-".to_owned(),
        |s| format!("ClientIP {}", output::duration(s)),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn service() -> api::Service {
        let endpoint = |last: u8, ready, terminating| api::Endpoint {
            address: format!("10.244.1.{last}"),
            port: 80,
            local: last == 5,
            ready,
            serving: ready || terminating,
            terminating,
            hinted_away: last == 7,
        };
        api::Service {
            namespace: "default".to_owned(),
            name: "web".to_owned(),
            kind: "NodePort".to_owned(),
            cluster_ips: vec!["10.96.0.1".to_owned(), "fd00::1".to_owned()],
            external_ips: vec!["192.0.2.10".to_owned()],
            load_balancer_ips: Vec::new(),
            conflicts: Vec::new(),
            internal_traffic_policy: "Cluster".to_owned(),
            external_traffic_policy: "Local".to_owned(),
            affinity_seconds: Some(10_800),
            ports: vec![api::ServicePort {
                name: "http".to_owned(),
                port: 8000,
                protocol: "tcp".to_owned(),
                node_port: Some(30_080),
                ready: 3,
                endpoints: vec![
                    endpoint(5, true, false),
                    endpoint(6, false, true),
                    endpoint(7, true, false),
                    api::Endpoint {
                        address: "fd00:10:244:1::5".to_owned(),
                        ..endpoint(5, true, false)
                    },
                ],
                connections: 12,
                refused: BTreeMap::from([("no-endpoints".to_owned(), 3)]),
            }],
        }
    }

    fn printed(wide: bool) -> String {
        let mut out = anstream::StripStream::new(Vec::new());
        table(&[service()], wide).write(&mut out).unwrap();
        String::from_utf8(out.into_inner()).unwrap()
    }

    #[test]
    fn a_row_for_each_port() {
        let text = printed(false);
        let row: Vec<&str> = text.lines().nth(1).unwrap().split("  ").collect();
        let row: Vec<&str> = row
            .into_iter()
            .map(str::trim)
            .filter(|c| !c.is_empty())
            .collect();
        assert_eq!(
            row,
            [
                "default/web",
                "10.96.0.1:8000/tcp",
                "NodePort",
                "2/3",
                "Cluster, external Local",
                "ClientIP 3h0m",
                "12"
            ]
        );
    }

    #[test]
    fn wide_shows_the_rest() {
        let text = printed(true);
        for part in [
            "[fd00::1]:8000/tcp, 192.0.2.10:8000/tcp, node port 30080",
            "no-endpoints 3",
            "10.244.1.5:80 (local), 10.244.1.6:80 (terminating, serving), 10.244.1.7:80 (hinted \
             to others)",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn a_vip_that_another_service_serves_says_so() {
        let mut service = service();
        service.conflicts.push(api::Conflict {
            frontend: "10.96.0.1:8000/tcp".to_owned(),
            winner: "default/older".to_owned(),
            losers: vec!["default/web".to_owned()],
        });
        let [_, vip, ..] = row(&service, &service.ports[0]);
        assert!(format!("{vip:?}").contains("10.96.0.1:8000/tcp (of default/older)"));
    }

    #[test]
    fn an_address_that_others_claim_in_vain_says_so_at_its_owner() {
        let mut service = service();
        service.conflicts.push(api::Conflict {
            frontend: "192.0.2.10:8000/tcp".to_owned(),
            winner: "default/web".to_owned(),
            losers: vec!["shop/thief".to_owned()],
        });
        let [_, vip, ..] = row(&service, &service.ports[0]);
        assert!(!format!("{vip:?}").contains("thief"));
        let [_, _, others, _] = wide_row(&service, &service.ports[0]);
        let others = format!("{others:?}");
        assert!(
            others.contains("192.0.2.10:8000/tcp (not of shop/thief)"),
            "{others}"
        );
    }

    #[test]
    fn a_host_port_is_no_headless_service() {
        let mut service = service();
        service.cluster_ips.clear();
        let shown = |service: &api::Service| {
            let [_, vip, _, endpoints, ..] = row(service, &service.ports[0]);
            format!("{vip:?} {endpoints:?}")
        };
        assert!(shown(&service).contains("192.0.2.10:8000/tcp"));
        service.external_ips.clear();
        let text = shown(&service);
        assert!(
            text.contains("host:30080/tcp") && text.contains("2/3"),
            "{text}"
        );
        service.ports[0].node_port = None;
        assert!(shown(&service).contains("headless:8000/tcp"));
    }

    #[test]
    fn names() {
        let args = |names: &[&str]| ServicesArgs {
            names: names.iter().map(|&name| name.to_owned()).collect(),
            namespace: None,
            not_ready: false,
            output: Format::Text,
            paths: PathArgs {
                bpffs: None,
                cgroup: None,
            },
            socket: SocketArgs {
                socket: Some("/nowhere".into()),
            },
        };
        assert!(args(&[]).names(&service()));
        assert!(args(&["web"]).names(&service()));
        assert!(args(&["default/web", "x"]).names(&service()));
        assert!(!args(&["kube-system/web"]).names(&service()));
    }
}
