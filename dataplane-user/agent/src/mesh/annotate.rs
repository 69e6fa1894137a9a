//! Annotates captured Pods for Istio's control plane.

use std::collections::{BTreeMap, BTreeSet};

use dataplane_common::capture::Enrolled;
use model::WorkloadName;
use plan::{Captured, enrol::Member};
use source::kubernetes::{Announcer, Pods};

use super::{Mesh, discover::Placed, problems::Problems};

impl Mesh {
    /// Sets the thread that writes the annotation.
    pub fn annotate_by(&mut self, announcer: Option<Announcer>) {
        self.announcer = announcer;
    }

    /// Annotates the Pods whose entries the tables hold and, with a proxy, whose connections it takes; with certificates, only
    /// Pods whose tunnels the agent's proxy accepts. `held`: the contents of the tables. `is_unsure`: whether facts could not be read. Returns why annotations could not be written.
    pub(super) fn annotate(
        &self,
        held: &Captured,
        members: &[Member],
        placed: &Placed<'_>,
        problems: &Problems,
        is_unsure: bool,
    ) -> Option<String> {
        let announcer = self.announcer.as_ref()?;
        let (mut captured, mut unsure) = (Pods::new(), BTreeSet::new());
        if self.config.announce == Some(true) {
            let numbers: BTreeMap<&WorkloadName, u32> = self.enroller.numbers().collect();
            for (member, namespace, flags) in &placed.enrolled {
                let name = &member.workload.name;
                let entry = held.namespaces.get(&namespace.cookie);
                let is_held = entry.is_some_and(|entry| {
                    entry.flags & Enrolled::CAPTURED != 0
                        && numbers.get(name) == Some(&entry.workload)
                });
                let is_taken = flags & Enrolled::PROXY == 0
                    || self.options.foreign
                    || self.attached.contains_key(&namespace.cookie);
                let speaks = self.encryption.is_none() || accepts_tunnels(*flags);
                let is_faulty = problems.of(name).is_some_and(|problem| problem.of_node);
                if let Some(uid) = member.workload.uid
                    && is_held
                    && is_taken
                    && speaks
                    && !is_faulty
                {
                    captured.insert((name.clone(), uid));
                }
            }
            let names = members.iter().map(|member| &member.workload.name);
            let unknown = |name: &&WorkloadName| {
                let number = numbers.get(name);
                is_unsure || number.is_some_and(|number| placed.unknown.contains_key(number))
            };
            unsure.extend(names.filter(unknown).cloned());
        }
        announcer.announce(captured, unsure);
        announcer.trouble()
    }

    /// Says that connections to captured Pods stay in plaintext although the agent accepts their tunnels, because nothing
    /// tells clients so.
    pub(super) fn untold(&self, placed: &Placed<'_>) -> Option<String> {
        self.encryption.as_ref()?;
        if self.config.announce == Some(true) && self.announcer.is_some() {
            return None;
        }
        let mut enrolled = placed.enrolled.iter();
        let (first, ..) = enrolled
            .find(|(member, _, flags)| accepts_tunnels(*flags) && !member.workload.speaks_hbone)?;
        Some(format!(
            "connections to captured Pods without the annotation ambient.istio.io/redirection: enabled are in plaintext, such \
             as to {}, although mesh.identity is set: set mesh.announce: true, with the Kubernetes API as the source, or set \
             the annotation in the Pods' manifests",
            first.workload.name
        ))
    }
}

/// Whether the agent's proxy accepts tunnels to a workload with these flags.
fn accepts_tunnels(flags: u32) -> bool {
    flags & (Enrolled::TUNNELS | Enrolled::REFUSES_INBOUND) == Enrolled::TUNNELS
}
