//! Loading any file ends in a snapshot, or in errors with a file and a text.

use std::{env, fs, path::PathBuf};

use dataplane_source::manifests;
use model::Node;
use proptest::prelude::*;

fn examples() -> Vec<Vec<u8>> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files: Vec<_> = fs::read_dir(root.join("examples"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "yaml")
    });
    files.sort();
    files.push(root.join("tests/data/kube-proxy-1.36/services.yaml"));
    files.push(root.join("tests/data/kube-proxy-1.36/endpointslices.json"));
    files
        .into_iter()
        .map(|path| fs::read(path).unwrap())
        .collect()
}

fn load(bytes: &[u8]) {
    for suffix in [".yaml", ".json"] {
        let file = tempfile::Builder::new().suffix(suffix).tempfile().unwrap();
        fs::write(file.path(), bytes).unwrap();
        match manifests::load(&[file.path().to_owned()], &Node::default()) {
            Ok(loaded) => {
                for service in loaded.snapshot.services.values() {
                    for port in &service.ports {
                        assert!(port.port != 0);
                        assert!(
                            port.endpoints
                                .is_sorted_by(|a, b| (a.addr, a.port) < (b.addr, b.port))
                        );
                    }
                }
            }
            Err(errors) => {
                assert!(!errors.faults.is_empty());
                let lines = bytes.split(|&byte| byte == b'\n').count();
                for fault in errors.faults {
                    assert!(!fault.text.is_empty());
                    assert_eq!(fault.file, file.path());
                    let line = fault.position.map_or(1, |position| position.line);
                    assert!((1..=lines + 1).contains(&line), "{fault}: of {lines} lines");
                }
            }
        }
    }
}

/// A change of a file: at a position, it replaces a number of bytes by others.
fn change() -> impl Strategy<Value = (prop::sample::Index, usize, Vec<u8>)> {
    let piece = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..4),
        prop::sample::select(vec![
            "\n",
            "\n---\n",
            "- ",
            ": ",
            "{",
            "}",
            "[",
            "]",
            "\"",
            "'",
            "#",
            "&a ",
            "*a",
            "<<: ",
            "!!binary ",
            "|\n",
            "null",
            "0",
            "-1",
            "70000",
            "1e999",
            ".nan",
            "fd00::1",
            "items:",
            "\u{feff}",
            "\t",
            "\r\n",
            "? ",
            "%YAML 1.2\n",
        ])
        .prop_map(|text| text.as_bytes().to_vec()),
    ];
    (any::<prop::sample::Index>(), 0_usize..40, piece)
}

/// Number of runs: 200, or `DATAPLANE_FUZZ_RUNS`.
fn runs() -> u32 {
    env::var("DATAPLANE_FUZZ_RUNS").map_or(200, |runs| runs.parse().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: runs(), ..ProptestConfig::default() })]

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        load(&bytes);
    }

    #[test]
    fn any_text(text in "[\\[\\]{}:,\\-#&*!|>'\"%@` \n\ta-c0-2]{0,200}") {
        load(text.as_bytes());
    }

    #[test]
    fn changed_manifests(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec(change(), 1..4),
    ) {
        let examples = examples();
        let mut bytes = which.get(&examples).clone();
        for (at, length, piece) in changes {
            let start = at.index(bytes.len().max(1)).min(bytes.len());
            let end = (start + length).min(bytes.len());
            bytes.splice(start..end, piece);
        }
        load(&bytes);
    }
}
