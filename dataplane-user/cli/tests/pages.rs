//! Compares the pages of the commands with the commands' help.

use std::{collections::BTreeSet, fs, path::Path};

use dataplane_tests::pages::{commands, help, options};

/// Options that docs/cli/README.md documents for all commands, and options that need no page.
const COMMON: [&str; 6] = [
    "--bpffs", "--cgroup", "--config", "--help", "--output", "--socket",
];

const DATAPLANE: &str = env!("CARGO_BIN_EXE_dataplane");

fn page(name: &str) -> String {
    read(&format!("cli/{name}.md"))
}

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../docs/{name}"));
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

/// The table of keys names the flag of each key that has one, and no other flag.
#[test]
fn the_flags_of_keys_are_those_of_run() {
    let guide = read("configuration.md");
    let rows = guide.lines().filter_map(|line| line.strip_prefix("| `"));
    let cells = rows.filter_map(|row| row.split(" | ").nth(1));
    let words = cells.flat_map(|cell| cell.split(['`', ' ', ',']));
    let documented: BTreeSet<&str> = words.filter(|word| word.starts_with("--")).collect();
    let help = help(DATAPLANE, &["run"]);
    let mut flags = options(&help);
    // `log.level` has `-v`.
    flags.retain(|flag| !["--config", "--help", "--verbose"].contains(flag));
    assert_eq!(documented, flags);
}
