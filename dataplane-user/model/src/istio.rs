//! Istio's objects that limit connections: waypoints, to which the proxy sends the connections that it carries, and policies,
//! which the proxy enforces for these connections.

use std::{collections::BTreeSet, sync::Arc};

use imbl::{OrdMap, ordmap::DiffItem};

use super::{
    Binding, Gateway, Service, ServiceName, ServiceType, UseWaypoint,
    authorization::{Authorization, PeerAuthentication, Policies, PolicyName, Rank},
};

/// All objects of Istio that limit connections, and the operator's settings for them.
#[derive(Clone, Debug, Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the operator's settings are independent"
)]
pub struct Istio {
    /// The objects of each namespace that has some.
    pub namespaces: OrdMap<Arc<str>, Arc<IstioNamespace>>,
    /// The Gateways.
    pub gateways: OrdMap<ServiceName, Arc<Gateway>>,
    /// The bindings of GatewayClasses that have one.
    pub classes: OrdMap<Box<str>, Binding>,
    /// Whether the agent's proxy sends the connections of workloads with identities to waypoints.
    pub waypoints: bool,
    /// `mesh.withoutWaypoint: pass`: connections go past waypoints that cannot be used.
    pub passes: bool,
    /// Whether a kind of policy cannot be read, or has not been read yet, although policies are wanted.
    pub unread: bool,
    /// `mesh.unsupported: deny`: the connections are refused.
    pub denies: bool,
    /// The namespace whose policies hold in all namespaces (`mesh.rootNamespace`).
    pub root: Arc<str>,
}

/// The objects of a namespace, by their kinds and names, such as `Service web`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IstioNamespace {
    /// The waypoint that labels of the Namespace name.
    pub waypoint: Option<UseWaypoint>,
    /// The waypoints that labels of Services and ServiceEntries name.
    pub labels: OrdMap<Arc<str>, UseWaypoint>,
    /// The labels of the Namespace, without its name.
    pub own_labels: Box<[Label]>,
    /// The policies.
    pub policies: OrdMap<Arc<str>, Arc<IstioPolicy>>,
}

/// A policy, as far as it concerns connections to Pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IstioPolicy {
    /// The labels of the Pods that it selects, sorted; empty: all Pods. `None`: they cannot be read, so the policy refuses
    /// all connections to all Pods.
    pub selector: Option<Box<[Label]>>,
    /// The effect.
    pub effect: Effect,
}

/// A label: key and value.
pub type Label = (Box<str>, Box<str>);

/// The effect of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It allows or refuses connections by rules.
    Authorization(Arc<Authorization>),
    /// It has rules for a program that Istio asks (CUSTOM).
    Custom,
    /// It refuses plaintext, or permits it.
    Plaintext(Arc<PeerAuthentication>),
}

impl Istio {
    /// Returns whether captured workloads whose connections go past waypoints may not connect to a service by TCP.
    pub fn refuses(&self, service: &Service) -> bool {
        let of = || self.namespaces.get(service.name.namespace());
        self.denies && of().is_some_and(|of| of.has_waypoint(service))
    }

    /// Returns the policies of a workload with these labels, which are sorted: those of its namespace and of the root
    /// namespace that select it. A policy whose selector cannot be read refuses all connections. As for Istio, a
    /// PeerAuthentication of the root namespace that has a selector has no effect.
    pub fn policies_of(&self, namespace: &str, labels: &[Label]) -> Policies {
        let mut found = Policies {
            unread: self.unread,
            ..Policies::default()
        };
        let root = Some(&*self.root).filter(|root| *root != namespace);
        for name in [Some(namespace), root].into_iter().flatten() {
            let Some((namespace, of)) = self.namespaces.get_key_value(name) else {
                continue;
            };
            let is_root = *name == *self.root;
            let policies = of.policies.iter();
            for (object, policy) in policies.filter(|(_, of)| of.selects(labels)) {
                let name = PolicyName {
                    namespace: Arc::clone(namespace),
                    object: Arc::clone(object),
                };
                let selector = policy.selector.as_deref();
                match (selector, &policy.effect) {
                    (None | Some([_, ..]), Effect::Plaintext(_)) if is_root => {}
                    (Some(_), Effect::Authorization(of)) => {
                        found.authorizations.push((name, Some(Arc::clone(of))));
                    }
                    (None, Effect::Authorization(of)) if of.dry_run => {}
                    (None, _) => {
                        let closed = Arc::new(Authorization::closed());
                        found.authorizations.push((name, Some(closed)));
                    }
                    (Some(_), Effect::Custom) => found.custom.push(name),
                    (Some(selector), Effect::Plaintext(of)) => {
                        let rank = match selector {
                            [_, ..] => Rank::Selector,
                            [] if is_root => Rank::Root,
                            [] => Rank::Namespace,
                        };
                        found.plaintext.add(rank, name, of);
                    }
                }
            }
        }
        found
    }

