//! Reads kube-proxy's tables from the text of `nft list ruleset`.

use super::{
    Broken, TABLE,
    tables::{Set, Table},
};
use crate::text::nft::{Entry, entries, words};

/// Reads kube-proxy's tables.
///
/// # Errors
///
/// If a line does not have this format.
pub fn read(text: &str) -> Result<Vec<Table<'_>>, Broken> {
    let mut tables: Vec<Table<'_>> = Vec::new();
    let mut ours = false;
    for entry in entries(text) {
        let entry = entry.map_err(|error| Broken {
            at: error.line,
            what: error.what.to_owned(),
        })?;
        if let Entry::Table { family, name } = entry {
            ours = name == TABLE && matches!(family, "ip" | "ip6");
            if ours {
                tables.push(Table::new(family == "ip"));
            }
            continue;
        }
        let Some(table) = tables.last_mut().filter(|_| ours) else {
            continue;
        };
        match entry {
            Entry::Chain { name } => {
                table.rows.chain(name);
            }
            Entry::Rule { line, chain, text } => {
                table.rows.add(chain, line, text);
            }
            Entry::Elements { line, name, text } => table.add_set(name, set(line, text)),
            // The hooks are not needed.
            Entry::Base { .. } | Entry::Table { .. } => {}
        }
    }
    for table in &mut tables {
        table.rows.finish();
    }
    Ok(tables)
}

/// Reads a set or a map from its lines. `line` is the number of the first one.
fn set(line: usize, text: &str) -> Set<'_> {
    const ELEMENTS: &str = "elements = {";
    let (said, elements) = match text.split_once(ELEMENTS) {
        Some((said, rest)) => (
            said,
            rest.rsplit_once('}').map_or(rest, |(inside, _)| inside),
        ),
        None => (text, ""),
    };
    let lines = said.bytes().filter(|byte| *byte == b'\n').count();
    let mut timeouts = said
        .lines()
        .filter_map(|line| line.trim().strip_prefix("timeout "));
    Set {
        at: line + lines,
        timeout: timeouts.next().and_then(seconds),
        elements,
    }
}

/// Reads a time such as `3h` or `1d2h3m4s`.
fn seconds(text: &str) -> Option<u64> {
    let mut rest = words(text).next()?;
    let mut all = 0_u64;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit())?;
        let (number, unit) = rest.split_at(end);
        let end = unit
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(unit.len());
        let (unit, more) = unit.split_at(end);
        let number: u64 = number.parse().ok()?;
        let factor = match unit {
            "w" => 7 * 24 * 3600,
            "d" => 24 * 3600,
            "h" => 3600,
            "m" => 60,
            "s" => 1,
            _ => return None,
        };
        all = all.checked_add(number.checked_mul(factor)?)?;
        rest = more;
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::seconds;

    #[test]
    fn times_are_read() {
        for (text, wanted) in [
            ("10s", Some(10)),
            ("3h", Some(10_800)),
            ("1d2h3m4s", Some(93_784)),
            ("788ms", None),
            ("3", None),
            ("99999999999999999999s", None),
            ("9999999999999999w", None),
        ] {
            assert_eq!(seconds(text), wanted, "{text}");
        }
    }
}
