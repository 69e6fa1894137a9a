//! Istio's policies at layer 4 as values, and the decision about a connection.
//!
//! The order is that of Istio's ztunnel: policies with DENY, then policies with ALLOW. A workload without a policy with
//! ALLOW accepts all other connections. <https://istio.io/latest/docs/concepts/security/#implicit-enablement>

mod clients;
mod plaintext;
mod rule;
#[cfg(test)]
mod tests;

use std::{fmt, sync::Arc};

pub use clients::{Clients, PlainClients, Verdict};
pub use plaintext::{PeerAuthentication, Plaintext, Rank};
pub use rule::{Account, Connection, Match, Rule, Values, Word};

/// An AuthorizationPolicy, without its name and its selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authorization {
    /// The effect on the connections that a rule matches.
    pub action: Action,
    /// Whether the policy is a dry run: its result is reported, and changes no connection.
    pub dry_run: bool,
    /// The rules. A policy matches if one of them does.
    pub rules: Box<[Rule]>,
}

/// The effect of a policy on the connections that it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// The policy allows these connections. It refuses all other connections that no policy allows.
    Allow,
    /// The policy refuses these connections.
    Deny,
}

/// The connections that a policy refuses, for programs that do not evaluate rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// No connections.
    Nothing,
    /// No connections, and other policies with ALLOW refuse no connections either.
    AllowsAll,
    /// The connections that no policy allows.
    AllowsSome,
    /// The connections that a rule matches.
    Denies,
}

impl Authorization {
    /// Returns a policy that refuses all connections, in place of one that cannot be read.
    pub fn closed() -> Self {
        Self {
            action: Action::Deny,
            dry_run: false,
            rules: [Rule::default()].into(),
        }
    }

    /// Returns the index of the first rule that matches.
    pub fn matching(&self, connection: &Connection<'_>) -> Option<usize> {
        let mut rules = self.rules.iter();
        rules.position(|rule| rule.mismatch(connection).is_none())
    }

    /// Returns whether the policy's decisions depend on the identity of the client.
    pub fn needs_identity(&self) -> bool {
        !self.dry_run && self.rules.iter().any(Rule::needs_identity)
    }

    /// Returns the connections that the policy refuses.
    pub fn extent(&self) -> Extent {
        match self.action {
            _ if self.dry_run => Extent::Nothing,
            Action::Deny if self.rules.is_empty() => Extent::Nothing,
            Action::Deny => Extent::Denies,
            Action::Allow if self.rules.iter().any(|rule| rule.0.is_empty()) => Extent::AllowsAll,
            Action::Allow => Extent::AllowsSome,
        }
    }
}

/// The name of a policy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyName {
    /// The namespace.
    pub namespace: Arc<str>,
    /// The kind and the name, such as `AuthorizationPolicy web`.
    pub object: Arc<str>,
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, name) = self.object.split_once(' ').unwrap_or(("", &self.object));
        write!(f, "{kind} {}/{name}", self.namespace)
    }
}

/// The policies of a workload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policies {
    /// Its AuthorizationPolicies. `None`: the workload has a policy of this name, which has not arrived. It refuses all
    /// connections.
    pub authorizations: Vec<(PolicyName, Option<Arc<Authorization>>)>,
    /// Its PeerAuthentications.
    pub plaintext: Plaintext,
    /// AuthorizationPolicies with the action CUSTOM, which no program on the node evaluates.
    pub custom: Vec<PolicyName>,
    /// Whether a kind of policy cannot be read, so that no connection is allowed.
    pub unread: bool,
}

/// A decision about a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision<'a> {
    /// The reason, which includes whether the connection is allowed.
    pub reason: Reason<'a>,
    /// The results of dry runs.
    pub dry_run: Vec<Reason<'a>>,
}

/// The reason for a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason<'a> {
    /// The workload has no policy with ALLOW, and no policy with DENY matches.
    NoPolicy,
    /// A rule of a policy with ALLOW matches: its index.
    Allowed(&'a PolicyName, usize),
    /// A rule of a policy with DENY matches: its index.
    Denied(&'a PolicyName, usize),
    /// The workload has policies with ALLOW, and none of them matches.
    NotAllowed,
    /// The client has no identity, and a PeerAuthentication requires one.
    Plaintext(&'a PolicyName),
    /// A policy of the workload has not arrived.
    Missing(&'a PolicyName),
    /// A kind of policy cannot be read.
    Unread,
}

impl Decision<'_> {
    /// Returns whether the connection is allowed.
    pub fn is_allowed(&self) -> bool {
        self.reason.is_allowed()
    }
}

impl<'a> Reason<'a> {
    /// Returns whether a connection is allowed for this reason.
    pub fn is_allowed(self) -> bool {
        matches!(self, Self::NoPolicy | Self::Allowed(..))
    }

    /// Returns the policy that decides, and the index of its rule. `None`: no single policy or rule decides.
    pub fn by(self) -> (Option<&'a PolicyName>, Option<usize>) {
        match self {
            Self::Allowed(name, rule) | Self::Denied(name, rule) => (Some(name), Some(rule)),
            Self::Plaintext(name) | Self::Missing(name) => (Some(name), None),
            Self::NoPolicy | Self::NotAllowed | Self::Unread => (None, None),
        }
    }
}

impl fmt::Display for Reason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPolicy => f.write_str("allowed: no policy refuses the connection"),
            Self::Allowed(name, at) => write!(f, "allowed by {name}, rule {}", at + 1),
            Self::Denied(name, at) => write!(f, "denied by {name}, rule {}", at + 1),
            Self::NotAllowed => f.write_str("denied: no policy with ALLOW matches"),
            Self::Plaintext(name) => {
                write!(
                    f,
                    "denied by {name}: the client has no identity (mode STRICT)"
                )
            }
            Self::Missing(name) => write!(f, "denied: {name} is not known yet"),
            Self::Unread => f.write_str("denied: Istio's policies cannot be read"),
        }
    }
}

