//! Workloads that are not captured as they should be.

use std::collections::{BTreeMap, btree_map::Entry};

use dataplane_common::capture::Enrolled;
use model::WorkloadName;
use plan::enrol::Problem;
use tracing::{error, info};

/// The problems of workloads.
#[derive(Debug, Default)]
pub struct Problems(BTreeMap<WorkloadName, Problem>);

impl Problems {
    /// Adds to the problem of a workload.
    pub fn add(&mut self, workload: &WorkloadName, problem: Problem) {
        match self.0.entry(workload.clone()) {
            Entry::Vacant(first) => {
                first.insert(problem);
            }
            Entry::Occupied(mut said) => {
                let said = said.get_mut();
                said.text.push_str("; ");
                said.text.push_str(&problem.text);
                said.of_node |= problem.of_node;
            }
        }
    }

    /// Returns the problem of a workload.
    pub fn of(&self, workload: &WorkloadName) -> Option<&Problem> {
        self.0.get(workload)
    }

    /// Whether there are no problems.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Logs new problems, and those that are over.
    pub fn tell(&self, before: &Self) {
        for (workload, problem) in &self.0 {
            if before.0.get(workload) != Some(problem) {
                error!("mesh: {workload}: {}", problem.text);
            }
        }
        for workload in before.0.keys().filter(|w| !self.0.contains_key(*w)) {
            info!(%workload, "mesh: its problem is over");
        }
    }
}

/// The problem of a workload to whose network namespace no program is attached. `flags`: those of its entry.
pub(super) fn not_attached(error: &str, flags: u32) -> Problem {
    let consequence = if flags & Enrolled::JUDGES_INBOUND == 0 {
        ""
    } else {
        "; Istio's policies have no effect: connections that they forbid pass"
    };
    Problem::of_node(format!("{error}{consequence}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_says_that_policies_have_no_effect() {
        for (flags, wanted) in [(Enrolled::JUDGES_INBOUND, true), (Enrolled::INBOUND, false)] {
            let text = not_attached("cannot attach: EPERM", flags).text;
            assert!(text.starts_with("cannot attach: EPERM"), "{text}");
            assert_eq!(text.contains("connections that they forbid pass"), wanted);
        }
    }

    #[test]
    fn a_workload_with_a_problem_of_the_nodes_has_one_of_the_nodes() {
        let mut problems = Problems::default();
        let name = WorkloadName::new("default", "app");
        problems.add(&name, Problem::of_workload("it has a proxy"));
        assert!(!problems.of(&name).unwrap().of_node);
        problems.add(&name, Problem::of_node("cannot set it"));
        problems.add(&name, Problem::of_workload("it is late"));
        let problem = problems.of(&name).unwrap();
        assert!(problem.of_node);
        assert_eq!(problem.text, "it has a proxy; cannot set it; it is late");
    }
}
