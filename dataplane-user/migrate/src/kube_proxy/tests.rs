//! Imports rules that the real kube-proxy wrote, versions 1.33 to 1.37, and lines that are not kube-proxy's own.

use std::{sync::Arc, time::Duration};

use model::{Service, ServiceName, ServiceType, TrafficPolicy};

use super::{Error, Facts, Imported, Masquerade, Text, import};

const SAVED: &str = include_str!("../../../../tests/data/kube-proxy-1.36/iptables-save.txt");
const LISTED: &str = include_str!("../../../../tests/data/kube-proxy-1.36/nft-ruleset.txt");
const SAVED_33: &str = include_str!("../../../../tests/data/kube-proxy-1.33/iptables-save.txt");
const LISTED_33: &str = include_str!("../../../../tests/data/kube-proxy-1.33/nft-ruleset.txt");
const LISTED_34: &str = include_str!("../../../../tests/data/kube-proxy-1.34/nft-ruleset.txt");
const LISTED_35: &str = include_str!("../../../../tests/data/kube-proxy-1.35/nft-ruleset.txt");

fn read(text: &str) -> Result<Imported, Error> {
    let text = Text {
        origin: "rules".into(),
        text: text.into(),
    };
    import(&[text])
}

fn good(text: &str) -> Imported {
    let imported = read(text).unwrap();
    assert_eq!(imported.leftovers, []);
    imported
}

fn service<'i>(imported: &'i Imported, name: &str) -> &'i Service {
    imported
        .services
        .get(&ServiceName::new("bench", name))
        .unwrap()
}

/// Describes a service in one line.
fn line(service: &Service) -> String {
    let ports = service.ports.iter().map(|port| {
        let endpoints = port.endpoints.iter().map(|endpoint| {
            let here = if endpoint.local { "*" } else { "" };
            format!("{}:{}{here}", endpoint.addr, endpoint.port)
        });
        format!(
            "{} {}/{} {:?} [{}]",
            port.name,
            port.protocol.word(),
            port.port,
            port.node_port,
            endpoints.collect::<Vec<_>>().join(" ")
        )
    });
    format!(
        "{} {:?} {:?} ext {:?} lb {:?} from {:?} aff {:?} int {:?} out {:?} check {:?}: {}",
        service.name,
        service.kind,
        service.cluster_ips,
        service.external_ips,
        service.load_balancer_ips,
        service.source_ranges,
        service.affinity,
        service.internal_policy,
        service.external_policy,
        service.health_check_node_port,
        ports.collect::<Vec<_>>().join(", ")
    )
}

#[test]
fn rules_of_iptables_that_nft_printed_are_named_as_such() {
    let text = "table ip nat {\n\tchain KUBE-SERVICES {\n\t}\n\tchain OUTPUT {\n\t\ttype nat hook output priority -100; policy accept;\n\t\tcounter packets 0 bytes 0 jump KUBE-SERVICES\n\t}\n}\n";
    let error = read(text).unwrap_err().to_string();
    assert!(error.contains("save them with iptables-save"), "{error}");
}

/// In mode nftables, 1.37 writes no map for a service with one endpoint, and truncates long comments.
#[test]
fn the_rules_of_both_modes_of_1_37_become_the_same_services() {
    let listed = include_str!("../../../../tests/data/kube-proxy-1.37/nft-ruleset.txt");
    let saved = include_str!("../../../../tests/data/kube-proxy-1.37/iptables-save.txt");
    let (listed, saved) = (good(listed), good(saved));
    assert_eq!(listed.services.len(), 62);
    assert!(listed.services.keys().eq(saved.services.keys()));
    let one = service(&listed, "one");
    assert_eq!(one.ports[0].endpoints.len(), 1);
    let local: Vec<bool> = service(&listed, "loc1").ports[0]
        .endpoints
        .iter()
        .map(|endpoint| endpoint.local)
        .collect();
    assert_eq!(local, [true, false, false, false]);
    let ports = |service: &Service| {
        let ports = service.ports.iter().map(|port| {
            let endpoints = port.endpoints.iter();
            let endpoints: Vec<_> = endpoints.map(|at| (at.addr, at.port)).collect();
            (port.name.clone(), port.port, port.node_port, endpoints)
        });
        let mut ports: Vec<_> = ports.collect();
        ports.sort_unstable();
        ports
    };
    for (name, service) in &listed.services {
        let known = &saved.services[name];
        assert_eq!(ports(service), ports(known), "{name}");
        assert_eq!(service.cluster_ips, known.cluster_ips, "{name}");
    }
}

/// Before 1.36, in mode nftables, each endpoint has a chain, and the chain of a port contains the rule for
/// masquerading. The rules of these versions are for the same objects as the rules of 1.36.
#[test]
fn the_rules_before_1_36_become_the_services_of_1_36() {
    let saved = good(SAVED);
    assert_eq!(good(SAVED_33).services, saved.services);
    let new = good(LISTED);
    // The old rules show which endpoints are on this node only if a policy needs it.
    let line = |service: &Service, policies: [TrafficPolicy; 2]| {
        let line = line(service);
        if policies.contains(&TrafficPolicy::Local) {
            line
        } else {
            line.replace('*', "")
        }
    };
    for text in [LISTED_33, LISTED_34, LISTED_35] {
        let old = good(text);
        assert_eq!(old.facts, new.facts);
        assert!(old.services.keys().eq(new.services.keys()));
        for (name, service) in &old.services {
            let policies = [service.internal_policy, service.external_policy];
            assert_eq!(line(service, policies), line(&new.services[name], policies));
        }
    }
}

