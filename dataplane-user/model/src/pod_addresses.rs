//! The addresses of Pods and of their nodes, as each node's kubelet reports them: the authors of other objects cannot
//! change them.

use std::net::IpAddr;

use imbl::OrdMap;

/// The addresses of Pods, and of the nodes on which they run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodAddresses {
    /// How many Pods have an address, or run on the node that has it.
    pub counts: OrdMap<IpAddr, u32>,
    /// Whether the Pods of all nodes are counted.
    pub everywhere: bool,
}

impl PodAddresses {
    /// Whether a Pod, or a node with a Pod, has an address.
    pub fn has(&self, address: IpAddr) -> bool {
        self.counts.contains_key(&address)
    }

    /// Counts the addresses of one Pod.
    pub fn add(&mut self, addresses: &[IpAddr]) {
        for address in addresses {
            *self.counts.entry(*address).or_default() += 1;
        }
    }

    /// Counts them no more.
    pub fn remove(&mut self, addresses: &[IpAddr]) {
        for address in addresses {
            match self.counts.get_mut(address) {
                Some(count) if *count > 1 => *count -= 1,
                _ => _ = self.counts.remove(address),
            }
        }
    }
}
