//! Rules of AuthorizationPolicies, and the connections that they match.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;

use crate::Identity;

/// A connection to a workload.
#[derive(Clone, Debug)]
pub struct Connection<'a> {
    peer: Option<&'a Identity>,
    /// The peer's identity in the form of principals: without `spiffe://`.
    principal: String,
    source: IpAddr,
    destination: SocketAddr,
}

impl<'a> Connection<'a> {
    /// Returns a connection. `peer`: the identity that the client has proven, `None` for plaintext. `destination`: the
    /// address and the port of the workload, not of a service.
    pub fn new(peer: Option<&'a Identity>, source: IpAddr, destination: SocketAddr) -> Self {
        let principal = peer.map(|of| of.to_string().split_off("spiffe://".len()));
        Self {
            peer,
            principal: principal.unwrap_or_default(),
            source: source.to_canonical(),
            destination: SocketAddr::new(destination.ip().to_canonical(), destination.port()),
        }
    }

    /// Returns the identity of the client.
    pub fn peer(&self) -> Option<&'a Identity> {
        self.peer
    }

    /// Returns the port of the workload.
    pub fn port(&self) -> u16 {
        self.destination.port()
    }
}

/// A rule: it matches if each of its clauses has a match that fits. A rule without clauses matches every connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule(
    /// The clauses. A clause without matches fits every connection.
    pub Box<[Box<[Match]>]>,
);

impl Rule {
    /// Returns a rule that matches no connection.
    pub fn never() -> Self {
        Self([[Match::default()].into()].into())
    }

    /// Returns the first clause that does not fit. `None` if the rule matches.
    pub fn mismatch(&self, connection: &Connection<'_>) -> Option<&[Match]> {
        let mut clauses = self.0.iter().map(|clause| &**clause);
        clauses.find(|clause| !clause.is_empty() && !clause.iter().any(|of| of.fits(connection)))
    }

    /// Returns whether the rule depends on the identity of the client.
    pub fn needs_identity(&self) -> bool {
        self.0.iter().flatten().any(Match::needs_identity)
    }

    /// Returns the rule's size in memory, in bytes, without the allocator's overhead.
    pub fn bytes(&self) -> usize {
        let words = |of: &Values<Word>| of.bytes(Word::len);
        let account = |of: &Account| of.namespace.len() + of.name.len();
        let matches = self.0.iter().flatten();
        let matches = matches.map(|of| {
            let addresses = of.sources.bytes(|_| 0) + of.destinations.bytes(|_| 0);
            let texts = words(&of.namespaces) + words(&of.principals) + of.accounts.bytes(account);
            size_of::<Match>() + addresses + texts + of.ports.bytes(|_| 0)
        });
        size_of::<Self>() + size_of_val(&*self.0) + matches.sum::<usize>()
    }
}

/// Properties of a connection, all of which must fit. A match without properties fits no connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// The client's namespace.
    pub namespaces: Values<Word>,
    /// The client's service account.
    pub accounts: Values<Account>,
    /// The client's identity, without `spiffe://`.
    pub principals: Values<Word>,
    /// The client's address.
    pub sources: Values<IpNet>,
    /// The workload's address.
    pub destinations: Values<IpNet>,
    /// The workload's port.
    pub ports: Values<u16>,
}

impl Match {
    /// Returns whether it has no properties.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the number of values.
    pub(super) fn count(&self) -> usize {
        let texts = self.namespaces.all().count() + self.principals.all().count();
        let ranges = self.sources.all().count() + self.destinations.all().count();
        texts + ranges + self.accounts.all().count() + self.ports.all().count()
    }

    fn needs_identity(&self) -> bool {
        let texts = [&self.namespaces, &self.principals];
        !texts.iter().all(|of| of.is_empty()) || !self.accounts.is_empty()
    }

    /// Returns whether it fits no client without an identity.
    pub(super) fn requires_identity(&self) -> bool {
        let texts = [&self.namespaces, &self.principals];
        texts.iter().any(|of| !of.any.is_empty()) || !self.accounts.any.is_empty()
    }

    fn fits(&self, connection: &Connection<'_>) -> bool {
        let peer = connection.peer;
        // Before the lists, which may be long.
        if peer.is_none() && self.requires_identity() {
            return false;
        }
        #[cfg(test)]
        super::tests::COMPARED.with(|all| all.set(all.get() + self.count() + 1));
        let (source, destination) = (&connection.source, connection.destination.ip());
        let is_in = |of: &Word, text: &str| peer.is_some() && of.fits(text);
        let namespace = peer.map_or("", Identity::namespace);
        !self.is_empty()
            && self.ports.fit(|port| *port == connection.port())
            && self.sources.fit(|range| range.contains(source))
            && self.destinations.fit(|range| range.contains(&destination))
            && self.namespaces.fit(|of| is_in(of, namespace))
            && self.principals.fit(|of| is_in(of, &connection.principal))
            && self
                .accounts
                .fit(|of| peer.is_some_and(|peer| of.is_of(peer)))
    }
}

