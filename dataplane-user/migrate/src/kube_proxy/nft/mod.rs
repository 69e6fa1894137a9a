//! Reads the rules of kube-proxy's mode nftables: the output of `nft list ruleset`.

mod chains;
mod elements;
mod fixed;
mod listed;
mod port;
mod services;
mod tables;

use super::{Error, Text, draft::Draft};

/// The name of kube-proxy's tables.
const TABLE: &str = "kube-proxy";

/// A set or a map with a fault. Its other elements cannot be trusted, because an element may also restrict an address.
#[derive(Debug)]
pub struct Broken {
    /// The line.
    at: usize,
    what: String,
}

impl Broken {
    /// Returns the fault of an element that starts with `word`.
    fn element(at: usize, of: &str, word: &str, what: &str) -> Self {
        // The message shows only the beginning of a long word.
        let word: String = word.chars().take(100).collect();
        let what = format!("{what}: {of}: {word:?}");
        Self { at, what }
    }

    /// Returns the error for a text.
    fn of(self, text: &Text) -> Error {
        Error::at(text, self.at, self.what)
    }
}

/// Reads kube-proxy's tables from the output of `nft list ruleset`. Returns whether the text has any.
///
/// # Errors
///
/// If the text has another form, rules of a family were read before, or no packet reaches the services.
pub fn read(text: &Text, draft: &mut Draft) -> Result<bool, Error> {
    let tables = listed::read(&text.text).map_err(|broken| broken.of(text))?;
    for table in &tables {
        if !fixed::leads_to_services(table) {
            let first = table.rules("services").next();
            let at = first.map_or(0, |rule| rule.at);
            return Err(Error::unhooked(text, at, table.v4, "services"));
        }
        draft.begin(table.v4, &text.origin)?;
        fixed::read(table, draft)
            .and_then(|()| services::read(table, draft))
            .map_err(|broken| broken.of(text))?;
        services::list_unread(table, draft);
    }
    Ok(!tables.is_empty())
}
