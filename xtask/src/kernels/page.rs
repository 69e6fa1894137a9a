//! The tables of docs/kernels.md, between its two marks, generated from docs/kernels.json.

use std::{fmt::Write as _, fs, path::PathBuf};

use anyhow::{Context, Result};

use super::record::{Feature, Program, Record, Report};
use crate::workspace;

const BEGIN: &str = "<!-- What follows is written by `cargo xtask kernels --write`. -->\n";
const END: &str = "<!-- End of what is written by `cargo xtask kernels --write`. -->\n";

/// Rows of `dataplane doctor` about the machine, not about its kernel.
const OF_THE_MACHINE: [&str; 4] = [
    "kernel programs in this binary",
    "capabilities",
    "cgroup v2",
    "bpffs",
];

fn file() -> PathBuf {
    workspace::root().join("docs/kernels.md")
}

/// Writes the tables into the page.
pub fn write(record: &Record) -> Result<()> {
    let file = file();
    let page =
        fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let (before, after) = around(&page).with_context(|| {
        format!(
            "{} has lost the marks that its tables go between",
            file.display()
        )
    })?;
    let page = format!("{before}{BEGIN}\n{}\n{END}{after}", tables(record));
    fs::write(&file, page).with_context(|| format!("cannot write {}", file.display()))
}

/// Returns the text before the first mark and the text after the second.
fn around(page: &str) -> Option<(&str, &str)> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some((before, after))
}

/// Returns the page's tables.
pub fn tables(record: &Record) -> String {
    let kernels = record.kernels();
    let parts = [
        kernels_table(&kernels),
        features_table(&kernels),
        programs_table(&kernels),
    ];
    parts.join("\n")
}

fn kernels_table(kernels: &[(&str, &Report)]) -> String {
    let mut text = String::from(
        "| Kernel | Machine | Programs accepted | Scenarios passed | Failed | Not run | Duration |\n\
         |---|---|---:|---:|---:|---:|---:|\n",
    );
    let mut notes = String::new();
    for (_, report) in kernels {
        let _ = write!(
            text,
            "| {} | {} | {}",
            report.release,
            report.runs_on,
            report.programs.len()
        );
        let Some(scenarios) = &report.scenarios else {
            text.push_str(" | | | | |\n");
            continue;
        };
        let skipped: usize = scenarios.skipped.values().map(Vec::len).sum();
        let _ = writeln!(
            text,
            " | {} | {} | {skipped} | {} s |",
            scenarios.passed, scenarios.failed, scenarios.seconds
        );
        for (reason, names) in &scenarios.skipped {
            let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
            let _ = writeln!(
                notes,
                "* Not run on {}: {}: {reason}.",
                report.release,
                names.join(", ")
            );
        }
    }
    if notes.is_empty() {
        return text;
    }
    format!("{text}\n{notes}")
}

/// Returns the table of features. Features that differ only in their names share a row.
fn features_table(kernels: &[(&str, &Report)]) -> String {
    let mut text = String::from("| Feature | Needed for |");
    for (series, _) in kernels {
        let _ = write!(text, " {series} |");
    }
    text.push_str(" Without it |\n|---|---|");
    text.push_str(&"---|".repeat(kernels.len() + 1));
    text.push('\n');

    let mut rows: Vec<(Vec<&str>, &Feature, String)> = Vec::new();
    for feature in kernels
        .iter()
        .rev()
        .flat_map(|(_, report)| &report.features)
    {
        let name = feature.name.as_str();
        let listed = |names: &[&str]| names.contains(&name);
        if listed(&OF_THE_MACHINE) || rows.iter().any(|(names, ..)| listed(names)) {
            continue;
        }
        let cells: String = kernels
            .iter()
            .map(|(_, report)| {
                let here = report.features.iter().find(|f| f.name == name);
                match here.map(|f| f.present) {
                    Some(true) => " yes |",
                    Some(false) => " **no** |",
                    None => " |",
                }
            })
            .collect();
        let alike = rows.iter_mut().find(|(_, other, others)| {
            other.needed_for == feature.needed_for
                && other.without == feature.without
                && *others == cells
        });
        match alike {
            Some((names, ..)) => names.push(name),
            None => rows.push((vec![name], feature, cells)),
        }
    }
    for (names, feature, cells) in rows {
        let _ = writeln!(
            text,
            "| {} | {} |{cells} {} |",
            names.join(", "),
            feature.needed_for,
            feature.without
        );
    }
    text
}

fn programs_table(kernels: &[(&str, &Report)]) -> String {
    let series: Vec<&str> = kernels.iter().map(|(series, _)| *series).collect();
    let series = series.join(" · ");
    let mut text = format!(
        "Cells with several numbers are for {series}; a cell with one number is the same for all.\n\n\
         | Program | Instructions followed | Stack, bytes | Machine code, bytes | Verified in |\n\
         |---|---:|---:|---:|---:|\n"
    );
    let mut names: Vec<&String> = kernels
        .iter()
        .flat_map(|(_, report)| report.programs.keys())
        .collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        let cell = |number: &dyn Fn(&Program) -> u64, unit: &str| {
            let mut cells: Vec<String> = kernels
                .iter()
                .map(|(_, report)| {
                    let program = report.programs.get(name);
                    program.map_or_else(|| "–".to_owned(), |program| grouped(number(program)))
                })
                .collect();
            if cells.iter().all(|cell| *cell == cells[0]) {
                cells.truncate(1);
            }
            format!("{}{unit}", cells.join(" · "))
        };
        let _ = writeln!(
            text,
            "| `{name}` | {} | {} | {} | {} |",
            cell(&|p| p.processed.into(), ""),
            cell(&|p| p.stack.into(), ""),
            cell(&|p| p.jited.into(), ""),
            cell(&|p| p.milliseconds, " ms"),
        );
    }
    text
}

/// Groups digits by three: `12 345`, with narrow no-break spaces.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page contains the generated tables, without manual changes.
    #[test]
    fn the_page_has_what_was_recorded() {
        let page = fs::read_to_string(file()).unwrap();
        let (before, after) = around(&page).expect("both marks");
        let record = Record::read().unwrap();
        let expected = format!("{before}{BEGIN}\n{}\n{END}{after}", tables(&record));
        assert!(
            page == expected,
            "docs/kernels.md is not what docs/kernels.json makes of it: cargo xtask kernels --write"
        );
    }

    #[test]
    fn numbers_are_grouped_by_three() {
        let thin = |text: &str| text.replace(' ', "\u{202f}");
        assert_eq!(grouped(7), "7");
        assert_eq!(grouped(829), "829");
        assert_eq!(grouped(12_345), thin("12 345"));
        assert_eq!(grouped(1_000_000), thin("1 000 000"));
    }
}
