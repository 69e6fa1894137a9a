//! Rules of sidecars, and changes of them that no configuration expresses.

use std::collections::BTreeSet;

use ipnet::IpNet;
use proptest::prelude::*;

use super::*;
use crate::iptables::chance::{self, changed};

/// As `iptables-save` prints what Istio's injector asks for by default; the ranges, ports and DNS vary.
const ISTIO: &str = "\
*raw
-A PREROUTING -j ISTIO_INBOUND
-A OUTPUT -j ISTIO_OUTPUT_DNS
-A ISTIO_INBOUND -s 10.96.0.10/32 -p udp -m udp --sport 53 -j CT --zone 1
-A ISTIO_OUTPUT_DNS -p udp -m udp --dport 53 -m owner --uid-owner 1337 -j CT --zone 1
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp -m tcp --dport 15008 -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 15020 -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 9090 -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -p tcp -m tcp --dport 3306 -j RETURN
-A ISTIO_OUTPUT -p udp -m udp --dport 3306 -j RETURN
-A ISTIO_OUTPUT -s 127.0.0.6/32 -o lo -j RETURN
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m multiport ! --dports 53,15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -p tcp -m tcp ! --dport 53 -m owner ! --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m tcp ! --dport 15008 -m owner --gid-owner 1338 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -p tcp -m tcp ! --dport 53 -m owner ! --gid-owner 1338 -j RETURN
-A ISTIO_OUTPUT -m owner --gid-owner 1338 -j RETURN
-A ISTIO_OUTPUT -m owner --gid-owner 888 -j RETURN
-A ISTIO_OUTPUT -j ISTIO_OUTPUT_DNS
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
-A ISTIO_OUTPUT -d 10.1.0.0/16 -j RETURN
-A ISTIO_OUTPUT -d 10.0.0.0/8 -j ISTIO_REDIRECT
-A ISTIO_OUTPUT_DNS -d 10.96.0.10/32 -p tcp -m tcp --dport 53 -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT_DNS -d 10.96.0.10/32 -p udp -m udp --dport 53 -j REDIRECT --to-ports 15053
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
COMMIT
";

const OSM: &str = "\
*nat
-A PREROUTING -p tcp -j PROXY_INBOUND
-A OUTPUT -p tcp -j PROXY_OUTPUT
-A PROXY_INBOUND -p tcp -m multiport --dports 6379,7070 -j RETURN
-A PROXY_INBOUND -p tcp -m tcp --dport 15010 -j RETURN
-A PROXY_INBOUND -p tcp -m tcp --dport 15901 -j RETURN
-A PROXY_INBOUND -p tcp -j PROXY_IN_REDIRECT
-A PROXY_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15003
-A PROXY_OUTPUT -p tcp -m multiport --dports 25,26 -j RETURN
-A PROXY_OUTPUT -d 192.0.2.0/24 -j RETURN
-A PROXY_OUTPUT -m owner --uid-owner 1500 -j RETURN
-A PROXY_OUTPUT -d 127.0.0.1/32 -j RETURN
-A PROXY_OUTPUT -j PROXY_REDIRECT
-A PROXY_REDIRECT -p tcp -j REDIRECT --to-ports 15001
-A PROXY_REDIRECT -p tcp -m tcp --dport 15000 -j ACCEPT
COMMIT
";

fn of(text: &str) -> Result<Capture, Fault> {
    read(&[Text {
        origin: "saved",
        form: Form::Saved,
        text,
    }])
}

