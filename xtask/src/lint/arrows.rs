//! No circles of files in a crate. Between crates, cargo allows none.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

use super::{
    circles::{self, Graph, circles},
    modules::{Arrow, Crate},
};
use crate::workspace;

/// Imports that close circles of files and are still to be mended. This list may only become shorter.
const KNOWN: &[(&str, &str)] = &[];

/// Checks the imports of every crate of the workspace.
///
/// # Errors
///
/// A file that cannot be read; otherwise everything that is not allowed, one a line.
pub fn check() -> Result<()> {
    let root = workspace::root();
    let read = |path: &Path| fs::read_to_string(root.join(path)).ok();
    let roots = crate_roots(root)?;
    let crates: Vec<_> = (roots.iter())
        .map(|path| Crate::read(path, &read))
        .collect::<Result<_>>()?;
    let wrong = circles_of_files(&crates, KNOWN);
    ensure!(
        wrong.is_empty(),
        "imports that are not allowed:\n{}",
        wrong.join("\n")
    );
    Ok(())
}

/// The root files of all crates: libraries, programs, tests and benchmarks.
fn crate_roots(workspace: &Path) -> Result<Vec<PathBuf>> {
    let mut found = vec![];
    let rooms = entries(&workspace.join("dataplane-user"))?;
    for package in entries(workspace)?.into_iter().chain(rooms) {
        if !package.join("Cargo.toml").is_file() {
            continue;
        }
        found.extend(["src/lib.rs", "src/main.rs"].map(|path| package.join(path)));
        for dir in ["src/bin", "tests", "benches", "examples"] {
            let dir = package.join(dir);
            if dir.is_dir() {
                for entry in entries(&dir)? {
                    let is_source = entry.extension().is_some_and(|of| of == "rs");
                    found.push(if is_source {
                        entry
                    } else {
                        entry.join("main.rs")
                    });
                }
            }
        }
    }
    found.retain(|path| path.is_file());
    let shown = |path: PathBuf| path.strip_prefix(workspace).map(Path::to_owned);
    Ok(found.into_iter().map(shown).collect::<Result<_, _>>()?)
}

/// What lies in a directory, sorted.
fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let failed = || format!("cannot read {}", dir.display());
    let found = fs::read_dir(dir).with_context(failed)?;
    let mut paths = found
        .map(|entry| Ok(entry.with_context(failed)?.path()))
        .collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// Looks for circles of files. A module's import from one that contains it does not count: every module may use what
/// its parents define. `known`: imports that are left out, as long as each closes a circle.
fn circles_of_files(crates: &[Crate], known: &[(&str, &str)]) -> Vec<String> {
    let mut wrong = vec![];
    let mut needed = BTreeSet::new();
    for of in crates {
        let arrows = of.arrows();
        let mut graph = Graph::new();
        let mut excepted = vec![];
        for arrow in &arrows {
            if of.contains(arrow.to, arrow.from) {
                continue;
            }
            let ends = (
                of.files()[arrow.from].to_str().unwrap_or_default(),
                of.files()[arrow.to].to_str().unwrap_or_default(),
            );
            if known.contains(&ends) {
                excepted.push((arrow, ends));
            } else {
                graph.entry(arrow.from).or_default().insert(arrow.to);
            }
        }
        for (arrow, ends) in excepted {
            if circles::way(&graph, arrow.to, arrow.from).is_some() {
                needed.insert(ends);
            }
        }
        for circle in circles(&graph) {
            wrong.push(describe(of, &arrows, &circle));
        }
    }
    for ends in known {
        if !needed.contains(ends) {
            wrong.push(format!(
                "{} -> {}: closes no circle (any more): remove it from KNOWN in {}",
                ends.0,
                ends.1,
                file!()
            ));
        }
    }
    wrong
}

