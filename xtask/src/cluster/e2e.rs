//! Kubernetes' own end-to-end tests.

use std::{
    collections::BTreeMap,
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::{
    Cluster, Size,
    agent::{self, Wanted},
    kube_proxy, kube_router,
    place::{self, CONTROL, in_netns},
    programs::{Programs, VARIABLE},
    stand_ins,
};
use crate::{
    command::{check, shown},
    progress::note,
    workspace,
};

/// Part of the names of tests of NetworkPolicies, which another program implements.
const POLICIES: &str = "Netpol";
/// Parts of the names of tests that cannot run here, or that are not about services: Ingress, which
/// other programs implement; load balancers of a cloud; SCTP, which this kernel does not have; the Internet; ssh to
/// nodes; CoreDNS's ConfigMap; measurements.
const LEFT_OUT: [&str; 11] = [
    "LoadBalancer",
    "Ingress",
    "SCTP",
    "sctp",
    "PerformanceDNS",
    "[Feature:Networking-",
    "DNS configMap",
    "KubeProxyDaemonSet",
    "Disruptive",
    "Service endpoints latency",
    "IPerf2",
];

/// Run Kubernetes' own tests of its network ([sig-network])
///
/// The dataplane is deployed as its DaemonSet first; with `--with`, kube-proxy runs instead. Several processes of
/// e2e.test share the specs, and serial specs run last. Results go to target/cluster/e2e/NAME.
///
/// Images come from $KUBERNETES_BIN/images/*.tar (`docker save`). If there are none, stand-ins are made of Debian's
/// packages and Kubernetes' agnhost.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is an option of the command line"
)]
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Only specs whose name contains this text, or one of several texts separated by |
    #[arg(default_value = "")]
    focus: String,
    /// The program that serves services
    #[arg(long, value_enum, default_value_t = Proxy::Dataplane)]
    with: Proxy,
    /// Run kube-router's firewall on the nodes, too, and the specs of NetworkPolicies. Without this, they are left out
    #[arg(long)]
    policies: bool,
    /// How many processes share the specs
    #[arg(long, default_value_t = 3)]
    jobs: usize,
    /// How many nodes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(2..=6))]
    nodes: u8,
    /// Leave host ports to the dataplane, instead of to CNI's plug-in `portmap`
    #[arg(long)]
    no_portmap: bool,
    /// Print the specs' names instead of running them
    #[arg(long)]
    list: bool,
    /// Name of the results [default: the program that serves]
    #[arg(long)]
    name: Option<String>,
    /// Leave the cluster running
    #[arg(long)]
    keep: bool,
}

/// The program that serves services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Proxy {
    Dataplane,
    Nftables,
    Iptables,
}

impl Proxy {
    fn name(self) -> &'static str {
        match self {
            Self::Dataplane => "dataplane",
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
        }
    }
}

/// Returns the programs that the tests need besides a cluster's programs.
pub fn programs(arguments: &Arguments) -> Vec<&'static str> {
    let mut programs = vec!["e2e.test"];
    let given = env::var_os(VARIABLE).map(PathBuf::from);
    if given.is_none_or(|directory| !directory.join("images").is_dir()) {
        // The stand-ins contain it.
        programs.push("agnhost");
    }
    if arguments.with != Proxy::Dataplane {
        programs.push(kube_proxy::PROGRAM);
    }
    programs
}

/// Part of the name of all selected specs: tests of the network.
const SUITE: &str = "[sig-network]";

/// How a spec ended.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Outcome {
    state: String,
    seconds: u64,
    message: String,
}

/// A spec to run.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Spec {
    name: String,
    serial: bool,
}

