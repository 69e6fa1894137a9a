//! Writes a value of YAML as the text of JSON.
//!
//! The text is about as long as that of the file, whatever the value is made of. A tree of values in memory would be a
//! hundred times as large for a list of small mappings.

use std::fmt::{self, Write as _};

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Number, Value};

/// Appends a value to a text of JSON.
pub struct Json<'a>(pub &'a mut String);

impl Json<'_> {
    fn write(self, value: impl fmt::Display) {
        // A `String` takes everything.
        let _ = write!(self.0, "{value}");
    }
}

/// Appends a comma, except after the beginning of a list or of an object.
pub fn separate(text: &mut String) {
    if !text.ends_with(['[', '{']) {
        text.push(',');
    }
}

/// Appends a text in quotes.
pub fn quote(to: &mut String, text: &str) {
    Json(to).write(Value::from(text));
}

impl<'de> DeserializeSeed<'de> for Json<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Json<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.write(value);
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.write(value);
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.write(value);
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        self.write(Number::from_f64(value).map_or(Value::Null, Value::Number));
        Ok(())
    }

    fn visit_str<E>(self, value: &str) -> Result<(), E> {
        quote(self.0, value);
        Ok(())
    }

    fn visit_none<E>(self) -> Result<(), E> {
        self.write("null");
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.write("null");
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        self.0.push('[');
        loop {
            let before = self.0.len();
            separate(self.0);
            if seq.next_element_seed(Json(self.0))?.is_none() {
                self.0.truncate(before);
                break;
            }
        }
        self.0.push(']');
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.0.push('{');
        while let Some(key) = map.next_key::<String>()? {
            separate(self.0);
            quote(self.0, &key);
            self.0.push(':');
            map.next_value_seed(Json(self.0))?;
        }
        self.0.push('}');
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(yaml: &str) -> String {
        let mut text = String::new();
        serde_saphyr::with_deserializer_from_str(yaml, |of| Json(&mut text).deserialize(of))
            .unwrap();
        text
    }

    #[test]
    fn the_text_has_the_value() {
        for yaml in [
            "{}",
            "[]",
            "[[], {}, [a, 1, -1, 1.5, true, null, ~]]",
            "{a: {b: [1, {c: d}], \"e\\\"\\n\": \"\\u0001 ü\"}, f: 18446744073709551615}",
            "{labels: &a {x: \"1\"}, again: *a}",
            "a: |\n  two\n  lines\nb:\n- c: ''\n  d:\n",
        ] {
            let value: Value = serde_saphyr::from_str(yaml).unwrap();
            let read: Value = serde_json::from_str(&json(yaml)).unwrap();
            assert_eq!(read, value, "{yaml}");
        }
    }

    #[test]
    fn small_parts_take_little_more_than_in_the_file() {
        let yaml = format!("[{}]", "{a: },".repeat(10_000));
        assert!(json(&yaml).len() < 2 * yaml.len());
    }
}
