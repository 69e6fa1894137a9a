//! The identities that the endpoints of a ServiceEntry may have.

use std::collections::BTreeSet;

use model::Identity;

use super::Findings;

/// Maximum number of identities in `spec.subjectAltNames`, because each tunnel holds them.
const IDENTITIES_MAX: usize = 64;

/// Returns the identities in `spec.subjectAltNames`. Names of other kinds, such as DNS names, are for proxies that begin TLS themselves.
pub fn identities(given: Option<&[String]>, findings: &mut Findings) -> Box<[Identity]> {
    let mut found = BTreeSet::new();
    for (index, text) in given.into_iter().flatten().enumerate() {
        let path = || format!("spec.subjectAltNames[{index}]");
        match text.parse() {
            Ok(_) if found.len() == IDENTITIES_MAX => {
                findings.note(
                    path(),
                    format!("no effect: more than {IDENTITIES_MAX} identities"),
                );
                break;
            }
            Ok(identity) => _ = found.insert(identity),
            Err(wrong) if text.starts_with("spiffe:") => {
                findings.note(path(), format!("no effect: {wrong}"));
            }
            Err(_) => {}
        }
    }
    found.into_iter().collect()
}
