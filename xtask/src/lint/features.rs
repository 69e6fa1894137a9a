//! One set of features: the node's build and the tests compile each crate of crates.io alike, so that they share one build.

use std::collections::BTreeSet;

use anyhow::{Result, bail};

use crate::{
    build::{ALL, TESTING},
    command::{cargo, output},
};

/// Fails if the tests compile a crate with other features than the node's build does.
///
/// # Errors
/// Cargo's; otherwise names these crates with the features of the node's build.
pub fn check() -> Result<()> {
    let packages = ALL.iter().flat_map(|package| ["--package", *package]);
    let of_node = crates("normal,build", packages.chain(["--features", TESTING]))?;
    let of_tests = crates("normal,build,dev", [])?;
    let others: Vec<&str> = of_node.difference(&of_tests).map(String::as_str).collect();
    if !others.is_empty() {
        bail!(
            "the tests compile these crates again, with other features than the node's build has: {}. Add a crate with the \
             tests' features to feature `testing` of dataplane-cli",
            others.join("; ")
        );
    }
    Ok(())
}

/// The crates of other people that cargo compiles for a selection of packages (the workspace's own choice if empty), with
/// their features. `edges`: by which kinds of dependency.
fn crates<'a>(
    edges: &str,
    selection: impl IntoIterator<Item = &'a str>,
) -> Result<BTreeSet<String>> {
    let tree = output(
        cargo()
            .args([
                "tree", "--edges", edges, "--prefix", "none", "--format", "{p} {f}",
            ])
            .args(selection),
    )?;
    // A crate of this workspace has its path in parentheses; a crate that was shown before, an asterisk.
    let lines = tree.lines().map(|line| line.trim_end_matches(" (*)"));
    Ok(lines
        .filter(|line| !line.contains('('))
        .map(str::to_owned)
        .collect())
}
