//! The decision of Istio's policies about a connection to a workload whose policies the proxy or the kernel enforces.

use std::net::{IpAddr, SocketAddr};

use admin::{api::Decision, client::Client as Agent};
use dataplane_common::{
    Reason,
    capture::{self, CAPTURED, Enrolled, Local},
};
use form_urlencoded::Serializer;

use super::{Destination, Mesh, Outcome, call::Call};
use crate::policies;

/// Why a plain inbound connection goes direct although the workload has a proxy.
pub(super) const WITHOUT_POLICIES: &str = "no AuthorizationPolicy or PeerAuthentication of the workload may refuse plain \
     connections, so they do not go to the proxy";

impl Mesh {
    /// Returns the address of a family of the workload in a network namespace. `None` if it has several, or if it is not known.
    pub fn address_in(&self, netns: u64, is_v4: bool) -> Option<IpAddr> {
        let locals = self.held.locals.iter();
        let its = locals.filter(|(addr, local)| local.netns == netns && addr.is_v4() == is_v4);
        let mut its = its.map(|(addr, _)| addr.ip());
        its.next().filter(|_| its.next().is_none())
    }

    /// Returns the verdict on an inbound connection that does not go to a proxy. `reason`: that of the rules; `client`: its address,
    /// if it is known.
    pub(super) fn without_proxy(
        &self,
        reason: Reason,
        local: &Local,
        client: Option<IpAddr>,
        port: u16,
    ) -> Reason {
        let is_judged = local.flags & Enrolled::JUDGES_INBOUND != 0;
        if reason != Reason::CapturedInbound
            || !is_judged && local.flags & Enrolled::ONLY_HBONE == 0
        {
            return Reason::ExcludedPort;
        }
        let client = client.filter(|_| is_judged);
        match client.map(|from| capture::judged(self, local, from.into(), port.into())) {
            None | Some(CAPTURED) => Reason::Direct,
            Some(_) => Reason::PolicyDenied,
        }
    }
}

impl Outcome {
    /// Adds whether the destination speaks HBONE, if this decides. Returns whether it refuses the connection in place of
    /// `withoutProxy`.
    pub(super) fn add_hbone(&mut self, call: &Call<'_>, reason: Reason) -> bool {
        let about = call.about_hbone(reason);
        let decides = about.is_some();
        self.steps.extend(about);
        if decides && reason == Reason::Captured && call.is_unclear() {
            self.allowed = Some(false);
        }
        decides && reason == Reason::ProxyDown
    }

    /// Adds the waypoint to which the proxy sends the connection, or why the proxy refuses the connection.
    pub fn lead(&mut self, agent: &Agent, to: Destination) {
        let captured = self.reason == Reason::Captured.word();
        let Some(workload) = self.workload.as_ref().filter(|_| captured) else {
            return;
        };
        let to = SocketAddr::new(to.addr, to.port).to_string();
        let mut query = Serializer::new(String::new());
        query.extend_pairs([("workload", workload), ("to", &to)]);
        let told = agent.list::<Decision>(&format!("/waypoint?{}", query.finish()));
        for decision in told.unwrap_or_default() {
            if !decision.allowed {
                self.allowed = Some(false);
            }
            self.steps.extend(decision.steps);
        }
    }

    /// Adds the decision of the workload's policies about an inbound connection in plaintext.
    pub fn judge(&mut self, agent: &Agent, client: Option<IpAddr>, to: Destination) {
        let Some(workload) = &self.workload else {
            return;
        };
        let judged = [
            Reason::CapturedInbound,
            Reason::Direct,
            Reason::PolicyDenied,
        ];
        let is_judged = judged.iter().any(|of| of.word() == self.reason);
        let is_unknown = self.verdict == "unknown";
        if self.direction != "inbound" || !is_judged && !is_unknown {
            return;
        }
        let connection = client.map(|from| (from, to.port));
        let told = policies::ask(agent, Some(workload), connection, None);
        let Some(told) = told.ok().and_then(|all| all.into_iter().next()) else {
            return;
        };
        let Some(by) = &told.enforced_by else {
            return;
        };
        if told.policies.is_empty() && !told.unread {
            return;
        }
        self.steps
            .push(format!("Istio's policies are enforced by the {by}"));
        match told.decision {
            Some(decision) => self.decided(decision),
            None if is_unknown => {}
            None => self.steps.push(format!(
                "policies decide by the client's address, which is not known here: give the address as SRC, or see \
                 dataplane policies --workload {workload}"
            )),
        }
    }

    /// Adds a decision. If the kernel's tables refuse the connection, they win: they may be older or closed.
    fn decided(&mut self, decision: Decision) {
        let refuses = self.reason == Reason::PolicyDenied.word();
        self.allowed = Some(decision.allowed && !refuses);
        let steps = decision.steps.into_iter();
        self.steps
            .extend(steps.map(|step| format!("policies: {}", step.trim())));
        if decision.allowed && refuses {
            self.steps.push(
                "the policies allow the connection, but the kernel's tables refuse it: see dataplane status".to_owned(),
            );
        }
    }

    /// Says that the verdict depends on the client's address, which is not known.
    pub(super) fn is_for_unknown_client(&mut self) {
        (self.verdict, self.reason) = ("unknown", "client-unknown");
        let text = "Istio's policies refuse some clients, and the client's address is not known here: give the address as SRC";
        self.steps.push(text.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reason from the tables, the evaluator's decision, and the resulting decision.
    #[test]
    fn a_table_that_refuses_is_not_overridden() {
        for (reason, allowed, wanted) in [
            (Reason::PolicyDenied, true, false),
            (Reason::PolicyDenied, false, false),
            (Reason::Direct, true, true),
            (Reason::Direct, false, false),
        ] {
            let mut told = Outcome {
                direction: "inbound",
                workload: None,
                verdict: "direct",
                reason: reason.word(),
                rule: None,
                allowed: None,
                steps: Vec::new(),
            };
            let steps = vec!["said".to_owned()];
            told.decided(Decision { allowed, steps });
            assert_eq!(told.allowed, Some(wanted), "{reason:?} {allowed}");
            assert_eq!(told.steps.len(), if allowed == wanted { 1 } else { 2 });
        }
    }
}
