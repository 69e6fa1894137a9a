//! Ranges of addresses.

use std::{net::IpAddr, str::FromStr};

use ipnet::IpNet;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A range of addresses: ADDRESS/LENGTH, or a single ADDRESS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Range(#[schemars(with = "String")] pub IpNet);

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let range = text
            .parse()
            .or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
        range.map(Self).map_err(|_| {
            format!(
                "`{text}` is not a range of addresses; expected one like 10.0.0.0/8 or fd00::/64, or an address"
            )
        })
    }
}

impl TryFrom<String> for Range {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Range> for String {
    fn from(range: Range) -> Self {
        range.0.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_range() {
        let parse = |text: &str| text.parse::<Range>();
        for (text, wanted) in [
            ("fd00:77::1", "fd00:77::1/128"),
            ("192.0.2.1", "192.0.2.1/32"),
            ("10.0.0.0/8", "10.0.0.0/8"),
        ] {
            assert_eq!(parse(text).unwrap().0.to_string(), wanted);
        }
        assert!(parse("fd00:77::1/").unwrap_err().contains("`fd00:77::1/`"));
    }
}
