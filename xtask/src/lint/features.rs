//! Checks that the build of the binaries and the build of the tests use equal features for each crate of crates.io, so
//! that both share one build.

use std::collections::BTreeSet;

use anyhow::{Result, bail};

use crate::{
    build::{ALL, TESTING},
    command::{cargo, output},
};

/// Fails if the tests compile a crate with other features than the build of the binaries.
///
/// # Errors
/// Returns the crates with the features of the binaries' build, or cargo's error.
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

/// Returns the third-party crates that cargo compiles for a selection of packages, with their features. An empty
/// selection means the workspace's default. `edges` selects the kinds of dependencies.
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
    // A crate of this workspace has its path in parentheses. A crate that was already shown has an asterisk.
    let lines = tree.lines().map(|line| line.trim_end_matches(" (*)"));
    Ok(lines
        .filter(|line| !line.contains('('))
        .map(str::to_owned)
        .collect())
}
