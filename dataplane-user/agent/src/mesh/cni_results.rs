//! CNI's records of pods' networks on this node: container runtimes make libcni store the result of each plug-in, with
//! its network namespace. Only root can write there.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Read as _},
    net::IpAddr,
    path::{Path, PathBuf},
};

use ipnet::IpNet;
use model::{Uid, Workload};
use serde::Deserialize;
use tracing::debug;

/// The directory in which libcni stores results.
pub const RESULTS: &str = "/var/lib/cni/results";
/// Directories in which container runtimes name network namespaces: as runtimes and as the agent know them.
const NAMED: [&str; 2] = ["/var/run/netns", "/run/netns"];
/// Larger than any result.
const MOST: u64 = 1 << 20;

/// All results, by the addresses that they assigned.
#[derive(Debug, Default)]
pub struct Results(HashMap<IpAddr, Vec<Assignment>>);

/// The pod or container that got an address.
#[derive(Debug, PartialEq, Eq)]
struct Assignment {
    /// The network namespace's name.
    namespace: PathBuf,
    /// The pod's namespace and name, if it is a pod.
    pod: Option<(String, String)>,
    uid: Option<Uid>,
}

/// A file of libcni's (`cachedInfo` in `libcni/api.go`).
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CachedResult {
    netns: Option<PathBuf>,
    #[serde(default)]
    cni_args: Vec<(String, String)>,
    result: Option<Outcome>,
}

/// A result (CNI's specification, section 5, since version 0.3.0).
#[derive(Deserialize)]
struct Outcome {
    #[serde(default)]
    interfaces: Vec<Interface>,
    #[serde(default)]
    ips: Vec<Ip>,
}

#[derive(Deserialize)]
struct Interface {
    sandbox: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Ip {
    /// The address, with the length of its network.
    address: String,
    interface: Option<usize>,
}

impl Results {
    /// Reads the results in a directory. A file that is not a result is left out.
    ///
    /// # Errors
    /// If the directory or a file cannot be read.
    pub fn read(directory: &Path) -> io::Result<Self> {
        let mut found = Self::default();
        let entries = match fs::read_dir(directory) {
            Ok(entries) => entries,
            // No container runtime here uses CNI.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let path = entry?.path();
            let mut text = String::new();
            let read = File::open(&path).and_then(|file| file.take(MOST).read_to_string(&mut text));
            match read {
                Ok(_) => {}
                // Removed since, with its pod; or not a text.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::NotFound
                            | io::ErrorKind::InvalidData
                            | io::ErrorKind::IsADirectory
                    ) =>
                {
                    continue;
                }
                Err(error) => return Err(error),
            }
            match serde_json::from_str::<CachedResult>(&text) {
                Ok(kept) => found.add(kept),
                Err(error) => debug!("{}: {error}", path.display()),
            }
        }
        Ok(found)
    }

    fn add(&mut self, kept: CachedResult) {
        let Some(result) = kept.result else { return };
        let arg = |name: &str| {
            let mut args = kept.cni_args.iter();
            args.find(|(key, _)| key == name)
                .map(|(_, value)| value.clone())
        };
        for ip in result.ips {
            let interface = ip.interface.and_then(|index| result.interfaces.get(index));
            let sandbox = interface.and_then(|interface| interface.sandbox.as_ref());
            let Some(path) = sandbox.or(kept.netns.as_ref()) else {
                continue;
            };
            // By its name, because the number of a process is reused.
            let Some(name) = NAMED.iter().find_map(|at| path.strip_prefix(at).ok()) else {
                continue;
            };
            let given = Assignment {
                namespace: name.to_owned(),
                pod: arg("K8S_POD_NAMESPACE").zip(arg("K8S_POD_NAME")),
                uid: arg("K8S_POD_UID").and_then(|uid| Uid::parse(&uid)),
            };
            let Ok(network) = ip.address.parse::<IpNet>() else {
                continue;
            };
            let all = self.0.entry(network.addr()).or_default();
            if !all.contains(&given) {
                all.push(given);
            }
        }
    }

