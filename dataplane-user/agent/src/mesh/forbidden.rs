//! Connections that went directly to a workload with the mode `auto` before a policy selected it, and that its policies forbid.

use std::{collections::BTreeMap, mem, net::SocketAddr};

use dataplane_common::capture::Enrolled;
use kernel::{Kernel, Namespace};
use model::{
    Snapshot,
    authorization::{Connection, Policies},
};
use plan::enrol::Member;
use tracing::info;

use super::Mesh;

/// The policies by which the connections of workloads were judged last, by the cookies of their network namespaces.
pub(super) type Judged = BTreeMap<u64, Policies>;

impl Mesh {
    /// Ends the connections that went directly to workloads and that their policies forbid, after each change of the policies. Returns
    /// the failures, which it tries again at the next call. Policies that cannot be read end no connection.
    pub(super) fn end_forbidden(
        &mut self,
        kernel: &Kernel,
        snapshot: &Snapshot,
        enrolled: &[(&Member, &Namespace, u32)],
    ) -> Vec<String> {
        let mut failed = Vec::new();
        let mut before = mem::take(&mut self.judged);
        for (member, namespace, flags) in enrolled {
            if member.auto.is_none() || flags & Enrolled::INBOUND == 0 {
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
            if last.as_ref() != Some(&policies) {
                // A dry run changes nothing.
                let is_forbidden = |client: SocketAddr, own| {
                    let connection = Connection::new(None, client.ip(), own);
                    !policies.decide(&connection).is_allowed()
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
            }
            self.judged.insert(namespace.cookie, policies);
        }
        failed
    }
}
