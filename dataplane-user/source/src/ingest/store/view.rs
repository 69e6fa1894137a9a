//! Combines the stored objects into views.

use std::sync::Arc;

use model::{Gravity, Istio, Node, Preference, Problem, Service, ServiceName};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::{
    super::{Kind, Perspective, Scope, WantedPolicies},
    Change, Store,
    problems::place,
};
use crate::{
    View,
    objects::{self, Distribution},
};

impl Store {
    /// Returns the perspective: this node with the facts of its object, once they are known, as far as slices depend on
    /// them; and whether the pods of all nodes are wanted.
    pub fn eyes(&mut self) -> Perspective {
        let node = || Node {
            leaving: None,
            ..self.facts.applied_to(&self.base)
        };
        Perspective {
            node: self.listed.contains(&Kind::Node).then(|| Arc::new(node())),
            everywhere: self.wants_everywhere(),
        }
    }

    /// Returns whether the pods of all nodes are wanted.
    fn wants_everywhere(&mut self) -> bool {
        let scope = self.wanted.scope;
        scope >= Scope::Registry
            || scope >= Scope::Mesh && self.pods.denies()
            || self.entries.select()
            || self.entries.name_addresses()
    }

    /// Returns a view if there is a change, and if every kind was read once.
    pub fn view(&mut self) -> Option<View> {
        let mut kinds = Kind::ALL.iter().filter(|kind| self.wanted.includes(**kind));
        let known = |kind| self.listed.contains(kind) || self.refused.contains(kind);
        if !self.changed || !kinds.all(known) {
            return None;
        }
        // The first view waits for the pods of all nodes, so that the destinations that an earlier agent allowed do not
        // disappear. Later views do not wait.
        if !self.told
            && !self.refused.contains(&Kind::Pod)
            && self.wants_everywhere()
            && !self.everywhere
        {
            return None;
        }
        let is_first = !std::mem::replace(&mut self.told, true);
        for name in self.entries.take_dirty_services() {
            self.join(&name);
        }
        for (name, change) in self.take_pending(is_first) {
            self.apply(&name, change);
            let alone = self.slices.contains_key(&name) && !self.services.contains_key(&name);
            self.orphans.note(name, alone);
        }
        let mut hopeful = self.joins.take_hopeful();
        hopeful.extend(self.entries.take_dirty_services());
        for name in hopeful {
            self.join(&name);
        }
        self.changed = self.is_behind();
        let orphans = self.orphans.told().filter(|service| {
            // A Service that cannot be read exists.
            let key = (Kind::Service, (*service).clone());
            !self.problems.contains_key(&key) && !self.unreadable.contains(&key.1)
        });
        let orphans = orphans.filter_map(|service| self.slices.get(service));
        let orphans = orphans.flatten().map(|slice| {
            let (_, file) = &self.named[&slice.name];
            Problem {
                gravity: Gravity::Warning,
                place: place(Kind::Slice, &slice.name, file.as_deref()),
                text: slice.orphan(),
            }
        });
        let entries = self.entries.view();
        let mut problems: Vec<Problem> = self
            .problems
            .values()
            .flatten()
            .chain(self.entries.problems())
            .chain(self.joins.problems())
            .cloned()
            .chain(orphans)
            .chain(self.istio.problems())
            .collect();
        problems.sort();
        if *self.problems_seen != *problems {
            self.problems_seen = problems.into();
        }
        // Without permission to read pods, there may be further pods.
        let everywhere = self.everywhere && !self.refused.contains(&Kind::Pod);
        Some(View {
            services: self.services.clone(),
            entries,
            routes: self.routes.clone(),
            grants: self.grants.clone(),
            istio: self.istio(),
            workloads: self.pods.workloads(),
            pods: self.pods.addresses(everywhere),
            whole: self.wanted.names,
            unread: self.unread(),
            namespaces: self.all_namespaces(),
            node: Some(self.facts.clone()),
            problems: Arc::clone(&self.problems_seen),
            since: self.since.take().map(Instant::into_std),
        })
    }

