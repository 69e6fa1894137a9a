//! Which of the three forms a text has.

/// The form of a text with rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Of `iptables-save`.
    Saved,
    /// Of `nft list ruleset`.
    Listed,
    /// Of `nft -j list ruleset`.
    Json,
}

/// Tells the form by the first line that is neither empty nor a comment. Another text counts as one of `iptables-save`.
pub fn of(text: &str) -> Form {
    let mut lines = text.lines().map(str::trim);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
    match first {
        Some(line) if line.starts_with('{') => Form::Json,
        Some(line) if line.starts_with("table ") => Form::Listed,
        _ => Form::Saved,
    }
}
