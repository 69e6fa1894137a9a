//! Checks the import with any text: it ends, its time grows with the text's length, and each place, endpoint and address in
//! its result is in the text.

use std::{
    env,
    fmt::Write as _,
    time::{Duration, Instant},
};

use imbl::OrdMap;
use proptest::prelude::*;

use super::{Text, import};

const EXAMPLES: [&str; 3] = [
    include_str!("../../../../tests/data/kube-proxy-1.36/iptables-save.txt"),
    include_str!("../../../../tests/data/kube-proxy-1.36/nft-ruleset.txt"),
    include_str!("../../../../tests/data/kube-proxy-1.36/nft-ruleset.json"),
];

/// A table `filter` of kube-proxy without rules.
const FILTER: &str = "*filter\n:KUBE-SERVICES - [0:0]\nCOMMIT\n";

/// Imports a text, and looks at what was made of it.
fn take(text: &str) {
    let given = [Text {
        origin: "rules".into(),
        text: text.into(),
    }];
    let lines = text.split('\n').count();
    match import(&given, &OrdMap::new()) {
        Err(super::Error::Line { line, .. }) => {
            assert!((1..=lines).contains(&line), "{line} of {lines}: {text}");
        }
        Err(_) => {}
        Ok(imported) => {
            for leftover in &imported.leftovers {
                assert!(leftover.line <= lines, "{leftover} of {lines}: {text}");
                assert!(leftover.text.chars().count() <= 301 && !leftover.text.contains('\n'));
            }
            for service in imported.services.values() {
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
            let again = import(&given, &imported.services).unwrap();
            assert!(
                again.services.ptr_eq(&imported.services) || again.services == imported.services
            );
        }
    }
}

/// 100, unless `DATAPLANE_FUZZ_RUNS` says.
fn runs() -> u32 {
    env::var("DATAPLANE_FUZZ_RUNS").map_or(100, |runs| runs.parse().unwrap())
}

/// A change of a text: at a place, so many bytes are replaced by others.
fn change() -> impl Strategy<Value = (prop::sample::Index, usize, String)> {
    let pieces = [
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
    ];
    let piece = prop_oneof![
        3 => prop::sample::select(pieces.to_vec()).prop_map(str::to_owned),
        1 => ".{0,3}",
    ];
    (any::<prop::sample::Index>(), 0_usize..30, piece)
}

/// Lines that are left out, and lines that are there twice.
fn lines() -> impl Strategy<Value = Vec<(prop::sample::Index, bool)>> {
    prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..4)
}

fn changed(
    text: &str,
    changes: Vec<(prop::sample::Index, usize, String)>,
    of_lines: Vec<(prop::sample::Index, bool)>,
) -> String {
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
    let mut bytes = all.concat().into_bytes();
    for (at, length, piece) in changes {
        let start = at.index(bytes.len().max(1)).min(bytes.len());
        let end = (start + length).min(bytes.len());
        bytes.splice(start..end, piece.into_bytes());
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: runs(), ..ProptestConfig::default() })]

    #[test]
    fn changed_rules(
        which in 0_usize..3,
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
        take(&format!("{{\"nftables\": [{{\"table\": {{\"family\": \"ip\", \"name\": \"kube-proxy\"}}}}, {text}]}}"));
    }
}

/// The shortest of a few tries.
fn shortest(work: impl Fn() -> usize) -> Duration {
    let tries = (0..3).map(|_| {
        let start = Instant::now();
        std::hint::black_box(work());
        start.elapsed()
    });
    tries.min().unwrap()
}

/// The time for many is compared with that for a tenth.
#[test]
fn importing_takes_time_by_the_length() {
    type Make = fn(usize) -> String;
    let makes: [(&str, Make); 3] = [
        ("endpoints of one service", |count| {
            let mut text = "*nat\n-A OUTPUT -j KUBE-SERVICES\n-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment \
                \"a/b cluster IP\" -m tcp --dport 80 -j KUBE-SVC-A\n"
                .to_owned();
            for n in 0..count {
                let share = 1.0 / f64::from(u32::try_from(count - n).unwrap());
                let share = if n + 1 == count {
                    String::new()
                } else {
                    format!("-m statistic --mode random --probability {share:.11} ")
                };
                let [b, c] = [n / 250, 1 + n % 250];
                let _ = writeln!(
                    text,
                    "-A KUBE-SVC-A -m comment --comment x {share}-j KUBE-SEP-{n}\n\
                     -A KUBE-SEP-{n} -s 10.0.{b}.{c}/32 -m comment --comment x -j KUBE-MARK-MASQ\n\
                     -A KUBE-SEP-{n} -p tcp -m comment --comment x -m tcp -j DNAT --to-destination 10.0.{b}.{c}:80"
                );
            }
            text + "COMMIT\n" + FILTER
        }),
        ("elements", |count| {
            let mut text =
                "table ip kube-proxy {\n\tmap service-nodeports {\n\t\telements = { ".to_owned();
            for n in 0..count {
                let _ = writeln!(text, "tcp . {n} : goto external-AAAAAAAA-a/b{n}/tcp/p,");
            }
            text + " }\n\t}\n}\n"
        }),
        ("lines that are not understood", |count| {
            let line = "-A KUBE-SERVICES -m what --comment \"a/b x\" -j KUBE-SVC-A\n";
            format!(
                "*nat\n-A OUTPUT -j KUBE-SERVICES\n{}COMMIT\n{FILTER}",
                line.repeat(count)
            )
        }),
    ];
    for (what, make) in makes {
        let time = |count| {
            let given = [Text {
                origin: "rules".into(),
                text: make(count),
            }];
            shortest(|| import(&given, &OrdMap::new()).unwrap().services.len())
        };
        let (few, many) = (time(100), time(1000));
        assert!(
            many < few * 40 + Duration::from_millis(10),
            "{what}: {few:?}, and {many:?} for ten times as much"
        );
    }
}
