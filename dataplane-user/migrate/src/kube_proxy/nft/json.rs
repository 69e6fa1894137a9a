//! kube-proxy's tables in the JSON of `nft -j list ruleset`. Rules and elements become the words that nft prints without `-j`.
//!
//! An object of the JSON is read alone, so that what is needed for it is soon free again.

use std::{borrow::Cow, fmt::Write as _, net::SocketAddr};

use serde::Deserialize;
use serde_json::{Value, value::RawValue};

use super::{
    super::leftover::At,
    Broken, TABLE,
    tables::{Set, Table},
};

#[derive(Deserialize)]
struct Ruleset<'a> {
    #[serde(borrow)]
    nftables: Vec<&'a RawValue>,
}

/// An entry of the ruleset, of which one field is there.
#[derive(Deserialize)]
struct Item<'a> {
    #[serde(borrow)]
    table: Option<Object<'a>>,
    #[serde(borrow)]
    chain: Option<Object<'a>>,
    #[serde(borrow)]
    rule: Option<Object<'a>>,
    #[serde(borrow)]
    set: Option<Object<'a>>,
    #[serde(borrow)]
    map: Option<Object<'a>>,
}

#[derive(Deserialize)]
struct Object<'a> {
    #[serde(borrow)]
    family: Cow<'a, str>,
    #[serde(borrow, default)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    table: Cow<'a, str>,
    /// Of a rule.
    #[serde(borrow, default)]
    chain: Cow<'a, str>,
    #[serde(borrow, default)]
    expr: Vec<&'a RawValue>,
    /// Of a set or a map.
    timeout: Option<u64>,
    #[serde(borrow, default)]
    elem: Vec<&'a RawValue>,
}

/// Reads kube-proxy's tables.
///
/// # Errors
///
/// The text is no JSON of `nft -j list ruleset`.
pub fn read(text: &str) -> Result<Vec<Table<'static>>, Broken> {
    let of_raw = |raw: &RawValue| (raw.get().as_ptr() as usize) - (text.as_ptr() as usize);
    let ruleset: Ruleset<'_> =
        serde_json::from_str(text).map_err(|error| fault(text, 0, &error))?;
    let mut tables: Vec<Table<'static>> = Vec::new();
    for raw in ruleset.nftables {
        let byte = of_raw(raw);
        let item: Item<'_> =
            serde_json::from_str(raw.get()).map_err(|error| fault(raw.get(), byte, &error))?;
        let at = At::Byte(byte);
        if let Some(table) = item.table {
            if table.name == TABLE && matches!(&*table.family, "ip" | "ip6") {
                tables.push(Table::new(table.family == "ip"));
            }
        } else if let Some(chain) = item.chain {
            if let Some(table) = of(&mut tables, &chain) {
                table.rows.chain(chain.name.into_owned().into());
            }
        } else if let Some(rule) = item.rule {
            if let Some(table) = of(&mut tables, &rule) {
                // What has no words stays as it is: no rule of kube-proxy's begins so.
                let words = all_words(rule.expr.iter().copied(), " ", statement);
                let chain = rule.chain.into_owned().into();
                table.rows.add(chain, (at, words.into()));
            }
        } else if let Some(set) = item.set.or(item.map)
            && let Some(table) = of(&mut tables, &set)
        {
            // Clients that are remembered are of no interest.
            let is_affinity = set.name.starts_with("affinity-");
            let elements = set.elem.iter().copied().filter(|_| !is_affinity);
            let set_of = Set {
                at,
                timeout: set.timeout,
                elements: all_words(elements, "\n", element).into(),
            };
            table.add_set(set.name.into_owned().into(), set_of);
        }
    }
    tables.iter_mut().for_each(|table| table.rows.finish());
    Ok(tables)
}

/// The fault of a part of a text that begins at a byte.
fn fault(part: &str, byte: usize, error: &serde_json::Error) -> Broken {
    let mut lines = part.split_inclusive('\n');
    let before: usize = lines
        .by_ref()
        .take(error.line().saturating_sub(1))
        .map(str::len)
        .sum();
    let text = error.to_string();
    // The place is that of the part.
    let what = text
        .rsplit_once(" at line ")
        .map_or(&*text, |(what, _)| what);
    Broken {
        at: At::Byte(byte + before + error.column().saturating_sub(1)),
        what: format!("not the JSON of `nft -j list ruleset`: {what}"),
    }
}

fn of<'t>(tables: &'t mut [Table<'static>], object: &Object<'_>) -> Option<&'t mut Table<'static>> {
    let v4 = match &*object.family {
        "ip" => true,
        "ip6" => false,
        _ => return None,
    };
    let mut tables = tables.iter_mut();
    tables.find(|known| object.table == TABLE && known.v4 == v4)
}

