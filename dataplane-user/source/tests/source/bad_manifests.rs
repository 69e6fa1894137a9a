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

/// A text in a field that is not used is copied for each alias, too.
#[test]
fn a_long_text_is_not_repeated_by_aliases() {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    for (copies, is_fault) in [(3, false), (20, true)] {
        let text = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: web}}\nspec:\n  \
             clusterIP: 10.96.0.1\n  ports: [{{port: 80}}]\n  unused: [&a {}{}]\n",
            "x".repeat(1 << 20),
            ", *a".repeat(copies),
        );
        fs::write(file.path(), text).unwrap();
        let errors = manifests::load(&[file.path().to_owned()], &Node::default()).err();
        assert_eq!(errors.is_some(), is_fault, "{copies}");
        let errors = errors.map(|errors| errors.to_string()).unwrap_or_default();
        assert!(!is_fault || errors.contains("more aliases"), "{errors}");
    }
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
