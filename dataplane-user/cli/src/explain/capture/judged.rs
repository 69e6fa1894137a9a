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
        if self.direction != "inbound" || !is_judged {
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
            Some(decision) => {
                self.allowed = Some(decision.allowed);
                let steps = decision.steps.into_iter();
                self.steps.extend(steps.map(|step| format!("policies: {}", step.trim())));
            }
            None => self.steps.push(format!(
                "policies decide by the client's address, which is not known here: give the address as SRC, or see \
                 dataplane policies --workload {workload}"
            )),
        }
    }
}
