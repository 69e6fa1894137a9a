//! Reads the rules of kube-proxy's mode iptables: the text of `iptables-save` and `ip6tables-save`.

mod chains;
mod filter;
mod hooks;
mod nat;
mod port;
mod rule;
mod tables;

use super::{Error, Text, draft::Draft, facts::family};

/// Reads kube-proxy's rules from a text. Returns whether the text has any.
///
/// # Errors
///
/// If a line does not have this format, rules of a family were read before, or table `filter` is missing.
pub fn read(text: &Text, draft: &mut Draft) -> Result<bool, Error> {
    let families = tables::read(&text.text).map_err(|error| Error::Line {
        origin: text.origin.clone(),
        line: error.line,
        what: error.what.to_owned(),
    })?;
    let mut found = false;
    for (v4, tables) in [true, false].into_iter().zip(&families) {
        let Some(nat) = &tables.nat else { continue };
        if !hooks::leads_to_services(nat) {
            if let Some(line) = nat.rules("KUBE-SERVICES").next() {
                draft.unhooked(v4, Error::unhooked(text, line.at, v4, "KUBE-SERVICES"));
            }
            continue;
        }
        found = true;
        // kube-proxy creates the chain before it writes its rules.
        if nat.rules("KUBE-SERVICES").next().is_none() {
            continue;
        }
        draft.begin(v4, &text.origin)?;
        hooks::read(nat, draft);
        nat::read(nat, draft);
        let filter = tables.filter.as_ref();
        let filter = filter.filter(|filter| filter.has("KUBE-SERVICES"));
        let filter = filter.ok_or_else(|| Error::Half {
            origin: text.origin.clone(),
            family: family(v4),
        })?;
        hooks::read(filter, draft);
        filter::read(filter, draft);
        draft.stale += nat.stale();
    }
    Ok(found)
}
