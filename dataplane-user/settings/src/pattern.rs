//! Names of interfaces, by shell patterns.

use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Names of interfaces, by shell patterns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Patterns(Vec<Pattern>);

/// A shell pattern (`eth*`), or the exclusion of one (`!eth9`).
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct Pattern {
    pattern: glob::Pattern,
    excludes: bool,
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (excludes, pattern) = match text.strip_prefix('!') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        if pattern.is_empty() {
            return Err("a name, or a pattern such as `eth*`, was expected".to_owned());
        }
        let pattern = glob::Pattern::new(pattern)
            .map_err(|error| format!("`{pattern}` is no pattern: {error}"))?;
        Ok(Self { pattern, excludes })
    }
}

impl TryFrom<String> for Pattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> Self {
        let sign = if pattern.excludes { "!" } else { "" };
        format!("{sign}{}", pattern.pattern)
    }
}

impl Patterns {
    /// Returns the set of these patterns.
    pub fn new(patterns: Vec<Pattern>) -> Self {
        Self(patterns)
    }

    /// Tells if a name is selected. An exclusion counts more than any other pattern. If all patterns are
    /// exclusions, `by_default` decides about the other names.
    pub fn select(&self, name: &str, by_default: bool) -> bool {
        let matching = |excludes: bool| {
            self.0
                .iter()
                .any(|p| p.excludes == excludes && p.pattern.matches(name))
        };
        let only_exclusions = self.0.iter().all(|p| p.excludes);
        let included = if only_exclusions {
            by_default
        } else {
            matching(false)
        };
        included && !matching(true)
    }
}
