//! Links between the pages: the file that a link names exists, and has the heading that it names.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

use crate::workspace;

/// Checks the links of every page of this clone, and the pages that sources name (`docs/….md`,
/// `dataplane-…/README.md`).
///
/// # Errors
///
/// Returns all links that lead nowhere, one a line. Also fails if a file cannot be read.
pub fn check() -> Result<()> {
    let root = workspace::root();
    let mut files = vec![];
    collect(root, &mut files)?;
    let mut wrong = vec![];
    for file in files {
        let text =
            fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let shown = file.strip_prefix(root).unwrap_or(&file).display();
        if file.extension().is_some_and(|of| of == "md") {
            for (line, link) in links(&text) {
                if let Err(reason) = follow(&file, link) {
                    wrong.push(format!("{shown}:{line}: {link}: {reason}"));
                }
            }
        } else {
            for (line, page) in mentions(&text) {
                if !root.join(page).is_file() {
                    wrong.push(format!("{shown}:{line}: {page}: there is no such page"));
                }
            }
        }
    }
    ensure!(
        wrong.is_empty(),
        "links that lead nowhere:\n{}",
        wrong.join("\n")
    );
    Ok(())
}

/// Collects the pages and sources below a directory. Skips hidden directories and build output.
fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        if entry.file_type()?.is_dir() {
            if !name.starts_with('.') && name != "target" {
                collect(&path, files)?;
            }
        } else if name.ends_with(".md") || name.ends_with(".rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Returns the targets of a page's links with their line numbers, without those in code blocks.
fn links(page: &str) -> Vec<(usize, &str)> {
    lines_of_prose(page)
        .flat_map(|(number, line)| {
            line.split("](")
                .skip(1)
                .filter_map(move |rest| Some((number, rest.split_once(')')?.0)))
        })
        .collect()
}

/// Returns a page's lines outside of code blocks, counted from 1.
fn lines_of_prose(page: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    page.lines().enumerate().filter_map(move |(index, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        (!code && !fence).then_some((index + 1, line))
    })
}

/// Checks a link in a page. Returns the reason if it leads nowhere. Does not follow links to other
/// hosts.
fn follow(page: &Path, link: &str) -> Result<(), &'static str> {
    if link.contains("://") {
        return Ok(());
    }
    let (path, heading) = link.split_once('#').unwrap_or((link, ""));
    let target = match path {
        "" => page.to_owned(),
        _ => page.with_file_name("").join(path),
    };
    if !target.exists() {
        return Err("there is no such file");
    }
    if heading.is_empty() {
        return Ok(());
    }
    let text = fs::read_to_string(&target).map_err(|_| "it has no headings")?;
    if anchors(&text).contains(heading) {
        Ok(())
    } else {
        Err("there is no such heading")
    }
}

/// Returns the anchors of a page's headings, as GitHub makes them: lower case, hyphens for spaces,
/// without punctuation.
fn anchors(page: &str) -> BTreeSet<String> {
    lines_of_prose(page)
        .filter_map(|(_, line)| line.strip_prefix('#'))
        .map(|heading| {
            (heading.trim_start_matches('#').trim().chars())
                .filter(|of| of.is_alphanumeric() || matches!(of, ' ' | '-' | '_'))
                .map(|of| if of == ' ' { '-' } else { of })
                .flat_map(char::to_lowercase)
                .collect()
        })
        .collect()
}

/// Returns the pages below `docs/` and beside the code that a source names, with line numbers.
fn mentions(source: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = source.lines().enumerate();
    lines.flat_map(|(index, line)| {
        let docs = line.match_indices("docs/");
        let begins = docs.chain(line.match_indices("dataplane-"));
        begins.filter_map(move |(at, _)| {
            let rest = &line[at..];
            let is_part = |of: char| of.is_ascii_alphanumeric() || "/._-".contains(of);
            let end = rest.find(|of| !is_part(of)).unwrap_or(rest.len());
            let page = &rest[..rest[..end].rfind(".md")? + ".md".len()];
            Some((index + 1, page))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_link_leads_somewhere() -> Result<()> {
        check()
    }

    #[test]
    fn links_are_found_outside_of_code() {
        let page = "a [b](c.md) and [d](e.md#f)\n```\n[g](h)\n```\n[i\nj](#k)";
        assert_eq!(links(page), [(1, "c.md"), (1, "e.md#f"), (6, "#k")]);
    }

    #[test]
    fn links_that_lead_nowhere_are_told() {
        let page = workspace::root().join("docs/performance.md");
        assert_eq!(follow(&page, "measurements/README.md"), Ok(()));
        assert_eq!(follow(&page, "https://example.com/x"), Ok(()));
        assert!(follow(&page, "measurements/none.md").is_err());
        assert!(follow(&page, "measurements/README.md#none").is_err());
    }

    #[test]
    fn anchors_are_those_of_github() {
        let page = "# What's `mode: kernel`, by parts\n```\n# no heading\n```\n## Two";
        let expected = ["whats-mode-kernel-by-parts", "two"];
        assert_eq!(anchors(page), expected.map(String::from).into());
    }

    #[test]
    fn pages_that_sources_name_are_found() {
        let source = "// see docs/proxy.md.\n// (docs/measurements/method.md)\n// docs/*.md\n\
                      // `dataplane-ebpf/README.md`, dataplane-mode";
        let found: Vec<_> = mentions(source).collect();
        assert_eq!(
            found,
            [
                (1, "docs/proxy.md"),
                (2, "docs/measurements/method.md"),
                (4, "dataplane-ebpf/README.md")
            ]
        );
    }
}