    /// Returns Istio's objects that limit connections.
    fn istio(&self) -> Istio {
        let mut policies = Kind::ALL.iter().filter(|kind| kind.is_policy());
        let is_wanted = self.wanted.policies != WantedPolicies::None;
        // A kind that the cluster lacked may have objects by now.
        let is_unread = |kind: &Kind| {
            let is_refused = self.refused.contains(kind);
            !self.listed.contains(kind) || is_refused && self.missing.contains(kind)
        };
        Istio {
            namespaces: self.istio.namespaces(),
            gateways: self.istio.gateways(),
            classes: self.istio.classes(),
            unread: is_wanted && policies.any(is_unread),
            ..Istio::default()
        }
    }

    /// Returns the next changes of services, or all of them if `all` is set.
    fn take_pending(&mut self, all: bool) -> Vec<(ServiceName, Change)> {
        let Some(most) = self.endpoints_at_once.filter(|_| !all) else {
            return std::mem::take(&mut self.pending).into_iter().collect();
        };
        for (name, change) in &self.pending {
            let slices = self.slices.get(name).into_iter().flatten();
            let endpoints = slices.map(|slice| slice.ports.len() * slice.endpoints.len());
            let cost = (1 + endpoints.sum::<usize>()) as u64;
            let stays = !matches!(change, Change::Remove);
            self.turns.put(name.namespace(), name, cost, stays);
        }
        let next = self.turns.take(most).into_iter();
        let next = next.filter_map(|name| self.pending.remove_entry(&name));
        next.collect()
    }

    /// Returns whether changes of services wait for the next view, which should then be taken soon.
    pub fn is_behind(&self) -> bool {
        self.told && !self.pending.is_empty()
    }

    /// Returns the namespaces in which a Service or a slice cannot be read, or waits: a name there may exist although
    /// it is not known.
    fn unread(&self) -> imbl::OrdSet<Arc<str>> {
        let is_unread = |kind: Kind, problems: &[Problem]| {
            let mut problems = problems.iter();
            matches!(kind, Kind::Service | Kind::Slice)
                && problems.any(|problem| problem.gravity != Gravity::Warning)
        };
        let problems = self.problems.iter();
        let unread = problems.filter(|((kind, _), problems)| is_unread(*kind, problems));
        let unread = unread.map(|((_, name), _)| name.namespace());
        let unreadable = self.unreadable.iter().map(ServiceName::namespace);
        unread
            .chain(unreadable)
            .chain(self.turns.namespaces())
            .map(Arc::from)
            .collect()
    }

    /// Returns all namespaces, if they are read.
    fn all_namespaces(&self) -> Option<imbl::OrdSet<Arc<str>>> {
        let kind = &Kind::Namespace;
        let known = self.listed.contains(kind) && !self.refused.contains(kind);
        known.then(|| self.pods.namespace_names.clone())
    }

    fn apply(&mut self, name: &ServiceName, change: Change) {
        let mut service = match change {
            Change::Put(service) => service,
            Change::Whole(service) => return self.serve(name, service),
            Change::Join => match self.services.get(name) {
                Some(service) => Arc::clone(service),
                None => return,
            },
            Change::Remove => {
                self.services.remove(name);
                self.joins.remove(name);
                return;
            }
        };
        let slices = self.slices.get(name).map_or(&[][..], SmallVec::as_slice);
        let selected = self.entries.slices(name);
        let has_entries = !selected.is_empty();
        let of_namespace = || {
            let preference = self.entries.preferred_in(name.namespace());
            preference.map(Distribution::Annotation)
        };
        let distribution = self.distributions.get(name).copied();
        let distribution = distribution.or_else(of_namespace);
        let sources = objects::Sources {
            slices,
            selected: &selected,
            names: self.wanted.names,
            preference: distribution.map_or(Preference::Any, |of| of.preference(has_entries)),
        };
        self.joins.join(Arc::make_mut(&mut service), sources);
        self.serve(name, service);
    }

    fn serve(&mut self, name: &ServiceName, service: Arc<Service>) {
        let known = self.services.get(name);
        if known.is_none_or(|known| *known != service) {
            self.services.insert(name.clone(), service);
        }
    }
}
