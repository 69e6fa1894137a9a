//! Checks the import with any text: it ends, its time grows with the text's length, and each place, endpoint and address in
//! its result is in the text.

use std::{collections::HashSet, fmt::Write as _, net::IpAddr, time::Duration};

use proptest::prelude::*;

use super::{Text, import};
use crate::text::chance::{self, Change, shortest};

const EXAMPLES: [&str; 2] = [
    include_str!("../../../../tests/data/kube-proxy-1.36/iptables-save.txt"),
    include_str!("../../../../tests/data/kube-proxy-1.36/nft-ruleset.txt"),
];

/// A table `filter` of kube-proxy without rules.
const FILTER: &str = "*filter\n:KUBE-SERVICES - [0:0]\nCOMMIT\n";

/// Returns the addresses that a text may contain, with or without ports.
fn addresses(text: &str) -> HashSet<IpAddr> {
    let of_address = |c: char| c.is_ascii_hexdigit() || matches!(c, ':' | '.');
    let words = text.split(|c| !of_address(c));
    let readings = words.flat_map(|word| {
        let before_port = word.rsplit_once(':').map(|(ip, _)| ip);
        [Some(word), before_port]
    });
    readings
        .flatten()
        .filter_map(|word| word.parse().ok())
        .collect()
}

/// Imports a text, and checks the result against the text.
fn take(text: &str) {
    let given = [Text {
        origin: "rules".into(),
        text: text.into(),
    }];
    let lines = text.split('\n').count();
    match import(&given) {
        Err(super::Error::Line { line, .. }) => {
            assert!((1..=lines).contains(&line), "{line} of {lines}: {text}");
        }
        Err(_) => {}
        Ok(imported) => {
            for leftover in &imported.leftovers {
                assert!(leftover.line <= lines, "{leftover} of {lines}: {text}");
                assert!(leftover.text.chars().count() <= 301 && !leftover.text.contains('\n'));
            }
            let known = addresses(text);
            for service in imported.services.values() {
                let endpoints = service.ports.iter().flat_map(|port| &port.endpoints);
                let mut all = (service.cluster_ips.iter())
                    .chain(&service.external_ips)
                    .chain(&service.load_balancer_ips)
                    .copied()
                    .chain(service.source_ranges.iter().map(ipnet::IpNet::addr))
                    .chain(endpoints.map(|endpoint| endpoint.addr));
                assert!(all.all(|ip| known.contains(&ip)), "{service:?}: {text}");
                for port in &service.ports {
                    assert!(text.contains(&port.port.to_string()), "{service:?}: {text}");
                    assert!(port.endpoints.is_sorted(), "{service:?}");
                    for endpoint in &port.endpoints {
                        assert!(
                            text.contains(&endpoint.port.to_string()),
                            "{service:?}: {text}"
                        );
                    }
                }
            }
            let again = import(&given).unwrap();
            assert_eq!(again.services, imported.services);
        }
    }
}

fn change() -> impl Strategy<Value = Change> {
    chance::change(&[
        "\n",
        "\t",
        " ",
        "\"",
        "\\",
        "!",
        " ! ",
        "-",
        "--",
        "*",
        ":",
        "{",
        "}",
        "[",
        "]",
        ",",
        ".",
        "/",
        "@",
        "0",
        "99999",
        "4294967296",
        "18446744073709551616",
        "-1",
        "1e999",
        "NaN",
        "null",
        "goto ",
        "-j ",
        "-s ",
        "::1",
        "::",
        "KUBE-SVC-",
        "KUBE-SEP-",
        "service-",
        "é",
        "\u{2003}",
        "\0",
        "COMMIT\n",
        "tcp",
        "sctp",
        "comment \"x\"",
        "-p udp",
    ])
}

/// Generates lines to remove and lines to duplicate.
fn lines() -> impl Strategy<Value = Vec<(prop::sample::Index, bool)>> {
    prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..4)
}

fn changed(text: &str, changes: Vec<Change>, of_lines: Vec<(prop::sample::Index, bool)>) -> String {
    let mut all: Vec<&str> = text.split_inclusive('\n').collect();
    for (at, twice) in of_lines {
        let at = at.index(all.len());
        if twice {
            all.insert(at, all[at]);
        } else {
            all.remove(at);
        }
        if all.is_empty() {
            break;
        }
    }
    chance::changed(all.concat().into_bytes(), changes)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: chance::runs(100), ..ProptestConfig::default() })]

    #[test]
    fn changed_rules(
        which in 0_usize..2,
        changes in prop::collection::vec(change(), 0..6),
        of_lines in lines(),
    ) {
        take(&changed(EXAMPLES[which], changes, of_lines));
    }

    #[test]
    fn any_text(text in "[{}\\[\\]\":;,#*@!. \t\na-z0-9-]{0,200}") {
        take(&text);
        take(&format!("*nat\n-A OUTPUT -j KUBE-SERVICES\n-A KUBE-SERVICES {text}\nCOMMIT\n{FILTER}"));
        take(&format!("table ip kube-proxy {{\n\tchain services {{\n\t\t{text}\n\t}}\n\tmap service-ips {{\n\t\telements = {{ {text} }}\n\t}}\n}}\n"));
    }
}

