//! How long something may be idle.

use std::{fmt, str::FromStr};

use jiff::SignedDuration;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A timeout in whole seconds, at least one. Written as `90s`, `5m`, `24h` or `1h30m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Timeout(#[schemars(with = "String")] u32);

impl Timeout {
    /// Returns a timeout of `seconds` seconds; `None` for 0.
    pub fn of_seconds(seconds: u32) -> Option<Self> {
        (seconds > 0).then_some(Self(seconds))
    }

    /// Returns the timeout in seconds.
    pub fn seconds(self) -> u32 {
        self.0
    }
}

impl FromStr for Timeout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is not a timeout; expected whole seconds with a unit such as 90s, 5m or 24h"
            )
        };
        let duration: SignedDuration = text.parse().map_err(|_| wrong())?;
        let seconds = u32::try_from(duration.as_secs()).map_err(|_| wrong())?;
        if duration.subsec_nanos() != 0 {
            return Err(wrong());
        }
        Self::of_seconds(seconds).ok_or_else(wrong)
    }
}

impl TryFrom<String> for Timeout {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for Timeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            seconds if seconds % 3600 == 0 => write!(f, "{}h", seconds / 3600),
            seconds if seconds % 60 == 0 => write!(f, "{}m", seconds / 60),
            seconds => write!(f, "{seconds}s"),
        }
    }
}

impl From<Timeout> for String {
    fn from(timeout: Timeout) -> Self {
        timeout.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_whole_seconds() {
        for (text, seconds, shown) in [
            ("1h", 3600, "1h"),
            // Go writes durations in this form.
            ("24h0m0s", 86_400, "24h"),
            ("1h30m", 5400, "90m"),
            ("1.5h", 5400, "90m"),
            ("90s", 90, "90s"),
            ("2m", 120, "2m"),
        ] {
            let timeout: Timeout = text.parse().unwrap();
            assert_eq!(timeout.seconds(), seconds, "{text}");
            assert_eq!(timeout.to_string(), shown, "{text}");
            assert_eq!(shown.parse(), Ok(timeout));
        }
        for wrong in ["", "60", "0s", "-5s", "500ms", "1.5s", "soon", "2000000h"] {
            let said = wrong.parse::<Timeout>();
            assert!(said.is_err_and(|said| said.contains("expected")), "{wrong}");
        }
    }
}
