//! Ranges of addresses.

use std::{net::IpAddr, str::FromStr};

use ipnet::IpNet;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use serde_json::Value;

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

/// External IPs that are served: a range of addresses, or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ExternalIps(#[schemars(with = "String")] pub Option<IpNet>);

impl FromStr for ExternalIps {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(None));
        }
        let range = text.parse::<Range>();
        range.map(|range| Self(Some(range.0))).map_err(|_| {
            format!("`{text}` is neither `none` nor a range of addresses like 198.51.100.0/24")
        })
    }
}

impl TryFrom<String> for ExternalIps {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<ExternalIps> for String {
    fn from(ips: ExternalIps) -> Self {
        ips.0
            .map_or_else(|| "none".to_owned(), |range| range.to_string())
    }
}

/// Reads `none`, a range, or a list of these.
pub fn one_or_several<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<ExternalIps>, D::Error> {
    let ips = match Value::deserialize(from)? {
        one @ Value::String(_) => Value::Array(vec![one]),
        several => several,
    };
    serde_json::from_value(ips).map_err(D::Error::custom)
}

/// Returns the schema of the values that [`one_or_several`] reads.
pub fn one_or_several_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "array"], "items": { "type": "string" } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn external_ips_are_a_list_or_one_word() {
        let read = |text: &str| {
            let read = one_or_several(&mut serde_json::Deserializer::from_str(text));
            read.map_err(|error| error.to_string())
        };
        assert_eq!(read(r#""none""#), Ok(vec![ExternalIps(None)]));
        assert_eq!(read(r#""none""#), read(r#"["none"]"#));
        assert_eq!(read(r#""192.0.2.0/24""#), read(r#"["192.0.2.0/24"]"#));
        assert_eq!(read("[]"), Ok(vec![]));
        assert!(read(r#""nowhere""#).is_err_and(|error| error.contains("neither `none` nor")));
    }

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
        let parse = |text: &str| text.parse::<ExternalIps>().map(String::from);
        assert_eq!(parse("none").unwrap(), "none");
        assert_eq!(parse("192.0.2.1").unwrap(), "192.0.2.1/32");
        assert!(parse("all").unwrap_err().contains("`none`"));
    }
}