/// kube-proxy writes these rules if their feature gate is on.
#[test]
fn node_ports_that_1_37_refuses_on_loopback_are_no_fault() {
    let listed = include_str!("../../../../tests/data/kube-proxy-1.37/nft-ruleset.txt");
    let chain = "\tchain nodeport-endpoints-check {\n";
    let asks =
        "\t\tip daddr 127.0.0.0/8 meta l4proto . th dport vmap @localhost-nodeport-reject-ports\n";
    let refuses =
        "\tchain localhost-nodeport-reject-tcp {\n\t\tcounter name \"rejected\" reject\n\t}\n\n";
    let text = listed.replacen(chain, &format!("{refuses}{chain}{asks}"), 1);
    assert_ne!(text, listed);
    assert_eq!(good(&text).services.len(), 62);
}

#[test]
fn kube_proxys_iptables_rules_become_its_services() {
    let imported = good(SAVED);
    let lines: Vec<String> = imported
        .services
        .values()
        .map(|service| line(service))
        .collect();
    let wanted = "\
bench/affinity NodePort [10.96.1.5] ext [] lb [] from [] aff Some(10s) int Cluster out Cluster check None: p tcp/80 Some(30083) [10.244.0.101:8080 10.244.0.102:8080]
bench/clusterip ClusterIp [10.96.1.1] ext [] lb [] from [] aff None int Cluster out Cluster check None: p tcp/80 None [10.244.0.101:8080 10.244.0.102:8080]
bench/extip ClusterIp [10.96.1.8] ext [203.0.113.50] lb [] from [] aff None int Cluster out Cluster check None: p tcp/80 None [10.244.0.101:8080 10.244.0.102:8080]
bench/iperf ClusterIp [10.99.0.1] ext [] lb [] from [] aff None int Cluster out Cluster check None: p tcp/5201 None [10.244.0.101:5201]
bench/itp-local ClusterIp [10.96.1.7] ext [] lb [] from [] aff None int Local out Cluster check None: p tcp/80 None [10.244.0.101:8080*]
bench/lb-local LoadBalancer [10.96.1.4] ext [] lb [203.0.113.11] from [] aff None int Cluster out Local check Some(30999): p tcp/80 Some(30082) [10.244.0.101:8080* 10.244.0.102:8080]
bench/lb-local-remote LoadBalancer [10.96.1.9] ext [] lb [203.0.113.12] from [] aff None int Cluster out Local check Some(30401): p tcp/80 Some(30085) [10.244.0.102:8080]
bench/lb-ranges LoadBalancer [10.96.1.3] ext [] lb [203.0.113.10] from [192.168.77.2/32] aff None int Cluster out Cluster check None: p tcp/80 Some(30081) [10.244.0.101:8080 10.244.0.102:8080]
bench/nodeport NodePort [10.96.1.2] ext [] lb [] from [] aff None int Cluster out Cluster check None: p tcp/80 Some(30080) [10.244.0.101:8080 10.244.0.102:8080]
bench/noeps NodePort [10.96.1.6] ext [] lb [] from [] aff None int Cluster out Cluster check None: p tcp/80 Some(30084) []
bench/udp ClusterIp [10.96.1.10] ext [] lb [] from [] aff None int Cluster out Cluster check None: p udp/53 None [10.244.0.101:8053 10.244.0.102:8053]
default/kubernetes ClusterIp [10.96.0.1] ext [] lb [] from [] aff None int Cluster out Cluster check None: https tcp/443 None [10.9.0.1:6443]";
    assert_eq!(lines.join("\n"), wanted);
    let facts = Facts {
        masquerade: [
            Some(Masquerade::OutsideOf("10.244.0.0/16".parse().unwrap())),
            None,
        ],
        mark: Some(0x4000),
        node_ports: ["0.0.0.0/0".parse().unwrap()].into(),
    };
    assert_eq!(imported.facts, facts);
}

