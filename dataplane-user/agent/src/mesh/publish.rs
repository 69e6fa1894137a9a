//! Publishes the state of each workload.

use plan::enrol::{Enrolment, Member};

use super::Mesh;

impl Mesh {
    pub(super) fn publish(&mut self, member: Member) -> Enrolment {
        let name = &member.workload.name;
        Enrolment {
            number: self.enroller.number(name),
            problem: self.problems.of(name).cloned(),
            rules: member.rules,
            workload: member.workload,
        }
    }
}
