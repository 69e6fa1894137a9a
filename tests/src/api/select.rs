//! Label and field selectors.

use std::collections::BTreeMap;

/// What a list or watch is restricted to.
#[derive(Clone, Debug, Default)]
pub struct Selector {
    labels: Vec<Term>,
    /// `metadata.name`.
    name: Option<String>,
    /// `metadata.namespace`.
    namespace: Option<String>,
}

#[derive(Clone, Debug)]
enum Term {
    Has(String),
    HasNot(String),
    Is(String, String),
    IsNot(String, String),
}

impl Selector {
    /// From the parameters of a request.
    ///
    /// # Errors
    ///
    /// What the server does not know.
    pub fn parse(labels: &str, fields: &str) -> Result<Self, String> {
        let mut selector = Self::default();
        for term in labels.split(',').filter(|term| !term.is_empty()) {
            let own = |text: &str| text.trim().to_owned();
            selector
                .labels
                .push(if let Some(key) = term.strip_prefix('!') {
                    Term::HasNot(own(key))
                } else if let Some((key, value)) = term.split_once("!=") {
                    Term::IsNot(own(key), own(value))
                } else if let Some((key, value)) = term.split_once("==").or(term.split_once('=')) {
                    Term::Is(own(key), own(value))
                } else if term.contains(' ') {
                    return Err(format!("set-based selectors are not served here: {term}"));
                } else {
                    Term::Has(own(term))
                });
        }
        for term in fields.split(',').filter(|term| !term.is_empty()) {
            match term.split_once('=') {
                Some(("metadata.name", name)) => selector.name = Some(name.to_owned()),
                Some(("metadata.namespace", name)) => selector.namespace = Some(name.to_owned()),
                _ => return Err(format!("field label not supported: {term}")),
            }
        }
        Ok(selector)
    }

    /// Whether it has an object.
    pub fn has(&self, namespace: &str, name: &str, labels: &BTreeMap<String, String>) -> bool {
        self.name.as_ref().is_none_or(|wanted| wanted == name)
            && self
                .namespace
                .as_ref()
                .is_none_or(|wanted| wanted == namespace)
            && self.labels.iter().all(|term| match term {
                Term::Has(key) => labels.contains_key(key),
                Term::HasNot(key) => !labels.contains_key(key),
                Term::Is(key, value) => labels.get(key) == Some(value),
                Term::IsNot(key, value) => labels.get(key) != Some(value),
            })
    }
}
