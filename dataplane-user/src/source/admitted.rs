//! Which services of a source this node serves, and at which addresses.

use std::{collections::BTreeMap, mem, net::IpAddr, sync::Arc};

use imbl::{OrdMap, ordmap::DiffItem};

use super::{external_ips::ExternalIps, host_ips};
use crate::model::{Node, Problem, Service, ServiceName};

/// Leaves out of a source's services the host ports at addresses that this node does not have, and the external IPs that
/// the operator does not admit. Names both.
#[derive(Debug)]
pub struct Admitted {
    services: OrdMap<ServiceName, Arc<Service>>,
    /// `services` without what is left out.
    served: OrdMap<ServiceName, Arc<Service>>,
    own: Vec<IpAddr>,
    external_ips: ExternalIps,
    left_out: BTreeMap<ServiceName, Problem>,
}

impl Admitted {
    /// Has seen no service yet.
    pub fn new(external_ips: ExternalIps) -> Self {
        Self {
            services: OrdMap::new(),
            served: OrdMap::new(),
            own: Vec::new(),
            external_ips,
            left_out: BTreeMap::new(),
        }
    }

    /// Returns the services that are served, and whether the [problems](Self::problems) have changed. Takes time for
    /// what changed, however much is left out; for all services if the node's addresses changed.
    pub fn take(
        &mut self,
        services: &OrdMap<ServiceName, Arc<Service>>,
        node: &Node,
    ) -> (OrdMap<ServiceName, Arc<Service>>, bool) {
        let before = (self.own != node.own).then(|| {
            self.own.clone_from(&node.own);
            self.services.clear();
            self.served = services.clone();
            mem::take(&mut self.left_out)
        });
        let mut changed = false;
        for change in self.services.diff(services) {
            let (name, service) = match change {
                DiffItem::Add(name, new)
                | DiffItem::Update {
                    new: (name, new), ..
                } => (name, Some(new)),
                DiffItem::Remove(name, _) => (name, None),
            };
            let (service, problem) = service.map_or((None, None), |service| self.admitted(service));
            match service {
                Some(service) => self.served.insert(name.clone(), service),
                None => self.served.remove(name),
            };
            let last = match &problem {
                Some(problem) => self.left_out.insert(name.clone(), problem.clone()),
                None => self.left_out.remove(name),
            };
            changed |= last != problem;
        }
        self.services = services.clone();
        // Judged anew, all that is left out looks new.
        let changed = before.map_or(changed, |before| before != self.left_out);
        (self.served.clone(), changed)
    }

    /// Names what is left out.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.left_out.values()
    }

    /// What is served of a service, and what is left out of it.
    fn admitted(&self, service: &Arc<Service>) -> (Option<Arc<Service>>, Option<Problem>) {
        if let Some(problem) = host_ips::problem(service, &self.own) {
            return (None, Some(problem));
        }
        match self.external_ips.left_out(service) {
            Some((rest, problem)) => (Some(Arc::new(rest)), Some(problem)),
            None => (Some(Arc::clone(service)), None),
        }
    }
}
