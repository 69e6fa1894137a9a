//! Decides which services fit into the tables.
//!
//! A service that exceeds its namespace's budget is left out by itself: the largest of a namespace first, then the
//! younger. The set follows from the objects alone. Half of each table is reserved for changes, during which old and
//! new entries coexist.

use std::collections::{BTreeMap, BTreeSet};

use model::{Gravity, Problem, Service, ServiceName, Snapshot};

use super::{
    Room,
    shares::{self, Entries, Shares},
    wanted::{self, WantedKey},
};

/// The tables that services fill, and the options that set their sizes.
const TABLES: [(&str, Option<&str>); 4] = [
    ("FRONTENDS", Some("limits.frontends")),
    ("POOLS", Some("limits.frontends")),
    ("ENDPOINTS", Some("limits.endpoints")),
    ("SOURCES", None),
];
const ENDPOINTS: usize = 2;

/// The part of a service that is left out of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftOut {
    /// The whole service: the tables have no entry of it.
    Whole,
    /// Its endpoints: connections to the service are refused.
    Endpoints,
}

/// The needs of services, and the services that fit.
#[derive(Debug)]
pub(super) struct Budgets {
    room: Room,
    shares: Shares<4>,
    left_out: BTreeMap<ServiceName, LeftOut>,
    /// Sum of the changes of one namespace since the last call (less, more): most changes concern one namespace.
    pending: Option<(ServiceName, Entries, Entries)>,
    /// One service of each namespace whose needs have changed.
    touched: Vec<ServiceName>,
}

impl Budgets {
    pub(super) fn of(room: Room) -> Self {
        let limits = [room.frontends, room.pools, room.endpoints, room.sources];
        // One sixteenth is reserved for the node's own addresses and networks.
        let capacity = limits.map(|limit| u64::from(limit - limit / 16) / 2);
        Self {
            room,
            shares: Shares::of(capacity),
            left_out: BTreeMap::new(),
            pending: None,
            touched: Vec::new(),
        }
    }

    pub(super) fn room(&self) -> &Room {
        &self.room
    }

    /// Returns the part of a service that is left out.
    pub(super) fn left(&self, service: &ServiceName) -> Option<LeftOut> {
        self.left_out.get(service).copied()
    }

    /// Returns all services that are left out, in whole or in part.
    pub(super) fn left_out(&self) -> &BTreeMap<ServiceName, LeftOut> {
        &self.left_out
    }

    /// Records that the needs of a service change from `less` to `more`, or that its age changes.
    pub(super) fn change(
        &mut self,
        name: &ServiceName,
        less: &Entries,
        more: &Entries,
        has_other_age: bool,
    ) {
        if less == more && !has_other_age {
            return;
        }
        match &mut self.pending {
            Some((of, all_less, all_more)) if of.namespace() == name.namespace() => {
                for (all, one) in [(all_less, less), (all_more, more)] {
                    for (all, one) in all.iter_mut().zip(one) {
                        *all += one;
                    }
                }
            }
            pending => {
                let before = pending.replace((name.clone(), *less, *more));
                self.flush(before);
            }
        }
    }

    fn flush(&mut self, pending: Option<(ServiceName, Entries, Entries)>) {
        if let Some((name, less, more)) = pending {
            self.shares.change(name.namespace(), &less, &more);
            self.touched.push(name);
        }
    }

    /// Decides which services of `snapshot` are left out, after all changes were recorded. Returns the services whose
    /// case has changed.
    pub(super) fn decide(&mut self, snapshot: &Snapshot) -> BTreeSet<ServiceName> {
        let pending = self.pending.take();
        self.flush(pending);
        let touched = std::mem::take(&mut self.touched);
        let mut namespaces: BTreeSet<Box<str>> = BTreeSet::new();
        if self.shares.divide() {
            namespaces.extend(self.shares.over().map(Box::from));
            let before = self.left_out.keys();
            namespaces.extend(before.map(|name| Box::from(name.namespace())));
        } else {
            // Nearly always all services fit.
            let is_known = |namespace: &str| {
                self.shares.is_over(namespace)
                    || of_namespace(&self.left_out, namespace).next().is_some()
            };
            let of = touched.iter().map(ServiceName::namespace);
            namespaces.extend(of.filter(|of| is_known(of)).map(Box::from));
        }
        let mut changed = BTreeSet::new();
        for namespace in namespaces {
            self.judge(&namespace, snapshot, &mut changed);
        }
        changed
    }