#[test]
fn kube_proxys_nftables_rules_become_its_services() {
    let imported = good(LISTED);
    assert_eq!(imported.services.len(), 12);
    let affinity = service(&imported, "affinity");
    assert_eq!(affinity.affinity, Some(Duration::from_secs(10)));
    let ranges = service(&imported, "lb-ranges");
    assert_eq!(ranges.kind, ServiceType::LoadBalancer);
    assert_eq!(
        ranges.source_ranges[..],
        ["192.168.77.2/32".parse().unwrap()]
    );
    let local = service(&imported, "lb-local");
    assert_eq!(local.external_policy, TrafficPolicy::Local);
    let local: Vec<bool> = local.ports[0].endpoints.iter().map(|e| e.local).collect();
    assert_eq!(local, [true, false]);
    // Facts that only this mode's rules contain: the endpoints on this node, and the addresses that answer node ports.
    assert!(service(&imported, "clusterip").ports[0].endpoints[0].local);
    let facts = Facts {
        masquerade: [
            Some(Masquerade::OutsideOf("10.244.0.0/16".parse().unwrap())),
            None,
        ],
        mark: Some(0x4000),
        node_ports: ["192.168.77.1/32".parse().unwrap(), "::/0".parse().unwrap()].into(),
    };
    assert_eq!(imported.facts, facts);
    // Facts that only the other mode's rules contain: the difference between external IPs and load balancers'
    // addresses, and the ports of health checks.
    let saved = good(SAVED);
    for (name, service) in &imported.services {
        let mut known = (*saved.services[name]).clone();
        let mut service = (**service).clone();
        for service in [&mut known, &mut service] {
            let all = std::mem::take(&mut service.load_balancer_ips);
            service.external_ips.extend(all);
            service.health_check_node_port = None;
            service.kind = ServiceType::ClusterIp;
            let endpoints = service
                .ports
                .iter_mut()
                .flat_map(|port| &mut port.endpoints);
            endpoints.for_each(|endpoint| endpoint.local = false);
        }
        assert_eq!(service, known);
    }
}

