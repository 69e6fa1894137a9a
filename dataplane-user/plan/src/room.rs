//! Which services the tables have room for.
//!
//! A service that its namespace's budget has no room for is left out by itself: the largest of a namespace first, then
//! the younger. The set follows from the objects alone. Half of each table is for changes, during which old and new
//! entries are there at the same time.

use std::collections::{BTreeMap, BTreeSet};

use model::{Gravity, Problem, Service, ServiceName, Snapshot};

use super::{
    Room,
    shares::{self, Entries, Shares},
    wanted::{self, WantedKey},
};

/// The tables that services fill, and the options that say how large they may be.
const TABLES: [(&str, Option<&str>); 4] = [
    ("FRONTENDS", Some("limits.frontends (--max-frontends)")),
    ("POOLS", Some("limits.frontends (--max-frontends)")),
    ("ENDPOINTS", Some("limits.endpoints (--max-endpoints)")),
    ("SOURCES", None),
];
const ENDPOINTS: usize = 2;

/// What is left out of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftOut {
    /// The service: the tables have nothing of it.
    Whole,
    /// Its endpoints: connections to it are refused.
    Endpoints,
}

/// What services want, and which of them get it.
#[derive(Debug)]
pub(super) struct Budgets {
    room: Room,
    shares: Shares<4>,
    left_out: BTreeMap<ServiceName, LeftOut>,
    /// What services of one namespace want less and more of since the last time: most changes are of one namespace.
    pending: Option<(ServiceName, Entries, Entries)>,
    /// A service of each namespace that wants less or more.
    touched: Vec<ServiceName>,
}

impl Budgets {
    pub(super) fn of(room: Room) -> Self {
        let limits = [room.frontends, room.pools, room.endpoints, room.sources];
        // The node's own addresses and networks have a sixteenth.
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

    /// What is left out of a service.
    pub(super) fn left(&self, service: &ServiceName) -> Option<LeftOut> {
        self.left_out.get(service).copied()
    }

    /// All that is left out.
    pub(super) fn left_out(&self) -> &BTreeMap<ServiceName, LeftOut> {
        &self.left_out
    }

    /// A service wants this in place of that, or has another age.
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

    /// Decides what is left out of `snapshot`, whose changes are known. Returns the services that are dealt with otherwise
    /// than before.
    pub(super) fn settle(&mut self, snapshot: &Snapshot) -> BTreeSet<ServiceName> {
        let pending = self.pending.take();
        self.flush(pending);
        let touched = std::mem::take(&mut self.touched);
        let mut namespaces: BTreeSet<Box<str>> = BTreeSet::new();
        if self.shares.settle() {
            namespaces.extend(self.shares.over().map(Box::from));
            let before = self.left_out.keys();
            namespaces.extend(before.map(|name| Box::from(name.namespace())));
        } else {
            // Nearly always all of them fit.
            let is_known = |namespace: &str| {
                self.shares.is_over(namespace)
                    || !self.left_out.is_empty()
                        && of_namespace(&self.left_out, namespace).next().is_some()
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

    /// Decides what is left out of a namespace.
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
                // Connections to a service without endpoints are refused, which is better than to let them pass.
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

    /// Names what is left out of a service, and why.
    pub(super) fn problem(&self, service: &Service, keys: &[WantedKey], left: LeftOut) -> Problem {
        let cost = wanted::cost(service, keys);
        let budget = self.shares.budget();
        // The table of which it takes the largest part.
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

/// What is left out of a namespace.
fn of_namespace<'a>(
    left_out: &'a BTreeMap<ServiceName, LeftOut>,
    namespace: &'a str,
) -> impl Iterator<Item = (&'a ServiceName, &'a LeftOut)> {
    let all = left_out.range(ServiceName::new(namespace, "")..);
    all.take_while(move |(name, _)| name.namespace() == namespace)
}

/// The services of a namespace.
fn of_namespace_in<'a>(
    snapshot: &'a Snapshot,
    namespace: &'a str,
) -> impl Iterator<Item = &'a Service> {
    let all = snapshot.services.range(ServiceName::new(namespace, "")..);
    let of = all.take_while(move |(name, _)| name.namespace() == namespace);
    of.map(|(_, service)| &**service)
}
