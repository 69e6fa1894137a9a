//! Other people's rules, as they are: nf_tables (`nft`, `iptables-nft`), the legacy tables of iptables, and the services of
//! IPVS. Read only: no module of legacy tables is loaded and no table made for it.

pub mod guard;
mod interface_chains;
mod ip_sets;
pub mod keep_nat;
mod legacy;
mod nf_message;
mod nf_tables;
mod nf_verdicts;
pub(crate) mod requests;

use std::{fs, io};

pub use self::{
    interface_chains::{InterfaceChain, interface_chains},
    ip_sets::make_ip_sets,
};
use super::error::{Doing, Error};

/// A chain of rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The table that it is in, as a person would name it: `iptables-legacy filter`, `nft inet firewalld`.
    pub table: String,
    /// Its name.
    pub name: String,
    /// The hook that calls the chain, if it is a base chain.
    pub base: Option<Base>,
    /// Its rules, in their order.
    pub rules: Vec<Rule>,
}

/// The place of a chain in the way of every packet that the stack forwards, or that the node sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// The hook, such as `forward` or [`OUTPUT`].
    pub hook: &'static str,
    /// Whether a packet is dropped that no rule has decided on.
    pub drops: bool,
}

/// A rule, without its matches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// The verdicts on a packet that matches.
    pub does: Vec<Verdict>,
}

/// A rule's verdict on a packet, other than accept or continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Drops or rejects the packet, or hands it to another program that may drop it (such as NFQUEUE).
    Refuse,
    /// Does something else with the packet: marks it, changes it, logs it, or keeps it from conntrack. Counters do not
    /// count: iptables gives each rule one.
    Act,
    /// Only counts the packet: the rule has no other purpose.
    Count,
    /// Jumps to another chain of the table.
    Jump(String),
}

/// The hooks that forwarded packets pass, and that the packet path bypasses; and [`OUTPUT`].
const BYPASSED: [&str; 4] = ["prerouting", "forward", "postrouting", OUTPUT];

/// The hook of packets that the node sends, such as ICMP errors about packets that it forwards.
pub const OUTPUT: &str = "output";

/// Every chain of the tables that have one at these hooks. Leaves out tables that only translate addresses, and
/// kube-proxy's table of nf_tables: they may have very many rules.
///
/// # Errors
/// If the query to the kernel fails.
pub fn bypassed_chains() -> Result<Vec<Chain>, Error> {
    let read = || -> io::Result<Vec<Chain>> {
        let mut chains = nf_tables::chains()?;
        chains.extend(legacy::chains()?);
        Ok(chains)
    };
    read().doing(|| "cannot read netfilter's rules for forwarded packets".to_owned())
}

/// Whether legacy tables of iptables are in use that [`bypassed_chains`] reads. The kernel does not report their changes.
///
/// # Errors
/// If the kernel does not list them.
pub fn has_legacy_tables() -> io::Result<bool> {
    legacy::has_tables()
}

/// Whether rules of NAT are at the output hook of the network namespace that this thread is in.
///
/// # Errors
/// If the query to the kernel fails.
pub fn has_nat_at_output() -> io::Result<bool> {
    Ok(nf_tables::has_nat_at_output()? || legacy::has_nat_at_output()?)
}

/// The hooks of packets of IP, by number.
const HOOKS: [&str; 5] = ["prerouting", "input", "forward", "output", "postrouting"];

/// The tool that made a table, recognized by the table's form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `iptables-legacy`: a table of x_tables.
    Legacy,
    /// `iptables-nft`: a table of nf_tables with the name and the base chains of a table of iptables.
    Compat,
    /// Any other table of nf_tables.
    Native,
}

/// A table, without its rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The tool that made the table.
    pub kind: Kind,
    /// `ip`, `ip6`, `inet`, `arp`, `bridge` or `netdev`.
    pub family: &'static str,
    /// Its name.
    pub name: String,
    /// Its chains.
    pub chains: Vec<Listed>,
    /// The names of its sets and maps that have names of their own.
    pub sets: Vec<String>,
}

impl Table {
    /// How many rules it has.
    pub fn rules(&self) -> usize {
        self.chains.iter().map(|chain| chain.rules).sum()
    }

    /// Whether it does more than its mere existence: it has a rule, a chain that is not at a hook, or a chain that drops.
    pub fn holds_rules(&self) -> bool {
        let holds = |chain: &Listed| chain.rules > 0 || chain.hook.is_none() || chain.drops;
        self.chains.iter().any(holds)
    }
}

/// A chain, without its rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// The hook that it is at, such as `prerouting`.
    pub hook: Option<&'static str>,
    /// Whether a packet is dropped that no rule has decided on.
    pub drops: bool,
    /// How many rules it has, without its policy.
    pub rules: usize,
}

/// Every table of the network namespace that this thread is in.
///
/// # Errors
/// If the query to the kernel fails.
pub fn tables() -> Result<Vec<Table>, Error> {
    let read = || -> io::Result<Vec<Table>> {
        let mut tables = legacy::tables()?;
        tables.extend(nf_tables::tables()?);
        Ok(tables)
    };
    read().doing(|| "cannot list netfilter's tables".to_owned())
}

/// Removes a table of nf_tables, in one transaction, from the network namespace that this thread is in. `false`: it is not there.
///
/// # Errors
/// If the kernel refuses.
pub fn delete_table(family: &str, name: &str) -> Result<bool, Error> {
    nf_tables::delete_table(family, name)
        .doing(|| format!("cannot remove the nf_tables table {family} {name}"))
}

/// How many services IPVS has in the network namespace that this thread is in; `None`: IPVS is not loaded.
///
/// # Errors
/// If the query to the kernel fails.
pub fn ipvs_services() -> Result<Option<usize>, Error> {
    match fs::read_to_string("/proc/thread-self/net/ip_vs") {
        Ok(list) => Ok(Some(services_in(&list))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).doing(|| "cannot read the services of IPVS".to_owned()),
    }
}

/// Three lines of headings, then a line for each service, and below it lines for its servers.
fn services_in(list: &str) -> usize {
    let services = list.lines().skip(3);
    services
        .filter(|line| line.starts_with(|c: char| c.is_ascii_alphabetic()))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_of_ipvs_are_counted_without_servers() {
        let head = "IP Virtual Server version 1.2.1 (size=4096)\nProt LocalAddress:Port Scheduler Flags\n  \
                    -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n";
        let services = "TCP  0A600001:01BB rr\n  -> C0A84D01:192B      Masq    1      0          0\n\
                        UDP  [fd00:0096:0000:0000:0000:0000:0000:000a]:0035 rr\nFWM  00000001 wlc\n";
        assert_eq!(services_in(head), 0);
        assert_eq!(services_in(&format!("{head}{services}")), 3);
    }

    #[test]
    fn an_empty_table_holds_nothing() {
        let chain = |hook, drops, rules| Listed {
            name: "X".to_owned(),
            hook,
            drops,
            rules,
        };
        let table = |chains: &[Listed]| Table {
            kind: Kind::Compat,
            family: "ip",
            name: "filter".to_owned(),
            chains: chains.to_vec(),
            sets: Vec::new(),
        };
        let at = Some("forward");
        assert!(!table(&[]).holds_rules());
        assert!(!table(&[chain(at, false, 0)]).holds_rules());
        for chain in [
            chain(at, false, 1),
            chain(at, true, 0),
            chain(None, false, 0),
        ] {
            assert!(
                table(std::slice::from_ref(&chain)).holds_rules(),
                "{chain:?}"
            );
        }
    }
}
