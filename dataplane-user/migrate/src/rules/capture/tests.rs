//! Tests with rules of sidecars, and with changed rules that no configuration can express.

use std::collections::BTreeSet;

use ipnet::IpNet;
use kernel::routing::Way;
use proptest::prelude::*;

use super::{said::Dns, *};
use crate::text::chance::{self, changed};

/// The rules for the defaults of Istio's injector, as `iptables-save` prints them, but with ranges, ports and DNS
/// capture.
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

/// Translates rules of IPv4 to IPv6.
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
        takes_inbound: true,
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

/// Istio's CNI plug-in writes such rules by default.
#[test]
fn outbound_ports_of_the_sidecar_itself_are_left_out() {
    let own = "-A ISTIO_OUTPUT -p tcp -m tcp --dport 15021 -j RETURN";
    let excluded = "-A ISTIO_OUTPUT -p tcp -m tcp --dport 3306 -j RETURN";
    let text = ISTIO.replace(excluded, &format!("{own}\n{excluded}"));
    assert_ne!(text, ISTIO);
    let (capture, known) = (of(&text).unwrap(), of(ISTIO).unwrap());
    assert_eq!(capture.own_ports, [15008, 15020, 15021].into());
    assert_eq!(
        capture,
        Capture {
            own_ports: capture.own_ports.clone(),
            ..known
        }
    );
}