/// The words of values, one after the other. A value without words stays as it is.
fn all_words<'a>(
    values: impl Iterator<Item = &'a RawValue>,
    between: &str,
    words: fn(&Value, &mut String) -> Option<()>,
) -> String {
    let mut all = String::new();
    for value in values {
        if !all.is_empty() {
            all.push_str(between);
        }
        let read: Option<Value> = serde_json::from_str(value.get()).ok();
        if read.and_then(|read| words(&read, &mut all)).is_none() {
            all.push_str(value.get());
        }
    }
    all.shrink_to_fit();
    all
}

/// The object, if it has these fields at most.
fn only<'v>(value: &'v Value, fields: &[&str]) -> Option<&'v Value> {
    let object = value.as_object()?;
    let mut names = object.keys();
    names.all(|name| fields.contains(&&**name)).then_some(value)
}

/// The only field of an object.
fn single(value: &Value) -> Option<(&str, &Value)> {
    let object = value.as_object()?;
    let (word, of) = object.iter().next().filter(|_| object.len() == 1)?;
    Some((word, of))
}

/// An element of a set, or of a map with its verdict.
fn element(value: &Value, to: &mut String) -> Option<()> {
    let Value::Array(pair) = value else {
        return key_text(value, to);
    };
    let [key, verdict] = &pair[..] else {
        return None;
    };
    key_text(key, to)?;
    to.push_str(" : ");
    self::verdict(verdict, to)
}

/// A key, with its comment.
fn key_text(value: &Value, to: &mut String) -> Option<()> {
    let Some(element) = value.get("elem") else {
        return operand(value, to);
    };
    only(value, &["elem"])?;
    only(element, &["val", "comment"])?;
    operand(element.get("val")?, to)?;
    if let Some(comment) = element.get("comment") {
        let _ = write!(to, " comment \"{}\"", plain(comment.as_str()?)?);
    }
    Some(())
}

/// A text that is one word of nft's.
fn plain(text: &str) -> Option<&str> {
    let odd = |c: char| c.is_control() || c == '"';
    (!text.contains(odd)).then_some(text)
}

/// A name: it has no white space and no mark that ends a word.
fn name(text: &str) -> Option<&str> {
    let odd =
        |c: char| c.is_whitespace() || c.is_control() || matches!(c, '"' | ',' | ';' | '{' | '}');
    (!text.contains(odd)).then_some(text)
}

fn verdict(value: &Value, to: &mut String) -> Option<()> {
    let (word, of) = single(value)?;
    match word {
        "goto" | "jump" => {
            let of = only(of, &["target"])?;
            let _ = write!(to, "{word} {}", name(of.get("target")?.as_str()?)?);
        }
        "drop" | "accept" | "return" if of.is_null() => to.push_str(word),
        _ => return None,
    }
    Some(())
}

/// The left side of a match, or a key of a map.
fn operand(value: &Value, to: &mut String) -> Option<()> {
    match value {
        Value::String(text) => to.push_str(name(text)?),
        Value::Number(number) => {
            let _ = write!(to, "{number}");
        }
        Value::Object(_) => {
            let (word, of) = single(value)?;
            let text = |key: &str| of.get(key).and_then(Value::as_str).and_then(name);
            match word {
                "payload" => {
                    only(of, &["protocol", "field"])?;
                    let _ = write!(to, "{} {}", text("protocol")?, text("field")?);
                }
                "meta" => match only(of, &["key"]).and_then(|_| text("key"))? {
                    key @ ("iifname" | "oifname") => to.push_str(key),
                    key => {
                        let _ = write!(to, "meta {key}");
                    }
                },
                "ct" => {
                    only(of, &["key"])?;
                    let _ = write!(to, "ct {}", text("key")?);
                }
                "fib" => {
                    only(of, &["flags", "result"])?;
                    let _ = write!(to, "fib {} {}", flag(of)?, text("result")?);
                }
                "numgen" => {
                    only(of, &["mode", "mod", "offset"])?;
                    let offset = of.get("offset").and_then(Value::as_u64).unwrap_or(0);
                    let modulus = of.get("mod")?.as_u64().filter(|_| offset == 0)?;
                    let _ = write!(to, "numgen {} mod {modulus}", text("mode")?);
                }
                "concat" => joined(of, " . ", to)?,
                "prefix" => {
                    only(of, &["addr", "len"])?;
                    let _ = write!(to, "{}/{}", text("addr")?, of.get("len")?.as_u64()?);
                }
                "set" => {
                    to.push_str("{ ");
                    joined(of, ", ", to)?;
                    to.push_str(" }");
                }
                "&" | "|" | "^" => {
                    let [left, right] = &of.as_array()?[..] else {
                        return None;
                    };
                    operand(left, to)?;
                    let _ = write!(to, " {word} ");
                    operand(right, to)?;
                }
                _ => return None,
            }
        }
        _ => return None,
    }
    Some(())
}

