//! Determines the connections that the rules of a mesh capture in a pod. Supports Istio's sidecar (by REDIRECT or
//! TPROXY), Istio's ambient mode, and Open Service Mesh. Pure: from the output of `iptables-save` or nft in a pod to
//! ranges, ports, interfaces, users and groups. A rule that is not understood is an error.

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

use std::borrow::Cow;

pub use ambient::OWNER as AMBIENT;
pub use said::{Capture, Fault};

use self::{
    chains::{Chains, MESHES},
    family::{Wrong, family, raw},
    mangle::mangle,
    merge::{Tables, merge},
};
use super::ruleset::{Form, Text};
use crate::text::{
    Entry, Rule, nft,
    tree::{self, Part},
};

/// A rule in a chain.
#[derive(Clone, Debug)]
pub struct Row<'a> {
    line: usize,
    /// The chain's name in iptables.
    chain: Cow<'a, str>,
    /// The printed text, with the chain if iptables printed it.
    text: String,
    parts: Vec<Part<'a>>,
}

impl<'a> Row<'a> {
    fn of_saved(rule: &Rule<'a>) -> Self {
        Self {
            line: rule.line,
            chain: rule.chain.into(),
            text: rule.to_string(),
            parts: tree::saved(rule.text).collect(),
        }
    }

    fn wrong(&self, what: &str) -> Wrong {
        (self.line, what.to_owned(), self.text.clone())
    }
}

/// The fault reported for Istio's rules on a node.
const NODES: &str = "the rules are the node's, for probes of the kubelet, and capture no connection; read those in a pod";

/// Determines the connections that the rules of a mesh capture in a pod.
///
/// # Errors
///
/// If there are no such rules, or a configuration cannot express the capture.
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
            Form::Saved => tables.read(text).map_err(fault)?,
            Form::Nft => {
                let native = native::read(text.text).map_err(fault)?;
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
    // Istio's tables of nf_tables hold the rules of both families. Istio captures the families whose addresses the
    // rules name.
    let are_named = [0, 1].map(|of| natives.iter().any(|(_, native)| native.are_named[of]));
    for (text, native) in natives {
        if let Some(row) = native.first.filter(|_| are_named == [false; 2]) {
            let what = "no rule names an address, so none says of which family the rules are";
            return Err(fault_in(text, row.wrong(what)));
        }
        let both = native.tables.into_iter().zip(are_named);
        for ((of_family, is_named), v4) in both.zip([true, false]) {
            for (table, rows) in of_family.into_iter().filter(|_| is_named) {
                let read = tables.read_table(text.origin, table, &rows, Some(v4));
                read.map_err(|wrong| fault_in(text, wrong))?;
            }
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

/// Returns the name of a mesh's chain in a table `ip` or `ip6` of an nft listing: such a table is one of iptables.
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
    /// Reads the output of `iptables-save`.
    fn read(&mut self, text: &Text<'a>) -> Result<(), Wrong> {
        let mut table = "";
        let mut rows: Vec<Row<'_>> = Vec::new();
        for entry in crate::text::entries(text.text) {
            match entry.map_err(|error| (error.line, error.what.to_owned(), String::new()))? {
                Entry::Table(name) => (table, rows) = (name, Vec::new()),
                Entry::Rule(rule) => {
                    // `-I` inserts the rule before others.
                    let of_chain = rows.iter().enumerate();
                    let mut of_chain = of_chain.filter(|(_, row)| row.chain == rule.chain);
                    let before = rule.before.map(|before| before as usize - 1);
                    let at = before.and_then(|before| of_chain.nth(before));
                    let at = at.map_or(rows.len(), |(at, _)| at);
                    rows.insert(at, Row::of_saved(&rule));
                }
                Entry::Chain { .. } => {}
                Entry::Commit => self.read_table(text.origin, table, &rows, None)?,
            }
        }
        Ok(())
    }

    /// Reads a table. `v4` is set for a table of the mesh's own, and tells its family.
    fn read_table(
        &mut self,
        origin: &'a str,
        table: &str,
        rows: &[Row<'_>],
        v4: Option<bool>,
    ) -> Result<(), Wrong> {
        let mut meshes = MESHES.iter();
        let Some(mesh) = meshes.find(|mesh| rows.iter().any(|row| mesh.has(row))) else {
            match (v4, rows.first()) {
                (Some(_), Some(row)) => {
                    return Err(row.wrong("the table has no chain of Istio's"));
                }
                _ if table == "nat" => {
                    let other = others::in_iptables(rows);
                    self.others.extend(other.map(|other| (origin, other)));
                }
                _ => {}
            }
            return Ok(());
        };
        self.table(origin, mesh, table, rows, v4.is_some())?;
        if let Some((_, family)) = self.families.last_mut() {
            family.v4 = family.v4.or(v4);
        }
        Ok(())
    }

    /// Reads a table of one family. `is_native`: the table is the mesh's own.
    fn table(
        &mut self,
        origin: &'a str,
        mesh: &'static Chains,
        table: &str,
        rows: &[Row<'_>],
        is_native: bool,
    ) -> Result<(), Wrong> {
        match table {
            "nat" if ambient::is_ambient(rows) => {
                self.families.push((origin, ambient::nat(rows)?));
            }
            "nat" => {
                let is_of_node =
                    |row: &&Row<'_>| mesh.has(row) && row.text.contains("ISTIO_POSTRT");
                if let Some(row) = rows.iter().find(is_of_node) {
                    return Err(row.wrong(NODES));
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
                return Err(row.wrong(&what));
            }
        }
        Ok(())
    }
}