    /// Decides which services of a namespace are left out.
    fn judge(&mut self, namespace: &str, snapshot: &Snapshot, changed: &mut BTreeSet<ServiceName>) {
        let mut after = BTreeMap::new();
        if self.shares.is_over(namespace) {
            let mut keys = Vec::new();
            let services = of_namespace_in(snapshot, namespace);
            let mut services: Vec<_> = services
                .map(|service| {
                    wanted::keys(service, &mut keys);
                    let cost = wanted::cost(service, &keys);
                    (service, cost, self.shares.smallness(&cost))
                })
                .collect();
            services.sort_by_cached_key(|(service, _, smallness)| {
                let Service { created, name, .. } = service;
                let smallness = std::cmp::Reverse(*smallness);
                (smallness, created.is_none(), *created, name.clone())
            });
            let mut left = self.shares.budget();
            for (service, cost, _) in services {
                // A service without endpoints refuses connections, which is better than to let them pass.
                let mut keys = cost;
                keys[ENDPOINTS] = 0;
                if shares::take(&cost, &mut left) {
                    continue;
                }
                let what = if shares::take(&keys, &mut left) {
                    LeftOut::Endpoints
                } else {
                    LeftOut::Whole
                };
                after.insert(service.name.clone(), what);
            }
        }
        let before: Vec<_> = of_namespace(&self.left_out, namespace)
            .map(|(name, left)| (name.clone(), *left))
            .collect();
        for (name, left) in &before {
            if after.get(name) != Some(left) {
                self.left_out.remove(name);
                changed.insert(name.clone());
            }
        }
        for (name, left) in after {
            if self.left_out.insert(name.clone(), left) != Some(left) {
                changed.insert(name);
            }
        }
    }

    /// Returns the problem of a service that is left out, with the reason.
    pub(super) fn problem(&self, service: &Service, keys: &[WantedKey], left: LeftOut) -> Problem {
        let cost = wanted::cost(service, keys);
        let budget = self.shares.budget();
        // The table of which the service needs the largest part.
        let part = |n: &usize| cost[*n].saturating_mul(1 << 20) / budget[*n].max(1);
        let candidates = match left {
            LeftOut::Endpoints => &[ENDPOINTS][..],
            LeftOut::Whole => &[0, 1, 3],
        };
        let most = candidates.iter().copied().max_by_key(part);
        let most = most.unwrap_or(ENDPOINTS);
        let (table, knob) = TABLES[most];
        let is = match left {
            LeftOut::Whole => "is not served",
            LeftOut::Endpoints => "has none of its endpoints, so connections to it are refused",
        };
        let raise = knob.map_or_else(String::new, |knob| format!(", or raise {knob}"));
        Problem {
            gravity: Gravity::Warning,
            place: format!("service {}", service.name),
            text: format!(
                "{is}: it needs {} entries of table {table}, more than the budget of namespace {} has left after its \
                 smaller and older services. Use fewer ports, addresses or endpoints{raise}",
                cost[most],
                service.name.namespace(),
            ),
        }
    }
}

/// Returns the services of a namespace that are left out.
fn of_namespace<'a>(
    left_out: &'a BTreeMap<ServiceName, LeftOut>,
    namespace: &'a str,
) -> impl Iterator<Item = (&'a ServiceName, &'a LeftOut)> {
    let all = left_out.range(ServiceName::new(namespace, "")..);
    all.take_while(move |(name, _)| name.namespace() == namespace)
}

/// Returns the services of a namespace.
fn of_namespace_in<'a>(
    snapshot: &'a Snapshot,
    namespace: &'a str,
) -> impl Iterator<Item = &'a Service> {
    let all = snapshot.services.range(ServiceName::new(namespace, "")..);
    let of = all.take_while(move |(name, _)| name.namespace() == namespace);
    of.map(|(_, service)| &**service)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_share_half_of_what_the_node_leaves() {
        let budgets = Budgets::of(Room {
            frontends: 1600,
            pools: 3200,
            endpoints: 6400,
            sources: 12_800,
        });
        assert_eq!(budgets.shares.budget(), [750, 1500, 3000, 6000]);
    }
}