/// Each change makes a line that kube-proxy does not write, or a line of another service. The import names the line and
/// leaves out the service that it concerns, and no other. `None`: the line concerns no single service, so all services
/// are imported.
#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn what_is_not_kube_proxys_is_named_and_never_guessed() {
    let saved: &[(&str, &str, Option<&str>)] = &[
        (
            "-A KUBE-SERVICES -d 10.96.1.1/32 -p tcp",
            "-A KUBE-SERVICES -s 192.0.2.1/32 -d 10.96.1.1/32 -p tcp",
            Some("clusterip"),
        ),
        (
            "-A KUBE-SERVICES -d 10.96.1.1/32 -p tcp",
            "-A KUBE-SERVICES -d 10.96.1.0/24 -p tcp",
            Some("clusterip"),
        ),
        (
            "-A KUBE-SERVICES -d 10.96.1.1/32 -p tcp",
            "-A KUBE-SERVICES -m time -d 10.96.1.1/32 -p tcp",
            Some("clusterip"),
        ),
        (
            "bench/clusterip:p cluster IP\" -m tcp --dport 80 -j KUBE-SVC",
            "bench/clusterip:p cluster IP\" -m tcp --dport 80 -j KUBE-EXT",
            Some("clusterip"),
        ),
        (
            "bench/udp:p -> 10.244.0.101:8053\" -m statistic --mode random --probability 0.50000000000",
            "bench/udp:p -> 10.244.0.101:8053\"",
            Some("udp"),
        ),
        (
            "bench/udp:p -> 10.244.0.102:8053\" -j",
            "bench/udp:p -> 10.244.0.102:8053\" -m statistic --mode random --probability 0.5 -j",
            Some("udp"),
        ),
        (
            "--to-destination 10.9.0.1:6443",
            "--to-destination 10.9.0.1:6443 --persistent",
            Some("kubernetes"),
        ),
        (
            "--to-destination 10.9.0.1:6443",
            "--to-destination 10.9.0.1",
            Some("kubernetes"),
        ),
        (
            "-A KUBE-SEP-XUWVZHSOFNFAZN3F -s 10.9.0.1/32",
            "-A KUBE-SEP-XUWVZHSOFNFAZN3F -s 10.9.0.2/32",
            Some("kubernetes"),
        ),
        (
            "--seconds 10 --reap --name KUBE-SEP-4XDQQEBYCEQDUXMR",
            "--seconds 11 --reap --name KUBE-SEP-4XDQQEBYCEQDUXMR",
            Some("affinity"),
        ),
        (
            "-m recent --set --name KUBE-SEP-4XDQQEBYCEQDUXMR",
            "-m recent --set --name OTHER",
            Some("affinity"),
        ),
        (
            "-A KUBE-EXT-FOMZKIHYRITMSA37 -j KUBE-SVL-FOMZKIHYRITMSA37",
            "-A KUBE-EXT-FOMZKIHYRITMSA37 -j KUBE-SVC-FOMZKIHYRITMSA37",
            Some("lb-local"),
        ),
        (
            "-A KUBE-FW-V74S4AVD7W2K2A2V -s 192.168.77.2/32",
            "-A KUBE-FW-V74S4AVD7W2K2A2V -i eth0",
            Some("lb-ranges"),
        ),
        (
            "! -s 10.244.0.0/16 -d 10.96.1.10/32",
            "! -s 10.245.0.0/16 -d 10.96.1.10/32",
            Some("udp"),
        ),
        (
            "-A PREROUTING -m comment",
            "-A PREROUTING -i eth0 -m comment",
            None,
        ),
        (
            "bench/noeps:p has no endpoints\" -m tcp --dport 80",
            "bench/noeps:p has no endpoints\" -m tcp --dport 81:82",
            Some("noeps"),
        ),
        (
            "--dport 30999 -j ACCEPT",
            "--dport 30999 -j DROP",
            Some("lb-local"),
        ),
        (
            "-A KUBE-NODEPORTS -p tcp -m comment --comment \"bench/nodeport:p\"",
            "-A KUBE-NODEPORTS -s 10.0.0.0/8 -p tcp -m comment --comment \"bench/nodeport:p\"",
            Some("nodeport"),
        ),
        (
            "! --mark 0x4000/0x4000 -j RETURN",
            "! --mark 0x8000/0x8000 -j RETURN",
            None,
        ),
        (
            "! --mark 0x4000/0x4000 -j RETURN",
            "! --mark 0x4000/0xc000 -j RETURN",
            None,
        ),
        (
            "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000",
            "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0xffffffff",
            None,
        ),
        (
            "-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0",
            "-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x4000",
            None,
        ),
        (
            "-m mark --mark 0x4000/0x4000 -j ACCEPT",
            "-m mark --mark 0x4000/0x4000 -j DROP",
            None,
        ),
        (
            "-m mark --mark 0x4000/0x4000 -j ACCEPT",
            "-m mark --mark 0x4000/0xc000 -j ACCEPT",
            None,
        ),
        (
            "--ctstate RELATED,ESTABLISHED -j ACCEPT",
            "--ctstate NEW -j ACCEPT",
            None,
        ),
        (
            "--rcheck --seconds 10 --reap --name KUBE-SEP-4XDQQEBYCEQDUXMR",
            "--rcheck --reap --name KUBE-SEP-4XDQQEBYCEQDUXMR",
            Some("affinity"),
        ),
        (
            "--rcheck --seconds 10 --reap --name KUBE-SEP-4XDQQEBYCEQDUXMR",
            "--rcheck --seconds 10 --name KUBE-SEP-4XDQQEBYCEQDUXMR",
            Some("affinity"),
        ),
        (
            "-m recent --set --name KUBE-SEP-4XDQQEBYCEQDUXMR --mask 255.255.255.255",
            "-m recent --set --name KUBE-SEP-4XDQQEBYCEQDUXMR --mask 255.255.255.0",
            Some("affinity"),
        ),
        (
            "--dport 80 -j REJECT --reject-with icmp-port-unreachable",
            "--dport 80 -j REJECT --reject-with tcp-reset",
            Some("noeps"),
        ),
        (
            "-m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-64BFOCM4LKB6LHPN",
            "-m statistic --mode random -j KUBE-SEP-64BFOCM4LKB6LHPN",
            Some("udp"),
        ),
        (
            "-A KUBE-NODEPORTS -d 127.0.0.0/8 -p tcp -m comment --comment \"bench/nodeport:p\"",
            "-A KUBE-NODEPORTS -d 127.0.0.0/16 -p tcp -m comment --comment \"bench/nodeport:p\"",
            Some("nodeport"),
        ),
        (
            "localhost_nps_accepted_pkts -j KUBE-EXT-QB6FNYM7XH3XG5C4",
            "localhost_nps_accepted_pkts -j KUBE-EXT-WE2NGXAJSN5RT2FO",
            Some("nodeport"),
        ),
    ];
    check(SAVED, saved);
    let listed: &[(&str, &str, Option<&str>)] = &[
        (
            "10.96.1.1 . tcp . 80 : goto service-EGW526KA",
            "10.96.1.1 . udp . 80 : goto service-EGW526KA",
            Some("clusterip"),
        ),
        // If the import served this address to all clients, the restriction would be lost.
        (
            "203.0.113.10 . tcp . 80 : goto firewall-",
            "203.0.113.10 . tcp . 80 : jump firewall-",
            Some("lb-ranges"),
        ),
        (
            "10.96.1.2 . tcp . 80 : goto service-",
            "10.96.1.2 . tcp . 80 : goto what-",
            Some("nodeport"),
        ),
        (
            "203.0.113.10 . tcp . 80 : goto external-",
            "203.0.113.10 . tcp . 80 : jump external-",
            Some("lb-ranges"),
        ),
        (
            "10.96.1.1 . tcp . 80 : goto service-",
            "10.96.1.1 . tcp . 80 : goto firewall-",
            Some("clusterip"),
        ),
        (
            "tcp . 30080 : goto external-",
            "tcp . 30080 : jump external-",
            Some("nodeport"),
        ),
        (
            "10.96.1.6 . tcp . 80 comment \"bench/noeps:p\" : goto reject-chain",
            "10.96.1.6 . tcp . 80 comment \"bench/noeps:p\" : accept",
            Some("noeps"),
        ),
        (
            "10.96.1.10 . udp . 53 : goto service-JNKDCQLK-bench/udp/udp/p",
            "10.96.1.10 . sctp . 53 : goto service-JNKDCQLK-bench/udp/sctp/p",
            Some("udp"),
        ),
        (
            "0 : 10.9.0.1 . 6443",
            "1 : 10.9.0.1 . 6443",
            Some("kubernetes"),
        ),
        (
            "numgen random mod 1 map { 0 : 10.9.0.1",
            "numgen inc mod 1 map { 0 : 10.9.0.1",
            Some("kubernetes"),
        ),
        (
            "meta l4proto tcp dnat to 10.244.0.102:8080",
            "meta l4proto tcp dnat to 10.244.0.102:8080 persistent",
            Some("affinity"),
        ),
        (
            "ip saddr != 192.168.77.2 drop",
            "ip saddr != 192.168.77.2 accept",
            Some("lb-ranges"),
        ),
        (
            "\t\tgoto local-KN4RD6MH",
            "\t\tiifname eth0 goto local-KN4RD6MH",
            Some("lb-local"),
        ),
        (
            "ct state new jump firewall-check",
            "jump firewall-check",
            None,
        ),
        (
            "ip daddr @cluster-ips ip saddr != 10.244.0.0/16 meta",
            "ip daddr @cluster-ips ip saddr != 10.244.0.0/16 oifname eth0 meta",
            None,
        ),
        ("\t\treject\n", "\t\treject with tcp reset\n", None),
    ];
    check(LISTED, listed);
    let listed: &[(&str, &str, Option<&str>)] = &[
        (
            "ip saddr 10.9.0.1 jump mark-for-masquerade",
            "ip saddr 10.9.0.2 jump mark-for-masquerade",
            Some("kubernetes"),
        ),
        (
            "ip daddr 10.96.0.1 tcp dport 443 ip saddr",
            "ip daddr 10.96.0.1 tcp dport 444 ip saddr",
            Some("kubernetes"),
        ),
        (
            "ip daddr 10.96.0.1 tcp dport 443 ip saddr",
            "ip daddr 10.96.0.2 tcp dport 443 ip saddr",
            Some("kubernetes"),
        ),
        (
            "meta l4proto tcp dnat to 10.9.0.1:6443",
            "meta l4proto tcp dnat to 10.9.0.1:6443 persistent",
            Some("kubernetes"),
        ),
        (
            "meta mark & 0x00004000 == 0x00000000 return",
            "meta mark & 0x00004000 == 0x00000000 accept",
            None,
        ),
    ];
    check(LISTED_33, listed);
}

