//! The kubelet's probes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::is_default;

/// The cgroups of the kubelet, in the distributions of Kubernetes: kubeadm, minikube and managed clusters, k3s, RKE2,
/// MicroK8s, k0s and Talos.
const KUBELETS: [&str; 9] = [
    "kubelet.service",
    "k3s.service",
    "k3s-agent.service",
    "rke2-server.service",
    "rke2-agent.service",
    "snap.microk8s.daemon-kubelite.service",
    "k0scontroller.service",
    "k0sworker.service",
    "podruntime/kubelet",
];

/// The kubelet's probes, which reach captured Pods without the proxy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MeshProbes {
    /// The cgroups of the kubelet: names of systemd's units, or paths with a slash, relative to `kernel.cgroup`.
    /// Connections of processes in these cgroups to captured Pods are not captured. Default: the units of kubelet, k3s,
    /// RKE2, MicroK8s and k0s, and Talos's cgroup.
    #[serde(skip_serializing_if = "is_default")]
    pub cgroups: Option<Vec<String>>,
}

impl MeshProbes {
    /// Returns the names and paths of the cgroups.
    pub fn cgroups(&self) -> Vec<String> {
        let usual = || KUBELETS.map(str::to_owned).to_vec();
        self.cgroups.clone().unwrap_or_else(usual)
    }

    /// Adds the keys with faults: values that would name no cgroup, or the cgroups of all processes.
    pub(super) fn faults(&self, faults: &mut Vec<(String, String)>) {
        for (index, name) in self.cgroups.iter().flatten().enumerate() {
            let mut parts = name.trim_matches('/').split('/');
            if parts.any(|part| ["", ".", ".."].contains(&part)) {
                let text = format!(
                    "{name:?} is not a cgroup; expected a unit's name such as kubelet.service, or a path such as \
                     podruntime/kubelet"
                );
                faults.push((format!("mesh.probes.cgroups[{index}]"), text));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_of_all_processes_are_faults() {
        let faults = |cgroups: &[&str]| {
            let cgroups = cgroups.iter().map(|name| (*name).to_owned()).collect();
            let probes = MeshProbes {
                cgroups: Some(cgroups),
            };
            let mut faults = Vec::new();
            probes.faults(&mut faults);
            faults.len()
        };
        assert_eq!(faults(&KUBELETS), 0);
        assert_eq!(faults(&["/podruntime/kubelet/"]), 0);
        assert_eq!(faults(&["", "/", "..", "a/../..", "a//b", "."]), 6);
        assert!(
            MeshProbes::default()
                .cgroups()
                .contains(&KUBELETS[0].to_owned())
        );
    }
}
