//! The Pods of this node to which the agent's proxy accepts tunnels. They speak HBONE, also without Istio's annotation. Clients on
//! this node learn it by the snapshot, from which the tables of the kernel's programs and the proxy's index are made. So the
//! programs and the proxy agree.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use dataplane_common::capture::Enrolled;
use imbl::OrdMap;
use model::{Place, Uid, Workload, WorkloadName};
use plan::Captured;

/// The Pods of this node to which the agent's proxy accepts tunnels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Accepting {
    /// Those with these addresses: an earlier agent accepted tunnels to them, and this one has not settled capture yet.
    Earlier(BTreeSet<IpAddr>),
    /// These Pods, by their names and UIDs.
    Pods(BTreeSet<(WorkloadName, Option<Uid>)>),
}

impl Default for Accepting {
    fn default() -> Self {
        Self::Pods(BTreeSet::new())
    }
}

impl Accepting {
    /// Returns the Pods to which an earlier agent accepted tunnels, as its tables say.
    pub fn after(held: &Captured) -> Self {
        let locals = held.locals.iter();
        let accepting = locals.filter(|(_, local)| accepts_tunnels(local.flags));
        Self::Earlier(accepting.map(|(addr, _)| addr.ip()).collect())
    }

    /// Whether it has a workload.
    pub fn has(&self, workload: &Workload) -> bool {
        match self {
            Self::Earlier(all) => workload.addresses.iter().any(|addr| all.contains(addr)),
            Self::Pods(all) => all.contains(&(workload.name.clone(), workload.uid)),
        }
    }

    /// Returns the workloads of a source in which these Pods speak HBONE.
    pub fn mark(
        &self,
        workloads: &OrdMap<WorkloadName, Arc<Workload>>,
    ) -> OrdMap<WorkloadName, Arc<Workload>> {
        let mut marked = workloads.clone();
        let candidates: Vec<&Arc<Workload>> = match self {
            Self::Earlier(all) if all.is_empty() => Vec::new(),
            Self::Earlier(_) => workloads.values().collect(),
            Self::Pods(all) => all
                .iter()
                .filter_map(|(name, _)| workloads.get(name))
                .collect(),
        };
        for workload in candidates {
            let has_identity = workload.place == Place::Address && !workload.account.is_empty();
            if has_identity && !workload.speaks_hbone && self.has(workload) {
                let speaking = Workload {
                    speaks_hbone: true,
                    ..(**workload).clone()
                };
                marked.insert(workload.name.clone(), Arc::new(speaking));
            }
        }
        marked
    }
}

/// Whether the agent's proxy accepts tunnels to a workload with these flags of its entry.
pub const fn accepts_tunnels(flags: u32) -> bool {
    flags & (Enrolled::TUNNELS | Enrolled::REFUSES_INBOUND) == Enrolled::TUNNELS
}

#[cfg(test)]
mod tests {
    use dataplane_common::capture::Local;

    use super::*;

    const UIDS: [&str; 2] = [
        "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60",
        "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b61",
    ];

    fn pod(name: &str, addr: &str, uid: Option<usize>, place: Place) -> Arc<Workload> {
        Arc::new(Workload {
            addresses: [addr.parse().unwrap()].into_iter().collect(),
            uid: uid.and_then(|uid| Uid::parse(UIDS[uid])),
            account: if name == "f" { "" } else { name }.into(),
            ..Workload::new(WorkloadName::new("shop", name), place)
        })
    }

    /// A Pod that follows another one by name has to be enrolled itself.
    #[test]
    fn only_pods_of_this_node_that_the_agent_has_enrolled_speak_hbone() {
        let here = || Place::Address;
        let pods = [
            pod("a", "10.0.0.1", Some(0), here()),
            pod("b", "10.0.0.2", Some(1), here()),
            pod("c", "10.0.0.3", None, here()),
            pod("d", "10.0.0.4", Some(0), Place::Elsewhere),
            pod("e", "10.0.0.5", Some(0), here()),
            pod("f", "10.0.0.6", Some(0), here()),
        ];
        let source: OrdMap<_, _> = pods
            .iter()
            .map(|of| (of.name.clone(), of.clone()))
            .collect();
        let named = |name: &str, uid: Option<usize>| {
            let uid = uid.and_then(|uid| Uid::parse(UIDS[uid]));
            (WorkloadName::new("shop", name), uid)
        };
        let local = |flags| Local {
            flags,
            ..Local::default()
        };
        let mut held = Captured::default();
        for (addr, flags) in [
            ("10.0.0.1", Enrolled::TUNNELS | Enrolled::INBOUND),
            ("10.0.0.2", Enrolled::TUNNELS | Enrolled::REFUSES_INBOUND),
            ("10.0.0.3", Enrolled::INBOUND),
            ("10.0.0.4", Enrolled::TUNNELS),
            ("10.0.0.6", Enrolled::TUNNELS),
            ("10.0.0.9", Enrolled::TUNNELS),
        ] {
            let addr: IpAddr = addr.parse().unwrap();
            held.locals.insert(addr.into(), local(flags));
        }
        let all = ["a", "b", "c", "d", "f"].map(|name| named(name, Some(0)));
        let pods = all
            .into_iter()
            .chain([named("c", None), named("gone", None)]);
        for (accepting, wanted) in [
            (Accepting::default(), ""),
            (Accepting::after(&Captured::default()), ""),
            (Accepting::after(&held), "a"),
            (Accepting::Pods(pods.collect()), "ac"),
        ] {
            let marked = accepting.mark(&source);
            let speaking = marked.values().filter(|of| of.speaks_hbone);
            let found: String = speaking.map(|of| of.name.name()).collect();
            assert_eq!(found, wanted, "{accepting:?}");
            assert!(marked.values().all(|of| !of.announces_hbone));
            assert_eq!(marked.len(), source.len());
        }
    }
}
