//! Chains of nf_tables at interfaces (family `netdev`; hook `egress`, or `ingress`, also of the family `inet`).
//!
//! Packets that a TC program sends on bypass these chains, on any interface (`sch_handle_ingress`, `nf_ingress` and
//! `nf_skip_egress` in `__netif_receive_skb_core`, `net/core/dev.c`).

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{
    nf_message::{HEADER, text},
    nf_tables::{GET_CHAIN, hook},
};
use crate::{
    error::{Doing as _, Error},
    netlink::{Netlink, attributes, content, is_without_netfilter},
};

const NETDEV: u8 = 5;
const INET: u8 = 1;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_HOOK_DEV: u16 = 3;
const NFTA_HOOK_DEVS: u16 = 4;
const NFTA_DEVICE_NAME: u16 = 1;
/// Since Linux 6.17: the beginning of names.
const NFTA_DEVICE_PREFIX: u16 = 2;

/// A chain that packets pass which leave or arrive by some interfaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceChain {
    /// Its table and its name.
    name: String,
    is_egress: bool,
    devices: Vec<Device>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Device {
    Name(String),
    Prefix(String),
}

impl InterfaceChain {
    /// Its name, as a person would say it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it is on the way out.
    pub const fn is_egress(&self) -> bool {
        self.is_egress
    }

    /// Whether it is on no interface.
    pub const fn is_on_none(&self) -> bool {
        self.devices.is_empty()
    }

    /// Whether it is on this interface.
    pub fn is_on(&self, interface: &str) -> bool {
        self.devices.iter().any(|device| match device {
            Device::Name(name) => name == interface,
            Device::Prefix(prefix) => interface.starts_with(prefix.as_str()),
        })
    }
}

/// Every such chain in the network namespace that this thread is in. A kernel without nf_tables has none.
///
/// # Errors
/// If the query to the kernel fails.
pub fn interface_chains() -> Result<Vec<InterfaceChain>, Error> {
    let mut chains = Vec::new();
    let listed = Netlink::open(NETLINK_NETFILTER).and_then(|mut netlink| {
        for family in [NETDEV, INET] {
            netlink.dump(GET_CHAIN, &[family, 0, 0, 0], |message| {
                chains.extend(chain(message));
            })?;
        }
        Ok(())
    });
    match listed {
        // The chains changed during the dump: the next look sees the change.
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(chains),
        Err(error) if is_without_netfilter(&error) => Ok(Vec::new()),
        listed => listed
            .map(|()| chains)
            .doing(|| "cannot list nf_tables' chains of interfaces".to_owned()),
    }
}

fn chain(message: &[u8]) -> Option<InterfaceChain> {
    let attributes_of_chain = message.get(HEADER..)?;
    let family = *message.first()?;
    let hook = hook(family, attributes_of_chain)?;
    if !matches!(hook, "egress" | "ingress") {
        return None;
    }
    let family = if family == INET { "inet" } else { "netdev" };
    let word = |kind| content(attributes_of_chain, kind).map(text);
    let (table, name) = (word(NFTA_CHAIN_TABLE)?, word(NFTA_CHAIN_NAME)?);
    let at = content(attributes_of_chain, NFTA_CHAIN_HOOK)?;
    let several = content(at, NFTA_HOOK_DEVS).unwrap_or_default();
    let several = attributes(several).filter_map(|(kind, name)| match kind {
        NFTA_DEVICE_NAME => Some(Device::Name(text(name))),
        NFTA_DEVICE_PREFIX => Some(Device::Prefix(text(name))),
        _ => None,
    });
    let one = content(at, NFTA_HOOK_DEV).map(|name| Device::Name(text(name)));
    Some(InterfaceChain {
        name: format!("nft chain {family} {table} {name}"),
        is_egress: hook == "egress",
        devices: several.chain(one).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        netfilter::requests::number,
        netlink::{nested, string},
    };

    #[test]
    fn chains_tell_their_interfaces() {
        let message = |hook: u32, devices: &[u8]| {
            let hook = [&number(1, hook)[..], devices].concat();
            let parts = [string(1, "t"), string(3, "c"), nested(4, &hook)];
            [&[NETDEV, 0, 0, 0][..], &parts.concat()].concat()
        };
        let names = nested(4, &[string(1, "veth1"), string(2, "cali")].concat());
        let found = chain(&message(1, &names)).unwrap();
        assert_eq!(found.name(), "nft chain netdev t c");
        assert!(found.is_on("veth1") && found.is_on("cali12"));
        assert!(!found.is_on("veth12") && !found.is_on("eth0"));
        let one = chain(&message(1, &string(3, "eth0"))).unwrap();
        assert!(one.is_on("eth0") && !one.is_on("eth1"));
        let arrives = chain(&message(0, &names)).unwrap();
        assert!(!arrives.is_egress() && arrives.is_on("veth1"));
    }
}
