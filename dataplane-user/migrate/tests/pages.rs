//! Compares the pages of the commands with the commands' help.

use std::{fs, path::Path};

use dataplane_tests::pages::{commands, help, options};

const MIGRATE: &str = env!("CARGO_BIN_EXE_dataplane-migrate");

/// A command with a section of docs/migrate/README.md, or a link there to a page of its own.
#[test]
fn every_command_has_a_section_with_its_options() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let read = |name: &str| fs::read_to_string(docs.join(name)).unwrap();
    let index = read("migrate/README.md");
    let pages = [
        index.clone(),
        read("migrate/takeover.md"),
        read("from-iptables.md"),
    ]
    .concat();
    let all = help(MIGRATE, &[]);
    let names = commands(&all);
    assert!(names.len() > 8, "no commands found in:\n{all}");
    let mut lacking = vec![];
    for name in names {
        if !index.contains(&format!("| [`{name}`](")) && name != "completions" {
            lacking.push(format!("docs/migrate/README.md lacks {name}"));
        }
        for option in options(&help(MIGRATE, &[name])) {
            if option != "--help" && !pages.contains(option) {
                lacking.push(format!("the pages lack {name} {option}"));
            }
        }
    }
    assert!(lacking.is_empty(), "{}", lacking.join("\n"));
}
