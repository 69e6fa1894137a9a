//! Istio's policies of attached workloads, and their decisions about connections.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use model::{
    Identity, Snapshot, Workload,
    authorization::{Connection, Policies, PolicyName, Reason},
};

use super::Index;

/// The reason why a workload's policies refuse a connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Denied {
    /// The policy that refuses the connection. `None`: the workload has policies with ALLOW and none matches, or policies cannot
    /// be read.
    pub policy: Option<PolicyName>,
    /// The index of the policy's rule that matches, if it has one.
    pub rule: Option<usize>,
    /// Whether the only reason is that the policies have not been read: a later snapshot may have them.
    pub is_unread: bool,
    text: String,
}

impl From<Reason<'_>> for Denied {
    fn from(reason: Reason<'_>) -> Self {
        let (policy, rule) = reason.by();
        Self {
            policy: policy.cloned(),
            rule,
            is_unread: reason == Reason::Unread,
            text: reason.to_string(),
        }
    }
}

/// The policies of workloads by the numbers of their attachments, each with the workload that the policies were found for.
type Found = HashMap<u64, (Arc<Workload>, Arc<Policies>)>;

/// The policies of attached workloads.
#[derive(Debug, Default)]
pub(super) struct Judged(Mutex<Found>);

impl Judged {
    fn lock(&self) -> MutexGuard<'_, Found> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An attached workload: the number of its attachment, and the workload as it was attached.
pub type Own<'a> = (u64, &'a Arc<Workload>);

impl Index {
    /// Returns the policies of an attached workload. Searches for them once after each change of the workload or of Istio's
    /// objects.
    pub fn policies(&self, own: Own<'_>) -> Arc<Policies> {
        let workload = self.present(own);
        let mut found = self.judged.lock();
        if let Some((of, policies)) = found.get(&own.0)
            && Arc::ptr_eq(of, workload)
        {
            return Arc::clone(policies);
        }
        let istio = &self.snapshot.istio;
        let policies = istio.policies_of(workload.name.namespace(), &workload.labels);
        let policies = Arc::new(policies);
        let entry = (Arc::clone(workload), Arc::clone(&policies));
        found.insert(own.0, entry);
        policies
    }

    /// Decides by the workload's policies about a new connection to it, and counts a refusal, also that of a dry run.
    /// `peer`: the identity that the client has proven, `None` for plaintext. `client`: the address that the kernel has for
    /// the client. `destination`: the address and port of the workload.
    ///
    /// # Errors
    /// The policies refuse the connection.
    pub fn authorize(
        &self,
        own: Own<'_>,
        peer: Option<&Identity>,
        client: SocketAddr,
        destination: SocketAddr,
    ) -> Result<(), Denied> {
        let policies = self.policies(own);
        let decision = policies.decide(&Connection::new(peer, client.ip(), destination));
        let workload = &own.1.name;
        for reason in decision.dry_run.iter().filter(|of| !of.is_allowed()) {
            self.denials.count(workload, *reason, true);
        }
        if decision.is_allowed() {
            return Ok(());
        }
        self.denials.count(workload, decision.reason, false);
        Err(decision.reason.into())
    }

    /// Returns the reason if the policies forbid a connection that the workload has accepted before, and counts the refusal.
    /// Policies that can no longer be read end no connection.
    pub fn forbids(
        &self,
        own: Own<'_>,
        peer: Option<&Identity>,
        client: SocketAddr,
        destination: SocketAddr,
    ) -> Option<Denied> {
        let policies = self.policies(own);
        let decision = policies.decide(&Connection::new(peer, client.ip(), destination));
        if decision.is_allowed() || decision.reason == Reason::Unread {
            return None;
        }
        self.denials.count(&own.1.name, decision.reason, false);
        Some(decision.reason.into())
    }

    /// Returns whether a workload has other policies than by a former index, or whether only one index has the workload.
    pub(crate) fn judges_anew(&self, before: &Self, own: Own<'_>) -> bool {
        self.has(own) != before.has(own) || self.policies(own) != before.policies(own)
    }

    /// Returns whether the snapshot has an attached workload.
    pub(crate) fn has(&self, (_, own): Own<'_>) -> bool {
        let known = self.snapshot.workloads.get(&own.name);
        known.is_some_and(|known| known.uid == own.uid)
    }

    /// Forgets the policies of workloads that are no longer attached.
    pub(crate) fn keep_policies(&self, attached: &HashSet<u64>) {
        self.judged.lock().retain(|id, _| attached.contains(id));
    }

