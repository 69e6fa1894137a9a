//! Tests with rules of sidecars, whose changes a simulated kernel carries out.

use super::{
    super::{
        super::{
            cleanup::tables,
            ruleset::{Form, Text},
            simulated::load,
        },
        expected::Expected,
    },
    *,
};

/// Some rules of Open Service Mesh, as `iptables-save` prints them.
const WANTED: &str = "*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:PROXY_INBOUND - [0:0]\n:PROXY_OUTPUT - [0:0]\n\
    -A PREROUTING -p tcp -j PROXY_INBOUND\n-A OUTPUT -i eth9 -j RETURN\n-A OUTPUT -p tcp -j PROXY_OUTPUT\n\
    -A PROXY_INBOUND -p tcp -m tcp --dport 15010 -j RETURN\n-A PROXY_INBOUND -p tcp -m tcp --dport 15901 -j RETURN\n\
    -A PROXY_INBOUND -p tcp -j REDIRECT --to-ports 15003\n\
    -A PROXY_OUTPUT -m owner --uid-owner 1500 -j RETURN\n-A PROXY_OUTPUT -p tcp -j REDIRECT --to-ports 15001\nCOMMIT\n";

fn text(rules: &str) -> Text<'_> {
    Text {
        origin: "iptables-nft",
        form: Form::Saved,
        text: rules,
    }
}

fn of(now: &str, how: How, front: usize) -> Vec<Change> {
    let (now, wanted) = (text(now), text(WANTED));
    let (now, wanted) = (tables(&now).unwrap(), tables(&wanted).unwrap());
    let whose = Expected::osm().whose;
    changes(&now, &wanted, &wanted, &whose, how, &|_, _| front)
}

/// Returns the differences from the wanted rules, and the rules after the replacement.
fn replaced(now: &str) -> (Vec<String>, String) {
    let changes = of(now, How::Replace, 0);
    let differences = changes.iter().flat_map(|change| change.differences.clone());
    let input: String = changes.iter().map(|change| change.input.as_str()).collect();
    (differences.collect(), load(now, &input))
}

#[test]
fn the_same_is_left_alone() {
    let swapped = WANTED
        .replace("15010", "0")
        .replace("15901", "15010")
        .replace("dport 0 ", "dport 15901 ");
    let between = WANTED
        .replace("-A OUTPUT -i", "-A OUTPUT -p udp -j ACCEPT\n-A OUTPUT -i")
        .replace("-A OUTPUT -p tcp", "-A OUTPUT -j mine\n-A OUTPUT -p tcp")
        .replace(":PROXY_INBOUND", ":mine - [0:0]\n:PROXY_INBOUND");
    let other = format!("*filter\n:mine - [0:0]\n-A INPUT -j mine\nCOMMIT\n{WANTED}");
    for now in [WANTED.to_owned(), swapped, between, other] {
        for change in of(&now, How::Replace, 0) {
            assert!(
                change.differences.is_empty() && change.input.is_empty(),
                "{now}: {change:?}"
            );
            assert_eq!(change.has_some, change.table == "nat");
        }
    }
}

#[test]
fn every_difference_is_found_and_goes() {
    let jump = "-A OUTPUT -p tcp -j PROXY_OUTPUT\n";
    let owner = "-A PROXY_OUTPUT -m owner --uid-owner 1500 -j RETURN\n";
    for (now, wanted) in [
        (String::new(), "missing: chain PROXY_INBOUND"),
        (WANTED.replace(jump, ""), "missing: -A OUTPUT -p tcp -j PROXY_OUTPUT"),
        (WANTED.replace(jump, &jump.repeat(2)), "left over: -A OUTPUT -p tcp -j PROXY_OUTPUT"),
        (WANTED.replace(owner, ""), "missing: -A PROXY_OUTPUT -m owner"),
        (WANTED.replace("1500 ", "1501 "), "left over: -A PROXY_OUTPUT -m owner --uid-owner 1501"),
        (
            WANTED.replace(owner, "").replace("COMMIT", &format!("{owner}COMMIT")),
            "another order: -A PROXY_OUTPUT -p tcp -j REDIRECT --to-ports 15001 is before -A PROXY_OUTPUT -m owner",
        ),
        (
            WANTED.replace("-A OUTPUT -i eth9 -j RETURN\n", "").replace("COMMIT", "-A OUTPUT -i eth9 -j RETURN\nCOMMIT"),
            "another order: -A OUTPUT -p tcp -j PROXY_OUTPUT is before -A OUTPUT -i eth9",
        ),
        (WANTED.replace("COMMIT", ":PROXY_OLD - [0:0]\nCOMMIT"), "left over: chain PROXY_OLD"),
        (
            WANTED.replace("COMMIT", ":mine - [0:0]\n-A mine -p udp -g PROXY_OLD\n:PROXY_OLD - [0:0]\n-A mine -j ACCEPT\nCOMMIT"),
            "left over: -A mine -p udp -g PROXY_OLD",
        ),
        (
            WANTED.replace("*nat", "*mangle\n:PROXY_OUTPUT - [0:0]\n-A OUTPUT -j PROXY_OUTPUT\n-A OUTPUT -j ACCEPT\nCOMMIT\n*nat"),
            "left over: chain PROXY_OUTPUT",
        ),
        ("*nat\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -p sctp -j DROP\nCOMMIT\n".to_owned(), "missing: chain PROXY_OUTPUT"),
    ] {
        let (differences, after) = replaced(&now);
        assert!(differences.iter().any(|line| line.starts_with(wanted)), "{now}: {differences:#?}");
        let (again, _) = replaced(&after);
        assert!(again.is_empty(), "{now}\n{after}: {again:?}");
        // The rules of others stay.
        let foreign = |text: &str| -> Vec<String> {
            let others = ["mine -j ACCEPT", "sctp", "OUTPUT -j ACCEPT", ":mine"];
            let lines = text.lines().filter(|line| others.iter().any(|other| line.contains(other)));
            lines.map(str::to_owned).collect()
        };
        assert_eq!(foreign(&after), foreign(&now), "{now}");
    }
}

