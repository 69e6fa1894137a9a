//! Reads kube-proxy's tables from the JSON of `nft -j list ruleset`. Converts rules and elements to the words that nft
//! prints without `-j`.
//!
//! Parses each object of the JSON separately, so that its memory is soon free again.

use std::{borrow::Cow, net::SocketAddr};

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

/// An entry of the ruleset. Exactly one field is set.
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
    /// The chain of a rule.
    #[serde(borrow, default)]
    chain: Cow<'a, str>,
    #[serde(borrow, default)]
    expr: Vec<&'a RawValue>,
    /// The timeout of a set or a map, in seconds.
    timeout: Option<u64>,
    #[serde(borrow, default)]
    elem: Vec<&'a RawValue>,
}

impl Object<'_> {
    /// Returns the name of a field that this object lacks and that objects of its kind have.
    fn lacks(&self, kind: &str) -> Option<&'static str> {
        let is_rule = kind == "rule";
        [
            ("name", !is_rule && self.name.is_empty()),
            ("table", kind != "table" && self.table.is_empty()),
            ("chain", is_rule && self.chain.is_empty()),
            ("expr", is_rule && self.expr.is_empty()),
        ]
        .into_iter()
        .find_map(|(field, lacks)| lacks.then_some(field))
    }
}

/// Reads kube-proxy's tables.
///
/// # Errors
///
/// If the text is not JSON of `nft -j list ruleset`.
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
        let objects = [
            ("table", &item.table),
            ("chain", &item.chain),
            ("rule", &item.rule),
            ("set", &item.set),
            ("map", &item.map),
        ];
        for (kind, object) in objects {
            if let Some(field) = object.as_ref().and_then(|object| object.lacks(kind)) {
                return Err(Broken {
                    at,
                    what: format!(
                        "not the JSON of `nft -j list ruleset`: a {kind} without {field}"
                    ),
                });
            }
        }
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
                // A statement that has no words stays JSON. The rule then becomes a leftover, because no rule of
                // kube-proxy starts with JSON.
                let words = all_words(rule.expr.iter().copied(), " ", statement);
                let chain = rule.chain.into_owned().into();
                table.rows.add(chain, (at, words.into()));
            }
        } else if let Some(set) = item.set.or(item.map)
            && let Some(table) = of(&mut tables, &set)
        {
            // The clients remembered for session affinity are not needed.
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
    for table in &mut tables {
        table.rows.finish();
    }
    Ok(tables)
}

/// Returns the fault of a part that starts at a byte of the text.
fn fault(part: &str, byte: usize, error: &serde_json::Error) -> Broken {
    let mut lines = part.split_inclusive('\n');
    let before: usize = lines
        .by_ref()
        .take(error.line().saturating_sub(1))
        .map(str::len)
        .sum();
    let text = error.to_string();
    // The error's own place is relative to the part, so it is cut off.
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

/// Joins the words of values. A value that has no words stays JSON.
fn all_words<'a>(
    values: impl Iterator<Item = &'a RawValue>,
    between: &str,
    words: Words,
) -> String {
    let mut all = String::new();
    for value in values {
        if !all.is_empty() {
            all.push_str(between);
        }
        let read: Option<Value> = serde_json::from_str(value.get()).ok();
        match read.as_ref().and_then(words) {
            Some(words) => all.push_str(&words),
            None => all.push_str(value.get()),
        }
    }
    all.shrink_to_fit();
    all
}

/// Returns the fields of an object, or `None` if the object has others.
fn fields<'v, const N: usize>(of: &'v Value, names: [&str; N]) -> Option<[Option<&'v Value>; N]> {
    let mut all = of.as_object()?.keys();
    let is_whole = all.all(|name| names.contains(&&**name));
    is_whole.then(|| names.map(|name| of.get(name)))
}

/// Returns the only field of an object.
fn single(value: &Value) -> Option<(&str, &Value)> {
    let object = value.as_object()?;
    let (word, of) = object.iter().next().filter(|_| object.len() == 1)?;
    Some((word, of))
}

/// Returns a name. A name contains no white space and no character that ends a word.
fn name(value: Option<&Value>) -> Option<&str> {
    let odd =
        |c: char| c.is_whitespace() || c.is_control() || matches!(c, '"' | ',' | ';' | '{' | '}');
    value?.as_str().filter(|text| !text.contains(odd))
}

/// Converts a value to words.
type Words = fn(&Value) -> Option<String>;

/// Converts an element of a set, or an element of a map with its verdict.
fn element(value: &Value) -> Option<String> {
    match value {
        Value::Array(_) => pair(value, key, verdict),
        value => key(value),
    }
}

/// Converts a key of a map and its value.
fn pair(value: &Value, of_key: Words, of_value: Words) -> Option<String> {
    let [key, value] = &value.as_array()?[..] else {
        return None;
    };
    Some(format!("{} : {}", of_key(key)?, of_value(value)?))
}

/// Converts a key, with its comment.
fn key(value: &Value) -> Option<String> {
    if value.get("elem").is_none() {
        return operand(value);
    }
    let [element] = fields(value, ["elem"])?;
    let [value, comment] = fields(element?, ["val", "comment"])?;
    let key = operand(value?)?;
    let Some(comment) = comment else {
        return Some(key);
    };
    let comment = comment.as_str()?;
    let is_odd = comment.contains(|c: char| c.is_control() || c == '"');
    (!is_odd).then(|| format!("{key} comment \"{comment}\""))
}

