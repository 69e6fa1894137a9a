//! kube-proxy's tables in the JSON of `nft -j list ruleset`. Rules and elements become the words that nft prints without `-j`.
//!
//! An object of the JSON is read alone, so that what is needed for it is soon free again.

use std::{borrow::Cow, fmt::Write as _};

use serde::Deserialize;
use serde_json::{Value, value::RawValue};

use super::{
    super::leftover::At,
    TABLE,
    tables::{Set, Table},
};

/// The text is no JSON of nft.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The place, in bytes.
    pub byte: usize,
    /// The fault.
    pub what: String,
}

#[derive(Deserialize)]
struct Ruleset<'a> {
    #[serde(borrow)]
    nftables: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct Item<'a> {
    #[serde(borrow)]
    table: Option<Named<'a>>,
    #[serde(borrow)]
    chain: Option<Named<'a>>,
    #[serde(borrow)]
    rule: Option<RuleItem<'a>>,
    #[serde(borrow)]
    set: Option<SetItem<'a>>,
    #[serde(borrow)]
    map: Option<SetItem<'a>>,
}

#[derive(Deserialize)]
struct Named<'a> {
    #[serde(borrow)]
    family: Cow<'a, str>,
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    table: Cow<'a, str>,
}

#[derive(Deserialize)]
struct RuleItem<'a> {
    #[serde(borrow)]
    family: Cow<'a, str>,
    #[serde(borrow)]
    table: Cow<'a, str>,
    #[serde(borrow)]
    chain: Cow<'a, str>,
    #[serde(borrow)]
    expr: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct SetItem<'a> {
    #[serde(borrow)]
    family: Cow<'a, str>,
    #[serde(borrow)]
    table: Cow<'a, str>,
    #[serde(borrow)]
    name: Cow<'a, str>,
    timeout: Option<u64>,
    #[serde(borrow, default)]
    elem: Vec<&'a RawValue>,
}

/// Reads kube-proxy's tables.
///
/// # Errors
///
/// The text is no JSON of `nft -j list ruleset`.
pub fn read(text: &str) -> Result<Vec<Table<'static>>, Fault> {
    let of_raw = |raw: &RawValue| (raw.get().as_ptr() as usize) - (text.as_ptr() as usize);
    let ruleset: Ruleset<'_> =
        serde_json::from_str(text).map_err(|error| fault(text, 0, &error))?;
    let mut tables: Vec<Table<'static>> = Vec::new();
    for raw in ruleset.nftables {
        let byte = of_raw(raw);
        let item: Item<'_> =
            serde_json::from_str(raw.get()).map_err(|error| fault(raw.get(), byte, &error))?;
        let at = At::Byte(byte);
        if let Some(named) = item.table {
            if named.name == TABLE && matches!(&*named.family, "ip" | "ip6") {
                tables.push(Table::new(named.family == "ip"));
            }
        } else if let Some(named) = item.chain {
            if let Some(table) = of(&mut tables, &named.family, &named.table) {
                table.chain(named.name.into_owned().into());
            }
        } else if let Some(rule) = item.rule {
            if let Some(table) = of(&mut tables, &rule.family, &rule.table) {
                let mut words = String::new();
                for expr in &rule.expr {
                    if !words.is_empty() {
                        words.push(' ');
                    }
                    if statement(expr, &mut words).is_none() {
                        // As it is: no rule of kube-proxy's begins so.
                        let _ = write!(words, "{}", expr.get());
                    }
                }
                let chain = table.chain(rule.chain.into_owned().into());
                words.shrink_to_fit();
                table.add(chain, at, words.into());
            }
        } else if let Some(set) = item.set.or(item.map)
            && let Some(table) = of(&mut tables, &set.family, &set.table)
        {
            let mut elements = String::new();
            // Clients that are remembered are of no interest.
            let is_affinity = set.name.starts_with("affinity-");
            for element in set.elem.iter().filter(|_| !is_affinity) {
                if self::element(element, &mut elements).is_none() {
                    let _ = write!(elements, "{}", element.get());
                }
                elements.push('\n');
            }
            elements.shrink_to_fit();
            table.add_set(
                set.name.into_owned().into(),
                Set {
                    at,
                    timeout: set.timeout,
                    elements: elements.into(),
                },
            );
        }
    }
    tables.iter_mut().for_each(Table::finish);
    Ok(tables)
}

/// The fault of a part of a text that begins at a byte.
fn fault(part: &str, byte: usize, error: &serde_json::Error) -> Fault {
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
    Fault {
        byte: byte + before + error.column().saturating_sub(1),
        what: format!("not the JSON of `nft -j list ruleset`: {what}"),
    }
}

fn of<'t>(
    tables: &'t mut [Table<'static>],
    family: &str,
    table: &str,
) -> Option<&'t mut Table<'static>> {
    let v4 = match family {
        "ip" => true,
        "ip6" => false,
        _ => return None,
    };
    let mut tables = tables.iter_mut();
    tables.find(|known| table == TABLE && known.v4 == v4)
}

