//! One document of a manifest: an object, or a list of objects.
//!
//! The objects are given to a sink one by one as they are read. So a file with thousands of objects is never in memory
//! as their fields.

use std::fmt;

use serde::{
    Deserialize,
    de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;

use super::json::{Json, quote, separate};
use crate::ingest::{Kind, Text};

/// An object of a document.
#[derive(Debug)]
pub enum Found<'a> {
    /// An object of a kind that is read.
    Object(Kind, Text<'a>),
    /// An object of a kind that is not served here.
    Ignored(String),
    /// A fault of an object or list: the object's kind and text if they are known, the field, and the text.
    Fault(Option<(Kind, Text<'a>)>, &'static str, String),
}

/// The fields that are read of an object of any kind, besides its type ([`wire`](crate::objects::wire)).
const FIELDS: [&str; 6] = [
    "metadata",
    "spec",
    "status",
    "addressType",
    "endpoints",
    "ports",
];

/// Receives the objects, each with its index in the document's list. `None` if it is the whole document.
pub type Sink<'a> = dyn FnMut(Option<usize>, Found<'_>) + 'a;

/// The type of an object, as far as it is stated.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Type {
    api_version: Option<String>,
    kind: Option<String>,
}

impl Type {
    fn is_list(&self) -> bool {
        let kind = self.kind.as_deref();
        let of = kind.and_then(|kind| kind.strip_suffix("List"));
        of.is_some_and(|of| of.is_empty() || Kind::of(of).is_some())
    }

    /// Returns the type of this list's items if they do not state it.
    fn of_items(&self) -> Self {
        let kind = self.kind.as_deref();
        match kind.and_then(|kind| kind.strip_suffix("List")) {
            None | Some("") => Self::default(),
            Some(kind) => Self {
                api_version: self.api_version.clone(),
                kind: Some(kind.to_owned()),
            },
        }
    }

    fn or(self, other: &Self) -> Self {
        Self {
            api_version: self.api_version.or_else(|| other.api_version.clone()),
            kind: self.kind.or_else(|| other.kind.clone()),
        }
    }

    /// Returns whether no kind that is read has this name.
    fn is_of_others(&self) -> bool {
        let kind = self.kind.as_deref();
        kind.is_some_and(|kind| Kind::of(kind).is_none())
    }

    /// Gives the object to `sink`, unless it is a list. Its items, if it `has_items`, were already given.
    fn give(&self, item: Option<usize>, has_items: bool, text: Text<'_>, sink: &mut Sink<'_>) {
        let kind = self.kind.as_deref();
        let fault = |text: &str| Found::Fault(None, "kind", text.to_owned());
        let found = if item.is_some() && self.is_list() {
            fault("a list within a list; expected an object")
        } else if has_items && kind.is_none_or(|kind| !kind.ends_with("List")) {
            fault("missing or not a list; expected List")
        } else if has_items || self.is_list() {
            return;
        } else {
            self.found(text)
        };
        sink(item, found);
    }

    fn found<'a>(&self, text: Text<'a>) -> Found<'a> {
        let Some(word) = self.kind.as_deref().filter(|kind| !kind.is_empty()) else {
            let expected = "missing; expected Service, EndpointSlice or List";
            return Found::Fault(None, "kind", expected.to_owned());
        };
        let Some(kind) = Kind::of(word) else {
            return Found::Ignored(word.to_owned());
        };
        let expected = || kind.api_versions().next().unwrap_or_default();
        let Some(given) = &self.api_version else {
            let fault = format!("missing; expected {}", expected());
            return Found::Fault(Some((kind, text)), "apiVersion", fault);
        };
        let (group, version) = given.split_once('/').unwrap_or(("", given));
        if group == kind.group() && kind.has_version(version) {
            Found::Object(kind, text)
        } else if group == kind.group() {
            let fault = format!(
                "{given:?} is not a known version of {word}; expected {}",
                expected()
            );
            Found::Fault(Some((kind, text)), "apiVersion", fault)
        } else if group.is_empty() {
            Found::Ignored(word.to_owned())
        } else {
            // Another group may have a kind of the same name.
            Found::Ignored(format!("{word}.{group}"))
        }
    }
}

