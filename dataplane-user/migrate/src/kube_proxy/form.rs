//! Which of the three forms a text has.

/// The form of a text with rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The output of `iptables-save`.
    Saved,
    /// The output of `nft list ruleset`.
    Listed,
    /// The output of `nft -j list ruleset`.
    Json,
}

/// Tells the form by the first line that has more than a comment. Any other text counts as one of `iptables-save`.
pub fn of(text: &str) -> Form {
    let mut lines = text.lines().map(str::trim);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
    match first {
        Some(line) if line.starts_with('{') => Form::Json,
        Some(line) if line.starts_with("table ") => Form::Listed,
        _ => Form::Saved,
    }
}
