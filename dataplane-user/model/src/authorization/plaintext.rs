//! PeerAuthentications: where a workload accepts plaintext.

use std::{collections::BTreeMap, sync::Arc};

use super::PolicyName;

/// A PeerAuthentication. DISABLE counts as PERMISSIVE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerAuthentication {
    /// The time of the policy's creation, in seconds since the epoch.
    pub created: Option<i64>,
    /// Whether plaintext is refused. `None`: less specific policies decide.
    pub strict: Option<bool>,
    /// Whether plaintext is refused at single ports. Holds only in a policy of [`Rank::Selector`].
    pub ports: BTreeMap<u16, bool>,
}

/// How specific a PeerAuthentication is, the most specific first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// It selects workloads by their labels.
    Selector,
    /// It holds in a namespace.
    Namespace,
    /// It holds in all namespaces.
    Root,
}

/// The PeerAuthentications of a workload: the oldest one of each rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plaintext([Option<(PolicyName, Arc<PeerAuthentication>)>; 3]);

impl Plaintext {
    /// Adds a policy. The caller adds equally old policies in the order of their names, and the first one counts.
    pub fn add(&mut self, rank: Rank, name: PolicyName, policy: &Arc<PeerAuthentication>) {
        let age = |of: &PeerAuthentication| (of.created.is_none(), of.created);
        let known = &mut self.0[rank as usize];
        if known.as_ref().is_none_or(|(_, of)| age(policy) < age(of)) {
            *known = Some((name, Arc::clone(policy)));
        }
    }

    /// Returns the policies that count, the most specific first.
    pub fn all(&self) -> impl Iterator<Item = (&PolicyName, &PeerAuthentication)> {
        self.0.iter().flatten().map(|(name, of)| (name, &**of))
    }

    /// Returns the policy with the modes of single ports, and whether each of these ports refuses plaintext.
    pub fn ports(&self) -> Option<(&PolicyName, &BTreeMap<u16, bool>)> {
        let (name, of) = self.0[Rank::Selector as usize].as_ref()?;
        Some((name, &of.ports))
    }

    /// Returns the policy because of which all other ports refuse plaintext.
    pub fn refused(&self) -> Option<&PolicyName> {
        let mut ranks = self.0.iter().flatten();
        let (name, strict) = ranks.find_map(|(name, of)| Some((name, of.strict?)))?;
        strict.then_some(name)
    }

    /// Returns the policy because of which a port refuses plaintext.
    pub fn refused_at(&self, port: u16) -> Option<&PolicyName> {
        let of_port = self.ports();
        match of_port.and_then(|(name, ports)| Some((name, ports.get(&port)?))) {
            Some((name, is_strict)) => is_strict.then_some(name),
            None => self.refused(),
        }
    }
}
