//! Imports kube-proxy's rules: reads the text of `iptables-save` or of `nft list ruleset` into the services that
//! kube-proxy wrote the rules for.
//!
//! [`import`] is pure. It reads only rules in the form that kube-proxy writes, and lists every other reachable line in
//! kube-proxy's chains. It leaves out a service with such a line: the rules still serve the service. This module
//! ignores rules of other programs.

mod draft;
mod endpoints;
mod error;
mod facts;
#[cfg(test)]
mod fuzz;
mod leftover;
mod nft;
mod rows;
mod saved;
#[cfg(test)]
mod tests;
mod written;

use std::sync::Arc;

pub use error::Error;
pub use facts::{Facts, Masquerade, all_of};
use imbl::OrdMap;
pub use leftover::Leftover;
use model::{Service, ServiceName};
pub use written::write;

use self::draft::Draft;
use crate::rules::ruleset::Form;

/// A text with rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// The origin, for messages: a file's path, or the program that printed the text.
    pub origin: String,
    /// The text.
    pub text: String,
}

/// The result of an import.
#[derive(Clone, Debug, Default)]
pub struct Imported {
    /// The services.
    pub services: OrdMap<ServiceName, Arc<Service>>,
    /// Facts about the node.
    pub facts: Facts,
    /// Lines in kube-proxy's chains that the import did not understand, and services that it left out.
    pub leftovers: Vec<Leftover>,
    /// Number of leftovers that are not listed.
    pub more: usize,
    /// Number of chains of services and endpoints that no packet reaches. Their rules serve no connection.
    pub stale: usize,
}

/// Reads the services from rules.
///
/// # Errors
///
/// If a text has neither form, no text has rules of kube-proxy, or no rule concerns a service.
pub fn import(texts: &[Text]) -> Result<Imported, Error> {
    let mut draft = Draft::default();
    let mut found = false;
    for text in texts {
        draft.leftovers.begin(&text.origin);
        found |= match Form::of(&text.text) {
            Form::Saved => saved::read(text, &mut draft)?,
            Form::Nft => nft::read(text, &mut draft)?,
        };
    }
    let origins: Vec<&str> = texts.iter().map(|text| &*text.origin).collect();
    if !found {
        draft.check_hooks()?;
        let of_iptables =
            |text: &Text| text.text.contains("KUBE-SERVICES") && Form::of(&text.text) == Form::Nft;
        return Err(match texts.iter().find(|text| of_iptables(text)) {
            Some(text) => Error::OfIptables(text.origin.clone()),
            None => Error::NoRules(origins.join(", ")),
        });
    }
    if draft.is_empty() {
        return Err(Error::NoServices(origins.join(", ")));
    }
    draft.check_hooks()?;
    Ok(draft.finish())
}