/// Returns a rule for a port at a service's address.
fn rule(ip: &str, comment: &str, port: usize, to: &str) -> String {
    format!(
        "-A KUBE-SERVICES -d {ip}/32 -p tcp -m comment --comment \"{comment}\" -m tcp --dport {port} -j {to}\n"
    )
}

/// Returns a table `nat` with these rules, and a table `filter` without rules.
fn tables(rules: &str) -> String {
    format!("*nat\n-A OUTPUT -j KUBE-SERVICES\n{rules}COMMIT\n{FILTER}")
}

/// Returns a distinct address for each number.
fn address(net: u8, number: usize) -> String {
    format!("{net}.{}.{}.1", number / 250, 1 + number % 250)
}

/// The chains of a service with one endpoint.
const CHAINS: &str = "-A KUBE-EXT-A -m comment --comment x -j KUBE-MARK-MASQ\n-A KUBE-EXT-A -j KUBE-SVC-A\n\
    -A KUBE-SVC-A -m comment --comment x -j KUBE-SEP-A\n\
    -A KUBE-SEP-A -s 10.0.0.1/32 -m comment --comment x -j KUBE-MARK-MASQ\n\
    -A KUBE-SEP-A -p tcp -m comment --comment x -m tcp -j DNAT --to-destination 10.0.0.1:80\n";

fn endpoints(count: usize) -> String {
    let mut rules = rule("10.96.0.1", "a/b cluster IP", 80, "KUBE-SVC-A");
    for n in 0..count {
        let share = 1.0 / f64::from(u32::try_from(count - n).unwrap());
        let share = if n + 1 == count {
            String::new()
        } else {
            format!("-m statistic --mode random --probability {share:.11} ")
        };
        let ip = address(10, n);
        let _ = writeln!(
            rules,
            "-A KUBE-SVC-A -m comment --comment x {share}-j KUBE-SEP-{n}\n\
             -A KUBE-SEP-{n} -s {ip}/32 -m comment --comment x -j KUBE-MARK-MASQ\n\
             -A KUBE-SEP-{n} -p tcp -m comment --comment x -m tcp -j DNAT --to-destination {ip}:80"
        );
    }
    tables(&rules)
}

fn ports(count: usize) -> String {
    let port = |n| {
        rule(
            "10.96.0.1",
            &format!("a/b:p{n} cluster IP"),
            1 + n,
            "KUBE-SVC-A",
        )
    };
    tables(&((0..count).map(port).collect::<String>() + CHAINS))
}

fn external_ips(count: usize) -> String {
    let ip = |n| rule(&address(20, n), "a/b external IP", 80, "KUBE-EXT-A");
    let rules: String = (0..count).map(ip).collect();
    let cluster_ip = rule("10.96.0.1", "a/b cluster IP", 80, "KUBE-SVC-A");
    tables(&(cluster_ip + &rules + CHAINS))
}

fn node_addresses(count: usize) -> String {
    let mut rules = rule("10.96.0.1", "a/b cluster IP", 80, "KUBE-SVC-A");
    for n in 0..count {
        let ip = address(20, n);
        let _ = writeln!(
            rules,
            "-A KUBE-SERVICES -d {ip}/32 -m comment --comment x -j KUBE-NODEPORTS"
        );
    }
    tables(&(rules + CHAINS))
}

fn not_understood(count: usize) -> String {
    let line = "-A KUBE-SERVICES -m what --comment \"a/b x\" -j KUBE-SVC-A\n";
    tables(&line.repeat(count))
}

fn elements(count: usize) -> String {
    let mut text = "table ip kube-proxy {\n\tchain nat-output {\n\t\tjump services\n\t}\n\tchain services {\n\t\t\
        ip daddr . meta l4proto . th dport vmap @service-ips\n\t}\n\tmap service-nodeports {\n\t\telements = { "
        .to_owned();
    for n in 0..count {
        let _ = writeln!(text, "tcp . {n} : goto external-AAAAAAAA-a/b{n}/tcp/p,");
    }
    text + " }\n\t}\n}\n"
}

/// Compares the time for many objects with the time for a tenth of them.
#[test]
fn importing_takes_time_by_the_length() {
    type Make = fn(usize) -> String;
    let makes: [(&str, Make); 6] = [
        ("endpoints of a service", endpoints),
        ("ports of a service", ports),
        ("external IPs of a service", external_ips),
        ("addresses for node ports", node_addresses),
        ("elements", elements),
        ("lines that are not understood", not_understood),
    ];
    // 2 000 and 20 000 in a long run.
    let few = chance::runs(100).min(2000) as usize;
    for (what, make) in makes {
        let time = |count| {
            let given = [Text {
                origin: "rules".into(),
                text: make(count),
            }];
            shortest(|| import(&given).unwrap().services.len())
        };
        let (less, more) = (time(few), time(10 * few));
        eprintln!("{what}: {less:?} for {few}, {more:?} for ten times as many");
        assert!(
            more < less * 20 + Duration::from_millis(5),
            "{what}: {less:?}, and {more:?} for ten times as much"
        );
    }
}