    /// Returns the services for which [`Istio::refuses`] differs from a former state, or whether they have a waypoint.
    pub fn changed<'a>(
        &'a self,
        old: &'a Self,
        services: &'a OrdMap<ServiceName, Arc<Service>>,
    ) -> impl Iterator<Item = &'a ServiceName> {
        let is_any = old.denies || self.denies || old.waypoints || self.waypoints;
        let namespaces = is_any.then(|| old.namespaces.diff(&self.namespaces));
        let namespaces = (namespaces.into_iter().flatten()).filter_map(|change| match change {
            // Policies concern no service.
            DiffItem::Update {
                old: (_, old),
                new: (_, new),
            } if (&old.waypoint, &old.labels) == (&new.waypoint, &new.labels) => None,
            DiffItem::Add(name, _)
            | DiffItem::Remove(name, _)
            | DiffItem::Update { new: (name, _), .. } => Some(name),
        });
        let gateways = self.changed_gateways(old);
        let names_one = move |of: &IstioNamespace| {
            let mut used = of.waypoint.iter().chain(of.labels.values());
            used.any(|used| used.gateway().is_some_and(|name| gateways.contains(name)))
        };
        let naming = self.namespaces.iter().filter(move |(_, of)| names_one(of));
        let namespaces = namespaces.chain(naming.map(|(name, _)| name));
        let services = namespaces.flat_map(|namespace| {
            let all = services.range(ServiceName::new(namespace, "")..);
            all.take_while(move |(name, _)| name.namespace() == &**namespace)
        });
        let state = |of: &Self, service: &Service| {
            (
                of.refuses(service),
                of.waypoint_of_service(service).is_some(),
            )
        };
        let changed = services.filter(move |(_, of)| state(old, of) != state(self, of));
        changed.map(|(name, _)| name)
    }

    /// Returns the Gateways that are new or gone, or that have become waypoints of other connections.
    fn changed_gateways<'a>(&'a self, old: &'a Self) -> BTreeSet<&'a ServiceName> {
        let all = old.gateways.diff(&self.gateways);
        let changed = all.filter_map(|change| match change {
            DiffItem::Update {
                old: (_, old),
                new: (_, new),
            } if old.for_services == new.for_services => None,
            DiffItem::Add(name, _)
            | DiffItem::Remove(name, _)
            | DiffItem::Update { new: (name, _), .. } => Some(name),
        });
        changed.collect()
    }
}

impl IstioNamespace {
    fn has_waypoint(&self, service: &Service) -> bool {
        let used = self.waypoint_label(service);
        used.is_some_and(|used| used.gateway().is_some())
    }

    /// Returns the waypoint that the labels of a service's object name, or else those of the Namespace.
    pub(super) fn waypoint_label(&self, service: &Service) -> Option<&UseWaypoint> {
        let name = service.name.name();
        let object = match service.kind {
            ServiceType::HostPort | ServiceType::ExternalName => return None,
            _ if self.labels.is_empty() => return self.waypoint.as_ref(),
            // The services of an entry have names such as `serviceentry:NAME:HOST`.
            ServiceType::Entry => {
                let entry = name.split(':').nth(1);
                format!("ServiceEntry {}", entry.unwrap_or_default())
            }
            _ => format!("Service {name}"),
        };
        self.labels.get(&*object).or(self.waypoint.as_ref())
    }
}

impl IstioPolicy {
    /// Returns whether it selects a Pod with these labels, which are sorted.
    pub fn selects(&self, labels: &[Label]) -> bool {
        let mut own = labels.iter();
        let mut wanted = self.selector.iter().flatten();
        wanted.all(|label| own.find(|own| own.0 >= label.0) == Some(label))
    }
}
