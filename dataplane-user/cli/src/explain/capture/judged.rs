//! The decision of Istio's policies about a connection that goes to the workload's proxy.

use std::net::{IpAddr, SocketAddr};

use admin::{api::Decision, client::Client as Agent};
use dataplane_common::Reason;
use form_urlencoded::Serializer;

use super::{Destination, Outcome, call::Call};
use crate::policies;

/// Why a plain inbound connection goes direct although the workload has a proxy.
pub(super) const WITHOUT_POLICIES: &str = "no AuthorizationPolicy or PeerAuthentication of the workload may refuse plain \
     connections, so they do not go to the proxy";

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

    /// Adds the decision of the workload's policies about a connection that goes to the proxy, in plaintext.
    pub fn judge(&mut self, agent: &Agent, client: Option<IpAddr>, to: Destination) {
        let Some(workload) = &self.workload else {
            return;
        };
        if self.reason != Reason::CapturedInbound.word() {
            return;
        }
        let connection = client.map(|from| (from, to.port));
        let told = policies::ask(agent, Some(workload), connection, None);
        let Some(told) = told.ok().and_then(|all| all.into_iter().next()) else {
            return;
        };
        if !told.enforced || told.policies.is_empty() && !told.unread {
            return;
        }
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
