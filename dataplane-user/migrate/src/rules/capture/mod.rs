//! Which connections the rules of a mesh capture in a pod: those of Istio's sidecar (by REDIRECT or TPROXY) and ambient mode,
//! and Open Service Mesh's. Pure: from what `iptables-save` prints in a pod to ranges, ports, interfaces, users and groups. A
//! rule that this does not understand is an error.

mod ambient;
mod chains;
mod family;
mod inbound;
mod mangle;
mod merge;
mod native;
mod options;
mod others;
mod routes;
mod said;
#[cfg(test)]
mod tests;

pub use ambient::OWNER as AMBIENT;
pub use said::{Capture, Fault};

use self::{
    chains::{Chains, MESHES},
    family::{Wrong, family, raw},
    mangle::mangle,
    merge::{Tables, merge},
};
use super::ruleset::{Form, Text};
use crate::text::{Entry, Rule, nft};

/// The fault of Istio's rules on a node.
const NODES: &str = "the rules are the node's, for probes of the kubelet, and capture no connection; read those in a pod";

/// Reads what the rules of a mesh capture in a pod.
///
/// # Errors
///
/// There are no such rules, or a rule captures connections in another way than a configuration can say.
pub fn read(texts: &[Text<'_>]) -> Result<Capture, Fault> {
    let mut tables = Tables::default();
    let fault_in = |text: &Text<'_>, (line, what, rule): Wrong| Fault {
        place: format!("{}:{line}", text.origin),
        what,
        text: rule,
    };
    let mut natives = Vec::new();
    for text in texts {
        let fault = |wrong| fault_in(text, wrong);
        match text.form {
            Form::Saved => tables.read(text.origin, text.text, None).map_err(fault)?,
            Form::Nft => {
                let native = native::in_iptables_words(text.text).map_err(fault)?;
                if native.is_none()
                    && let Some(name) = of_iptables(text.text)
                {
                    let what = format!(
                        "chain {name} is one of iptables, as nft prints it: print its rules with iptables-save and ip6tables-save"
                    );
                    return Err(Fault {
                        place: text.origin.to_owned(),
                        what,
                        text: String::new(),
                    });
                }
                natives.extend(native.map(|native| (text, native)));
            }
        }
    }
    // Tables of nf_tables are of both families. Istio was told to capture those of which it names addresses.
    let are_named = [0, 1].map(|of| natives.iter().any(|(_, native)| native.are_named[of]));
    for (text, native) in &natives {
        if let Some((line, rule)) = native.first.clone().filter(|_| are_named == [false; 2]) {
            let what = "no rule names an address, so none says of which family the rules are";
            return Err(fault_in(text, (line, what.to_owned(), rule)));
        }
        let both = native.texts.iter().zip(are_named);
        for ((rules, is_named), v4) in both.zip([true, false]) {
            if !is_named {
                continue;
            }
            let read = tables.read(text.origin, rules, Some(v4));
            read.map_err(|(line, what, _)| {
                let rule = text.text.lines().nth(line - 1).unwrap_or_default();
                fault_in(text, (line, what, rule.trim().to_owned()))
            })?;
        }
    }
    let captured = [true, false].map(|v4| {
        let mut families = tables.families.iter();
        families.any(|(_, family)| family.v4.is_none_or(|its| its == v4))
    });
    for (origin, (line, what, rule)) in &tables.others {
        if others::is_captured(origin, captured) {
            return Err(Fault {
                place: format!("{origin}:{line}"),
                what: what.clone(),
                text: rule.clone(),
            });
        }
    }
    for text in texts.iter().filter(|text| text.form == Form::Nft) {
        others::in_nftables(text.text, captured).map_err(|wrong| fault_in(text, wrong))?;
    }
    merge(tables.families, tables.mangles).map_err(|(place, what, text)| Fault {
        place,
        what,
        text,
    })
}

/// A chain of a mesh in a listing of nf_tables that is one of iptables' tables.
fn of_iptables(text: &str) -> Option<&str> {
    let mut is_ip = false;
    nft::entries(text).find_map(|entry| match entry {
        Ok(nft::Entry::Table { family, .. }) => {
            is_ip = matches!(family, "ip" | "ip6");
            None
        }
        Ok(nft::Entry::Chain { name }) if is_ip => {
            let mut meshes = MESHES.iter();
            meshes
                .any(|mesh| name.starts_with(mesh.prefix))
                .then_some(name)
        }
        _ => None,
    })
}

impl<'a> Tables<'a> {
    /// Reads what `iptables-save` prints. `v4`: the family, if it is known.
    fn read(&mut self, origin: &'a str, text: &str, v4: Option<bool>) -> Result<(), Wrong> {
        let mut table = "";
        let mut rows: Vec<Rule<'_>> = Vec::new();
        for entry in crate::text::entries(text) {
            match entry.map_err(|error| (error.line, error.what.to_owned(), String::new()))? {
                Entry::Table(name) => (table, rows) = (name, Vec::new()),
                Entry::Rule(rule) => match rule.before {
                    // `-I` puts it at a place before others.
                    Some(before) => {
                        let of_chain = rows.iter().enumerate();
                        let of_chain = of_chain.filter(|(_, row)| row.chain == rule.chain);
                        let at = of_chain.map(|(at, _)| at).nth(before as usize - 1);
                        rows.insert(at.unwrap_or(rows.len()), rule);
                    }
                    None => rows.push(rule),
                },
                Entry::Chain { .. } => {}
                Entry::Commit => {
                    let mesh = MESHES
                        .iter()
                        .find(|mesh| rows.iter().any(|row| mesh.has(row)));
                    let Some(mesh) = mesh else {
                        match (v4, rows.first()) {
                            (Some(_), Some(row)) => {
                                let what = "the table has no chain of Istio's";
                                return Err((row.line, what.to_owned(), row.to_string()));
                            }
                            _ if table == "nat" => {
                                let other = others::in_iptables(&rows);
                                self.others.extend(other.map(|other| (origin, other)));
                            }
                            _ => {}
                        }
                        continue;
                    };
                    self.table(origin, mesh, table, &rows, v4.is_some())?;
                    if let Some((_, family)) = self.families.last_mut() {
                        family.v4 = family.v4.or(v4);
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads a table of one family. `is_native`: it is the mesh's own.
    fn table(
        &mut self,
        origin: &'a str,
        mesh: &'static Chains,
        table: &str,
        rows: &[Rule<'_>],
        is_native: bool,
    ) -> Result<(), Wrong> {
        match table {
            "nat" if ambient::is_ambient(rows) => {
                self.families.push((origin, ambient::nat(rows)?));
            }
            "nat" => {
                let is_of_node =
                    |row: &&Rule<'_>| mesh.has(row) && row.text.contains("ISTIO_POSTRT");
                if let Some(row) = rows.iter().find(is_of_node) {
                    return Err((row.line, NODES.to_owned(), row.to_string()));
                }
                self.families.push((origin, family(mesh, rows)?));
            }
            "mangle" if ambient::is_ambient(rows) => ambient::mangle(rows)?,
            "mangle" if mesh.prefix == "ISTIO_" => self.mangles.push((origin, mangle(mesh, rows)?)),
            "raw" => raw(mesh, rows, is_native)?,
            _ => {
                let row = rows.iter().find(|row| mesh.has(row));
                let row = row.expect("has one");
                let what = format!("table {table} of {} has no counterpart", mesh.owner);
                return Err((row.line, what, row.text.to_owned()));
            }
        }
        Ok(())
    }
}
