//! `cargo xtask lines`: counts the lines to read, by crate.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, Result};

use crate::workspace;

/// Count the lines of code, comments and tests, by crate
///
/// Lines of tests are lines of modules that only tests compile (`cfg(test)`, or the feature `testing`), and of the
/// folder `tests` of a crate. Empty lines do not count.
#[derive(Debug, clap::Args)]
pub struct Arguments {}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Lines {
    code: usize,
    comments: usize,
    tests: usize,
}

pub fn main() -> Result<ExitCode> {
    let root = workspace::root();
    let rooms = children(&root.join("dataplane-user"))?;
    let mut total = Lines::default();
    println!(
        "{:<24} {:>8} {:>8} {:>8}",
        "CRATE", "CODE", "COMMENTS", "TESTS"
    );
    let row = |name: &str, lines: Lines| {
        let Lines {
            code,
            comments,
            tests,
        } = lines;
        println!("{name:<24} {code:>8} {comments:>8} {tests:>8}");
    };
    for package in children(root)?.into_iter().chain(rooms) {
        if !package.join("Cargo.toml").is_file() {
            continue;
        }
        let mut lines = Lines::default();
        count_folder(&package.join("src"), false, &mut lines)?;
        count_folder(&package.join("tests"), true, &mut lines)?;
        let name = package.strip_prefix(root).unwrap_or(&package);
        row(&name.display().to_string(), lines);
        total.code += lines.code;
        total.comments += lines.comments;
        total.tests += lines.tests;
    }
    row("total", total);
    Ok(ExitCode::SUCCESS)
}

/// Returns the entries of a folder, sorted; none if the folder does not exist.
fn children(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut found = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?;
    found.sort();
    Ok(found)
}

/// Adds the lines of a folder's files. `tests` says whether all of them are tests.
fn count_folder(folder: &Path, tests: bool, lines: &mut Lines) -> Result<()> {
    let entries = children(folder)?;
    let is_source = |path: &&PathBuf| path.extension().is_some_and(|of| of == "rs");
    let mut only_tests = BTreeSet::new();
    for file in entries.iter().filter(is_source) {
        let text =
            fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        only_tests.extend(count(&text, lines, tests));
    }
    // These files were counted as code above, before their parent showed that only tests compile them.
    for file in entries.iter().filter(is_source) {
        let stem = file
            .file_stem()
            .and_then(|stem| stem.to_str())
            .unwrap_or_default();
        if !tests && only_tests.contains(stem) {
            let mut wrongly = Lines::default();
            count(&fs::read_to_string(file)?, &mut wrongly, false);
            lines.code -= wrongly.code;
            lines.comments -= wrongly.comments;
            lines.tests += wrongly.code + wrongly.comments;
        }
    }
    for below in entries.iter().filter(|entry| entry.is_dir()) {
        let name = below
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        count_folder(below, tests || only_tests.contains(name), lines)?;
    }
    Ok(())
}

/// The attributes of modules that only tests compile.
const FOR_TESTS: [&str; 2] = ["#[cfg(test)]", "#[cfg(feature = \"testing\")]"];

/// Adds a file's lines. Returns the names of its modules that only tests compile, and that have files of their own.
fn count(text: &str, lines: &mut Lines, mut tests: bool) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_for_tests = false;
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if std::mem::take(&mut is_for_tests) {
            let module = line.trim_start_matches("pub ").strip_prefix("mod ");
            match module.and_then(|name| name.strip_suffix(';')) {
                Some(name) => found.push(name.to_owned()),
                // A module of tests is the last item of its file.
                None if module.is_some() => tests = true,
                None => {}
            }
        }
        is_for_tests = FOR_TESTS.contains(&line);
        if tests {
            lines.tests += 1;
        } else if line.starts_with("//") {
            lines.comments += 1;
        } else {
            lines.code += 1;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_of_three_kinds() {
        let mut lines = Lines::default();
        let text = "//! A file.\n\nfn f() {}\n#[cfg(test)]\nmod fuzz;\n#[cfg(feature = \"testing\")]\npub mod rig;\n\n\
                    #[cfg(test)]\nmod tests {\n    // One.\n}\n";
        assert_eq!(count(text, &mut lines, false), ["fuzz", "rig"]);
        let wanted = Lines {
            code: 6,
            comments: 1,
            tests: 3,
        };
        assert_eq!(lines, wanted);
    }
}