fn verdict(value: &Value) -> Option<String> {
    let (word, of) = single(value)?;
    match word {
        "goto" | "jump" => {
            let [target] = fields(of, ["target"])?;
            Some(format!("{word} {}", name(target)?))
        }
        "drop" | "accept" | "return" if of.is_null() => Some(word.to_owned()),
        _ => None,
    }
}

/// Converts the left side of a match, or a key of a map.
fn operand(value: &Value) -> Option<String> {
    if let Value::Number(number) = value {
        return Some(number.to_string());
    }
    if value.is_string() {
        return name(Some(value)).map(str::to_owned);
    }
    let (word, of) = single(value)?;
    Some(match word {
        "payload" => {
            let [protocol, field] = fields(of, ["protocol", "field"])?;
            format!("{} {}", name(protocol)?, name(field)?)
        }
        "meta" | "ct" => {
            let [key] = fields(of, ["key"])?;
            match name(key)? {
                key @ ("iifname" | "oifname") => key.to_owned(),
                key => format!("{word} {key}"),
            }
        }
        "fib" => {
            let [flags, result] = fields(of, ["flags", "result"])?;
            format!("fib {} {}", flag(flags?)?, name(result)?)
        }
        "numgen" => {
            let [mode, modulus, offset] = fields(of, ["mode", "mod", "offset"])?;
            let offset = offset.and_then(Value::as_u64).unwrap_or(0);
            let modulus = modulus?.as_u64().filter(|_| offset == 0)?;
            format!("numgen {} mod {modulus}", name(mode)?)
        }
        "concat" => joined(of, " . ", operand)?,
        "prefix" => {
            let [addr, length] = fields(of, ["addr", "len"])?;
            format!("{}/{}", name(addr)?, length?.as_u64()?)
        }
        "set" => format!("{{ {} }}", joined(of, ", ", operand)?),
        "&" | "|" | "^" if of.as_array()?.len() == 2 => joined(of, &format!(" {word} "), operand)?,
        _ => return None,
    })
}

fn joined(list: &Value, between: &str, words: impl Fn(&Value) -> Option<String>) -> Option<String> {
    let parts: Option<Vec<String>> = list.as_array()?.iter().map(words).collect();
    Some(parts?.join(between))
}

/// Returns an object's only flag.
fn flag(flags: &Value) -> Option<&str> {
    match flags.as_array().map(Vec::as_slice) {
        Some([flag]) => name(Some(flag)),
        Some(_) => None,
        None => name(Some(flags)),
    }
}

/// Converts a map in a rule: its key, and its name or elements.
fn map(map: &Value, word: &str, of_value: Words) -> Option<String> {
    let [key, data] = fields(map, ["key", "data"])?;
    let data = match data? {
        data if data.is_string() => name(Some(data))?.to_owned(),
        data => {
            let [set] = fields(data, ["set"])?;
            let pairs = joined(set?, ", ", |value| pair(value, operand, of_value));
            format!("{{ {} }}", pairs?)
        }
    };
    Some(format!("{} {word} {data}", operand(key?)?))
}

/// Converts a statement of a rule.
fn statement(value: &Value) -> Option<String> {
    let (word, of) = single(value)?;
    Some(match word {
        "vmap" => map(of, "vmap", verdict)?,
        "dnat" => translation(of)?,
        "match" => {
            let [op, left, right] = fields(of, ["op", "left", "right"])?;
            let not = match op?.as_str()? {
                "==" | "in" => "",
                "!=" => "!= ",
                _ => return None,
            };
            format!("{} {not}{}", operand(left?)?, operand(right?)?)
        }
        "mangle" => {
            let [key, value] = fields(of, ["key", "value"])?;
            format!("{} set {}", operand(key?)?, operand(value?)?)
        }
        "masquerade" if of.is_null() => word.to_owned(),
        "masquerade" => match fields(of, ["flags"])? {
            [Some(flags)] => format!("{word} {}", flag(flags)?),
            [None] => word.to_owned(),
        },
        "reject" if is_reject(of) => word.to_owned(),
        "set" => {
            let [op, elem, set] = fields(of, ["op", "elem", "set"])?;
            format!("{} {} {{ {} }}", name(op)?, name(set)?, key(elem?)?)
        }
        _ => return verdict(value),
    })
}

/// Returns true if `of` refuses a packet as a port without a listener does. nft prints such a refusal as the single
/// word `reject`.
fn is_reject(of: &Value) -> bool {
    let is = |value: Option<&Value>, words: &[&str]| {
        let word = value.and_then(Value::as_str);
        word.is_some_and(|word| words.contains(&word))
    };
    match fields(of, ["type", "expr"]) {
        None => of.is_null(),
        Some([None, None]) => true,
        Some([kind, expr]) => {
            is(kind, &["icmp", "icmpv6", "icmpx"]) && is(expr, &["port-unreachable"])
        }
    }
}

/// Converts a translation: `dnat to 10.244.0.101:8080`, `dnat ip to numgen random mod 2 map { … }`.
fn translation(dnat: &Value) -> Option<String> {
    let [family, addr, port] = fields(dnat, ["family", "addr", "port"])?;
    let family = match family {
        Some(family) => format!(" {}", name(Some(family))?),
        None => String::new(),
    };
    let addr = addr?;
    let to = if let Some(addr) = addr.as_str() {
        let port = u16::try_from(port?.as_u64()?).ok()?;
        SocketAddr::new(addr.parse().ok()?, port).to_string()
    } else {
        let [by] = fields(addr, ["map"]).filter(|_| port.is_none())?;
        map(by?, "map", operand)?
    };
    Some(format!("dnat{family} to {to}"))
}
