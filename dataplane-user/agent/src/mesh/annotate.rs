//! Which Pods of this node accept tunnels, and their annotation for Istio's control plane.

use std::collections::{BTreeMap, BTreeSet};

use dataplane_common::capture::Enrolled;
use model::{Uid, Workload, WorkloadName};
use plan::{Captured, enrol::Member};
use source::kubernetes::Announcer;

use super::{Mesh, discover::Placed, settle::Draft};
use crate::accepting::{Accepting, accepts_tunnels};

/// The captured Pods, as far as the agent has verified it.
#[derive(Default)]
pub(super) struct Verified {
    /// Their names and UIDs.
    pods: BTreeSet<(WorkloadName, Option<Uid>)>,
    /// Workloads that may be captured as before.
    unsure: BTreeSet<WorkloadName>,
}

impl Mesh {
    /// Sets the thread that writes the annotation.
    pub fn annotate_by(&mut self, announcer: Option<Announcer>) {
        self.announcer = announcer;
    }

    /// Returns the Pods whose entries the tables hold and, with a proxy, whose connections it takes; with certificates, only
    /// Pods whose tunnels the agent's proxy accepts. Also returns the workloads of which this is not known, because facts could not
    /// be read. `waits`: whether another layout's programs still serve, so that the proxy takes no connections yet.
    pub(super) fn verify(
        &self,
        held: &Captured,
        members: &[Member],
        placed: &Placed<'_>,
        draft: &Draft,
        waits: bool,
    ) -> Verified {
        let mut verified = Verified::default();
        if self.encryption.is_none() && self.config.announce != Some(true) {
            return verified;
        }
        let numbers: BTreeMap<&WorkloadName, u32> = self.enroller.numbers().collect();
        for (member, namespace, flags) in &placed.enrolled {
            let Workload { name, uid, .. } = &*member.workload;
            let entry = held.namespaces.get(&namespace.cookie);
            let is_held = entry.is_some_and(|entry| {
                entry.flags & Enrolled::CAPTURED != 0 && numbers.get(name) == Some(&entry.workload)
            });
            let is_taken = flags & Enrolled::PROXY == 0
                || self.options.foreign
                || waits
                || self.attached.contains_key(&namespace.cookie);
            let speaks = self.encryption.is_none() || accepts_tunnels(*flags);
            let is_faulty = draft
                .problems
                .of(name)
                .is_some_and(|problem| problem.of_node);
            if is_held && is_taken && speaks && !is_faulty {
                verified.pods.insert((name.clone(), *uid));
            }
        }
        for member in members {
            let name = &member.workload.name;
            let number = numbers.get(name);
            if draft.trouble.is_some()
                || number.is_some_and(|number| placed.unknown.contains_key(number))
            {
                verified.unsure.insert(name.clone());
            }
        }
        verified
    }

    /// Notes to which Pods the agent's proxy accepts tunnels.
    pub(super) fn accept(&mut self, members: &[Member], verified: &Verified) {
        if self.encryption.is_none() {
            return;
        }
        let mut pods = verified.pods.clone();
        for Member { workload, .. } in members {
            if verified.unsure.contains(&workload.name) && self.accepting.has(workload) {
                pods.insert((workload.name.clone(), workload.uid));
            }
        }
        self.accepting = Accepting::Pods(pods);
    }

    /// Annotates Pods. Returns why annotations could not be written.
    pub(super) fn annotate(&self, verified: Verified) -> Option<String> {
        let announcer = self.announcer.as_ref()?;
        let Verified { pods, unsure } = if self.config.announce == Some(true) {
            verified
        } else {
            Verified::default()
        };
        let pods = pods.into_iter();
        let pods = pods.filter_map(|(name, uid)| Some((name, uid?)));
        announcer.announce(pods.collect(), unsure);
        announcer.trouble()
    }

    /// Says that connections of other nodes to captured Pods stay in plaintext although the agent accepts their tunnels, because
    /// nothing tells these nodes so.
    pub(super) fn untold(&self, placed: &Placed<'_>) -> Option<String> {
        self.encryption.as_ref()?;
        if self.config.announce == Some(true) && self.announcer.is_some() {
            return None;
        }
        let mut enrolled = placed.enrolled.iter();
        let (first, ..) = enrolled.find(|(member, _, flags)| {
            accepts_tunnels(*flags) && !member.workload.announces_hbone
        })?;
        Some(format!(
            "connections of other nodes to captured Pods without the annotation ambient.istio.io/redirection: enabled are in \
             plaintext, such as to {}, although mesh.identity is set: set mesh.announce: true, with the Kubernetes API as the source, or set \
             the annotation in the Pods' manifests",
            first.workload.name
        ))
    }
}