    /// Returns the network namespaces that were made for a workload with this address. A pod that has gone may have
    /// results without a namespace.
    pub fn of(&self, workload: &Workload, addr: IpAddr) -> impl Iterator<Item = PathBuf> {
        let name = &workload.name;
        let is_its = move |given: &&Assignment| match (&given.uid, &workload.uid, &given.pod) {
            (Some(given), Some(wanted), _) => given == wanted,
            (_, Some(_), Some((namespace, pod))) => {
                namespace == name.namespace() && pod == name.name()
            }
            (_, Some(_), None) => false,
            // Only the configuration knows the workload, by its addresses.
            (_, None, _) => true,
        };
        let all = self.0.get(&addr).into_iter().flatten();
        all.filter(is_its)
            .map(|given| Path::new(NAMED[1]).join(&given.namespace))
    }
}

#[cfg(test)]
mod tests {
    use model::{Place, WorkloadName};

    use super::*;

    const UID: &str = "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60";

    fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    fn of(results: &Results, name: &str, uid: Option<&str>, addr: &str) -> Vec<PathBuf> {
        let workload = Workload {
            uid: uid.map(|uid| Uid::parse(uid).unwrap()),
            ..Workload::new(WorkloadName::new("shop", name), Place::Address)
        };
        results.of(&workload, addr.parse().unwrap()).collect()
    }

    #[test]
    fn a_result_leads_to_the_network_namespace_of_its_pod_and_of_no_other() {
        let web = r#"{"kind": "cniCacheV1", "containerId": "1", "config": "e30=", "ifName": "eth0",
            "networkName": "net", "cniArgs": [["IgnoreUnknown", "1"], ["K8S_POD_NAMESPACE", "shop"],
            ["K8S_POD_NAME", "web"], ["K8S_POD_UID", "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60"]],
            "result": {"cniVersion": "1.0.0", "dns": {},
            "interfaces": [{"name": "cni0", "mac": "02:00:00:00:00:01"},
                {"name": "eth0", "sandbox": "/var/run/netns/cni-web"}],
            "ips": [{"address": "10.0.0.5/24", "gateway": "10.0.0.1", "interface": 1},
                {"address": "fd00::5/64", "interface": 1}]}}"#;
        // A result of an earlier version of libcni, which names no pod; one that leads to a process; and one that is
        // malformed.
        let old =
            r#"{"netns": "/run/netns/cni-old", "result": {"ips": [{"address": "10.0.0.6/24"}]}}"#;
        let process =
            r#"{"netns": "/proc/7/ns/net", "result": {"ips": [{"address": "10.0.0.7/24"}]}}"#;
        let all = directory(&[
            ("web", web),
            ("old", old),
            ("process", process),
            ("wrong", "{"),
        ]);
        fs::create_dir(all.path().join("directory")).unwrap();
        let results = Results::read(all.path()).unwrap();
        let expected = [PathBuf::from("/run/netns/cni-web")];
        for addr in ["10.0.0.5", "fd00::5"] {
            assert_eq!(of(&results, "web", Some(UID), addr), expected);
            assert_eq!(of(&results, "web", None, addr), expected);
        }
        let other = UID.replace('8', "9");
        assert!(of(&results, "web", Some(&other), "10.0.0.5").is_empty());
        assert_eq!(of(&results, "old", None, "10.0.0.6").len(), 1);
        assert!(of(&results, "old", Some(UID), "10.0.0.6").is_empty());
        assert!(of(&results, "x", None, "10.0.0.7").is_empty());
    }

    #[test]
    fn what_cannot_be_read_is_an_error_and_no_directory_is_none() {
        let none = tempfile::tempdir().unwrap();
        let missing = none.path().join("missing");
        assert!(Results::read(&missing).unwrap().0.is_empty());
        let long = none.path().join("x".repeat(300));
        assert!(Results::read(&long).is_err());
    }
}
