//! Connections that went directly to a workload before a policy forbade them.

use std::{
    collections::BTreeMap,
    mem,
    net::SocketAddr,
    time::{Duration, Instant},
};

use dataplane_common::capture::Enrolled;
use kernel::{Kernel, capture::Namespace};
use model::{
    Snapshot,
    authorization::{Connection, Policies},
};
use plan::enrol::Member;
use tracing::info;

use super::Mesh;

/// The policies by which the connections of workloads were judged last, and when to judge again, by the cookies of their network
/// namespaces.
pub(super) type Judged = BTreeMap<u64, (Policies, Option<Instant>)>;

/// After this time, connections are judged again: a client can delay the end of a handshake for as long as the kernel repeats its
/// SYN-ACK, 63 s by default (`net.ipv4.tcp_synack_retries`).
const HANDSHAKE: Duration = Duration::from_secs(130);

impl Mesh {
    /// Ends the connections that went directly to workloads and that their policies forbid, after each change of the policies. Returns
    /// the failures, which it tries again at the next call. Policies that cannot be read end no connection. `is_enforced`: whether new
    /// connections to a workload are judged; if not, this waits until they are.
    pub(super) fn end_forbidden(
        &mut self,
        kernel: &Kernel,
        snapshot: &Snapshot,
        enrolled: &[(&Member, &Namespace, u32)],
        is_enforced: impl Fn(&Member) -> bool,
    ) -> Vec<String> {
        let mut failed = Vec::new();
        let mut before = mem::take(&mut self.judged);
        for (member, namespace, flags) in enrolled {
            // With `auto`, direct connections can be forbidden only if a policy selects the workload.
            let to_proxy = member.auto.is_some() && flags & Enrolled::INBOUND != 0;
            if !to_proxy && !member.by_kernel || !is_enforced(member) {
                continue;
            }
            let (name, labels) = (&member.workload.name, &member.workload.labels);
            let policies = snapshot.istio.policies_of(name.namespace(), labels);
            let last = before.remove(&namespace.cookie);
            if policies.unread {
                self.judged
                    .extend(last.map(|last| (namespace.cookie, last)));
                continue;
            }
            let now = Instant::now();
            let is_new = last.as_ref().is_none_or(|(last, _)| *last != policies);
            let mut again = last.and_then(|(_, again)| again);
            if is_new || again.is_some_and(|again| again <= now) {
                let is_forbidden = |client: SocketAddr, own| {
                    let connection = Connection::new(None, client.ip(), own);
                    !policies.reason(&connection).is_allowed()
                };
                let number = self.enroller.number(name);
                match kernel.end_arrived(namespace, number, is_forbidden) {
                    Ok(0) => {}
                    Ok(ended) => {
                        info!(
                            "mesh: {name}: ended {ended} direct connections that its policies forbid"
                        );
                    }
                    Err(error) => {
                        failed.push(format!(
                            "{name}: connections that its policies forbid now go on: {error}"
                        ));
                        continue;
                    }
                }
                again = is_new.then(|| now + HANDSHAKE);
            }
            self.judged.insert(namespace.cookie, (policies, again));
        }
        failed
    }
}
