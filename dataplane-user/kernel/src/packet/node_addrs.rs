//! The node's addresses in `NODE_ADDRS`.

use std::collections::BTreeSet;

use dataplane_common::Addr;

/// Assigns an index in `NODE_ADDRS` to each of the node's addresses. A flow refers to an index during its whole
/// lifetime. So an address that the node loses keeps its index, until another address needs the index that has been
/// idle for longest.
#[derive(Debug)]
pub struct NodeAddrs {
    /// The addresses by index; the first index is never used.
    slots: Vec<Option<Addr>>,
    /// When each was last wanted, in calls of [`NodeAddrs::want`].
    wanted_at: Vec<u64>,
    now: u64,
}

/// An index that gets an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewAddr {
    pub index: u8,
    pub addr: Addr,
    /// The previous address of the index.
    pub before: Option<Addr>,
}

impl NodeAddrs {
    /// Adopts the addresses of an earlier agent.
    pub fn adopt(get: impl Fn(u8) -> Option<Addr>) -> Self {
        let slots: Vec<_> = (0..=u8::MAX).map(get).collect();
        Self {
            wanted_at: vec![0; slots.len()],
            slots,
            now: 0,
        }
    }

    /// Returns all addresses.
    pub fn all(&self) -> Vec<Addr> {
        self.slots.iter().flatten().copied().collect()
    }

    /// The index of an address, if it has one.
    pub fn index(&self, addr: Addr) -> Option<u8> {
        let index = self.slots.iter().position(|slot| *slot == Some(addr))?;
        u8::try_from(index).ok()
    }

    /// Gives every address an index, if it has none and there is one for it.
    pub fn want(&mut self, addrs: &BTreeSet<Addr>) -> Vec<NewAddr> {
        self.now += 1;
        let mut changes = Vec::new();
        for addr in addrs {
            if let Some(index) = self.index(*addr) {
                self.wanted_at[usize::from(index)] = self.now;
            }
        }
        for addr in addrs {
            if self.index(*addr).is_some() {
                continue;
            }
            let free = (1..=u8::MAX).find(|i| self.slots[usize::from(*i)].is_none());
            let idle = || {
                (1..=u8::MAX)
                    .filter(|i| self.wanted_at[usize::from(*i)] < self.now)
                    .min_by_key(|i| self.wanted_at[usize::from(*i)])
            };
            if let Some(index) = free.or_else(idle) {
                let at = usize::from(index);
                let before = self.slots[at].replace(*addr);
                self.wanted_at[at] = self.now;
                changes.push(NewAddr {
                    index,
                    addr: *addr,
                    before,
                });
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(n: u16) -> Addr {
        let [high, low] = n.to_be_bytes();
        Addr::from_v4([192, 0, high, low])
    }

    #[test]
    fn an_address_keeps_its_index_while_there_are_others() {
        let mut addrs = NodeAddrs::adopt(|index| (index == 7).then(|| addr(1000)));
        assert_eq!(addrs.want(&[addr(1000)].into()), [], "adopted");
        assert_eq!(addrs.index(addr(1000)), Some(7));
        let one = addrs.want(&[addr(1)].into());
        assert_eq!((one[0].index, one[0].before), (1, None));
        assert_eq!(addrs.want(&[addr(2)].into())[0].index, 2);
        assert_eq!(addrs.want(&[addr(1)].into()), [], "it came back");

        // 3 to 255 without 7: then the longest idle, which is the adopted one, then 2.
        let many: BTreeSet<Addr> = (100..352).map(addr).collect();
        assert_eq!(many.len(), 252);
        assert_eq!(addrs.want(&many).len(), 252);
        let more = many
            .iter()
            .copied()
            .chain([addr(3), addr(4), addr(5), addr(6)])
            .collect();
        let changes = addrs.want(&more);
        let given: Vec<_> = changes.iter().map(|c| (c.index, c.before)).collect();
        assert_eq!(
            given,
            [
                (7, Some(addr(1000))),
                (2, Some(addr(2))),
                (1, Some(addr(1)))
            ]
        );
        assert_eq!(addrs.index(addr(6)), None, "no more room");
    }
}
