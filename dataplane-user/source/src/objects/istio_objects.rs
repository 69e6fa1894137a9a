//! Stores Istio's objects that limit connections.

use std::{collections::BTreeSet, sync::Arc};

use imbl::OrdMap;
use model::{
    Binding, Effect, Gateway, Gravity, IstioNamespace, IstioPolicy, Label, Problem, ServiceName,
    UseWaypoint, authorization::Rule,
};

use super::unreadable_policy;

/// Maximum number of policies of a namespace whose content is kept. Further policies count as policies that cannot be read.
const POLICIES_MAX: usize = 1000;
/// Maximum size of the rules of all policies of a namespace, in bytes in memory.
const RULES_MAX: usize = 4 << 20;

fn bytes(policy: &IstioPolicy) -> usize {
    match &policy.effect {
        Effect::Authorization(of) => of.rules.iter().map(Rule::bytes).sum(),
        Effect::Custom | Effect::Plaintext(_) => 0,
    }
}

/// The objects of all namespaces.
#[derive(Debug)]
pub struct IstioObjects {
    /// Whether objects are stored.
    is_wanted: bool,
    namespaces: OrdMap<Arc<str>, Arc<IstioNamespace>>,
    gateways: OrdMap<ServiceName, Arc<Gateway>>,
    classes: OrdMap<Box<str>, Binding>,
    /// The namespaces and keys of policies beyond [`POLICIES_MAX`] and [`RULES_MAX`], whose content is not kept.
    beyond: BTreeSet<(Arc<str>, Arc<str>)>,
}

impl IstioObjects {
    /// Returns a collection without objects. `is_wanted`: whether it stores any.
    pub fn new(is_wanted: bool) -> Self {
        Self {
            is_wanted,
            namespaces: OrdMap::new(),
            gateways: OrdMap::new(),
            classes: OrdMap::new(),
            beyond: BTreeSet::new(),
        }
    }

    /// Returns all objects. Cheap.
    pub fn namespaces(&self) -> OrdMap<Arc<str>, Arc<IstioNamespace>> {
        self.namespaces.clone()
    }

    /// Returns all Gateways. Cheap.
    pub fn gateways(&self) -> OrdMap<ServiceName, Arc<Gateway>> {
        self.gateways.clone()
    }

    /// Stores a Gateway, or removes it. Returns whether anything has changed.
    pub fn put_gateway(&mut self, name: &ServiceName, gateway: Option<Arc<Gateway>>) -> bool {
        if self.gateways.get(name) == gateway.as_ref() {
            return false;
        }
        match gateway {
            Some(gateway) => _ = self.gateways.insert(name.clone(), gateway),
            None => _ = self.gateways.remove(name),
        }
        true
    }

    /// Returns the bindings of all GatewayClasses. Cheap.
    pub fn classes(&self) -> OrdMap<Box<str>, Binding> {
        self.classes.clone()
    }

    /// Stores the binding of a GatewayClass, or removes it. Returns whether anything has changed.
    pub fn put_class(&mut self, name: &str, binding: Option<Binding>) -> bool {
        let before = match binding {
            Some(binding) => self.classes.insert(name.into(), binding),
            None => self.classes.remove(name),
        };
        before != binding
    }

    /// Returns a problem for each namespace with policies whose content is not kept.
    pub fn problems(&self) -> impl Iterator<Item = Problem> {
        let full: BTreeSet<&Arc<str>> = self.beyond.iter().map(|(of, _)| of).collect();
        full.into_iter().map(|namespace| Problem {
            gravity: Gravity::Warning,
            place: format!("Namespace {namespace}"),
            text: format!(
                "has or had more than {POLICIES_MAX} of Istio's policies, or more than 4 MiB of their rules: the agent treats each further policy as one that \
                 limits all connections to the Pods that it may select, until there is room and the policy changes, or the \
                 agent restarts"
            ),
        })
    }

    /// Stores the waypoint that the labels of a Namespace name, and all of its labels.
    pub fn label_namespace(
        &mut self,
        name: &str,
        waypoint: Option<UseWaypoint>,
        labels: Box<[Label]>,
    ) {
        self.change(name, |of| {
            of.waypoint = waypoint;
            of.own_labels = labels;
        });
    }

    /// Stores the waypoint that the labels of a Service or ServiceEntry name. `None` removes the object.
    pub fn label(&mut self, kind: &str, name: &ServiceName, waypoint: Option<UseWaypoint>) {
        let key = format!("{kind} {}", name.name());
        self.change(name.namespace(), |of| match waypoint {
            Some(waypoint) => _ = of.labels.insert(key.into(), waypoint),
            None => _ = of.labels.remove(&*key),
        });
    }

