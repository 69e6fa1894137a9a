//! The path of packets of services through the node, as `packets.path` says: past the network stack, or through it.

use std::{
    path::Path as FsPath,
    time::{Duration, Instant},
};

use dataplane_common::packet::PacketConfig;
use kernel::netfilter;
use plan::ipsec::Policy;
use settings::PacketPath;
use takeover::path::{self, Chains};
use tracing::info;

use super::{LOOK, RETRY, due::Due};

/// How often to look at the legacy tables of iptables: the kernel does not report their changes.
const LEGACY: Duration = Duration::from_secs(2);
/// The rest after a look at legacy tables is so many times as long as the look.
const REST_FOR: u32 = 50;

/// The choice of the path.
pub struct Path {
    wanted: PacketPath,
    /// Whether flows that belong to no service bypass the stack, if nothing there must see packets.
    bypass: bool,
    /// What chains do, at the last look that succeeded.
    chains: Chains,
    /// An interface with filters of other programs on the way in, at the last look.
    filtered: Option<String>,
    /// Whether other programs are at TCX, after ours, on the way in of an interface.
    followed: bool,
    /// Why the last look at the chains failed.
    problem: Option<String>,
    /// Whether there was a choice.
    has_chosen: bool,
    /// The reason for the path through the stack, at the last choice.
    because: Option<String>,
    /// When to look at the chains.
    rules: Due,
    /// When to look whether there are legacy tables.
    legacy: Due,
}

impl Path {
    /// The choice before the first look.
    pub fn new(wanted: PacketPath, bypass: bool, now: Instant) -> Self {
        let due = || {
            if wanted == PacketPath::Auto {
                Due::at(now)
            } else {
                Due::never(now)
            }
        };
        Self {
            wanted,
            // With `fast`, nobody looks.
            bypass: bypass && wanted == PacketPath::Auto,
            // Rules that cannot be read may be policies, so the first look fails closed.
            chains: Chains {
                because: Some("netfilter's rules, which cannot be read".to_owned()),
                bar_bypass: false,
            },
            filtered: None,
            followed: false,
            problem: None,
            has_chosen: false,
            because: None,
            rules: due(),
            legacy: due(),
        }
    }

    /// When the next look is due.
    pub fn at(&self) -> Instant {
        self.rules.at.min(self.legacy.at)
    }

    /// Rules have changed.
    pub fn soon(&mut self) {
        self.rules.soon();
    }

    /// Looks at the chains. Returns whether the result differs from the last one. If they cannot be read, the path stays.
    pub fn look(&mut self) -> bool {
        let start = Instant::now();
        if start < self.rules.at && !netfilter::has_legacy_tables().unwrap_or(true) {
            self.legacy.done(start, LEGACY);
            return false;
        }
        let before = (self.chains.clone(), self.problem.take());
        let patience = match path::look_at_chains() {
            Ok(chains) => {
                self.chains = chains;
                LOOK
            }
            Err(error) => {
                self.problem = Some(format!("{error}; packets keep their path"));
                RETRY
            }
        };
        self.rules.done(start, patience);
        self.legacy.done_resting(REST_FOR, start, LEGACY);
        before.0 != self.chains || before.1 != self.problem
    }

    /// Looks for filters of other programs on the way in of interfaces. Returns whether the result differs from the last one.
    ///
    /// # Errors
    /// If the kernel does not return them.
    pub fn look_at_filters(
        &mut self,
        bpffs: &FsPath,
        interfaces: impl IntoIterator<Item = u32>,
    ) -> Result<bool, kernel::Error> {
        if self.wanted != PacketPath::Auto {
            return Ok(false);
        }
        let filtered = kernel::tc::ingress_of_others(bpffs)?;
        let followed = self.bypass && kernel::tc::has_programs_after_ours(bpffs, interfaces);
        let is_news = filtered != self.filtered || followed != self.followed;
        (self.filtered, self.followed) = (filtered, followed);
        Ok(is_news)
    }

    /// Chooses the path. Returns its flags of [`PacketConfig`].
    ///
    /// # Errors
    /// If the routing rules cannot be read.
    pub fn choose(&mut self, policies: &[Policy]) -> Result<u32, kernel::Error> {
        let because = match self.wanted {
            PacketPath::Off => return Ok(0),
            PacketPath::Fast => None,
            PacketPath::Stack => Some("packets.path: stack".to_owned()),
            PacketPath::Auto if self.chains.because.is_some() => self.chains.because.clone(),
            PacketPath::Auto => path::of_the_rest(policies, self.filtered.as_deref())?,
        };
        if !self.has_chosen || self.because != because {
            if let Some(why) = &because {
                info!("packets of services go through the stack because of {why}");
            } else {
                info!("packets of services take the fast path");
            }
            (self.has_chosen, self.because) = (true, because);
        }
        let mut flags = 0;
        if self.bypass {
            flags |= PacketConfig::BYPASS_STAYS;
        }
        if self.because.is_some() {
            flags |= PacketConfig::STACK;
        } else if self.bypass && !self.chains.bar_bypass && !self.followed {
            flags |= PacketConfig::BYPASS | PacketConfig::BYPASS_NEW;
        }
        Ok(flags)
    }

    /// The reason for the path through the stack, at the last choice.
    pub fn because(&self) -> Option<String> {
        self.because.clone()
    }

    /// Why the last look failed.
    pub fn problem(&self) -> Option<String> {
        self.problem.clone()
    }
}

#[cfg(test)]
mod tests {
    use plan::ipsec;

    use super::*;

    #[test]
    fn the_settings_decide_unless_they_are_auto() {
        const STACK: u32 = PacketConfig::STACK;
        let now = Instant::now();
        let policies = ipsec::block_by_default(2);
        for (wanted, flags) in [
            (PacketPath::Fast, 0),
            (PacketPath::Stack, STACK),
            (PacketPath::Off, 0),
            // Before the first look.
            (PacketPath::Auto, STACK),
        ] {
            let mut path = Path::new(wanted, true, now);
            let stays = PacketConfig::BYPASS_STAYS;
            let chosen = path.choose(&policies).unwrap();
            assert_eq!(chosen & !stays, flags, "{wanted:?}");
            assert_eq!(chosen & stays != 0, wanted == PacketPath::Auto);
            assert_eq!(path.because().is_some(), flags == STACK);
            assert_eq!(path.at() == now, wanted == PacketPath::Auto);
        }
    }
}
