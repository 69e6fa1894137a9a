//! The help of a command line, to be compared with its pages.

use std::{collections::BTreeSet, path::Path, process::Command};

/// Prints the help of a program, or of one of its commands.
///
/// # Panics
/// When the program does not start.
pub fn help(program: impl AsRef<Path>, arguments: &[&str]) -> String {
    let output = Command::new(program.as_ref())
        .args(arguments)
        .arg("--help")
        .output()
        .expect("the program starts");
    String::from_utf8(output.stdout).expect("help is text")
}

/// Returns the commands in a help text.
pub fn commands(help: &str) -> Vec<&str> {
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
pub fn options(help: &str) -> BTreeSet<&str> {
    help.lines()
        .map(str::trim_start)
        .filter(|line| line.starts_with('-'))
        .flat_map(|line| line.split([' ', ',', '.']))
        .filter(|word| word.starts_with("--"))
        .collect()
}
