//! From boot until this agent has taken over: the guard of `dataplane guard` stands, and the node has its startup taint.
//! The agent lets network namespaces go as with `mesh.guard`, and ends both when it knows the network namespaces that were
//! there before it.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use kernel::Kernel;
use model::{Workload, WorkloadName};
use plan::enrol::Member;
use tracing::info;

use super::Mesh;

/// How long the agent waits for the Pods of processes that were there before it: the kubelet reports the address of a Pod
/// some seconds after the Pod's network namespace exists.
const UNKNOWN: Duration = Duration::from_secs(30);

/// The guard or the taint, as long as there is one.
#[derive(Debug)]
pub struct BootGuard {
    /// When the agent first looked; with the network namespaces with processes of unknown Pods that it found then, by
    /// their cookies, and that are still unknown.
    first: Option<(Instant, BTreeSet<u64>)>,
    /// Whether there is a guard, by which connections are refused.
    refuses: bool,
    /// The key of the taint.
    taint: Option<String>,
    /// Whether pods may still start that do not wait for the agent.
    lacks_cni: bool,
    /// Why the agent has not taken over yet, for `status`.
    because: String,
}

impl BootGuard {
    /// `refuses`: whether there is a guard; `taint`: the key of the taint. `None`: there is neither.
    pub fn new(refuses: bool, taint: Option<&str>) -> Option<Self> {
        (refuses || taint.is_some()).then(|| Self {
            first: None,
            refuses,
            taint: taint.map(str::to_owned),
            lacks_cni: false,
            because: "the agent cannot look for them yet".to_owned(),
        })
    }

    /// Sets whether the CNI plug-in, by which pods wait for the agent, has to be in the runtime's configuration, and is not.
    pub fn lacks_cni(&mut self, lacks: bool) {
        self.lacks_cni = lacks;
    }

    /// Whether connections are refused from unknown network namespaces.
    pub fn refuses(&self) -> bool {
        self.refuses
    }

    /// Takes the result of a look: the Pods to be captured that were not found, and the network namespaces with
    /// processes of unknown Pods. Returns whether the agent has to wait.
    pub fn is_needed<'a>(
        &mut self,
        missing: impl IntoIterator<Item = &'a WorkloadName>,
        unknown: &BTreeSet<u64>,
        now: Instant,
    ) -> bool {
        let (since, waiting) = self.first.get_or_insert_with(|| (now, unknown.clone()));
        waiting.retain(|cookie| unknown.contains(cookie));
        if let Some(name) = missing.into_iter().next() {
            self.because = format!("the agent has not found the Pod {name}");
            return true;
        }
        if self.lacks_cni {
            "the CNI plug-in is not in the container runtime's configuration"
                .clone_into(&mut self.because);
            return true;
        }
        let is_waiting = !waiting.is_empty() && now.duration_since(*since) < UNKNOWN;
        if is_waiting {
            self.because = format!(
                "the agent waits up to {} s for the Pods of {} network namespaces",
                UNKNOWN.as_secs(),
                waiting.len()
            );
        }
        is_waiting
    }

    /// Returns the text for `status`.
    pub fn text(&self) -> String {
        let because = &self.because;
        match &self.taint {
            Some(taint) if !self.refuses => {
                format!("the agent has not removed the startup taint {taint} yet: {because}")
            }
            _ => format!(
                "the guard of `dataplane guard` stands, so connections are refused from all network namespaces that the \
                 agent does not know: {because}"
            ),
        }
    }
}

impl Mesh {
    /// Whether the guard of `dataplane guard` stands.
    pub(super) fn has_boot_guard(&self) -> bool {
        self.boot.as_ref().is_some_and(BootGuard::refuses)
    }

    /// Ends the guard of `dataplane guard`, and has the startup taint removed, if this run has captured all workloads, and
    /// knows the network namespaces that were there before. The tables have them by now. The next run decides about unknown
    /// network namespaces. `is_unread`: whether this run lacks facts. Returns why the guard has not ended, for `status`.
    pub(super) fn end_boot_guard(
        &mut self,
        kernel: &mut Kernel,
        members: &[Member],
        is_unread: bool,
    ) -> Result<Option<String>, kernel::Error> {
        let Some(guard) = &mut self.boot else {
            return Ok(None);
        };
        let missing = members
            .iter()
            .map(|member| &member.workload)
            .filter(|workload| self.absent.contains_key(&workload.name))
            .filter(|workload| has_started(workload))
            .map(|workload| &workload.name);
        let unknown = self.closed.keys().copied().collect();
        if guard.is_needed(missing, &unknown, Instant::now()) || is_unread {
            return Ok(Some(guard.text()));
        }
        if guard.refuses() {
            kernel.end_boot_guard()?;
            info!(
                "mesh: all workloads are captured that were there before: the guard of `dataplane guard` ends"
            );
        }
        self.boot = None;
        if let Some(verified) = &self.verified {
            // Fails only if the thread has died, which ends the agent.
            let _ = verified.send(());
        }
        Ok(None)
    }
}

/// Whether a workload is a Pod that the source places on this node and that has started: it has an address.
pub fn has_started(workload: &Workload) -> bool {
    let is_here = workload.uid.is_some() || !workload.node.is_empty();
    is_here && !workload.addresses.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guard_stands_until_all_is_known_that_was_there() {
        let web = WorkloadName::new("shop", "web");
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut guard = BootGuard::new(true, None).unwrap();
        let needed =
            |guard: &mut BootGuard, missing: &[&WorkloadName], unknown: &[u64], seconds| {
                let unknown = unknown.iter().copied().collect();
                guard.is_needed(missing.iter().copied(), &unknown, at(seconds))
            };
        assert!(needed(&mut guard, &[&web], &[1, 2], 0));
        assert!(guard.text().contains("shop/web"), "{}", guard.text());
        assert!(needed(&mut guard, &[], &[1, 2], 1));
        // Another that comes later is not waited for; one that was known in between is not, either.
        assert!(needed(&mut guard, &[], &[2, 3], 2));
        assert!(!needed(&mut guard, &[], &[1, 3], 3));
        // Processes of no Pod end the wait after some time, but a Pod that is not found never does.
        let mut guard = BootGuard::new(true, None).unwrap();
        assert!(needed(&mut guard, &[], &[1], 0));
        assert!(needed(&mut guard, &[], &[1], 29));
        assert!(!needed(&mut guard, &[], &[1], 30));
        assert!(needed(&mut guard, &[&web], &[], 3600));
        guard.lacks_cni(true);
        assert!(needed(&mut guard, &[], &[], 3600));
        // It is found, and pods that start wait for the agent.
        guard.lacks_cni(false);
        assert!(!needed(&mut guard, &[], &[], 3600));
    }
}
