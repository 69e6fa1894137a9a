//! The programs that a cluster is made of: Kubernetes' from `KUBERNETES_BIN` or from `cargo xtask judges`, the others
//! from the distribution.

use std::{env, path::PathBuf};

use crate::{command::on_path, judges};

/// Environment variable with the directory of Kubernetes' programs.
pub const VARIABLE: &str = "KUBERNETES_BIN";

/// The judges that a cluster uses if the variable is not set.
pub const JUDGES: &str = "kubernetes-1.36";

/// Programs of Kubernetes that every cluster needs.
const KUBERNETES: [&str; 5] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kubectl",
];

/// Programs of the distribution: program, Debian's package, purpose.
const OTHERS: [(&str, &str, &str); 8] = [
    ("etcd", "etcd-server", "keeps the API server's objects"),
    ("containerd", "containerd", "runs pods' containers"),
    ("ctr", "containerd", "imports images"),
    ("runc", "runc", "makes containers"),
    (
        "conntrack",
        "conntrack",
        "kubelets and kube-proxy look for it",
    ),
    ("nft", "nftables", "kube-proxy's rules"),
    (
        "ip",
        "iproute2",
        "makes network namespaces, links and routes",
    ),
    ("nsenter", "util-linux", "enters nodes"),
];

/// Directories in which distributions install CNI plug-ins.
const CNI: [&str; 3] = ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"];

/// The programs of a cluster.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The directory with Kubernetes' programs.
    pub kubernetes: PathBuf,
    /// The directory with CNI plug-ins.
    pub cni: PathBuf,
}

/// The reason why a cluster has no programs.
#[derive(Debug)]
pub enum Missing {
    /// There is no directory with Kubernetes' programs: the chore is skipped.
    NoDirectory,
    /// Programs are missing; one line for each.
    Programs(Vec<String>),
}

/// Tells the user how to get Kubernetes' programs.
pub const HOW: &str = "\
`cargo xtask judges kubernetes-1.36` builds Kubernetes' programs, with Go, for the chore to find them. Or
set KUBERNETES_BIN to a directory with kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and
kubectl, of one release of Kubernetes. Official releases have them (kubernetes-server-linux-amd64.tar.gz, its
directory kubernetes/server/bin). `e2e` also needs e2e.test (kubernetes-test-linux-amd64.tar.gz) and agnhost. etcd,
containerd, runc and CNI plug-ins come from the distribution:
    apt-get install etcd-server containerd runc containernetworking-plugins conntrack nftables
docs/development.md, \"A real cluster\", says more.";

impl Programs {
    /// Finds all programs, with these additional programs of Kubernetes.
    ///
    /// # Errors
    /// Returns the missing programs.
    pub fn find(besides: &[&str]) -> Result<Self, Missing> {
        let kubernetes = Self::directory().ok_or(Missing::NoDirectory)?;
        let mut missing = Vec::new();
        for name in KUBERNETES.iter().chain(besides) {
            if !kubernetes.join(name).is_file() {
                let directory = kubernetes.display();
                missing.push(format!("{name}: not in {directory}"));
            }
        }
        for (name, package, purpose) in OTHERS {
            if on_path(name).is_none() {
                missing.push(format!("{name} ({purpose}): apt-get install {package}"));
            }
        }
        let cni = CNI.iter().map(PathBuf::from).find(|directory| {
            ["ptp", "host-local", "loopback", "portmap"]
                .iter()
                .all(|plugin| directory.join(plugin).is_file())
        });
        match cni {
            Some(cni) if missing.is_empty() => Ok(Self { kubernetes, cni }),
            Some(_) => Err(Missing::Programs(missing)),
            None => {
                missing.push(format!(
                    "CNI plug-ins (in none of {}): apt-get install containernetworking-plugins",
                    CNI.join(", ")
                ));
                Err(Missing::Programs(missing))
            }
        }
    }

    /// Returns the directory with Kubernetes' programs, if there is one.
    pub fn directory() -> Option<PathBuf> {
        let named = env::var_os(VARIABLE).filter(|value| !value.is_empty());
        let built = || Some(judges::directory(JUDGES)).filter(|directory| directory.is_dir());
        named.map(PathBuf::from).or_else(built)
    }

    /// Returns the directory with definitions of custom resources, if there is one.
    pub fn definitions(&self) -> Option<PathBuf> {
        Some(self.kubernetes.join("crds")).filter(|directory| directory.is_dir())
    }

    /// Returns the path of one of Kubernetes' programs.
    pub fn kubernetes(&self, name: &str) -> PathBuf {
        self.kubernetes.join(name)
    }
}