#[test]
fn the_rules_of_open_service_mesh_become_a_capture() {
    let wanted = Capture {
        owner: "Open Service Mesh",
        outbound: 15001,
        inbound: 15003,
        takes_inbound: true,
        exclude_ranges: nets(&["192.0.2.0/24", "::/0"]),
        exclude_ports: [25, 26].into(),
        exclude_inbound: [6379, 7070].into(),
        uids: [1500].into(),
        own_ports: [15010, 15901].into(),
        missing: Some("IPv6"),
        ..Capture::default()
    };
    assert_eq!(of(OSM), Ok(wanted));
    // In the form of the wrapper's commands, which insert each exclusion before the other rules.
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

/// A rule that the configuration cannot express is an error with its line.
#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn a_rule_without_a_counterpart_is_an_error_with_its_line() {
    let line = |text: &str, of: &str| 1 + text.lines().position(|line| line == of).unwrap();
    let rules = [
        (
            "-A ISTIO_OUTPUT -j ISTIO_OUTPUT_DNS",
            "-A ISTIO_OUTPUT -m owner ! --gid-owner 5 -j RETURN",
        ),
        (
            "-A ISTIO_OUTPUT -m owner --gid-owner 888 -j RETURN",
            "-A ISTIO_OUTPUT -m owner --gid-owner java -j RETURN",
        ),
        (
            "-A PREROUTING -p tcp -j ISTIO_INBOUND",
            "-A PREROUTING -i eth1 -j RETURN",
        ),
        (":OUTPUT ACCEPT [0:0]", "-A PREROUTING -i eth+ -j RETURN"),
        (":OUTPUT ACCEPT [0:0]", "-A OUTPUT -o eth+ -j RETURN"),
        (
            "-A ISTIO_INBOUND -p tcp -m tcp --dport 15008 -j RETURN",
            "-A OUTPUT -o eth1 -j RETURN",
        ),
        (
            ":OUTPUT ACCEPT [0:0]",
            "-A OUTPUT -d 192.0.2.1/32 -j ACCEPT",
        ),
        (
            ":OUTPUT ACCEPT [0:0]",
            "-A PREROUTING -i eth1 -d 10.2.0.0/16 -j ISTIO_REDIRECT",
        ),
        (
            ":OUTPUT ACCEPT [0:0]",
            "-A PREROUTING -i eth1 -j ISTIO_REDIRECT",
        ),
        (
            ":OUTPUT ACCEPT [0:0]",
            "-A PREROUTING -i eth+ -d 10.0.0.0/8 -j ISTIO_REDIRECT",
        ),
        (
            ":OUTPUT ACCEPT [0:0]",
            "-A PREROUTING -i lo -d 10.0.0.0/8 -j ISTIO_REDIRECT",
        ),
        (
            "-A ISTIO_INBOUND -p tcp -m tcp --dport 15008 -j RETURN",
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
            "-A ISTIO_OUTPUT -p udp -m udp --dport 53 -j RETURN",
        ),
        (
            ":OUTPUT ACCEPT [0:0]",
            "-A ISTIO_OUTPUT -s 127.0.0.7/32 -o lo -j RETURN",
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
    let gone = |rule: &str| {
        assert!(ISTIO.contains(rule), "{rule}");
        of(&ISTIO.replacen(rule, "", 1))
            .map(drop)
            .expect_err(rule)
            .what
    };
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
        assert!(of(none).unwrap_err().what.contains("no rule of Istio"));
    }
    let native = |rule: &str| {
        let text = format!(
            "table inet istio-proxy-nat {{\n\tchain istio-output {{\n\t\t{rule}\n\t}}\n}}\n"
        );
        let read = read(&[Text {
            origin: "nft",
            form: Form::Nft,
            text: &text,
        }]);
        read.unwrap_err().to_string()
    };
    assert!(native("").contains("no rule of Istio"));
    let by_nft = read(&[Text {
        origin: "nft",
        form: Form::Nft,
        text: "table ip nat {\n\tchain ISTIO_OUTPUT {\n\t\treturn\n\t}\n}\n",
    }]);
    assert!(by_nft.unwrap_err().what.contains("iptables-save"));
    for (rule, what) in [
        ("tcp flags syn return", "\"flags\" is not understood"),
        ("meta skuid 1337 return", "no rule names an address"),
        ("ip daddr 192.0.2.1 accept", "no counterpart"),
    ] {
        let said = native(rule);
        assert!(
            said.starts_with("nft:3: ") && said.contains(what) && said.ends_with(rule),
            "{said}"
        );
    }
}

#[test]
fn only_some_users_and_groups_are_captured() {
    let with = |rules: &str| {
        let after = "-A ISTIO_OUTPUT -m owner --gid-owner 888 -j RETURN\n";
        of(&ISTIO.replacen(after, &format!("{after}{rules}"), 1))
    };
    let some = "-A ISTIO_OUTPUT -m owner ! --gid-owner 5 -m owner ! --uid-owner 6 -m owner ! --gid-owner 7 -j RETURN\n";
    let found = with(some).unwrap();
    assert_eq!(
        (found.include_uids, found.include_gids),
        ([6].into(), [5, 7].into())
    );
    assert_eq!(found.gids, [888, 1338].into());
    // Both rules together would capture only connections that match both.
    let fault = with(&format!(
        "{some}-A ISTIO_OUTPUT -m owner ! --gid-owner 5 -j RETURN\n"
    ));
    assert!(fault.unwrap_err().what.contains("a rule before"));
}

#[test]
fn rules_that_capture_no_inbound_connection_say_so() {
    for rule in [
        "-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT\n",
        "-A PREROUTING -p tcp -j ISTIO_INBOUND\n",
    ] {
        assert!(ISTIO.contains(rule));
        let found = of(&ISTIO.replacen(rule, "", 1)).unwrap();
        assert!(
            !found.takes_inbound && found.exclude_inbound.is_empty(),
            "{rule}"
        );
    }
}

#[test]
fn an_interface_that_the_rules_leave_alone_is_excluded() {
    let first = |rules: &str| {
        let after = ":OUTPUT ACCEPT [0:0]\n";
        ISTIO.replacen(after, &format!("{after}{rules}"), 1)
    };
    let found = of(&first("-A PREROUTING -i eth1 -j RETURN\n")).unwrap();
    assert_eq!(found.exclude_interfaces, ["eth1".to_owned()].into());
    // For outbound connections, routes give the ranges of the interface.
    let both = first("-A PREROUTING -i eth1 -j RETURN\n-A OUTPUT -o eth1 -j RETURN\n");
    let found = of(&both).unwrap();
    let fault = found.clone().by_routes(None).unwrap_err();
    assert!(
        fault.place == "saved:11" && fault.what.contains("does not know its interface"),
        "{fault}"
    );
    let way = Way {
        to: "10.7.0.0/16".parse().unwrap(),
        metric: 0,
        by: vec!["eth1".to_owned()],
    };
    let ranges = found.by_routes(Some(&[way])).unwrap().exclude_ranges;
    assert_eq!(ranges, nets(&["10.1.0.0/16", "10.7.0.0/16"]));
    let without = both
        .replace("-A ISTIO_OUTPUT -d 10.0.0.0/8 -j ISTIO_REDIRECT\n", "")
        .replace("-A ISTIO_OUTPUT -j ISTIO_OUTPUT_DNS\n", "");
    let without: String = without
        .split_inclusive('\n')
        .filter(|line| !line.starts_with("-A ISTIO_OUTPUT_DNS"))
        .collect();
    let found = of(&without).unwrap();
    assert_eq!(found.exclude_interfaces, ["eth1".to_owned()].into());
    assert_eq!(
        found.exclude_ranges,
        nets(&["0.0.0.0/0", "10.1.0.0/16", "::/0"])
    );
}

#[test]
fn connections_that_come_in_by_an_interface_are_captured_as_outbound_ones() {
    let first = |text: &str, rules: &str| {
        let after = ":OUTPUT ACCEPT [0:0]\n";
        text.replacen(after, &format!("{after}{rules}"), 1)
    };
    let redirect = "-A PREROUTING -i eth1 -d 10.0.0.0/8 -j ISTIO_REDIRECT\n";
    let wanted = Capture {
        virtual_interfaces: ["eth1".to_owned()].into(),
        ..of(ISTIO).unwrap()
    };
    assert_eq!(of(&first(ISTIO, redirect)), Ok(wanted.clone()));
    // Inbound connections from this interface are not captured.
    let left = "-A PREROUTING -i eth1 -j RETURN\n";
    let found = of(&first(ISTIO, &format!("{redirect}{left}")));
    let both = Capture {
        exclude_interfaces: ["eth1".to_owned()].into(),
        ..wanted
    };
    assert_eq!(found, Ok(both));
    let fault = of(&first(ISTIO, &format!("{left}{redirect}"))).unwrap_err();
    assert!(
        fault
            .what
            .contains("leaves connections at this interface alone"),
        "{fault}"
    );
    // The rule must be present in both families, or absent in both.
    let ours = first(ISTIO, redirect);
    let other = of(&format!("{ours}{}", v6(ISTIO))).unwrap_err();
    assert!(other.what.contains("IPv4 and IPv6 differ"), "{other}");
    assert!(of(&format!("{ours}{}", v6(&ours))).is_ok());
}

/// Excluded ranges do not apply at virtual interfaces.
#[test]
fn a_range_that_a_rule_before_leaves_alone_is_captured_at_virtual_interfaces_only() {
    let left = "-A ISTIO_OUTPUT -d 10.1.0.0/16 -j RETURN";
    let none = ISTIO.replace(left, "-A ISTIO_OUTPUT -d 10.0.0.0/8 -j RETURN");
    let found = of(&none).unwrap();
    assert!(found.include_ranges.is_empty(), "{found:?}");
    let excluded = ["0.0.0.0/0", "10.0.0.0/8", "::/0"];
    assert_eq!(found.exclude_ranges, nets(&excluded));
    let after = ":OUTPUT ACCEPT [0:0]\n";
    let redirect = "-A PREROUTING -i eth1 -d 10.0.0.0/8 -j ISTIO_REDIRECT\n";
    let found = of(&none.replacen(after, &format!("{after}{redirect}"), 1)).unwrap();
    assert_eq!(found.include_ranges, nets(&["10.0.0.0/8"]));
    let excluded = ["10.0.0.0/9", "10.128.0.0/9"];
    assert_eq!(found.exclude_ranges, nets(&excluded));
    // A single address cannot be split.
    let one = none.replace("10.0.0.0/8", "10.0.0.1/32");
    let redirect = redirect.replace("10.0.0.0/8", "10.0.0.1/32");
    let fault = of(&one.replacen(after, &format!("{after}{redirect}"), 1)).unwrap_err();
    assert!(fault.what.contains("leaves the address alone"), "{fault}");
}

#[test]
fn ranges_of_loopback_are_captured_unless_a_rule_before_leaves_them_alone() {
    let own = "-A ISTIO_OUTPUT -d 10.0.0.0/8 -j ISTIO_REDIRECT\n";
    let text = ISTIO.replacen(
        own,
        &format!("{own}-A ISTIO_OUTPUT -d 127.1.2.3/32 -j ISTIO_REDIRECT\n"),
        1,
    );
    // Removes the rules that exclude the pod's connections to itself.
    let text: String = text
        .split_inclusive('\n')
        .filter(|line| !(line.contains("-o lo -p tcp") && line.ends_with("-j RETURN\n")))
        .collect();
    let found = of(&text).unwrap();
    assert_eq!(found.include_ranges, nets(&["10.0.0.0/8", "127.1.2.3/32"]));
    let left = |range: &str| {
        let before = "-d 127.0.0.1/32 -j RETURN";
        of(&text.replace(
            before,
            &format!("{before}\n-A ISTIO_OUTPUT -d {range} -j RETURN"),
        ))
    };
    let fault = left("127.0.0.0/8").unwrap_err();
    assert!(fault.text.contains("127.1.2.3"), "{fault}");
    let ranges = left("127.1.0.0/16").unwrap().include_ranges;
    assert_eq!(ranges, nets(&["10.0.0.0/8"]));
    let proxys = of(&text.replace("127.1.2.3", "127.0.0.1")).unwrap_err();
    assert!(
        proxys.text.contains("127.0.0.1/32 -j ISTIO_REDIRECT"),
        "{proxys}"
    );
}

/// Rules of TPROXY mode, as `iptables-save` prints them.
const TPROXY: &str = "\
*mangle
-A PREROUTING -i net1 -j RETURN
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A PREROUTING -p tcp -m mark --mark 0x539 -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff
-A PREROUTING -m conntrack --ctstate INVALID -j ISTIO_DROP
-A OUTPUT -o net1 -j RETURN
-A OUTPUT -o lo -p tcp -m mark --mark 0x539 -j RETURN
-A OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m owner --uid-owner 1337 -j MARK --set-xmark 0x53a/0xffffffff
-A OUTPUT -p tcp -m connmark --mark 0x539 -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff
-A ISTIO_DIVERT -j MARK --set-xmark 0x539/0xffffffff
-A ISTIO_DIVERT -j ACCEPT
-A ISTIO_DROP -j DROP
-A ISTIO_INBOUND -p tcp -m mark --mark 0x539 -j RETURN
-A ISTIO_INBOUND -s 127.0.0.6/32 -i lo -p tcp -j RETURN
-A ISTIO_INBOUND -i lo -p tcp -m mark ! --mark 0x53a -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 9090 -j RETURN
-A ISTIO_INBOUND -p tcp -m conntrack --ctstate RELATED,ESTABLISHED -j ISTIO_DIVERT
-A ISTIO_INBOUND -p tcp -j ISTIO_TPROXY
-A ISTIO_TPROXY ! -d 127.0.0.1/32 -p tcp -j TPROXY --on-port 15006 --on-ip 0.0.0.0 --tproxy-mark 0x539/0xffffffff
COMMIT
";

/// TPROXY captures the same connections as REDIRECT.
#[test]
fn tproxy_captures_the_same() {
    let redirect = "-A PREROUTING -p tcp -j ISTIO_INBOUND\n";
    let nat = ISTIO.replace(redirect, "");
    let nat: String = nat
        .split_inclusive('\n')
        .filter(|line| {
            !line.starts_with("-A ISTIO_INBOUND -p")
                || line.contains("1502")
                || line.contains("15008")
        })
        .collect();
    let found = of(&format!("{TPROXY}{nat}")).unwrap();
    let wanted = Capture {
        by_tproxy: true,
        drops_invalid: true,
        exclude_interfaces: ["net1".to_owned()].into(),
        ..of(ISTIO).unwrap()
    };
    assert_eq!(found, wanted);
    let fault = |text: &str| of(text).unwrap_err().what;
    assert!(fault(&format!("{TPROXY}{ISTIO}")).contains("by REDIRECT and by TPROXY"));
    assert!(fault(TPROXY).contains("none in table nat"));
    for (rule, other) in [
        ("-A ISTIO_DROP -j DROP", "-A ISTIO_DROP -j ACCEPT"),
        (
            "-o lo -p tcp -m mark --mark 0x539 -j RETURN",
            "-o eth0 -p tcp -m mark --mark 0x539 -j RETURN",
        ),
        ("--ctstate INVALID", "--ctstate NEW"),
        (
            "-A ISTIO_INBOUND -s 127.0.0.6/32 -i lo",
            "-A ISTIO_INBOUND -s 127.0.0.6/32 -i eth0",
        ),
        (
            "-A ISTIO_TPROXY ! -d 127.0.0.1/32",
            "-A ISTIO_TPROXY ! -d 192.0.2.1/32",
        ),
        (
            "-A PREROUTING -i net1 -j RETURN",
            "-A PREROUTING -s 192.0.2.1/32 -j ACCEPT",
        ),
    ] {
        assert!(TPROXY.contains(rule), "{rule}");
        let text = TPROXY.replacen(rule, other, 1);
        let line = text.lines().position(|line| line.contains(other)).unwrap() + 1;
        let fault = of(&format!("{text}{nat}")).unwrap_err();
        assert_eq!(fault.place, format!("saved:{line}"), "{fault}");
    }
}

const AMBIENT_RULES: &str = "\
*mangle
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff
-A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
COMMIT
*raw
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -p udp -m mark --mark 0x539/0xfff -m udp --dport 53 -j CT --zone 1
-A ISTIO_PRERT -p udp -m mark ! --mark 0x539/0xfff -m udp --sport 53 -j CT --zone 1
COMMIT
*nat
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -d 169.254.7.127/32 -p tcp -m tcp -j ACCEPT
-A ISTIO_OUTPUT ! -o lo -p udp -m mark ! --mark 0x539/0xfff -m udp --dport 53 -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -p tcp -m tcp --dport 53 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -j ACCEPT
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
-A ISTIO_PRERT -s 169.254.7.127/32 -p tcp -m tcp -j ACCEPT
-A ISTIO_PRERT ! -d 127.0.0.1/32 -p tcp -m tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006
COMMIT
";

#[test]
fn the_rules_of_ambient_mode_become_a_capture() {
    let wanted = Capture {
        owner: AMBIENT,
        outbound: 15001,
        inbound: 15006,
        takes_inbound: true,
        dns: Some(Dns {
            port: 15053,
            any: true,
        }),
        probes: ["169.254.7.127".parse().unwrap()].into(),
        own_ports: [15008].into(),
        exclude_ranges: nets(&["::/0"]),
        missing: Some("IPv6"),
        ..Capture::default()
    };
    assert_eq!(of(AMBIENT_RULES), Ok(wanted));
    let six = v6(AMBIENT_RULES).replace("169.254.7.127/32", "fd16:9254:7127::1/128");
    let both = of(&format!("{AMBIENT_RULES}{six}")).unwrap();
    assert!(both.exclude_ranges.is_empty() && both.missing.is_none() && both.probes.len() == 2);
    let without = |rule: &str| {
        let line = AMBIENT_RULES
            .lines()
            .find(|line| line.contains(rule))
            .unwrap();
        AMBIENT_RULES.replacen(&format!("{line}\n"), "", 1)
    };
    // The rules of an ingress gateway.
    let inbound = without("--to-ports 15006");
    assert!(!of(&inbound).unwrap().takes_inbound);
    assert!(
        of(&without("--to-ports 15001"))
            .unwrap_err()
            .what
            .contains("outbound")
    );
    let line = |other: &str, rule: &str| {
        let text = AMBIENT_RULES.replacen(other, rule, 1);
        assert_ne!(text, AMBIENT_RULES);
        let line = text.lines().position(|line| line.contains(rule)).unwrap() + 1;
        let fault = of(&text).unwrap_err();
        assert_eq!(fault.place, format!("saved:{line}"), "{fault}");
        fault.what
    };
    let tap = "-A ISTIO_PRERT -i tap0 -p tcp -j REDIRECT --to-ports 15001";
    let text = AMBIENT_RULES.replacen("-A ISTIO_PRERT -s", &format!("{tap}\n-A ISTIO_PRERT -s"), 1);
    let found = of(&text).unwrap();
    assert_eq!(found.virtual_interfaces, ["tap0".to_owned()].into());
    assert!(found.exclude_interfaces.is_empty(), "{found:?}");
    let left = format!("{tap}\n-A ISTIO_PRERT -i tap0 -p tcp -j RETURN");
    let found = of(&text.replacen(tap, &left, 1)).unwrap();
    assert_eq!(found.exclude_interfaces, ["tap0".to_owned()].into());
    let elsewhere = of(&text.replacen(tap, &tap.replace("15001", "15002"), 1));
    assert!(elsewhere.unwrap_err().what.contains("another port"));
    let of_other = "-p tcp -m mark --mark 0x112/0xfff -j ACCEPT";
    assert!(line("-p tcp -m mark --mark 0x111/0xfff -j ACCEPT", of_other).contains("ztunnel"));
    line("-d 169.254.7.127/32", "-d 169.254.7.128/32");
    line(
        "-A ISTIO_PRERT -s 169.254.7.127/32 -p tcp -m tcp",
        "-A ISTIO_PRERT -s 169.254.7.127/32 -p udp -m udp",
    );
    line("-m connmark --mark 0x111/0xfff", "-m connmark --mark 0x111");
    let without_inbound = without("--to-ports 15006").replace(
        "-A ISTIO_PRERT -s 169.254.7.127/32 -p tcp -m tcp -j ACCEPT\n",
        "",
    );
    assert!(!of(&without_inbound).unwrap().takes_inbound);
    let node = "*nat\n-A POSTROUTING -j ISTIO_POSTRT\n-A ISTIO_POSTRT -p tcp -m owner --socket-exists -m set --match-set istio-inpod-probes-v4 dst -j SNAT --to-source 169.254.7.127\nCOMMIT\n";
    let fault = of(node).unwrap_err();
    assert!(
        fault.place == "saved:2" && fault.what.contains("the node's"),
        "{fault}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: chance::runs(100), ..ProptestConfig::default() })]

    /// Reading any text ends, and a fault names one of its lines.
    #[test]
    fn changed_rules_of_a_sidecar(
        which in 0_usize..4,
        changes in prop::collection::vec(chance::change(&[
            "\n", " ", "! ", "-j ", "-d ", "--dport ", "-I ISTIO_OUTPUT 9 ", "99999", "::1/128", "0.0.0.0/0", "*nat\n",
            "COMMIT\n", "ISTIO_", "é", "\"",
        ]), 0..5),
    ) {
        let text = changed([ISTIO, OSM, TPROXY, AMBIENT_RULES][which].as_bytes().to_vec(), changes);
        if let Err(fault) = of(&text) {
            let line = fault.place.strip_prefix("saved:").map(|line| line.parse().unwrap());
            let lines = 1..=text.lines().count().max(1);
            assert!(line.is_none_or(|line: usize| lines.contains(&line)), "{fault}: {text}");
        }
    }
}
