//! Compares the pages of the commands with the commands' help.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

/// Options that docs/cli/README.md documents for all commands, and options that need no page.
const COMMON: [&str; 6] = [
    "--bpffs", "--cgroup", "--config", "--help", "--output", "--socket",
];

fn help(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_dataplane"))
        .args(arguments)
        .arg("--help")
        .output()
        .expect("the program starts");
    String::from_utf8(output.stdout).expect("help is text")
}

fn page(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../docs/cli/{name}.md"));
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the commands in a help text.
fn commands(help: &str) -> Vec<&str> {
    let list = help.split("Commands:\n").nth(1).unwrap_or_default();
    list.lines()
        .take_while(|line| !line.is_empty())
        // The text of a description is indented further.
        .filter_map(|line| line.strip_prefix("  ")?.split(' ').next())
        .filter(|name| !name.is_empty())
        .filter(|name| *name != "help")
        .collect()
}

/// Returns the long options in a help text.
fn options(help: &str) -> BTreeSet<&str> {
    help.lines()
        .map(str::trim_start)
        .filter(|line| line.starts_with('-'))
        .flat_map(|line| line.split([' ', ',', '.']))
        .filter(|word| word.starts_with("--"))
        .collect()
}

#[test]
fn every_command_has_a_page_with_its_options() {
    let all = help(&[]);
    let index = page("README");
    let names = commands(&all);
    assert!(names.len() > 10, "no commands found in:\n{all}");
    let mut lacking = vec![];
    for name in names {
        if !index.contains(&format!("]({name}.md)")) {
            lacking.push(format!("docs/cli/README.md lacks {name}"));
        }
        let (page, help) = (page(name), help(&[name]));
        for option in options(&help) {
            if !COMMON.contains(&option) && !page.contains(option) {
                lacking.push(format!("docs/cli/{name}.md lacks {option}"));
            }
        }
    }
    assert!(lacking.is_empty(), "{}", lacking.join("\n"));
}
