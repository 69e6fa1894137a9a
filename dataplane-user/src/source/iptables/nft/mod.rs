//! kube-proxy's mode nftables: what `nft list ruleset` prints, as text or as JSON.

mod chains;
mod elements;
mod fixed;
mod json;
mod listed;
mod port;
mod services;
mod tables;

use super::{
    Error, Text,
    draft::Draft,
    leftover::{At, Leftovers},
};
use tables::Table;

/// The name of kube-proxy's tables.
const TABLE: &str = "kube-proxy";

/// Reads kube-proxy's tables out of a text of `nft list ruleset`, and says whether there are some.
///
/// # Errors
///
/// A line is not of this format, or rules of the same family were read before.
pub fn listed(text: &Text, draft: &mut Draft, leftovers: &mut Leftovers) -> Result<bool, Error> {
    let tables = listed::read(&text.text).map_err(|error| Error::Line {
        origin: text.origin.clone(),
        line: error.line,
        column: None,
        what: error.what.to_owned(),
    })?;
    all(&tables, &text.origin, draft, leftovers)
}

/// Imports the output of `nft -j list ruleset`.
///
/// # Errors
///
/// The text is no such JSON, or rules of the same family were read before.
pub fn json(text: &Text, draft: &mut Draft, leftovers: &mut Leftovers) -> Result<bool, Error> {
    let tables = json::read(&text.text).map_err(|fault| {
        let mut place = Leftovers::default();
        place.add(At::Byte(fault.byte), "", fault.what);
        place.locate(&text.text);
        let (found, _) = place.finish();
        let first = found.into_iter().next();
        let (line, column, what) = first.map_or((1, None, String::new()), |first| {
            (first.line, first.column, first.why)
        });
        Error::Line {
            origin: text.origin.clone(),
            line,
            column,
            what,
        }
    })?;
    let found = all(&tables, &text.origin, draft, leftovers);
    leftovers.locate(&text.text);
    found
}

fn all(
    tables: &[Table<'_>],
    origin: &str,
    draft: &mut Draft,
    leftovers: &mut Leftovers,
) -> Result<bool, Error> {
    for table in tables {
        draft.begin(table.v4, origin)?;
        fixed::read(table, draft, leftovers);
        services::read(table, draft, leftovers);
    }
    Ok(!tables.is_empty())
}
