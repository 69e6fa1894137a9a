//! Label and field selectors.

use super::stored::Object;

/// The restriction of a list or watch.
#[derive(Clone, Debug, Default)]
pub struct Selector {
    labels: Vec<Term>,
    /// `metadata.name`.
    name: Option<String>,
    /// `metadata.namespace`.
    namespace: Option<String>,
    /// `spec.nodeName`.
    node: Option<String>,
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
    /// If the server does not support a selector.
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
                Some(("spec.nodeName", name)) => selector.node = Some(name.to_owned()),
                _ => return Err(format!("field label not supported: {term}")),
            }
        }
        Ok(selector)
    }

    /// Whether it has an object.
    pub fn has(&self, object: &Object) -> bool {
        let is =
            |wanted: &Option<String>, value: &String| wanted.as_ref().is_none_or(|w| w == value);
        let labels = &object.labels;
        is(&self.name, &object.name)
            && is(&self.namespace, &object.namespace)
            && is(&self.node, &object.node)
            && self.labels.iter().all(|term| match term {
                Term::Has(key) => labels.contains_key(key),
                Term::HasNot(key) => !labels.contains_key(key),
                Term::Is(key, value) => labels.get(key) == Some(value),
                Term::IsNot(key, value) => labels.get(key) != Some(value),
            })
    }
}
