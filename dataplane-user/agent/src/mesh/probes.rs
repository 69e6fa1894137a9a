//! The kubelet's cgroups. A process with rights in a cgroup can make others below it, with any name, so units are looked
//! for only where root of the node alone makes cgroups.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use kernel::Kernel;

use super::Mesh;

/// Part of the name of the cgroup in which a kubelet makes those of Pods.
const PODS: &str = "kubepods";
/// How many slices systemd may have put around a unit.
const SLICES: usize = 4;

/// The directories of the kubelet's cgroups that exist.
#[derive(Debug, Default)]
pub struct Kubelets {
    /// Those without Pods.
    pub found: Vec<PathBuf>,
    /// Those with Pods: their processes cannot be told from the kubelet.
    pub with_pods: Vec<PathBuf>,
}

impl Kubelets {
    /// Returns a warning if there are none. `names`: those by which they were looked for below `root`.
    fn missing(&self, root: &Path, names: &[String]) -> Option<String> {
        let is_missing = self.found.is_empty() && self.with_pods.is_empty() && !names.is_empty();
        is_missing.then(|| {
            format!(
                "no cgroup of a kubelet is found below {}, so policies that refuse connections also refuse the kubelet's probes, and \
                 the kubelet restarts these Pods: name its cgroup in mesh.probes.cgroups, or use an empty list if there is no \
                 kubelet; looked for {}",
                root.display(),
                names.join(", ")
            )
        })
    }
}

impl Mesh {
    /// Has the programs recognise the kubelet's connections, before any connection is captured. Without workloads, none is.
    /// `may_refuse`: whether policies may refuse connections to a workload. Returns the problems.
    pub(super) fn leave_probes_alone(
        &self,
        kernel: &Kernel,
        has_workloads: bool,
        may_refuse: impl FnOnce() -> bool,
    ) -> Vec<String> {
        let names = if has_workloads {
            self.config.probes.cgroups()
        } else {
            Vec::new()
        };
        let captured = |why: String| format!("probes of the kubelet may be captured: {why}");
        let kubelets = match kubelets(&self.cgroup, &names) {
            Ok(kubelets) => kubelets,
            Err(error) => {
                let root = self.cgroup.display();
                let why = format!("cannot look for the kubelet's cgroups below {root}: {error}");
                return vec![captured(why)];
            }
        };
        let with_pods = kubelets.with_pods.iter().map(|path| {
            format!(
                "the kubelet's cgroup {} has the cgroups of Pods in it, so its connections are captured: name a cgroup of the \
                 kubelet alone in mesh.probes.cgroups",
                path.display()
            )
        });
        let failed = kernel.set_probers(&kubelets.found).err();
        let failed = failed.map(|error| captured(error.to_string()));
        let missing = kubelets.missing(&self.cgroup, &names);
        let missing = missing.filter(|_| may_refuse());
        with_pods.chain(failed).chain(missing).collect()
    }
}

/// Looks for the kubelet's cgroups. `names`: of units, or paths below `root`.
///
/// # Errors
/// If a directory cannot be read.
pub fn kubelets(root: &Path, names: &[String]) -> io::Result<Kubelets> {
    let (paths, units): (Vec<_>, Vec<_>) = names.iter().partition(|name| name.contains('/'));
    let paths = paths
        .into_iter()
        .map(|path| root.join(path.trim_matches('/')));
    let mut found: Vec<PathBuf> = paths.filter(|path| path.is_dir()).collect();
    if !units.is_empty() {
        search(root, &units, SLICES, &mut found)?;
    }
    let (with_pods, found) = found.into_iter().partition(|path| has_pods(path));
    Ok(Kubelets { found, with_pods })
}

/// Whether the kubelet makes the cgroups of Pods in this cgroup (`--cgroup-root`).
fn has_pods(directory: &Path) -> bool {
    let mut entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.any(|entry| entry.file_name().to_string_lossy().contains(PODS))
}

fn search(
    directory: &Path,
    units: &[&String],
    slices: usize,
    found: &mut Vec<PathBuf>,
) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        // It was removed meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let file_name = entry.file_name();
        let Some(name) = file_name.to_str() else {
            continue;
        };
        let is_unit = units.iter().any(|unit| *unit == name);
        if !is_unit && !is_of_node(name) || !entry.file_type()?.is_dir() {
            continue;
        }
        if is_unit {
            found.push(entry.path());
        } else if slices > 0 {
            search(&entry.path(), units, slices - 1, found)?;
        }
    }
    Ok(())
}

/// Whether it is one of systemd's slices that has no Pods, users or machines in it.
fn is_of_node(name: &str) -> bool {
    name.strip_suffix(".slice").is_some()
        && !name.contains(PODS)
        && !name.starts_with("user")
        && !name.starts_with("machine")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn units_are_found_where_root_alone_makes_cgroups() {
        let root = tempfile::tempdir().unwrap();
        for path in [
            "system.slice/kubelet.service",
            "system.slice/kubelet.service/k3s.service",
            "runtime.slice/runtime-node.slice/k3s.service",
            "k3s.service",
            "podruntime/kubelet",
            "kubepods.slice/kubepods-pod1.slice/kubelet.service",
            "kubelet.slice/kubelet-kubepods.slice/kubelet.service",
            "kubepods/pod1/system.slice/kubelet.service",
            "user.slice/user-1.slice/kubelet.service",
            "machine.slice/kubelet.service",
            "system.slice/docker-1.scope/system.slice/kubelet.service",
            "system.slice/sshd.service/kubelet.service",
        ] {
            fs::create_dir_all(root.path().join(path)).unwrap();
        }
        let found = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let found = kubelets(root.path(), &names).unwrap().found.into_iter();
            let below = |path: PathBuf| path.strip_prefix(root.path()).unwrap().to_owned();
            found.map(below).collect::<BTreeSet<PathBuf>>()
        };
        let paths = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<BTreeSet<_>>();
        assert_eq!(
            found(&[
                "kubelet.service",
                "k3s.service",
                "/podruntime/kubelet",
                "a/b"
            ]),
            paths(&[
                "system.slice/kubelet.service",
                "runtime.slice/runtime-node.slice/k3s.service",
                "k3s.service",
                "podruntime/kubelet",
            ])
        );
        assert_eq!(found(&["kubelet"]), paths(&[]));
        for (name, wanted) in [("kubelet", true), ("kubelet.service", false)] {
            let names = [name.to_owned()];
            let found = kubelets(root.path(), &names).unwrap();
            assert_eq!(found.missing(root.path(), &names).is_some(), wanted);
        }
        assert_eq!(Kubelets::default().missing(root.path(), &[]), None);
        let none = root.path().join("none");
        assert!(kubelets(&none, &["a".to_owned()]).unwrap().found.is_empty());
        // As with `--cgroup-root`.
        let with_pods = root.path().join("podruntime/kubelet");
        fs::create_dir(with_pods.join("kubepods.slice")).unwrap();
        let looked = kubelets(root.path(), &["podruntime/kubelet".to_owned()]).unwrap();
        assert_eq!(looked.missing(root.path(), &["kubelet".to_owned()]), None);
        assert_eq!((looked.found.len(), looked.with_pods), (0, vec![with_pods]));
    }
}