/// Makes the cluster, runs the specs, and prints the specs that did not pass.
pub fn main(arguments: &Arguments, programs: &Programs, no_install: bool) -> Result<ExitCode> {
    let name = arguments.name.as_deref().unwrap_or(arguments.with.name());
    let results = workspace::target().join("cluster/e2e").join(name);
    if results.exists() {
        fs::remove_dir_all(&results)
            .with_context(|| format!("cannot remove {}", results.display()))?;
    }
    fs::create_dir_all(&results).with_context(|| format!("cannot create {}", results.display()))?;
    if arguments.list {
        // This only lists the tests and does not contact a cluster.
        let mut dry = Command::new(programs.kubernetes("e2e.test"));
        for spec in select(&mut dry, &results, arguments)? {
            println!("{}", spec.name);
        }
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.policies
        && let Some(why) = kube_router::missing()
    {
        bail!("{why}");
    }
    let archives = stand_ins::archives(programs)?;
    let size = Size {
        nodes: arguments.nodes,
        portmap: !arguments.no_portmap,
    };
    let cluster = Cluster::make_with(programs, size, no_install, &archives)?;
    let specs = select(&mut tests(programs), &results, arguments)?;
    ensure!(
        !specs.is_empty(),
        "no spec's name contains {:?}",
        arguments.focus
    );
    let proxies = serve(&cluster, arguments.with)?;
    let of_policies = cluster.nodes.iter().filter(|_| arguments.policies);
    let firewalls: Vec<_> = of_policies
        .map(|node| kube_router::Process::start(*node))
        .collect::<Result<_>>()?;
    note(&format!(
        "{} specs with {name}, in {} processes",
        specs.len(),
        arguments.jobs
    ));
    let outcomes = run(programs, &results, &specs, arguments.jobs)?;
    drop((firewalls, proxies));
    let failed = report(name, &specs, &outcomes);
    note(&format!("logs and JUnit files: {}", results.display()));
    if arguments.keep {
        cluster.leave();
    }
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Starts the program that serves services, on every node.
fn serve(cluster: &Cluster, with: Proxy) -> Result<Vec<kube_proxy::Process>> {
    if with == Proxy::Dataplane {
        // As an administrator's file in sysctl.d sets it. One test expects the value that kube-proxy's configuration
        // sets.
        const TIMEOUT: &str = "net.netfilter.nf_conntrack_tcp_timeout_close_wait=3600";
        for node in &cluster.nodes {
            check(in_netns(&node.name(), "sysctl").args(["-qw", TIMEOUT]))?;
        }
        agent::deploy(cluster, &Wanted::default())?;
        return Ok(Vec::new());
    }
    cluster
        .nodes
        .iter()
        .map(|node| kube_proxy::Process::start(cluster, *node, with.name()))
        .collect()
}

/// Returns a command for e2e.test in the control plane's network namespace.
fn tests(programs: &Programs) -> Command {
    in_netns(CONTROL, programs.kubernetes("e2e.test"))
}

fn common(command: &mut Command) -> &mut Command {
    command.args([
        "--provider=skeleton",
        "--node-os-distro=custom",
        "--ginkgo.no-color",
        "--ginkgo.v",
        "--minStartupPods=0",
        "--num-nodes=-1",
        "--prepull-images=false",
    ])
}

/// Returns the specs to run.
fn select(tests: &mut Command, results: &Path, arguments: &Arguments) -> Result<Vec<Spec>> {
    let file = results.join("dry.json");
    common(tests)
        .args(["--ginkgo.dry-run", r"--ginkgo.focus=\[sig-network\]"])
        .arg(format!("--ginkgo.json-report={}", file.display()))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    check(tests)?;
    let mut specs: Vec<Spec> = reports(&file)?
        .iter()
        .filter(|report| report["LeafNodeType"] == "It" && report["State"] == "passed")
        .map(|report| {
            let name = full_name(report);
            let serial = report["IsSerial"] == true || name.contains("[Serial]");
            Spec { name, serial }
        })
        .filter(|spec| wanted(&spec.name, &arguments.focus, arguments.policies))
        .collect();
    specs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(specs)
}

fn wanted(name: &str, focus: &str, policies: bool) -> bool {
    name.contains(SUITE)
        && (policies || !name.contains(POLICIES))
        && LEFT_OUT.iter().all(|part| !name.contains(part))
        && focus.split('|').any(|part| name.contains(part))
}

/// Returns the specs in a Ginkgo report. The list is empty if the report has none, because the process ended early.
fn reports(file: &Path) -> Result<Vec<Value>> {
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let report: Value =
        serde_json::from_str(&text).with_context(|| format!("{}", file.display()))?;
    Ok(report[0]["SpecReports"]
        .as_array()
        .cloned()
        .unwrap_or_default())
}

fn full_name(report: &Value) -> String {
    let containers = report["ContainerHierarchyTexts"]
        .as_array()
        .into_iter()
        .flatten();
    let mut words: Vec<&str> = containers.filter_map(Value::as_str).collect();
    words.extend(report["LeafNodeText"].as_str());
    words.join(" ")
}

/// Runs the specs in parallel, then the serial specs.
fn run(
    programs: &Programs,
    results: &Path,
    specs: &[Spec],
    jobs: usize,
) -> Result<BTreeMap<String, Outcome>> {
    let (serial, parallel): (Vec<&Spec>, Vec<&Spec>) = specs.iter().partition(|spec| spec.serial);
    let share =
        |job: usize| -> Vec<&Spec> { parallel.iter().skip(job).step_by(jobs).copied().collect() };
    let running = (0..jobs)
        .map(|job| (format!("job-{job}"), share(job)))
        .filter(|(_, share)| !share.is_empty())
        .map(|(tag, share)| start(programs, results, &tag, &share).map(|child| (tag, child)))
        .collect::<Result<Vec<_>>>()?;
    let mut tags = Vec::new();
    for (tag, mut child) in running {
        // e2e.test fails if a spec fails, so its exit status is ignored.
        child.wait().context("lost e2e.test")?;
        tags.push(tag);
    }
    if !serial.is_empty() {
        start(programs, results, "serial", &serial)?
            .wait()
            .context("lost e2e.test")?;
        tags.push("serial".into());
    }
    let mut outcomes = BTreeMap::new();
    for tag in tags {
        for report in reports(&results.join(format!("{tag}.json")))? {
            let message = report["Failure"]["Message"]
                .as_str()
                .unwrap_or_default()
                .trim()
                .to_owned();
            // Specs of other shares are skipped without a message.
            let counted = report["LeafNodeType"] == "It"
                && (report["State"] != "skipped" || !message.is_empty());
            if counted {
                let outcome = Outcome {
                    state: report["State"].as_str().unwrap_or_default().to_owned(),
                    seconds: report["RunTime"].as_u64().unwrap_or_default() / 1_000_000_000,
                    message,
                };
                outcomes.insert(full_name(&report), outcome);
            }
        }
    }
    Ok(outcomes)
}

fn start(programs: &Programs, results: &Path, tag: &str, specs: &[&Spec]) -> Result<Child> {
    let names: Vec<String> = specs.iter().map(|spec| quoted(&spec.name)).collect();
    let log = File::create(results.join(format!("{tag}.log"))).context("cannot open a log")?;
    let mut tests = tests(programs);
    common(&mut tests)
        .arg(format!("--kubeconfig={}", place::admin_config().display()))
        .arg(format!(
            "--kubectl-path={}",
            programs.kubernetes("kubectl").display()
        ))
        // Ginkgo matches against the name of the suite and the name of the spec.
        .arg(format!("--ginkgo.focus=suite ({})$", names.join("|")))
        .arg("--ginkgo.timeout=100m")
        .arg(format!(
            "--ginkgo.json-report={}",
            results.join(format!("{tag}.json")).display()
        ))
        .arg(format!(
            "--ginkgo.junit-report={}",
            results.join(format!("{tag}.xml")).display()
        ))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    tests
        .spawn()
        .with_context(|| format!("cannot start {}", shown(&tests)))
}

/// Quotes a name for a regular expression.
fn quoted(name: &str) -> String {
    let mut quoted = String::new();
    for letter in name.chars() {
        if r"\.^$|?*+()[]{}".contains(letter) {
            quoted.push('\\');
        }
        quoted.push(letter);
    }
    quoted
}

/// Prints the specs that did not pass and those that took long. Returns the number of failed specs.
fn report(name: &str, specs: &[Spec], outcomes: &BTreeMap<String, Outcome>) -> usize {
    let mut counts = BTreeMap::<&str, usize>::new();
    for spec in specs {
        let short = spec.name.replace("[sig-network] ", "");
        let Some(outcome) = outcomes.get(&spec.name) else {
            *counts.entry("lost").or_default() += 1;
            println!("lost {short}");
            continue;
        };
        *counts.entry(&outcome.state).or_default() += 1;
        if outcome.state != "passed" {
            let message: String = outcome.message.chars().take(300).collect();
            println!(
                "{} after {} s: {short}\n    {}",
                outcome.state,
                outcome.seconds,
                message.replace('\n', "\n    ")
            );
        }
    }
    let conformance = |passed: bool| {
        let of = specs
            .iter()
            .filter(|spec| spec.name.contains("[Conformance]"));
        of.filter(|spec| {
            !passed
                || outcomes
                    .get(&spec.name)
                    .is_some_and(|is| is.state == "passed")
        })
        .count()
    };
    let counted: Vec<String> = counts
        .iter()
        .map(|(state, count)| format!("{count} {state}"))
        .collect();
    println!(
        "{name}: {} specs, {}; conformance: {} of {} passed",
        specs.len(),
        counted.join(", "),
        conformance(true),
        conformance(false)
    );
    let passed = counts.get("passed").copied().unwrap_or_default();
    let skipped = counts.get("skipped").copied().unwrap_or_default();
    specs.len() - passed - skipped
}

#[cfg(test)]
mod tests_of_names {
    use serde_json::json;

    use super::*;

    #[test]
    fn specs_are_chosen_by_name() {
        let hairpin = "[sig-network] Services should allow hairpin";
        assert!(wanted(hairpin, "", false));
        assert!(wanted(hairpin, "affinity|hairpin", false));
        assert!(!wanted(hairpin, "affinity", false));
        assert!(!wanted("[sig-network] Netpol should", "", false));
        assert!(wanted("[sig-network] Netpol should", "", true));
        assert!(!wanted("[sig-node] Pods should", "", true));
    }

    #[test]
    fn a_name_is_quoted_for_a_regular_expression() {
        assert_eq!(quoted("a (b) [c] x.y"), r"a \(b\) \[c\] x\.y");
    }

    #[test]
    fn a_spec_is_named_by_its_containers() {
        let report =
            json!({ "ContainerHierarchyTexts": ["[sig-network] DNS", "a"], "LeafNodeText": "b" });
        assert_eq!(full_name(&report), "[sig-network] DNS a b");
    }
}