    /// Returns the refusals by policy.
    pub fn denials(&self) -> &super::Denials {
        &self.denials
    }

    /// Returns the policies that still hold by a new snapshot: all, if Istio's objects have not changed.
    pub(super) fn judged_by(&self, snapshot: &Snapshot) -> Arc<Judged> {
        let (old, new) = (&self.snapshot.istio, &snapshot.istio);
        let same = old.namespaces.ptr_eq(&new.namespaces)
            && (old.unread, &old.root) == (new.unread, &new.root);
        if same {
            Arc::clone(&self.judged)
        } else {
            Arc::default()
        }
    }

    /// Returns the attached workload from the snapshot, with its present labels. If the snapshot has another workload with its
    /// name, returns the workload as it was attached.
    pub(super) fn present<'a>(&'a self, (_, own): Own<'a>) -> &'a Arc<Workload> {
        let known = self.snapshot.workloads.get(&own.name);
        known.filter(|known| known.uid == own.uid).unwrap_or(own)
    }
}

#[cfg(test)]
mod tests {
    use model::{
        Effect, IstioNamespace, IstioPolicy, Place, WorkloadName,
        authorization::{Action, Authorization, Match, PeerAuthentication, Rule, Values},
    };
    use threads::none_dies;

    use super::*;
    use crate::{
        AccessLog, Attached, Attachment, Direction, Flag, Limits, Log, Permit, Session,
        limits::Holders,
    };

    fn workload(labels: &[(&str, &str)]) -> Arc<Workload> {
        let labels = labels
            .iter()
            .map(|(key, value)| ((*key).into(), (*value).into()));
        Arc::new(Workload {
            labels: labels.collect(),
            ..Workload::new(WorkloadName::new("shop", "web"), Place::Address)
        })
    }

    fn attached() -> Arc<Attached> {
        let (log, _) = Log::start(AccessLog::Off, std::io::sink(), none_dies()).unwrap();
        let attachment = Attachment {
            workload: workload(&[("app", "web")]),
            namespace: None,
            outbound: vec![],
            inbound: vec![],
            tunnels: vec![],
            egress: model::Egress::Allow,
        };
        let limits = Arc::new(Limits::new(Some(1), None, 1024));
        let shared = (limits, Holders::default(), Arc::new(log));
        let (attached, _) = Attached::new(7, attachment, Box::default(), shared).unwrap();
        attached
    }

    /// A policy with one rule, for a range of clients, that selects `app=web`.
    fn policy(action: Action, dry_run: bool, range: &str) -> Effect {
        let of = Match {
            sources: Values {
                any: [range.parse().unwrap()].into(),
                none: Box::default(),
            },
            ..Match::default()
        };
        let rules = [Rule([[of].into()].into())].into();
        Effect::Authorization(Arc::new(Authorization {
            action,
            dry_run,
            rules,
        }))
    }

    fn snapshot(effects: &[Effect]) -> Snapshot {
        let mut of = IstioNamespace::default();
        for (number, effect) in effects.iter().enumerate() {
            let policy = IstioPolicy {
                selector: Some([("app".into(), "web".into())].into()),
                effect: effect.clone(),
            };
            let name = format!("AuthorizationPolicy p{number}");
            of.policies.insert(name.into(), Arc::new(policy));
        }
        let mut snapshot = Snapshot::default();
        let namespaces = &mut snapshot.istio.namespaces;
        namespaces.insert("shop".into(), Arc::new(of));
        snapshot
    }

    fn judge(index: &Index, attached: &Attached, client: &str) -> String {
        let client = SocketAddr::new(client.parse().unwrap(), 4000);
        let to = "10.0.0.1:80".parse().unwrap();
        let denied = index.authorize(attached.own(), None, client, to);
        denied.map_or_else(|denied| denied.to_string(), |()| "allowed".to_owned())
    }

