//! Which connections the rules of a mesh capture in a pod: those of Istio's sidecar (by REDIRECT or TPROXY) and ambient mode,
//! and Open Service Mesh's. Pure: from what `iptables-save` prints in a pod to ranges, ports, interfaces, users and groups. A
//! rule that this does not understand is an error.

mod ambient;
mod chains;
mod family;
mod inbound;
mod mangle;
mod merge;
mod options;
mod routes;
mod said;
#[cfg(test)]
mod tests;

pub use ambient::OWNER as AMBIENT;
pub use said::{Capture, Dns, Fault};

use self::{
    chains::{Chains, MESHES},
    family::{Wrong, family, raw},
    mangle::mangle,
    merge::{Tables, merge},
};
use super::ruleset::{Form, Text};
use crate::iptables::{self, Entry, Rule};

/// Reads what the rules of a mesh capture in a pod.
///
/// # Errors
///
/// There are no such rules, or a rule captures connections in another way than a configuration can say.
pub fn read(texts: &[Text<'_>]) -> Result<Capture, Fault> {
    let mut tables = Tables::default();
    for text in texts {
        let fault = |line: usize, what: String, rule: String| Fault {
            place: format!("{}:{line}", text.origin),
            what,
            text: rule,
        };
        if text.form == Form::Nft {
            let mut lines = text.text.lines().zip(1..);
            let of_mesh = |line: &str| {
                line.trim_start().starts_with("table ") && line.contains("istio")
                    || MESHES.iter().any(|mesh| line.contains(mesh.prefix))
            };
            if let Some((line, number)) = lines.find(|(line, _)| of_mesh(line)) {
                let what = "rules of nf_tables are not understood; only those of iptables are";
                return Err(fault(number, what.to_owned(), line.trim().to_owned()));
            }
            continue;
        }
        let mut table = "";
        let mut rows: Vec<Rule<'_>> = Vec::new();
        for entry in iptables::entries(text.text) {
            match entry.map_err(|error| fault(error.line, error.what.to_owned(), String::new()))? {
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
                    let Some(mesh) = mesh else { continue };
                    let read = tables.read(text.origin, mesh, table, &rows);
                    read.map_err(|(line, what, rule)| fault(line, what, rule))?;
                }
            }
        }
    }
    merge(tables).map_err(|(place, what, text)| Fault { place, what, text })
}

impl<'a> Tables<'a> {
    /// Reads a table of one family.
    fn read(
        &mut self,
        origin: &'a str,
        mesh: &'static Chains,
        table: &str,
        rows: &[Rule<'_>],
    ) -> Result<(), Wrong> {
        match table {
            "nat" if ambient::is_ambient(rows) => {
                self.families.push((origin, ambient::nat(rows)?));
            }
            "nat" => {
                let is_of_node =
                    |row: &&Rule<'_>| mesh.has(row) && row.text.contains("ISTIO_POSTRT");
                if let Some(row) = rows.iter().find(is_of_node) {
                    let what = "the rules are the node's, for probes of the kubelet, and capture no connection; read those in a \
                                pod";
                    return Err((row.line, what.to_owned(), row.to_string()));
                }
                self.families.push((origin, family(mesh, rows)?));
            }
            "mangle" if ambient::is_ambient(rows) => ambient::mangle(rows)?,
            "mangle" if mesh.prefix == "ISTIO_" => self.mangles.push((origin, mangle(mesh, rows)?)),
            "raw" => raw(mesh, rows)?,
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