impl Policies {
    /// Decides about a connection to the workload.
    pub fn decide(&self, connection: &Connection<'_>) -> Decision<'_> {
        let mut dry_run = self.denied(true, connection).collect::<Vec<_>>();
        let refusal = self.refusal(connection);
        if refusal.is_none() {
            // If the workload has policies with ALLOW, a further policy with ALLOW that does not match would change nothing.
            let is_limited = self.of(Action::Allow, false).next().is_some();
            let tried = self.allowed(true, connection);
            dry_run.extend(tried.filter(|of| of.is_allowed() || !is_limited));
        }
        let reason = refusal.unwrap_or_else(|| self.without_refusal(connection));
        Decision { reason, dry_run }
    }

    /// As [`Policies::decide`], without dry runs: does not evaluate their rules.
    pub fn reason(&self, connection: &Connection<'_>) -> Reason<'_> {
        let refusal = self.refusal(connection);
        refusal.unwrap_or_else(|| self.without_refusal(connection))
    }

    /// Returns whether a decision depends on the identity of the client. If not, addresses and ports are enough for
    /// [`Policies::decide`]. For PeerAuthentications, the question is only whether the client has one.
    pub fn needs_identity(&self) -> bool {
        let mut known = self
            .authorizations
            .iter()
            .filter_map(|(_, of)| of.as_deref());
        known.any(Authorization::needs_identity)
    }

    /// Explains a decision: one line for each policy and each rule, in the order in which they count, and the result.
    pub fn explain(&self, connection: &Connection<'_>) -> Vec<String> {
        let mut lines = Vec::new();
        for name in &self.custom {
            lines.push(format!(
                "{name}: CUSTOM is not evaluated (ZtunnelAccepted=False, UnsupportedValue)"
            ));
        }
        for (action, dry_run) in [
            (Action::Deny, true),
            (Action::Deny, false),
            (Action::Allow, true),
            (Action::Allow, false),
        ] {
            for (name, of) in self.of(action, dry_run) {
                let dry = if dry_run { " (dry run)" } else { "" };
                lines.push(format!("{name}: {}{dry}", action.word()));
                for (at, rule) in of.rules.iter().enumerate() {
                    let text = match rule.mismatch(connection) {
                        None => format!("matches: {rule}"),
                        Some(clause) => format!("does not match: {}", rule::Clause(clause)),
                    };
                    lines.push(format!("  rule {} {text}", at + 1));
                }
                if of.rules.is_empty() {
                    lines.push("  has no rules, so it does not match".to_owned());
                }
            }
        }
        let decision = self.decide(connection);
        let dry_run = decision.dry_run.iter();
        lines.extend(dry_run.map(|reason| format!("dry run: {reason}")));
        lines.push(decision.reason.to_string());
        lines
    }

    /// Returns why a connection is refused before policies with ALLOW count.
    fn refusal(&self, connection: &Connection<'_>) -> Option<Reason<'_>> {
        if self.unread {
            return Some(Reason::Unread);
        }
        let mut all = self.authorizations.iter();
        let missing = all.find_map(|(name, of)| of.is_none().then_some(Reason::Missing(name)));
        let plaintext = || {
            let refused = connection.peer().is_none();
            let by = refused.then(|| self.plaintext.refused_at(connection.port()))?;
            by.map(Reason::Plaintext)
        };
        missing
            .or_else(plaintext)
            .or_else(|| self.denied(false, connection).next())
    }

    /// Returns the reason if [`Policies::refusal`] has none.
    fn without_refusal(&self, connection: &Connection<'_>) -> Reason<'_> {
        self.allowed(false, connection).unwrap_or(Reason::NoPolicy)
    }

    /// Returns the policies with DENY that match.
    fn denied<'a>(
        &'a self,
        dry_run: bool,
        connection: &Connection<'_>,
    ) -> impl Iterator<Item = Reason<'a>> {
        let of = self.of(Action::Deny, dry_run);
        of.filter_map(|(name, of)| Some(Reason::Denied(name, of.matching(connection)?)))
    }

    /// Returns the result of the policies with ALLOW. `None`: the workload has none.
    fn allowed(&self, dry_run: bool, connection: &Connection<'_>) -> Option<Reason<'_>> {
        let mut found = None;
        for (name, of) in self.of(Action::Allow, dry_run) {
            if let Some(at) = of.matching(connection) {
                return Some(Reason::Allowed(name, at));
            }
            found = Some(Reason::NotAllowed);
        }
        found
    }

    fn of(
        &self,
        action: Action,
        dry_run: bool,
    ) -> impl Iterator<Item = (&PolicyName, &Authorization)> {
        let known = self.authorizations.iter();
        let known = known.filter_map(|(name, of)| Some((name, of.as_deref()?)));
        known.filter(move |(_, of)| (of.action, of.dry_run) == (action, dry_run))
    }
}

impl Action {
    /// Returns the word in policies.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Allow => "ALLOW",
            Self::Deny => "DENY",
        }
    }
}
