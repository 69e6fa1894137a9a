//! Compares the pages of the commands with the commands' help.

use std::{fs, path::Path};

use dataplane_tests::pages::{commands, help, options};

/// Options that docs/cli/README.md documents for all commands, and options that need no page.
const COMMON: [&str; 6] = [
    "--bpffs", "--cgroup", "--config", "--help", "--output", "--socket",
];

const DATAPLANE: &str = env!("CARGO_BIN_EXE_dataplane");

fn page(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../docs/cli/{name}.md"));
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn every_command_has_a_page_with_its_options() {
    let all = help(DATAPLANE, &[]);
    let index = page("README");
    let names = commands(&all);
    assert!(names.len() > 10, "no commands found in:\n{all}");
    let mut lacking = vec![];
    for name in names {
        if !index.contains(&format!("]({name}.md)")) {
            lacking.push(format!("docs/cli/README.md lacks {name}"));
        }
        let (page, help) = (page(name), help(DATAPLANE, &[name]));
        for option in options(&help) {
            if !COMMON.contains(&option) && !page.contains(option) {
                lacking.push(format!("docs/cli/{name}.md lacks {option}"));
            }
        }
    }
    assert!(lacking.is_empty(), "{}", lacking.join("\n"));
}
