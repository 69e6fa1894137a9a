//! Tests with the rules of meshes and of kube-proxy.

use takeover::owners::{ISTIO_AMBIENT, ISTIO_SIDECAR, OSM};

use super::{
    super::{
        ruleset::Form,
        simulated::{data, load},
    },
    *,
};

const ISTIO: &[&Owner] = &[ISTIO_SIDECAR, ISTIO_AMBIENT];

fn removal(rules: &str, owners: &[&Owner]) -> Removal {
    let text = Text {
        origin: "iptables-nft",
        form: Form::Saved,
        text: rules,
    };
    plan(&text, owners).unwrap()
}

/// Returns the chains and rules that are left after a removal.
fn after(rules: &str, removal: &Removal) -> Vec<String> {
    let left = load(rules, &removal.input);
    let (mut table, mut all) = ("", Vec::new());
    for line in left.lines() {
        match line.strip_prefix('*') {
            Some(name) => table = name,
            None if line == "COMMIT" => {}
            None => all.push(format!("{table} {}", line.trim_end_matches(" - [0:0]"))),
        }
    }
    all
}

#[test]
fn nothing_of_the_owner_is_left_and_everything_of_others() {
    for (name, owners, signs) in [
        (
            "kube-proxy-1.36/iptables-save.txt",
            &[KUBE_PROXY][..],
            &["KUBE-"][..],
        ),
        ("rules/ipvs.save", &[KUBE_PROXY], &["KUBE-"]),
        ("rules/sidecar.save", ISTIO, &["ISTIO"]),
        (
            "rules/sidecar-tproxy.save",
            ISTIO,
            &["ISTIO", "0x539", "0x53a"],
        ),
        ("rules/ambient.save", ISTIO, &["ISTIO", "0x111"]),
        ("rules/ambient-host.save", ISTIO, &["ISTIO", "ztunnel-P"]),
        (
            "rules/meshes.save",
            &[OSM],
            &[
                "PROXY_IN_",
                "PROXY_INBOUND",
                "PROXY_OUTPUT",
                "PROXY_REDIRECT",
            ],
        ),
        (
            "rules/node.save",
            &[KUBE_PROXY],
            &["KUBE-FORWARD", "KUBE-SERVICES"],
        ),
    ] {
        let rules = data(name);
        let removal = removal(&rules, owners);
        let left = after(&rules, &removal);
        let stays = |line: &String| {
            removal
                .stays
                .iter()
                .any(|stays| stays.ends_with(line.split_once(' ').unwrap().1))
        };
        for line in left
            .iter()
            .filter(|line| !line.contains("KUBE-FIREWALL") && !stays(line))
        {
            let owned = signs.iter().any(|sign| line.contains(sign));
            assert!(!owned, "{name}: {line}");
        }
        // The lines without a sign of the owner are lines of others.
        let others = Removal::default();
        let before = after(&rules, &others);
        let gone: Vec<&String> = before.iter().filter(|line| !left.contains(line)).collect();
        for line in gone {
            assert!(
                signs.iter().any(|sign| line.contains(sign)) || line.contains("ztunnel-"),
                "{name}: {line} is gone"
            );
        }
        assert!(
            removal.chains > 0 && removal.jumps > 0,
            "{name}: {removal:?}"
        );
    }
}

#[test]
fn what_others_need_stays_and_rules_that_are_no_jumps() {
    let rules = "*nat\n:POSTROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:KUBE-HP-X - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n\
        :KUBE-SERVICES - [0:0]\n:mine - [0:0]\n\
        -A OUTPUT -j KUBE-SERVICES\n-A OUTPUT -j mine\n-A OUTPUT -j KUBE-SERVICES\n\
        -A POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE\n\
        -A KUBE-HP-X -s 10.244.1.5/32 -j KUBE-MARK-MASQ\n-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000\n\
        -A KUBE-SERVICES -j KUBE-MARK-MASQ\n-A mine -g KUBE-SERVICES\n-A mine -j ACCEPT\nCOMMIT\n";
    let removal = removal(rules, &[KUBE_PROXY]);
    let wanted = "*nat\n:KUBE-SERVICES - [0:0]\n-D OUTPUT -j KUBE-SERVICES\n-D OUTPUT -j KUBE-SERVICES\n\
        -D mine -g KUBE-SERVICES\n-X KUBE-SERVICES\nCOMMIT\n";
    assert_eq!(removal.input, wanted);
    assert_eq!((removal.jumps, removal.chains), (3, 1));
    assert_eq!(removal.stays.len(), 2, "{:?}", removal.stays);
    assert!(
        removal.stays[0].contains("chain KUBE-MARK-MASQ: host ports needs it"),
        "{:?}",
        removal.stays
    );
    assert!(
        removal.stays[1].contains("KUBE-LOOP-BACK"),
        "{:?}",
        removal.stays
    );
    assert_eq!(removal_of_nothing(), Removal::default());
}

fn removal_of_nothing() -> Removal {
    removal(
        "*nat\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -j ACCEPT\nCOMMIT\n",
        &[KUBE_PROXY],
    )
}

/// Comments, names and values that quote the owner's chains are no jumps.
#[test]
fn rules_that_only_speak_of_the_owner_stay() {
    let of_others = [
        r#"-A FORWARD -m comment --comment "-j KUBE-SERVICES" -j ACCEPT"#,
        r#"-A FORWARD -m comment --comment "a\" -j KUBE-SERVICES" -j ACCEPT"#,
        "-A FORWARD -m comment --comment KUBE-SERVICES -j ACCEPT",
        "-A FORWARD -j MY-KUBE-SERVICES",
        "-A MY-KUBE-SERVICES -m comment --comment COMMIT -j ACCEPT",
    ];
    let rules = format!(
        "*filter\n:FORWARD ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n:MY-KUBE-SERVICES - [0:0]\n{}\n\
         -A FORWARD -j KUBE-SERVICES\nCOMMIT\n",
        of_others.join("\n")
    );
    let removal = removal(&rules, &[KUBE_PROXY]);
    let wanted =
        "*filter\n:KUBE-SERVICES - [0:0]\n-D FORWARD -j KUBE-SERVICES\n-X KUBE-SERVICES\nCOMMIT\n";
    assert_eq!(removal.input, wanted);
    assert!(removal.stays.is_empty(), "{:?}", removal.stays);
}

#[test]
fn a_text_that_is_not_understood_is_left_alone() {
    let of = |text| {
        let text = Text {
            origin: "iptables-nft",
            form: Form::Saved,
            text,
        };
        plan(&text, &[KUBE_PROXY])
    };
    let error = of("*nat\n:KUBE-SERVICES - [0:0]\nrubbish\nCOMMIT\n")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("line 3") && error.contains("rubbish"),
        "{error}"
    );
    // The kernel takes a comment with a line break in it, and iptables-save prints the break.
    let error = of("*filter\n:FORWARD ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n\
        -A FORWARD -m comment --comment \"a\n-A FORWARD -j KUBE-SERVICES\nb\" -j ACCEPT\nCOMMIT\n")
    .unwrap_err()
    .to_string();
    assert!(error.contains("line 4"), "{error}");
    // A rule whose target belongs to an unknown module is accepted: it belongs to another program.
    let known = of("*nat\n:KUBE-SERVICES - [0:0]\n-A OUTPUT -j NOSUCH --a 1\nCOMMIT\n").unwrap();
    assert_eq!(known.chains, 1);
}
