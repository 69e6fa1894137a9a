//! Publishes the state of each workload.

use model::{Acceleration, Place};
use plan::enrol::{Enrolment, Member};

use super::Mesh;

impl Mesh {
    pub(super) fn publish(&mut self, member: Member) -> Enrolment {
        let name = &member.workload.name;
        let (acceleration, not_accelerated) = match self.accelerated(&member) {
            Ok(acceleration) => (acceleration, None),
            Err(why) => (Acceleration::Off, Some(why)),
        };
        Enrolment {
            number: self.enroller.number(name),
            problem: self.problems.of(name).cloned(),
            acceleration,
            not_accelerated,
            rules: member.rules,
            workload: member.workload,
        }
    }

    /// Whether a workload's bytes bypass the TCP stack on the way to the proxy; or why they do not, though this is
    /// configured.
    fn accelerated(&self, member: &Member) -> Result<Acceleration, String> {
        let (policy, name) = (&member.policy, &member.workload.name);
        let why = if policy.acceleration == Acceleration::Off {
            return Ok(Acceleration::Off);
        } else if !policy.mode.is_proxied(self.options.foreign) {
            "its connections go direct"
        } else if self.options.foreign {
            "its proxy is not the agent's"
        } else if member.is_by_packets() {
            "it is captured by its packets, and its sockets are elsewhere"
        } else if matches!(member.workload.place, Place::Cgroup(_)) {
            "it has no network namespace of its own"
        } else if let Some(attached) = self.attached.values().find(|a| a.name == *name) {
            let why = attached.not_accelerated.clone();
            return why.map_or(Ok(policy.acceleration), Err);
        } else {
            "the proxy does not listen for it"
        };
        Err(why.to_owned())
    }
}
