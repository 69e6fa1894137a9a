//! The scenarios. Each scenario leaves the cluster as it found it: with the DaemonSet of the base.

mod accepted;
mod address;
mod agents;
mod api;
mod cut;
mod deploy;
mod enrolment;
mod load;
mod mesh;
mod migration;
mod mounts;
mod netpol;
mod node_goes;
mod pods;
mod routes;
mod services;
mod wrong_cgroup;

use std::{fs, time::Instant};

use anyhow::{Result, bail};

use super::{Cluster, kube_proxy, place};
use crate::{
    command::output,
    progress::note,
    style::{BOLD, ERROR, RESET},
    workspace,
};

/// A scenario: checks a property of the dataplane in a cluster.
pub struct Scenario {
    name: &'static str,
    about: &'static str,
    /// Runs the scenario. Returns its observations in one line.
    run: fn(&Cluster) -> Result<String>,
    /// Kubernetes' programs that the scenario needs besides those of every cluster.
    programs: &'static [&'static str],
}

/// All scenarios, in the order in which they run.
const ALL: [Scenario; 21] = [
    Scenario {
        name: "rbac",
        about: "the agent reads what our ClusterRole allows, and nothing that it asks for is forbidden",
        run: deploy::rbac,
        programs: &[],
    },
    Scenario {
        name: "mounts",
        about: "what of the node the agent's container can write to",
        run: mounts::read_only,
        programs: &[],
    },
    Scenario {
        name: "services",
        about: "every type of service, from pods, nodes and outside, IPv4 and IPv6, TCP and UDP",
        run: services::all_types,
        programs: &[],
    },
    Scenario {
        name: "policies",
        about: "externalTrafficPolicy, health check ports, session affinity, internalTrafficPolicy, no endpoints",
        run: services::policies,
        programs: &[],
    },
    Scenario {
        name: "rollout",
        about: "a Deployment's rolling update under load",
        run: services::rollout,
        programs: &[],
    },
    Scenario {
        name: "api-server",
        about: "the API server killed and back, under load",
        run: api::killed,
        programs: &[],
    },
    Scenario {
        name: "compaction",
        about: "a node cut off while etcd is compacted and the API server forgets",
        run: api::compaction,
        programs: &[],
    },
    Scenario {
        name: "tokens",
        about: "a service account's token renewed in time, and one that expires",
        run: api::tokens,
        programs: &[],
    },
    Scenario {
        name: "cut",
        about: "connections to the API server that are cut without a word",
        run: cut::silently,
        programs: &[],
    },
    Scenario {
        name: "no-address",
        about: "the base without `apiServer`, on nodes without a service proxy",
        run: address::missing,
        programs: &[],
    },
    Scenario {
        name: "node",
        about: "the Node object tainted by the cluster autoscaler, deleted, and back",
        run: node_goes::tainted_and_deleted,
        programs: &[],
    },
    Scenario {
        name: "cgroup",
        about: "a wrong `kernel.cgroup`, and its correction under load",
        run: wrong_cgroup::corrected,
        programs: &[],
    },
    Scenario {
        name: "upgrade",
        about: "a new image under load, without the component surge and with it",
        run: deploy::upgrade,
        programs: &[],
    },
    Scenario {
        name: "mesh",
        about: "pods captured by the agent's proxy: probes keep working; upgrades without the component surge and with it",
        run: mesh::captured_pods,
        programs: &[],
    },
    Scenario {
        name: "enrolment",
        about: "the CNI plug-in with containerd and kubelet: first connections captured, probes, an agent that is away",
        run: enrolment::plugin_and_probes,
        programs: &[],
    },
    Scenario {
        name: "chart",
        about: "the chart in the base's place",
        run: deploy::chart,
        programs: &[],
    },
    Scenario {
        name: "cleanup",
        about: "the clean-up Job leaves nothing on the node",
        run: deploy::cleanup,
        programs: &[],
    },
    Scenario {
        name: "accepted",
        about: "every component and every value of the chart are objects that the API server takes",
        run: accepted::objects,
        programs: &[],
    },
    Scenario {
        name: "routes",
        about: "what the pages and examples/ show is taken; a Service that a TCPRoute splits, a host among its backends",
        run: routes::split,
        programs: &[],
    },
    Scenario {
        name: "kube-proxy",
        about: "from kube-proxy (nftables) to the agent and back, by the steps of docs/kubernetes.md, under load",
        run: migration::there_and_back,
        programs: &[kube_proxy::PROGRAM],
    },
    Scenario {
        name: "netpol",
        about: "network policies by kube-router's firewall: 22 ways to a service by 6 policies, beside kube-proxy's answers",
        run: netpol::enforced,
        programs: &[kube_proxy::PROGRAM],
    },
];