    /// Stores a policy, or removes it. Returns whether anything has changed.
    pub fn put(&mut self, kind: &str, name: &ServiceName, policy: Option<IstioPolicy>) -> bool {
        let key: Arc<str> = format!("{kind} {}", name.name()).into();
        let of = self.namespaces.get(name.namespace());
        let is_known = of.is_some_and(|of| of.policies.contains_key(&key));
        let others = of.map_or(0, |of| of.policies.len()) - usize::from(is_known);
        let id: (Arc<str>, Arc<str>) = (name.namespace().into(), Arc::clone(&key));
        let was_beyond = self.beyond.remove(&id);
        let other = of.into_iter().flat_map(|of| &of.policies);
        let other = other.filter(|(name, _)| **name != key);
        let other: usize = other.map(|(_, of)| bytes(of)).sum();
        let is_beyond = policy.as_ref().is_some_and(|policy| {
            others >= POLICIES_MAX && (!is_known || was_beyond) || other + bytes(policy) > RULES_MAX
        });
        if is_beyond {
            self.beyond.insert(id);
        }
        let has_changed = self.change(name.namespace(), |of| match policy {
            None => _ = of.policies.remove(&key),
            Some(policy) => {
                let policy = if is_beyond {
                    unreadable_policy()
                } else {
                    policy
                };
                of.policies.insert(key, Arc::new(policy));
            }
        });
        has_changed || was_beyond != is_beyond
    }

    /// Returns whether anything has changed.
    fn change(&mut self, namespace: &str, change: impl FnOnce(&mut IstioNamespace)) -> bool {
        if !self.is_wanted {
            return false;
        }
        let known = self.namespaces.get(namespace);
        let before = known.map_or_else(Default::default, |known| (**known).clone());
        let mut of = before.clone();
        change(&mut of);
        if of == before {
            return false;
        }
        if of == IstioNamespace::default() {
            self.namespaces.remove(namespace);
        } else {
            self.namespaces.insert(namespace.into(), Arc::new(of));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use model::authorization::Authorization;

    use super::*;

    #[test]
    fn what_exceeds_a_bound_limits_everything_that_it_may_select() {
        let mut objects = IstioObjects::new(true);
        let name = |n: usize| ServiceName::new("shop", &format!("p{n}"));
        let policy = || IstioPolicy {
            selector: Some(Box::default()),
            effect: Effect::Custom,
        };
        for n in (0..=POLICIES_MAX).chain([5, POLICIES_MAX]) {
            objects.put("P", &name(n), Some(policy()));
            let stored = &objects.namespaces()["shop"].policies[&*format!("P p{n}")];
            assert_eq!(**stored == policy(), n < POLICIES_MAX, "{n}");
        }
        assert_eq!(objects.problems().count(), 1);
        // A policy that grows counts again.
        let rules = |n: usize| {
            let of = Authorization {
                rules: vec![Rule::default(); n / size_of::<Rule>()].into(),
                ..Authorization::closed()
            };
            let effect = Effect::Authorization(Arc::new(of));
            let selector = Some(Box::default());
            IstioPolicy { selector, effect }
        };
        for (namespace, n, is_kept) in [
            ("a", RULES_MAX, true),
            ("b", RULES_MAX + 100, false),
            ("a", RULES_MAX + 100, false),
            ("b", 100, true),
            ("a", 100, true),
        ] {
            let name = ServiceName::new(namespace, "p");
            objects.put("P", &name, Some(rules(n)));
            let stored = &objects.namespaces()[namespace].policies["P p"];
            assert_eq!(**stored == rules(n), is_kept, "{namespace} {n}");
            if n == 100 {
                objects.put("P", &name, None);
            }
        }
        assert_eq!(objects.problems().count(), 1);
        // If there is room again, the policy stays as it is until it is read again.
        objects.put("P", &name(0), None);
        assert_eq!(objects.problems().count(), 1);
        assert!(objects.put("P", &name(POLICIES_MAX), Some(policy())));
        assert_eq!(objects.problems().count(), 0);
        objects.put("P", &name(0), Some(policy()));
        assert_eq!(objects.problems().count(), 1);
        for n in 0..=POLICIES_MAX {
            objects.put("P", &name(n), None);
        }
        assert!(objects.namespaces().is_empty());
        assert_eq!(objects.problems().count(), 0);
    }
}