fn joined(list: &Value, between: &str, to: &mut String) -> Option<()> {
    for (index, part) in list.as_array()?.iter().enumerate() {
        if index > 0 {
            to.push_str(between);
        }
        operand(part, to)?;
    }
    Some(())
}

/// The only one of an object's flags.
fn flag(of: &Value) -> Option<&str> {
    let flags = of.get("flags")?;
    let flag = match flags.as_array().map(Vec::as_slice) {
        Some([flag]) => flag,
        Some(_) => return None,
        None => flags,
    };
    name(flag.as_str()?)
}

/// A map in a rule: its key, and its name or its elements.
fn map(
    map: &Value,
    word: &str,
    of_element: fn(&Value, &mut String) -> Option<()>,
    to: &mut String,
) -> Option<()> {
    only(map, &["key", "data"])?;
    operand(map.get("key")?, to)?;
    let _ = write!(to, " {word} ");
    let data = map.get("data")?;
    if let Some(of) = data.as_str() {
        to.push_str(name(of)?);
        return Some(());
    }
    to.push_str("{ ");
    let set = only(data, &["set"])?.get("set")?.as_array()?;
    for (index, pair) in set.iter().enumerate() {
        if index > 0 {
            to.push_str(", ");
        }
        let [key, value] = &pair.as_array()?[..] else {
            return None;
        };
        operand(key, to)?;
        to.push_str(" : ");
        of_element(value, to)?;
    }
    to.push_str(" }");
    Some(())
}

/// A part of a rule.
fn statement(value: &Value, to: &mut String) -> Option<()> {
    let (word, of) = single(value)?;
    match word {
        "vmap" => map(of, "vmap", verdict, to)?,
        "dnat" => translation(of, to)?,
        "match" => {
            only(of, &["op", "left", "right"])?;
            operand(of.get("left")?, to)?;
            match of.get("op")?.as_str()? {
                "==" | "in" => to.push(' '),
                "!=" => to.push_str(" != "),
                _ => return None,
            }
            operand(of.get("right")?, to)?;
        }
        "mangle" => {
            only(of, &["key", "value"])?;
            operand(of.get("key")?, to)?;
            to.push_str(" set ");
            operand(of.get("value")?, to)?;
        }
        "masquerade" => {
            to.push_str("masquerade");
            if !of.is_null() {
                only(of, &["flags"])?;
            }
            if of.get("flags").is_some() {
                let _ = write!(to, " {}", flag(of)?);
            }
        }
        "reject" if is_reject(of) => to.push_str("reject"),
        "set" => {
            only(of, &["op", "elem", "set"])?;
            let [op, set] = ["op", "set"].map(|key| of.get(key).and_then(Value::as_str));
            let (op, set) = (name(op?)?, name(set?)?);
            let _ = write!(to, "{op} {set} {{ ");
            key_text(of.get("elem")?, to)?;
            to.push_str(" }");
        }
        _ => return verdict(value, to),
    }
    Some(())
}

/// Whether a refusal is that of a port where nobody listens, as nft prints it without a word.
fn is_reject(of: &Value) -> bool {
    let Some(kind) = of.get("type") else {
        return of.is_null() || of.as_object().is_some_and(serde_json::Map::is_empty);
    };
    only(of, &["type", "expr"]).is_some()
        && matches!(kind.as_str(), Some("icmp" | "icmpv6" | "icmpx"))
        && of.get("expr").and_then(Value::as_str) == Some("port-unreachable")
}

/// `dnat to 10.244.0.101:8080`, `dnat ip to numgen random mod 2 map { … }`.
fn translation(dnat: &Value, to: &mut String) -> Option<()> {
    only(dnat, &["family", "addr", "port"])?;
    to.push_str("dnat");
    if let Some(family) = dnat.get("family") {
        let _ = write!(to, " {}", name(family.as_str()?)?);
    }
    to.push_str(" to ");
    let (addr, port) = (dnat.get("addr")?, dnat.get("port"));
    if let Some(addr) = addr.as_str() {
        let port = u16::try_from(port?.as_u64()?).ok()?;
        let _ = write!(to, "{}", SocketAddr::new(addr.parse().ok()?, port));
        return Some(());
    }
    let by = only(addr, &["map"]).filter(|_| port.is_none())?;
    map(by.get("map")?, "map", operand, to)
}