/// Prints the names of all scenarios.
pub fn list() {
    for Scenario { name, about, .. } in &ALL {
        println!("{name:<12}{about}");
    }
}

/// Returns the scenarios with these names, or all.
pub fn choose(names: &[String]) -> Result<Vec<&'static Scenario>> {
    for name in names {
        if ALL.iter().all(|scenario| scenario.name != *name) {
            bail!("there is no scenario {name}; `cargo xtask cluster run --list` prints them");
        }
    }
    let chosen = ALL
        .iter()
        .filter(|scenario| names.is_empty() || names.iter().any(|name| name == scenario.name));
    Ok(chosen.collect())
}

/// Returns Kubernetes' programs that these scenarios need besides those of every cluster.
pub fn programs(chosen: &[&Scenario]) -> Vec<&'static str> {
    let programs = chosen.iter().flat_map(|scenario| scenario.programs);
    programs.copied().collect()
}

/// Runs the scenarios one after the other. Returns the number of failed scenarios.
pub fn run(cluster: &Cluster, chosen: &[&Scenario]) -> Result<usize> {
    let mut failed = Vec::new();
    for scenario in chosen {
        note(&format!("{} …", scenario.name));
        let started = Instant::now();
        let result = (scenario.run)(cluster);
        let took = started.elapsed().as_secs();
        match result {
            Ok(seen) => anstream::println!(
                "{BOLD}ok{RESET}     {:<12}{took:>4} s  {seen}",
                scenario.name
            ),
            Err(error) => {
                anstream::println!(
                    "{ERROR}FAILED{RESET} {:<12}{took:>4} s  {error:#}",
                    scenario.name
                );
                evidence(cluster, scenario.name)?;
                failed.push(scenario.name);
            }
        }
    }
    println!(
        "{} passed, {} failed",
        chosen.len() - failed.len(),
        failed.len()
    );
    Ok(failed.len())
}

/// Saves files that show why a scenario failed, because the cluster will be removed.
fn evidence(cluster: &Cluster, name: &str) -> Result<()> {
    let directory = workspace::target().join("cluster").join(name);
    fs::create_dir_all(&directory)?;
    let keep = |name: &str, text: Result<String>| {
        fs::write(
            directory.join(name),
            text.unwrap_or_else(|error| format!("{error:#}\n")),
        )
    };
    let ask = |arguments: &[&str]| cluster.kubectl.run(arguments);
    keep(
        "objects.txt",
        ask(&["get", "pods,services,endpointslices", "-A", "-o", "wide"]),
    )?;
    keep(
        "events.txt",
        ask(&["get", "events", "-A", "--sort-by=.lastTimestamp"]),
    )?;
    let label = "app.kubernetes.io/name=dataplane";
    keep(
        "agents.log",
        ask(&[
            "-n",
            "kube-system",
            "logs",
            "--prefix",
            "--tail=-1",
            "-l",
            label,
        ]),
    )?;
    let previous = [
        "-n",
        "kube-system",
        "logs",
        "--previous",
        "--prefix",
        "--tail=-1",
        "-l",
        label,
    ];
    keep("agents-before.log", ask(&previous))?;
    for node in &cluster.nodes {
        let mut status = node.command(&cluster.dataplane)?;
        // `status` exits with 1 if the node is not healthy.
        let status = status.args(["status", "-o", "json"]).output()?;
        fs::write(
            directory.join(format!("status-{}.json", node.name())),
            status.stdout,
        )?;
        let services = output(node.command(&cluster.dataplane)?.arg("services"));
        keep(&format!("services-{}.txt", node.name()), services)?;
        for log in ["kubelet.log", "agent.log"] {
            let log = node.directory().join(log);
            if log.is_file() {
                let name = log
                    .file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned();
                fs::copy(&log, directory.join(format!("{}-{name}", node.name())))?;
            }
        }
    }
    for log in ["kube-apiserver.log", "kube-controller-manager.log"] {
        let from = place::control_directory().join(log);
        if from.is_file() {
            fs::copy(&from, directory.join(log))?;
        }
    }
    note(&format!(
        "objects, logs and status: {}",
        directory.display()
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_chosen_in_the_order_of_the_list() {
        let names = |chosen: Vec<&Scenario>| chosen.iter().map(|s| s.name).collect::<Vec<_>>();
        assert_eq!(names(choose(&[]).unwrap()).len(), ALL.len());
        let two = ["upgrade".to_owned(), "rbac".to_owned()];
        assert_eq!(names(choose(&two).unwrap()), ["rbac", "upgrade"]);
        assert!(choose(&["upgrades".to_owned()]).is_err());
    }
}
