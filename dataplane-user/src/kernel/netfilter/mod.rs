//! Other people's rules at netfilter's forward hook, as they are: nf_tables (`nft`, `iptables-nft`) and the legacy tables of
//! iptables. Read only: no module is loaded and no table made for it.

mod legacy;
mod nf_tables;

use std::io;

use super::error::{Doing, Error};

/// `NF_INET_FORWARD` (`include/uapi/linux/netfilter.h`).
const FORWARD: u32 = 2;

/// A chain of rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The table that it is in, as a person would name it: `iptables-legacy filter`, `nft inet firewalld`.
    pub table: String,
    /// Its name.
    pub name: String,
    /// Where packets come from, if not from other chains.
    pub base: Option<Base>,
    /// Its rules, in their order.
    pub rules: Vec<Rule>,
}

/// A chain that every forwarded packet passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// Whether a packet is dropped that no rule has decided on.
    pub drops: bool,
}

/// A rule, without what it asks of packets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// What it does with a packet that it is for.
    pub does: Vec<Verdict>,
}

/// What a rule does with a packet, besides letting it pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Drops it, refuses it, or gives it to somebody who may.
    Refuse,
    /// Has another chain of the table decide.
    Jump(String),
}

/// Every chain of the tables that have one at the forward hook.
///
/// # Errors
/// If the kernel does not tell.
pub fn forward_chains() -> Result<Vec<Chain>, Error> {
    let read = || -> io::Result<Vec<Chain>> {
        let mut chains = nf_tables::chains()?;
        chains.extend(legacy::chains()?);
        Ok(chains)
    };
    read().doing(|| "cannot read netfilter's rules at the forward hook".to_owned())
}