/// The values that a property may have, and the values that it may not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Values<T> {
    /// The property must have one of these values. Empty: any value.
    pub any: Box<[T]>,
    /// The property must have none of these values.
    pub none: Box<[T]>,
}

impl<T> Default for Values<T> {
    fn default() -> Self {
        Self {
            any: Box::default(),
            none: Box::default(),
        }
    }
}

impl<T> Values<T> {
    pub(super) fn is_empty(&self) -> bool {
        self.any.is_empty() && self.none.is_empty()
    }

    /// Returns both kinds of values.
    pub(super) fn all(&self) -> impl Iterator<Item = &T> {
        self.any.iter().chain(&self.none)
    }

    fn bytes(&self, text: impl Fn(&T) -> usize) -> usize {
        self.all().map(|of| size_of::<T>() + text(of)).sum()
    }

    fn fit(&self, mut is: impl FnMut(&T) -> bool) -> bool {
        (self.any.is_empty() || self.any.iter().any(&mut is)) && !self.none.iter().any(is)
    }
}

/// A text of a client with an identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// This text.
    Exact(Box<str>),
    /// A text with this beginning.
    Prefix(Box<str>),
    /// A text with this end.
    Suffix(Box<str>),
    /// Any text.
    Present,
}

impl Word {
    fn fits(&self, text: &str) -> bool {
        match self {
            Self::Exact(of) => **of == *text,
            Self::Prefix(of) => text.starts_with(&**of),
            Self::Suffix(of) => text.ends_with(&**of),
            Self::Present => !text.is_empty(),
        }
    }
}

impl Word {
    fn len(&self) -> usize {
        match self {
            Self::Exact(text) | Self::Prefix(text) | Self::Suffix(text) => text.len(),
            Self::Present => 0,
        }
    }
}

impl From<&str> for Word {
    /// Reads the form in policies: `text`, `text*`, `*text` or `*`.
    fn from(text: &str) -> Self {
        match (text.strip_prefix('*'), text.strip_suffix('*')) {
            (Some(""), _) => Self::Present,
            (Some(end), _) => Self::Suffix(end.into()),
            (None, Some(start)) => Self::Prefix(start.into()),
            (None, None) => Self::Exact(text.into()),
        }
    }
}

/// A service account, in any trust domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Its namespace.
    pub namespace: Box<str>,
    /// Its name.
    pub name: Box<str>,
}

impl Account {
    fn is_of(&self, peer: &Identity) -> bool {
        (peer.namespace(), peer.account()) == (&*self.namespace, &*self.name)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("every connection");
        }
        for (at, clause) in self.0.iter().enumerate() {
            let and = if at > 0 { " and " } else { "" };
            write!(f, "{and}{}", Clause(clause))?;
        }
        Ok(())
    }
}

/// A clause as people read it.
pub(super) struct Clause<'a>(pub &'a [Match]);

impl fmt::Display for Clause<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, of) in self.0.iter().enumerate() {
            let or = if at > 0 { " or " } else { "" };
            write!(f, "{or}({of})")?;
        }
        if self.0.is_empty() {
            f.write_str("(every connection)")?;
        }
        Ok(())
    }
}

impl fmt::Display for Match {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("no connection: no field counts at layer 4");
        }
        let mut all = Vec::new();
        self.namespaces.show("namespace", &mut all);
        self.accounts.show("service account", &mut all);
        self.principals.show("principal", &mut all);
        self.sources.show("source", &mut all);
        self.destinations.show("destination", &mut all);
        self.ports.show("port", &mut all);
        f.write_str(&all.join(", "))
    }
}

impl<T: fmt::Display> Values<T> {
    fn show(&self, property: &str, all: &mut Vec<String>) {
        for (not, values) in [("", &self.any), ("not ", &self.none)] {
            if !values.is_empty() {
                let values: Vec<String> = values.iter().map(ToString::to_string).collect();
                all.push(format!("{not}{property} {}", values.join("|")));
            }
        }
    }
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(text) => f.write_str(text),
            Self::Prefix(text) => write!(f, "{text}*"),
            Self::Suffix(text) => write!(f, "*{text}"),
            Self::Present => f.write_str("*"),
        }
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
