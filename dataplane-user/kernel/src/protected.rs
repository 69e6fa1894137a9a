//! The networks that IPsec policies protect: sets of networks in `SOURCES`. The configuration has the number of the
//! first set ([`PacketConfig::policies`]). A change writes new sets beside those in use, and then changes this one
//! word.

use dataplane_common::{
    Addr,
    packet::{PacketConfig, SourceKey},
};
use ipnet::{IpNet, Ipv4Net};
use plan::{
    ipsec::{Policy, Selectors, selectors},
    source_key,
};

use super::{error::Error, packet::PacketTables, sources::Sources};

/// The bit that distinguishes the two halves of the sets: one is in use, the other is written.
const HALF: u32 = 1 << 30;

/// The sets' one writer.
#[derive(Debug)]
pub struct Protected {
    /// The first set in use.
    first: u32,
    /// The policies that it was made from; `None` before the first write.
    policies: Option<Vec<Policy>>,
}

/// The result of a change.
#[derive(Debug)]
pub enum Change {
    /// There is none.
    Nothing,
    /// There is another first set, in use once the configuration says so. After that and a grace period,
    /// [`Protected::remove_old`].
    Made,
}

impl Protected {
    /// Adopts the sets of an earlier agent.
    pub fn adopt(config: PacketConfig) -> Self {
        Self {
            first: config.policies,
            policies: None,
        }
    }

    /// The first set in use.
    pub fn first(&self) -> u32 {
        self.first
    }

    /// Writes the networks that policies protect. If an error occurs, everything is protected, and the reason is added
    /// to `problems`.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub fn write(
        &mut self,
        sources: &Sources,
        policies: &[Policy],
        problems: &mut Vec<String>,
    ) -> Result<Change, Error> {
        if self.policies.as_deref() == Some(policies) {
            return Ok(Change::Nothing);
        }
        // Left by an agent that died meanwhile.
        self.remove_old(sources)?;
        let first = SourceKey::POLICIES | !self.first & HALF;
        let written = match selectors(policies) {
            None => Err("they are too many to tell apart".to_owned()),
            Some(selectors) => fill(sources, &selectors, first).map_err(|error| error.to_string()),
        };
        self.first = match written {
            Ok(is_any) if is_any => first,
            Ok(_) => 0,
            Err(why) => {
                problems.push(format!(
                    "IPsec policies: {why}; no flow to a service goes on by the packet path \
                     (ipsec-policy)"
                ));
                PacketConfig::ALL_PROTECTED
            }
        };
        self.policies = Some(policies.to_vec());
        Ok(Change::Made)
    }

    /// Removes the sets that are not in use any more.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove_old(&self, sources: &Sources) -> Result<(), Error> {
        let is_used = |set: u32| self.first != 0 && (set ^ self.first) & HALF == 0;
        for key in sources.all()? {
            if key.is_of_policy() && !is_used(key.set) {
                sources.remove(&key)?;
            }
        }
        Ok(())
    }
}

impl PacketTables {
    /// Which IPsec policies protect packets from one address to another: bits of [`SourceKey::PROTECTED`] and
    /// [`SourceKey::SURELY_FORWARD`].
    ///
    /// # Errors
    /// If the kernel refuses to read the table.
    pub fn protection(&self, src: Addr, dst: Addr) -> Result<u32, Error> {
        let first = self.config().policies;
        if first == PacketConfig::ALL_PROTECTED {
            return Ok(SourceKey::PROTECTED);
        }
        let from = match first {
            0 => None,
            first => self.sources().said(first, dst)?,
        };
        let Some(from) = from.filter(|from| *from != 0) else {
            return Ok(0);
        };
        Ok(self.sources().said(from, src)?.unwrap_or_default())
    }
}

/// Writes sets from `first` on; whether there are any.
fn fill(sources: &Sources, selectors: &Selectors, first: u32) -> Result<bool, Error> {
    for (set, (dst, from)) in (first + 1..).zip(selectors) {
        for (src, protection) in from {
            sources.put(&source_key(set, src), *protection)?;
        }
        sources.put(&source_key(first, dst), set)?;
    }
    // In the table's sixteen bytes `::/0` is IPv4's, too.
    let v4 = IpNet::V4(Ipv4Net::default());
    if !selectors.is_empty() && !selectors.contains_key(&v4) {
        sources.put(&source_key(first, &v4), 0)?;
    }
    Ok(!selectors.is_empty())
}