/// Says which imports make a circle.
fn describe(of: &Crate, arrows: &[Arrow], circle: &[usize]) -> String {
    let mut text = "a circle of files; move what two of them need to a file below both:".to_owned();
    for (index, &from) in circle.iter().enumerate() {
        let to = circle[(index + 1) % circle.len()];
        let arrow = (arrows.iter()).find(|arrow| arrow.from == from && arrow.to == to);
        let arrow = arrow.expect("a circle is made of arrows");
        let _ = write!(
            text,
            "\n    {}:{}: imports {} from {}",
            of.files()[from].display(),
            arrow.line,
            arrow.import,
            of.files()[to].display()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// A crate made of these files, of which the first is the root.
    fn crate_of(files: &[(&str, &str)]) -> Crate {
        let by_path: BTreeMap<_, _> = files.iter().copied().collect();
        let read = |path: &Path| Some((*by_path.get(path.to_str()?)?).to_owned());
        Crate::read(Path::new(files[0].0), &read).expect("the files are there")
    }

    fn circles_in(files: &[(&str, &str)]) -> Vec<String> {
        circles_of_files(&[crate_of(files)], &[])
    }

    #[test]
    fn this_clone_has_no_circle() -> Result<()> {
        check()
    }

    #[test]
    fn files_that_import_each_other_are_a_circle() {
        let files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a.rs", "\nuse crate::{b::B, c};"),
            ("src/b.rs", "pub struct B(super::a::A);"),
        ];
        let found = circles_in(&files);
        assert_eq!(found.len(), 1);
        assert!(
            found[0].contains("src/a.rs:2: imports crate::b::B from src/b.rs"),
            "{found:?}"
        );
        assert!(
            found[0].contains("src/b.rs:1: imports super::a::A from src/a.rs"),
            "{found:?}"
        );
    }

    #[test]
    fn arrows_in_macros_and_by_imported_modules_count() {
        let files = [
            ("src/lib.rs", "mod a; mod b; mod c;"),
            ("src/a.rs", "fn f() { println!(\"{}\", super::b::f()) }"),
            ("src/b.rs", "use crate::c as other; fn f() { other::f() }"),
            ("src/c.rs", "macro_rules! m { () => { $crate::a::f() } }"),
        ];
        assert_eq!(circles_in(&files).len(), 1);
    }

    #[test]
    fn a_parent_and_its_child_are_no_circle() {
        let files = [
            ("src/lib.rs", "mod a;"),
            ("src/a/mod.rs", "mod b; mod c; pub struct A(b::B);"),
            (
                "src/a/b.rs",
                "use super::A; pub struct B; struct D(super::c::C);",
            ),
            ("src/a/c.rs", "pub struct C(super::A);"),
        ];
        assert_eq!(circles_in(&files), [] as [&str; 0]);
    }

    #[test]
    fn a_circle_through_a_parent_and_its_child_counts() {
        let files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a/mod.rs", "mod c; pub struct A(c::C);"),
            ("src/a/c.rs", "pub struct C(crate::b::B);"),
            ("src/b.rs", "pub struct B(crate::a::A);"),
        ];
        assert_eq!(circles_in(&files).len(), 1);
    }

    #[test]
    fn a_re_export_leads_to_the_file_that_defines() {
        let files = [
            ("src/lib.rs", "mod a; mod b;"),
            (
                "src/a/mod.rs",
                "mod c; mod d; pub use c::{C as Known}; pub use d::*; struct Own(crate::b::B);",
            ),
            ("src/a/c.rs", "pub struct C;"),
            ("src/a/d.rs", "pub struct D;"),
            ("src/b.rs", "use crate::a::{D, Known}; pub struct B;"),
        ];
        let found = crate_of(&files);
        assert_eq!(circles_of_files(&[found], &[]), [] as [&str; 0]);
        let mut files = files;
        files[4].1 = "use crate::a::Own; pub struct B;";
        assert_eq!(circles_in(&files).len(), 1);
    }

    #[test]
    fn a_module_by_name_is_no_import_and_its_items_are() {
        let mut files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a/mod.rs", "pub mod c; struct Own(crate::b::B);"),
            ("src/a/c.rs", "pub struct C;"),
            (
                "src/b.rs",
                "use crate::a; use crate::a::c; pub struct B(a::c::C, c::C);",
            ),
        ];
        assert_eq!(circles_in(&files), [] as [&str; 0]);
        files[3].1 = "use crate::a; pub struct B(a::Own);";
        assert_eq!(circles_in(&files).len(), 1);
    }

    #[test]
    fn what_only_tests_compile_does_not_count() {
        let files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a.rs", "use crate::b::B; pub struct A;"),
            (
                "src/b.rs",
                "pub struct B; #[cfg(test)] mod tests { use crate::a::A; } #[cfg(test)] use crate::a::A;",
            ),
        ];
        assert_eq!(circles_in(&files), [] as [&str; 0]);
    }

    #[test]
    fn a_known_circle_is_excused_until_it_is_mended() {
        let mut files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a.rs", "use crate::b::B; pub struct A;"),
            ("src/b.rs", "use crate::a::A; pub struct B;"),
        ];
        let known = [("src/a.rs", "src/b.rs")];
        assert_eq!(
            circles_of_files(&[crate_of(&files)], &known),
            [] as [&str; 0]
        );
        files[2].1 = "pub struct B;";
        let found = circles_of_files(&[crate_of(&files)], &known);
        assert_eq!(found.len(), 1);
        assert!(
            found[0].starts_with("src/a.rs -> src/b.rs: closes no circle"),
            "{found:?}"
        );
    }
}