#[test]
fn rules_keep_their_places_between_those_of_others() {
    let foreign = "-A OUTPUT -p tcp -m tcp --dport 80 -j ACCEPT\n";
    let jump = "-A OUTPUT -p tcp -j PROXY_OUTPUT\n";
    let fine = WANTED.replace(jump, &format!("{jump}{foreign}"));
    // A difference in another chain, and one in this chain.
    for drifted in [
        fine.replace("15010", "15011"),
        fine.replace("-A OUTPUT -i eth9 -j RETURN\n", ""),
    ] {
        let (differences, after) = replaced(&drifted);
        assert!(!differences.is_empty());
        let output: Vec<&str> = after
            .lines()
            .filter(|line| line.starts_with("-A OUTPUT"))
            .collect();
        assert_eq!(
            output,
            [
                "-A OUTPUT -i eth9 -j RETURN",
                "-A OUTPUT -p tcp -j PROXY_OUTPUT",
                "-A OUTPUT -p tcp -m tcp --dport 80 -j ACCEPT",
            ]
        );
    }
}

#[test]
fn a_difference_elsewhere_moves_no_rule() {
    let foreign = "-A OUTPUT -p tcp -m tcp --dport 80 -j ACCEPT\n";
    let jump = "-A OUTPUT -p tcp -j PROXY_OUTPUT\n";
    let fine = WANTED.replace(jump, &format!("{foreign}{jump}"));
    let (differences, after) = replaced(&fine.replace("15010", "15011"));
    assert!(!differences.is_empty());
    assert_eq!(after, load("", &fine));
}

#[test]
fn a_table_without_chains_of_the_mesh_is_written_on_top() {
    let wanted =
        "*raw\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -p udp -m udp --dport 53 -j CT --zone 1\nCOMMIT\n";
    let wanted = text(wanted);
    let wanted = tables(&wanted).unwrap();
    let whose = Expected::osm().whose;
    let changes = changes(&[], &wanted, &wanted, &whose, How::OnTop, &|_, _| 0);
    assert!(changes[0].input.contains("--dport 53"), "{changes:?}");
}

#[test]
fn rules_of_others_with_the_meshs_mark_are_theirs() {
    let foreign = "-A OUTPUT -p sctp -m mark ! --mark 0x539 -j ACCEPT\n";
    let now = WANTED.replace("COMMIT", &format!("{foreign}COMMIT"));
    let (differences, _) = replaced(&now);
    assert_eq!(differences, Vec::<String>::new());
}

#[test]
fn nothing_is_removed_on_top() {
    let drifted = WANTED
        .replace("1500 ", "1499 ")
        .replace("-A OUTPUT -i eth9 -j RETURN\n", "")
        .replace("COMMIT", ":PROXY_OLD - [0:0]\nCOMMIT");
    let changes = of(&drifted, How::OnTop, 0);
    let input = &changes[0].input;
    assert!(
        !input.contains("-D ") && !input.contains("-X ") && !input.contains("PROXY_OLD"),
        "{input}"
    );
    let after = load(&drifted, input);
    assert_eq!(after.matches("-A OUTPUT -p tcp -j PROXY_OUTPUT").count(), 1);
    assert!(
        after.contains("1500")
            && !after.contains("1499")
            && after.contains("eth9")
            && after.contains("PROXY_OLD"),
        "{after}"
    );
}

#[test]
fn rules_for_the_front_come_before_those_of_others() {
    let now =
        "*nat\n:OUTPUT ACCEPT [0:0]\n:PREROUTING ACCEPT [0:0]\n-A OUTPUT -p sctp -j DROP\nCOMMIT\n";
    let changes = of(now, How::Replace, 1);
    let after = load(now, &changes[0].input);
    let output: Vec<&str> = after
        .lines()
        .filter(|line| line.starts_with("-A OUTPUT"))
        .collect();
    assert_eq!(
        output,
        [
            "-A OUTPUT -i eth9 -j RETURN",
            "-A OUTPUT -p sctp -j DROP",
            "-A OUTPUT -p tcp -j PROXY_OUTPUT",
        ]
    );
}

#[test]
fn what_was_there_comes_back_to_its_place() {
    let before = WANTED
        .replace("1500 ", "1501 ")
        .replace(
            "-A OUTPUT -p tcp",
            "-A OUTPUT -p sctp -j DROP\n-A OUTPUT -p tcp",
        )
        .replace(
            "COMMIT",
            "-A OUTPUT -p udp -j ACCEPT\n:PROXY_OLD - [0:0]\n-A PROXY_OLD -j RETURN\nCOMMIT",
        );
    let before = load("", &before);
    let (_, after) = replaced(&before);
    assert_ne!(after, before);
    let texts = [text(&before), text(&after), text(WANTED)];
    let [was, now, wanted] = texts.each_ref().map(|text| tables(text).unwrap());
    let whose = Expected::osm().whose;
    let back_to = |now| back(find(&was, "nat"), now, find(&wanted, "nat"), &whose);
    let change = back_to(find(&now, "nat")).unwrap();
    assert_eq!(load(&after, &change.input), before);
    assert_eq!(back_to(find(&was, "nat")), None);
}