/// The object, if it has these fields at most.
fn only<'v>(value: &'v Value, fields: &[&str]) -> Option<&'v Value> {
    let object = value.as_object()?;
    let mut names = object.keys();
    names.all(|name| fields.contains(&&**name)).then_some(value)
}

/// An element of a set, or of a map with its verdict.
fn element(raw: &RawValue, to: &mut String) -> Option<()> {
    let value: Value = serde_json::from_str(raw.get()).ok()?;
    match &value {
        Value::Array(pair) => {
            let [key, verdict] = &pair[..] else {
                return None;
            };
            key_text(key, to)?;
            to.push_str(" : ");
            self::verdict(verdict, to)
        }
        key => key_text(key, to),
    }
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
    let object = value.as_object()?;
    let (word, of) = object.iter().next().filter(|_| object.len() == 1)?;
    match &**word {
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
        Value::Object(object) => {
            let (word, of) = object.iter().next().filter(|_| object.len() == 1)?;
            let text = |key: &str| of.get(key).and_then(Value::as_str).and_then(name);
            match &**word {
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
                    let flags = of.get("flags")?;
                    let flags = match flags {
                        Value::String(flag) => name(flag)?,
                        Value::Array(flags) => match &flags[..] {
                            [Value::String(flag)] => name(flag)?,
                            _ => return None,
                        },
                        _ => return None,
                    };
                    let _ = write!(to, "fib {flags} {}", text("result")?);
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

/// The data of a map in a rule: its name, or its elements.
fn map_data(
    raw: &RawValue,
    of_element: fn(&Value, &mut String) -> Option<()>,
    to: &mut String,
) -> Option<()> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inside<'a> {
        #[serde(borrow)]
        set: Vec<&'a RawValue>,
    }
    if let Ok(of) = serde_json::from_str::<String>(raw.get()) {
        to.push_str(name(&of)?);
        return Some(());
    }
    let inside: Inside<'_> = serde_json::from_str(raw.get()).ok()?;
    to.push_str("{ ");
    for (index, raw) in inside.set.iter().enumerate() {
        if index > 0 {
            to.push_str(", ");
        }
        let (key, value): (Value, Value) = serde_json::from_str(raw.get()).ok()?;
        operand(&key, to)?;
        to.push_str(" : ");
        of_element(&value, to)?;
    }
    to.push_str(" }");
    Some(())
}

/// A statement that may have an element for each endpoint: it is read element by element.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Long<'a> {
    #[serde(borrow)]
    Vmap(Map<'a>),
    #[serde(borrow)]
    Dnat(Dnat<'a>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Map<'a> {
    key: Value,
    #[serde(borrow)]
    data: &'a RawValue,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Dnat<'a> {
    #[serde(borrow)]
    family: Option<Cow<'a, str>>,
    #[serde(borrow)]
    addr: &'a RawValue,
    port: Option<u16>,
}

/// A part of a rule.
fn statement(raw: &RawValue, to: &mut String) -> Option<()> {
    match serde_json::from_str(raw.get()) {
        Ok(Long::Vmap(map)) => {
            operand(&map.key, to)?;
            to.push_str(" vmap ");
            return map_data(map.data, verdict, to);
        }
        Ok(Long::Dnat(dnat)) => return translation(&dnat, to),
        // Another statement, or one of these that kube-proxy does not write.
        Err(_) => {}
    }
    let value: Value = serde_json::from_str(raw.get()).ok()?;
    let object = value.as_object()?;
    let (word, of) = object.iter().next().filter(|_| object.len() == 1)?;
    match &**word {
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
            if let Some(flags) = of.get("flags") {
                let flags = match flags {
                    Value::Array(flags) => match &flags[..] {
                        [flag] => flag,
                        _ => return None,
                    },
                    flags => flags,
                };
                let _ = write!(to, " {}", name(flags.as_str()?)?);
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
        _ => return verdict(&value, to),
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
fn translation(dnat: &Dnat<'_>, to: &mut String) -> Option<()> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct ByMap<'a> {
        #[serde(borrow)]
        map: Map<'a>,
    }
    to.push_str("dnat");
    if let Some(family) = &dnat.family {
        let _ = write!(to, " {}", name(family)?);
    }
    to.push_str(" to ");
    if let Ok(addr) = serde_json::from_str::<std::net::IpAddr>(dnat.addr.get()) {
        let _ = write!(to, "{}", std::net::SocketAddr::new(addr, dnat.port?));
        return Some(());
    }
    let by: ByMap<'_> = serde_json::from_str(dnat.addr.get()).ok()?;
    if dnat.port.is_some() {
        return None;
    }
    operand(&by.map.key, to)?;
    to.push_str(" map ");
    map_data(by.map.data, operand, to)
}