fn check(text: &str, changes: &[(&str, &str, Option<&str>)]) {
    let whole = good(text);
    let wrong: Vec<String> = changes
        .iter()
        .filter_map(|(from, to, left_out)| {
            let at = text
                .find(from)
                .unwrap_or_else(|| panic!("{from} is not there"));
            let other = format!("{}{to}{}", &text[..at], &text[at + from.len()..]);
            let imported = read(&other).unwrap();
            let line = 1 + other[..at].bytes().filter(|byte| *byte == b'\n').count();
            let mut lines = imported.leftovers.iter().map(|leftover| leftover.line);
            let is_named = lines.any(|of| of.abs_diff(line) <= 3);
            let gone: Vec<&str> = (whole.services.keys())
                .filter(|name| !imported.services.contains_key(*name))
                .map(ServiceName::name)
                .collect();
            let mut others = imported.services.iter();
            let good = is_named
                && gone == left_out.iter().copied().collect::<Vec<_>>()
                && others.all(|(name, service)| *service == whole.services[name]);
            let leftovers = &imported.leftovers;
            (!good).then(|| format!("{to} in line {line}: {gone:?} left out: {leftovers:?}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_text_that_is_none_is_an_error_with_its_line() {
    for (text, line) in [
        ("*nat\n:KUBE-SERVICES - [0:0]\nrubbish\nCOMMIT\n", 3),
        (
            "*nat\n:KUBE-SERVICES - [0:0]\n-A OUTPUT -j KUBE-SERVICES\n",
            1,
        ),
        ("table ip kube-proxy {\n\tchain services {\n\t\tjump x\n", 3),
        ("{\"nftables\": [\n{\"rule\": 1}]}", 1),
        ("hello", 1),
        (
            "# Generated by iptables-save v1.8.9\n*nat\n-A OUTPUT -j KUBE-SERVICES\nCOMMIT\n# Generated by iptables-save\n*nat\n\
          -A OUTPUT -j KUBE-SERVICES\nCOMMIT\n",
            7,
        ),
    ] {
        match read(text) {
            Err(Error::Line { line: found, .. }) => assert_eq!(found, line, "{text}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    for text in [
        "",
        "*nat\n-A OUTPUT -j mine\nCOMMIT\n",
        "table ip mine {\n}\n",
    ] {
        assert!(matches!(read(text), Err(Error::NoRules(_))), "{text}");
    }
    let both = [SAVED, LISTED].map(|text| Text {
        origin: "rules".into(),
        text: text.into(),
    });
    let twice = import(&both);
    assert!(
        matches!(twice, Err(Error::Twice { family: "IPv4", .. })),
        "{twice:?}"
    );
}

/// kube-proxy writes no unequal probabilities, and an EndpointSlice has no weights.
#[test]
fn a_service_with_unequal_probabilities_is_left_out() {
    for probability in ["0.75000000000", "0.50000001000", "0", "NaN"] {
        let to = format!("--probability {probability}");
        let imported = read(&SAVED.replacen("--probability 0.50000000000", &to, 1)).unwrap();
        let why: Vec<String> = imported.leftovers.iter().map(ToString::to_string).collect();
        assert!(
            why.len() == 1 && why[0].contains("the same share"),
            "{why:?}"
        );
        assert_eq!(imported.services.len(), good(SAVED).services.len() - 1);
    }
}

/// An element that is not understood may concern any service, so no element of the map is used.
#[test]
fn a_map_with_a_fault_is_an_error_with_its_line() {
    for (from, to) in [
        (
            "203.0.113.10 . tcp . 80 : goto firewall-",
            "203.0.113.10 . tcp : goto firewall-",
        ),
        (
            "10.96.1.2 . tcp . 80 : goto service-",
            "10.96.1.2/31 . tcp . 80 : goto service-",
        ),
        (
            "10.96.1.2 . tcp . 80 : goto service-",
            "10.96.1.2 . tcp . 80 : queue service-",
        ),
        (
            "203.0.113.10 . tcp . 80 : goto firewall-5QXSR6LZ-bench/lb-ranges/",
            "203.0.113.10 . tcp . 80 : goto firewall-5QXSR6LZ-bench/lb-ranges/what/",
        ),
        (
            "tcp . 30080 : goto external-JUSXFCZS-bench/",
            "tcp . 30080 : goto external-JUSXFCZS-",
        ),
        (
            "203.0.113.12 . tcp . 80 comment \"bench/lb-local-remote:p\" :",
            "203.0.113.12 . tcp . 80 :",
        ),
        (
            "tcp . 30084 comment \"bench/noeps:p\" :",
            "tcp . 30084 comment \"noeps\" :",
        ),
        ("10.96.0.1, 10.96.1.1", "10.96.0.1, 10.96.1.1-10.96.1.3"),
        (
            "elements = { 192.168.77.1 }",
            "elements = { 192.168.77.0/24 }",
        ),
        (
            "10.244.0.101 . 10.244.0.101 . udp",
            "10.244.0.101 . 10.244.0.102 . udp",
        ),
    ] {
        let at = LISTED
            .find(from)
            .unwrap_or_else(|| panic!("{from} is not there"));
        let line = 1 + LISTED[..at].bytes().filter(|byte| *byte == b'\n').count();
        match read(&LISTED.replacen(from, to, 1)) {
            Err(Error::Line { line: found, .. }) => assert_eq!(found, line, "{to}"),
            other => panic!("{to}: {other:?}"),
        }
    }
}

/// An address with restricted clients belongs to the service that the restriction names.
#[test]
fn a_restricted_address_of_another_service_is_left_out() {
    let text = LISTED.replacen(
        "203.0.113.10 . tcp . 80 : goto external-5QXSR6LZ-bench/lb-ranges/",
        "203.0.113.10 . tcp . 80 : goto external-BWYT44RG-bench/extip/",
        1,
    );
    let imported = read(&text).unwrap();
    assert!(
        !imported
            .services
            .contains_key(&ServiceName::new("bench", "extip"))
    );
    assert_eq!(imported.leftovers.len(), 1, "{:?}", imported.leftovers);
}

#[test]
fn a_rule_whose_place_in_its_chain_is_unknown_is_an_error() {
    let from = "-A KUBE-SVC-Z4IGN4CMAMRA3BAQ -m comment";
    let line = 1 + SAVED
        .lines()
        .position(|line| line.starts_with(from))
        .unwrap();
    let text = SAVED.replacen(from, "-I KUBE-SVC-Z4IGN4CMAMRA3BAQ -m comment", 1);
    match read(&text) {
        Err(Error::Line { line: found, .. }) => assert_eq!(found, line),
        other => panic!("{other:?}"),
    }
}

/// Services without endpoints occur only in table `filter`.
#[test]
fn rules_without_table_filter_are_an_error() {
    let [start, end] = ["*filter\n", "*nat\n"].map(|table| SAVED.find(table).unwrap());
    let none = format!("{}{}", &SAVED[..start], &SAVED[end..]);
    let empty = format!(
        "{}*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n{}",
        &SAVED[..start],
        &SAVED[end..]
    );
    for text in [none, empty] {
        let found = read(&text);
        assert!(
            matches!(found, Err(Error::Half { family: "IPv4", .. })),
            "{found:?}"
        );
    }
}

#[test]
fn addresses_that_answer_node_ports_are_none_if_the_rules_name_none() {
    let saved: String = SAVED
        .split_inclusive('\n')
        .filter(|line| {
            !(line.starts_with("-A KUBE-SERVICES") && line.contains("-j KUBE-NODEPORTS"))
        })
        .collect();
    assert!(good(&saved).facts.node_ports.is_empty());
    let listed = LISTED
        .replacen("\t\telements = { 192.168.77.1 }\n", "", 1)
        .replace("\t\tfib daddr type local ip6 daddr != ::1 meta l4proto . th dport vmap @service-nodeports\n", "");
    assert!(good(&listed).facts.node_ports.is_empty());
}

/// A service of a protocol that the dataplane does not serve costs one line, which says what to do.
#[test]
fn a_service_of_sctp_is_named_once_with_what_to_do() {
    let saved = SAVED
        .replacen("*nat\n", "*nat\n:KUBE-SVC-SCTP - [0:0]\n:KUBE-SEP-SCTP - [0:0]\n", 1)
        .replacen(
            "-A KUBE-SERVICES -d 10.96.1.1/32",
            "-A KUBE-SEP-SCTP -p sctp -m comment --comment \"bench/assoc:p\" -m sctp -j DNAT --to-destination 10.244.0.101:3868\n\
             -A KUBE-SVC-SCTP -m comment --comment \"bench/assoc:p -> 10.244.0.101:3868\" -j KUBE-SEP-SCTP\n\
             -A KUBE-SERVICES -d 10.96.1.40/32 -p sctp -m comment --comment \"bench/assoc:p cluster IP\" -m sctp --dport 3868 \
             -j KUBE-SVC-SCTP\n\
             -A KUBE-SERVICES -d 10.96.1.1/32",
            1,
        );
    let listed = LISTED
        .replacen(
            "10.96.1.1 . tcp . 80 : goto service-",
            "10.96.1.40 . sctp . 3868 : goto service-ABCDEFGH-bench/assoc/sctp/p,\n10.96.1.1 . tcp . 80 : goto service-",
            1,
        )
        .replacen(
            "\tchain service-EGW526KA-",
            "\tchain service-ABCDEFGH-bench/assoc/sctp/p {\n\t\tmeta l4proto sctp dnat to 10.244.0.101:3868\n\t}\n\n\
             \tchain service-EGW526KA-",
            1,
        );
    for (text, without) in [(saved, SAVED), (listed, LISTED)] {
        let imported = read(&text).unwrap();
        assert_eq!(imported.services, good(without).services);
        let why: Vec<String> = imported.leftovers.iter().map(ToString::to_string).collect();
        let wanted = "protocol sctp is not served: keep kube-proxy on this node, or remove the port from the Service";
        assert!(why.len() == 1 && why[0].contains(wanted), "{why:?}");
        assert_eq!(imported.stale, 0);
    }
}

/// The rules lack the line for a service's cluster IP.
#[test]
fn a_service_without_its_cluster_ip_is_left_out() {
    let without = |text: &str, what: &str| -> String {
        let lines = text.split_inclusive('\n');
        let left: String = lines.filter(|line| !line.contains(what)).collect();
        assert_ne!(left, text);
        left
    };
    for (text, service) in [
        (
            without(
                SAVED,
                "bench/extip:p cluster IP\" -m tcp --dport 80 -j KUBE-SVC",
            ),
            "extip",
        ),
        (without(SAVED, "-d 10.96.1.6/32"), "noeps"),
        (
            without(
                SAVED,
                "-d 10.96.1.2/32 -p tcp -m comment --comment \"bench/nodeport:p cluster IP\" -m tcp --dport 80 -j KUBE-SVC",
            ),
            "nodeport",
        ),
        (without(LISTED, "10.96.1.8 . tcp . 80"), "extip"),
        (
            LISTED.replacen(
                "10.96.1.6 . tcp . 80 comment \"bench/noeps:p\" : goto reject-chain,",
                "",
                1,
            ),
            "noeps",
        ),
    ] {
        let imported = read(&text).unwrap();
        let name = ServiceName::new("bench", service);
        assert!(!imported.services.contains_key(&name), "{service}");
        assert_eq!(imported.services.len(), 11, "{service}");
        let why: Vec<String> = imported.leftovers.iter().map(ToString::to_string).collect();
        assert_eq!(why.len(), 1, "{why:?}");
        let wanted = format!("at a cluster IP, so service bench/{service} is left out");
        assert!(
            why[0].contains("of IPv4") && why[0].contains(&wanted),
            "{why:?}"
        );
    }
}

/// One rule refuses a port because the service has no endpoint, and other rules jump to endpoints of the port.
#[test]
fn a_port_that_is_served_and_refused_is_left_out() {
    let line = "-A KUBE-SERVICES -d 10.96.1.10/32 -p udp -m comment --comment \"bench/udp:p has no endpoints\" -m udp --dport 53 \
        -j REJECT --reject-with icmp-port-unreachable\n";
    let at = SAVED.find("-A KUBE-SERVICES -d 10.96.1.6/32").unwrap();
    let saved = format!("{}{line}{}", &SAVED[..at], &SAVED[at..]);
    let listed = LISTED.replacen(
        "elements = { 10.96.1.6 . tcp . 80",
        "elements = { 10.96.1.10 . udp . 53 comment \"bench/udp:p\" : goto reject-chain, 10.96.1.6 . tcp . 80",
        1,
    );
    for text in [saved, listed] {
        let imported = read(&text).unwrap();
        assert!(
            !imported
                .services
                .contains_key(&ServiceName::new("bench", "udp"))
        );
        assert_eq!(imported.services.len(), 11);
        assert_eq!(imported.leftovers.len(), 1, "{:?}", imported.leftovers);
    }
}

/// The rule for all addresses is missing, but the rule that counts connections to loopback is present.
#[test]
fn a_node_port_at_loopback_alone_is_left_out() {
    let line = "-A KUBE-NODEPORTS -p tcp -m comment --comment \"bench/nodeport:p\"";
    let lines = SAVED.split_inclusive('\n');
    let text: String = lines.filter(|of| !of.starts_with(line)).collect();
    let imported = read(&text).unwrap();
    assert!(
        !imported
            .services
            .contains_key(&ServiceName::new("bench", "nodeport"))
    );
    assert_eq!(imported.leftovers.len(), 1, "{:?}", imported.leftovers);
}

#[test]
fn chains_that_no_packet_comes_to_are_noted() {
    assert_eq!(good(SAVED).stale, 0);
    // kube-proxy leaves the chains of a removed service and its endpoints for a while.
    let line = "-A KUBE-SERVICES -d 10.96.1.10/32";
    let lines = SAVED.split_inclusive('\n');
    let text: String = lines.filter(|of| !of.starts_with(line)).collect();
    let imported = good(&text);
    assert_eq!((imported.services.len(), imported.stale), (11, 3));
    // After a rule that is not understood, the chains are not stale.
    let text = SAVED.replacen(line, "-A KUBE-SERVICES -i eth0 -d 10.96.1.10/32", 1);
    assert_eq!(read(&text).unwrap().stale, 0);
    // In mode nftables, kube-proxy removes their rules at once.
    let text = LISTED.replacen(
        "10.96.1.10 . udp . 53 : goto service-JNKDCQLK-bench/udp/udp/p,",
        "",
        1,
    );
    let line = 1 + text[..text
        .find("numgen random mod 2 map { 0 : 10.244.0.101 . 8053")
        .unwrap()]
        .lines()
        .count()
        - 1;
    let found: Vec<usize> = read(&text)
        .unwrap()
        .leftovers
        .iter()
        .map(|of| of.line)
        .collect();
    assert_eq!(found, [line]);
}

/// A part of the rules is removed, so that no packet reaches a service.
#[test]
fn rules_that_no_packet_comes_to_are_an_error() {
    let lines = |text: &str, keep: &dyn Fn(&str) -> bool| -> String {
        text.split_inclusive('\n')
            .filter(|line| keep(line))
            .collect()
    };
    let hooks = |line: &str| !line.ends_with("-j KUBE-SERVICES\n");
    let saved = lines(SAVED, &hooks);
    let first = 1 + saved
        .lines()
        .position(|line| line.starts_with("-A KUBE-SERVICES -d 10.96.1.1/32"))
        .unwrap();
    match read(&saved) {
        Err(Error::Line { line, what, .. }) => {
            assert_eq!(line, first);
            assert!(
                what.contains("IPv4") && what.contains("KUBE-SERVICES"),
                "{what}"
            );
        }
        other => panic!("{other:?}"),
    }
    for gone in [
        "\t\tjump services\n",
        "\t\tip daddr . meta l4proto . th dport vmap @service-ips\n",
    ] {
        let found = read(&LISTED.replace(gone, ""));
        assert!(matches!(found, Err(Error::Line { .. })), "{found:?}");
    }
    // If other rules cover the family, the chains are listed as leftovers.
    let both = [&*saved, LISTED].map(|text| Text {
        origin: "rules".into(),
        text: text.into(),
    });
    let imported = import(&both).unwrap();
    assert_eq!(imported.services, good(LISTED).services);
    assert_eq!(imported.leftovers.len(), 1, "{:?}", imported.leftovers);
}

/// kube-proxy's chains exist without its rules.
#[test]
fn rules_without_a_service_are_an_error() {
    let flushed =
        |line: &&str| !line.starts_with("-A KUBE-") || line.starts_with("-A KUBE-FORWARD");
    let saved: String = SAVED.split_inclusive('\n').filter(flushed).collect();
    let start = LISTED.find("table ip6 ").unwrap();
    for text in [&*saved, &LISTED[start..]] {
        let found = read(text);
        assert!(matches!(found, Err(Error::NoServices(_))), "{found:?}");
    }
}

#[test]
fn a_family_that_is_there_twice_in_one_file_is_named_once() {
    let error = read(&format!("{LISTED}{LISTED}")).unwrap_err().to_string();
    assert_eq!(
        error.matches("rules").count() - error.matches("'s rules").count(),
        1,
        "{error}"
    );
    assert!(error.contains("twice"), "{error}");
}

/// Manifests written from imported rules read back as the imported services.
#[test]
fn manifests_say_what_the_rules_say() {
    let node = model::Node {
        name: "node1".into(),
        ..model::Node::default()
    };
    for text in [
        SAVED,
        LISTED,
        SAVED_33,
        LISTED_33,
        LISTED_34,
        LISTED_35,
        include_str!("../../../../tests/data/kube-proxy-1.37/iptables-save.txt"),
        include_str!("../../../../tests/data/kube-proxy-1.37/nft-ruleset.txt"),
    ] {
        let imported = good(text);
        let mut file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
        super::write(&imported, &node.name, &mut file).unwrap();
        let loaded = source::manifests::load(&[file.path().into()], &node).unwrap();
        assert_eq!(
            loaded.snapshot.problems.len(),
            0,
            "{:?}",
            loaded.snapshot.problems
        );
        let lines = |services: &imbl::OrdMap<ServiceName, Arc<Service>>| -> Vec<String> {
            services.values().map(|service| line(service)).collect()
        };
        assert_eq!(lines(&loaded.snapshot.services), lines(&imported.services));
    }
}