/// Gives the objects of the first document of JSON to `sink`, as text. Returns the end of the document. `None` if it
/// cannot be read in this way: then no object was given.
pub fn json(text: &str, sink: &mut Sink<'_>) -> Option<usize> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct List<'a> {
        api_version: Option<String>,
        kind: Option<String>,
        #[serde(borrow)]
        items: Option<Vec<&'a RawValue>>,
    }
    let mut documents = serde_json::Deserializer::from_str(text).into_iter::<List<'_>>();
    let List {
        api_version,
        kind,
        items,
    } = documents.next()?.ok()?;
    let end = documents.byte_offset();
    let of = Type { api_version, kind };
    of.kind.as_ref()?;
    let texts = || items.iter().flatten().map(|item| item.get());
    let types: Result<Vec<Type>, _> = texts().map(serde_json::from_str).collect();
    let of_items = of.of_items();
    for (item, (text, of)) in texts().zip(types.ok()?).enumerate() {
        let of = of.or(&of_items);
        of.give(Some(item), false, Text(text), sink);
    }
    of.give(None, items.is_some(), Text(&text[..end]), sink);
    Some(end)
}

/// Reads a document, or an item of its list.
pub struct Document<'a, 'b> {
    item: Option<usize>,
    /// The type if it is not stated.
    inherited: Type,
    /// Receives an item without a kind, whose list may state it later.
    later: &'a mut Vec<(usize, Type, String)>,
    sink: &'a mut Sink<'b>,
}

impl<'a, 'b> Document<'a, 'b> {
    /// Reads a document into `sink`.
    pub fn read<'de, D: Deserializer<'de>>(
        deserializer: D,
        sink: &'a mut Sink<'b>,
    ) -> Result<(), D::Error> {
        let document = Document {
            item: None,
            inherited: Type::default(),
            later: &mut Vec::new(),
            sink,
        };
        document.deserialize(deserializer)
    }
}

impl<'de> DeserializeSeed<'de> for Document<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Document<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a Kubernetes object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { item, sink, .. } = self;
        let mut of = self.inherited;
        let mut fields = String::from("{");
        let mut has_items = false;
        let mut later = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "apiVersion" => of.api_version = map.next_value()?,
                "kind" => of.kind = map.next_value()?,
                "items" if item.is_none() => {
                    has_items = true;
                    map.next_value_seed(Items {
                        inherited: of.of_items(),
                        later: &mut later,
                        sink: &mut *sink,
                    })?;
                }
                field if FIELDS.contains(&field) && !of.is_of_others() => {
                    separate(&mut fields);
                    quote(&mut fields, field);
                    fields.push(':');
                    map.next_value_seed(Json(&mut fields))?;
                }
                _ => _ = map.next_value::<IgnoredAny>()?,
            }
        }
        fields.push('}');
        if let (Some(item), None) = (item, &of.kind) {
            self.later.push((item, of, fields));
            return Ok(());
        }
        let inherited = of.of_items();
        for (item, of, fields) in later {
            let of = of.or(&inherited);
            of.give(Some(item), false, Text(&fields), sink);
        }
        of.give(item, has_items, Text(&fields), sink);
        Ok(())
    }
}

struct Items<'a, 'b> {
    inherited: Type,
    later: &'a mut Vec<(usize, Type, String)>,
    sink: &'a mut Sink<'b>,
}

impl<'de> DeserializeSeed<'de> for Items<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for Items<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of Kubernetes objects")
    }

    fn visit_none<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        for item in 0.. {
            let document = Document {
                item: Some(item),
                inherited: self.inherited.clone(),
                later: self.later,
                sink: self.sink,
            };
            if seq.next_element_seed(document)?.is_none() {
                break;
            }
        }
        Ok(())
    }
}