    #[test]
    fn policies_decide_by_address_and_each_refusal_counts() {
        let attached = attached();
        let strict = Effect::Plaintext(Arc::new(PeerAuthentication {
            created: None,
            strict: Some(true),
            ports: std::collections::BTreeMap::new(),
        }));
        let (deny, allow) = (Action::Deny, Action::Allow);
        let mut index = Index::default();
        for (effects, client, wanted) in [
            (vec![], "10.0.0.9", "allowed"),
            (
                vec![policy(deny, false, "10.0.0.0/8")],
                "10.0.0.9",
                "denied by AuthorizationPolicy shop/p0, rule 1",
            ),
            (
                vec![policy(deny, false, "10.0.0.0/8")],
                "fd00::9",
                "allowed",
            ),
            (
                vec![policy(allow, false, "10.0.0.0/8")],
                "fd00::9",
                "denied: no policy with ALLOW matches",
            ),
            (vec![policy(deny, true, "::/0")], "fd00::9", "allowed"),
            (
                vec![strict],
                "10.0.0.9",
                "denied by AuthorizationPolicy shop/p0: the client has no identity (mode STRICT)",
            ),
        ] {
            index = index.updated(snapshot(&effects));
            assert_eq!(judge(&index, &attached, client), wanted);
        }
        let counted = index.denials().totals();
        let told = counted.iter().map(|(of, count)| {
            let dry = if of.dry_run { " dry" } else { "" };
            format!("{}/{}{dry} {count}", of.namespace, of.policy)
        });
        assert_eq!(
            told.collect::<Vec<_>>(),
            [
                "shop/AuthorizationPolicy p0 2",
                "shop/AuthorizationPolicy p0 dry 1",
                "shop/no ALLOW matches 1"
            ]
        );
    }

    #[test]
    fn policies_that_are_not_read_refuse_and_end_nothing() {
        let attached = attached();
        let mut unread = Snapshot::default();
        unread.istio.unread = true;
        let index = Index::default().updated(unread);
        let (client, to) = (
            "10.0.0.9:1".parse().unwrap(),
            "10.0.0.1:80".parse().unwrap(),
        );
        let denied = index
            .authorize(attached.own(), None, client, to)
            .unwrap_err();
        assert!(denied.is_unread && denied.policy.is_none());
        assert_eq!(index.forbids(attached.own(), None, client, to), None);
        assert!(index.denials().totals().is_empty());
    }

    #[test]
    fn a_session_waits_for_policies_and_ends_by_those_that_change() {
        let attached = attached();
        let (client, to) = (
            "10.0.0.9:1".parse().unwrap(),
            "10.0.0.1:80".parse().unwrap(),
        );
        for (direction, is_judged) in [(Direction::Inbound, true), (Direction::Outbound, false)] {
            let mut unread = Snapshot::default();
            unread.istio.unread = true;
            let index = Index::default().updated(unread);
            let permit = Permit::acquire(&attached, direction).unwrap();
            let now = std::time::Instant::now();
            let mut session = Session::begin(permit, direction, client, to, 1, now);
            let refusal = session.route(&index).err();
            assert_eq!(refusal.is_some_and(|of| of.is_unknown), is_judged);
            let index = index.updated(Snapshot::default());
            session.route(&index).unwrap();
            assert_eq!(session.forbidden(&index), None);
            let index = index.updated(snapshot(&[policy(Action::Deny, false, "10.0.0.0/8")]));
            let forbidden = session.forbidden(&index);
            assert_eq!(forbidden.is_some_and(|of| of.rule == Some(0)), is_judged);
            let refusal = session.route(&index).err();
            let flag = refusal.map(|of| (of.flag, of.is_unknown));
            assert_eq!(flag, is_judged.then_some((Flag::Denied, false)));
        }
    }

    #[test]
    fn the_policies_of_a_workload_are_found_again_only_if_they_may_differ() {
        let attached = attached();
        let mut snapshot = snapshot(&[policy(Action::Deny, false, "::/0")]);
        let first = Index::default().updated(snapshot.clone());
        let policies = first.policies(attached.own());
        snapshot.problems = Arc::default();
        let second = first.updated(snapshot.clone());
        assert!(Arc::ptr_eq(&policies, &second.policies(attached.own())));
        assert!(!second.judges_anew(&first, attached.own()));
        // No policy selects these labels.
        let other = workload(&[("app", "db")]);
        snapshot.workloads.insert(other.name.clone(), other);
        let third = second.updated(snapshot.clone());
        assert!(third.judges_anew(&second, attached.own()));
        assert!(third.policies(attached.own()).authorizations.is_empty());
        // Another pod has this name, and the attached pod keeps its labels.
        let mut other = (*workload(&[("app", "db")])).clone();
        other.uid = model::Uid::parse("8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60");
        snapshot
            .workloads
            .insert(other.name.clone(), Arc::new(other));
        let fourth = third.updated(snapshot);
        assert_eq!(*fourth.policies(attached.own()), *policies);
        fourth.keep_policies(&HashSet::new());
        assert!(fourth.judged.lock().is_empty());
    }
}
