//! kube-proxy's rules: the text of `iptables-save`, or what `nft list ruleset` prints as text or as JSON, becomes
//! the services that kube-proxy wrote the rules for.
//!
//! [`import`] is pure. It takes for a service only what has the form that kube-proxy writes, and lists every other line of
//! kube-proxy's that a packet comes to. A service with such a line is left out: its rules still serve it. Rules of other programs are no concern of
//! this module.

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
mod shares;
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
    /// How people call its origin: a file's path, or the program that printed it.
    pub origin: String,
    /// The text.
    pub text: String,
}

impl Text {
    /// Whether it is the output of `nft -j`.
    fn is_json(&self) -> bool {
        self.text.trim_start().starts_with('{')
    }
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
    /// How many more there are.
    pub more: usize,
    /// Chains of services and endpoints to which no packet comes. Their rules serve nothing.
    pub stale: usize,
}

/// Reads the services out of rules.
///
/// # Errors
///
/// A text is not of one of the three forms, or no text has rules of kube-proxy, or none of the rules is about a service.
pub fn import(texts: &[Text]) -> Result<Imported, Error> {
    let mut draft = Draft::default();
    let mut found = false;
    for text in texts {
        draft.leftovers.begin(&text.origin);
        found |= match Form::of(&text.text) {
            Form::Saved if !text.is_json() => saved::read(text, &mut draft)?,
            _ => nft::read(text, &mut draft)?,
        };
    }
    let origins: Vec<&str> = texts.iter().map(|text| &*text.origin).collect();
    if !found {
        draft.check_hooks()?;
        let of_iptables = |text: &Text| {
            text.text.contains("KUBE-SERVICES")
                && (text.is_json() || Form::of(&text.text) == Form::Nft)
        };
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
