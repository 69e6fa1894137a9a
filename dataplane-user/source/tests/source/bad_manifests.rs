//! Every bad manifest in `manifests/bad`, with all its messages in `NAME.expected`.
//!
//! After a change of the messages run `DATAPLANE_BLESS=1 cargo test --test source bad_manifests`, and read the
//! difference.

use std::{fs, path::Path};

use dataplane_source::manifests;
use model::Node;

#[test]
fn messages() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/manifests/bad");
    let mut files: Vec<_> = fs::read_dir(&directory)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    files.retain(|file| {
        file.extension()
            .is_some_and(|extension| extension != "expected")
    });
    files.sort();
    assert!(files.len() > 20, "the files are gone");
    let mut wrong = String::new();
    for file in files {
        let errors = manifests::load(std::slice::from_ref(&file), &Node::default())
            .err()
            .unwrap_or_else(|| panic!("{} was accepted", file.display()));
        let prefix = format!("{}/", directory.display());
        let said = format!("{errors}\n").replace(&prefix, "");
        let expected = file.with_added_extension("expected");
        if std::env::var_os("DATAPLANE_BLESS").is_some() {
            fs::write(&expected, &said).unwrap();
        }
        if fs::read_to_string(&expected).unwrap_or_default() != said {
            wrong += &said;
        }
    }
    assert!(wrong.is_empty(), "not as expected:\n{wrong}");
}

#[test]
fn the_guide_shows_what_is_said() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let guide = fs::read_to_string(root.join("../../docs/manifests.md")).unwrap();
    for (name, lines) in [("bad", usize::MAX), ("empty", 1)] {
        let expected = root.join(format!("tests/manifests/bad/{name}.yaml.expected"));
        let said = fs::read_to_string(expected).unwrap();
        for line in said.lines().take(lines) {
            assert!(
                guide.lines().any(|shown| shown == line),
                "not in docs/manifests.md: {line}"
            );
        }
    }
}