fn nets(texts: &[&str]) -> BTreeSet<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// The same for the other family.
fn v6(text: &str) -> String {
    let pairs = [
        ("127.0.0.1/32", "::1/128"),
        ("127.0.0.6/32", "::6/128"),
        ("10.1.0.0/16", "fd01::/32"),
        ("10.0.0.0/8", "fd00::/8"),
        ("10.96.0.10/32", "fd00::a/128"),
        ("192.0.2.0/24", "2001:db8::/32"),
    ];
    pairs
        .iter()
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

#[test]
fn istios_rules_become_ranges_ports_users_and_groups() {
    let wanted = Capture {
        owner: "Istio",
        outbound: 15001,
        inbound: 15006,
        include_ranges: nets(&["10.0.0.0/8"]),
        exclude_ranges: nets(&["10.1.0.0/16"]),
        exclude_ports: [3306].into(),
        exclude_inbound: [9090].into(),
        uids: [1337].into(),
        gids: [888, 1338].into(),
        dns: Some(Dns {
            port: 15053,
            any: false,
        }),
        resolvers: ["10.96.0.10".parse().unwrap()].into(),
        own_ports: [15008, 15020].into(),
        missing: Some("IPv6"),
        ..Capture::default()
    };
    assert_eq!(of(ISTIO), Ok(wanted.clone()));
    let both = Capture {
        include_ranges: nets(&["10.0.0.0/8", "fd00::/8"]),
        exclude_ranges: nets(&["10.1.0.0/16", "fd01::/32"]),
        resolvers: ["10.96.0.10".parse().unwrap(), "fd00::a".parse().unwrap()].into(),
        missing: None,
        ..wanted
    };
    assert_eq!(of(&format!("{ISTIO}{}", v6(ISTIO))), Ok(both));
}

#[test]
fn the_rules_of_open_service_mesh_become_a_capture() {
    let wanted = Capture {
        owner: "Open Service Mesh",
        outbound: 15001,
        inbound: 15003,
        exclude_ranges: nets(&["192.0.2.0/24", "::/0"]),
        exclude_ports: [25, 26].into(),
        exclude_inbound: [6379, 7070].into(),
        uids: [1500].into(),
        own_ports: [15010, 15901].into(),
        missing: Some("IPv6"),
        ..Capture::default()
    };
    assert_eq!(of(OSM), Ok(wanted));
    // As the commands write it, each exclusion before the other rules.
    let inserted = OSM
        .replace("-A PROXY_OUTPUT -d 192.0.2.0/24 -j RETURN\n", "")
        .replace(
            "-A PROXY_REDIRECT -p tcp -j",
            "-I PROXY_OUTPUT -d 192.0.2.0/24 -j RETURN\n-A PROXY_REDIRECT -p tcp -j",
        );
    assert_eq!(of(&inserted), of(OSM));
}

#[test]
fn what_is_captured_outbound_is_said_by_ranges_and_ports() {
    let with = |rules: &str| {
        let redirect = "-A ISTIO_OUTPUT -d 10.0.0.0/8 -j ISTIO_REDIRECT\n";
        let text = ISTIO.replace("-A ISTIO_OUTPUT -d 10.1.0.0/16 -j RETURN\n", "");
        assert!(text.contains(redirect));
        text.replace(redirect, rules)
    };
    let ports = "-A ISTIO_OUTPUT -p tcp -m tcp --dport 80 -j ISTIO_REDIRECT\n";
    let all = "-A ISTIO_OUTPUT -j ISTIO_REDIRECT\n";
    let none = of(&with(ports)).unwrap();
    assert_eq!(none.exclude_ranges, nets(&["0.0.0.0/0", "::/0"]));
    assert_eq!(none.include_ports, [80].into());
    let one = of(&with(all)).unwrap();
    assert_eq!(one.exclude_ranges, nets(&["::/0"]));
    let both = of(&(with(all) + &v6(&with(all)))).unwrap();
    assert!(both.exclude_ranges.is_empty() && both.include_ranges.is_empty());
    let mixed =
        of(&(with(all) + &v6(&with("-A ISTIO_OUTPUT -d 10.0.0.0/8 -j ISTIO_REDIRECT\n")))).unwrap();
    assert_eq!(mixed.include_ranges, nets(&["0.0.0.0/0", "fd00::/8"]));
}

/// What the configuration cannot express is an error with its line.
#[test]
fn a_rule_without_a_counterpart_is_an_error_with_its_line() {
    let line = |text: &str, of: &str| 1 + text.lines().position(|line| line == of).unwrap();
    let rules = [
        (
            "-A ISTIO_OUTPUT -m owner --gid-owner 888 -j RETURN",
            "-A ISTIO_OUTPUT -m owner ! --gid-owner 5 -j RETURN",
        ),
        (
            "-A ISTIO_OUTPUT -m owner --gid-owner 888 -j RETURN",
            "-A ISTIO_OUTPUT -m owner --gid-owner java -j RETURN",
        ),
        (":OUTPUT ACCEPT [0:0]", "-A PREROUTING -i eth1 -j RETURN"),
        (":OUTPUT ACCEPT [0:0]", "-A OUTPUT -o eth1 -j RETURN"),
        (
            ":OUTPUT ACCEPT [0:0]",
            "-A OUTPUT -d 192.0.2.1/32 -j ACCEPT",
        ),
        (
            ":OUTPUT ACCEPT [0:0]",
            "-A PREROUTING -i eth1 -d 10.0.0.0/8 -j ISTIO_REDIRECT",
        ),
        (":OUTPUT ACCEPT [0:0]", "-A ISTIO_WHAT -j RETURN"),
        (
            "-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT",
            "-A ISTIO_INBOUND -p tcp -m tcp --dport 1 -j RETURN",
        ),
        (
            ":OUTPUT ACCEPT [0:0]",
            "-A ISTIO_INBOUND -s 192.0.2.1/32 -p tcp -j RETURN",
        ),
        (
            ":OUTPUT ACCEPT [0:0]",
            "-A ISTIO_OUTPUT -p tcp -m tcp --dport 15012 -m mark --mark 0x1 -j RETURN",
        ),
        (
            ":OUTPUT ACCEPT [0:0]",
            "-A ISTIO_OUTPUT -p tcp -m tcp --dport 15001 -j RETURN",
        ),
        (
            ":OUTPUT ACCEPT [0:0]",
            "-A ISTIO_OUTPUT -p udp -m udp --dport 53 -j RETURN",
        ),
        (
            ":OUTPUT ACCEPT [0:0]",
            "-A ISTIO_OUTPUT -s 127.0.0.7/32 -o lo -j RETURN",
        ),
        (
            "-A ISTIO_OUTPUT -d 10.1.0.0/16 -j RETURN",
            "-A ISTIO_OUTPUT -d 10.1.2.0/24 -j ISTIO_REDIRECT",
        ),
        (
            "-A ISTIO_OUTPUT -d 10.1.0.0/16 -j RETURN",
            "-A ISTIO_OUTPUT -p tcp -m tcp --dport 80 -j ISTIO_REDIRECT",
        ),
        (
            "-A ISTIO_OUTPUT -d 10.1.0.0/16 -j RETURN",
            "-A ISTIO_OUTPUT -d 127.1.2.3/32 -j ISTIO_REDIRECT",
        ),
        (
            "-A ISTIO_OUTPUT -d 10.0.0.0/8 -j ISTIO_REDIRECT",
            "-A ISTIO_OUTPUT -d 10.2.0.0/16 -j RETURN",
        ),
        (
            "-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006",
            "-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 7",
        ),
        (
            "-A OUTPUT -j ISTIO_OUTPUT_DNS",
            "-A ISTIO_OUTPUT_DNS -j DROP",
        ),
    ];
    let wrong: Vec<String> = rules
        .iter()
        .filter_map(|(after, rule)| {
            let text = ISTIO.replacen(after, &format!("{after}\n{rule}"), 1);
            let found = of(&text);
            let place = format!("saved:{}", line(&text, rule));
            let good = |fault: &Fault| {
                fault.place == place && !fault.what.is_empty() && rule.ends_with(&fault.text)
            };
            let good = found.as_ref().is_err_and(good);
            (!good).then(|| format!("{rule}: {found:?}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let mangle = "*mangle\n-A PREROUTING -p tcp -j ISTIO_INBOUND\n-A ISTIO_INBOUND -p tcp -j ISTIO_TPROXY\nCOMMIT\n";
    assert_eq!(
        of(&format!("{mangle}{ISTIO}")).unwrap_err().place,
        "saved:2"
    );
    let gone = |rule: &str| {
        assert!(ISTIO.contains(rule), "{rule}");
        of(&ISTIO.replacen(rule, "", 1))
            .map(drop)
            .expect_err(rule)
            .what
    };
    assert!(gone("-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT\n").contains("inbound"));
    assert!(gone("-A PREROUTING -p tcp -j ISTIO_INBOUND\n").contains("inbound"));
    assert!(gone("-A OUTPUT -j ISTIO_OUTPUT\n").contains("OUTPUT"));
    assert!(gone("-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN\n").contains("loopback"));
    assert!(gone("-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001\n").contains("redirect"));
    assert!(gone("-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN\n").contains("family"));
    assert!(gone("-A ISTIO_OUTPUT_DNS -d 10.96.0.10/32 -p tcp -m tcp --dport 53 -j REDIRECT --to-ports 15053\n").contains("DNS"));
    let differ = v6(ISTIO).replace("--dport 9090", "--dport 9091");
    assert!(
        of(&format!("{ISTIO}{differ}"))
            .unwrap_err()
            .what
            .contains("differ")
    );
    assert!(
        of(&format!("{ISTIO}{ISTIO}"))
            .unwrap_err()
            .what
            .contains("twice")
    );
    for none in ["", "*nat\n-A OUTPUT -j PROXY_INIT_OUTPUT\nCOMMIT\n"] {
        assert!(
            of(none)
                .unwrap_err()
                .what
                .contains("no rule of Istio's sidecar")
        );
    }
    let native = read(&[Text {
        origin: "nft",
        form: Form::Nft,
        text: "table inet istio-proxy-nat {\n}\n",
    }]);
    assert!(native.unwrap_err().what.contains("nf_tables"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: chance::runs(100), ..ProptestConfig::default() })]

    /// Whatever the text: reading it ends, and a fault names a line of it.
    #[test]
    fn changed_rules_of_a_sidecar(
        which in 0_usize..2,
        changes in prop::collection::vec(chance::change(&[
            "\n", " ", "! ", "-j ", "-d ", "--dport ", "-I ISTIO_OUTPUT 9 ", "99999", "::1/128", "0.0.0.0/0", "*nat\n",
            "COMMIT\n", "ISTIO_", "é", "\"",
        ]), 0..5),
    ) {
        let text = changed([ISTIO, OSM][which].as_bytes().to_vec(), changes);
        if let Err(fault) = of(&text) {
            let line = fault.place.strip_prefix("saved:").map(|line| line.parse().unwrap());
            let lines = 1..=text.lines().count().max(1);
            assert!(line.is_none_or(|line: usize| lines.contains(&line)), "{fault}: {text}");
        }
    }
}
