//! Network policies, enforced by kube-router's firewall: what a policy does for the clients of a service is the same with
//! the dataplane as with kube-proxy, for each way to the service.

use std::{fmt::Write as _, fs, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{
    pods::{From, SHORT, Space, TCP, UDP, at},
    services::two,
};
use crate::{
    cluster::{
        Cluster,
        agent::{self, Wanted},
        images, kube_proxy, kube_router,
        kubectl::eventually,
        network,
        place::{CONTROL_V4, CONTROL_V6, Node},
    },
    workspace,
};

/// How long kube-router gets to follow a change, before each of the looks.
const SYNC: Duration = Duration::from_secs(6);
const LOOKS: u32 = 3;
const CONNECT: &str = "connect --count 1 --timeout-ms 1500";
const DATAGRAM: &str = "udp --count 1 --timeout-ms 1500";

/// Names of the policies. The first is none.
const POLICIES: [&str; 6] = [
    "none",
    "deny ingress",
    "allow a client",
    "allow outside",
    "outside, but for it",
    "deny egress",
];
const OUTSIDE_TO_CLUSTER: &str = "outside, node port (Cluster) at the endpoint's node";
const OUTSIDE_TO_LOCAL: &str = "outside, node port (Local)";
const OUTSIDE_TO_LOCAL_UDP: &str = "outside, node port (Local), UDP";
const OUTSIDE_TO_IP: &str = "outside, cluster IP routed to the endpoint's node";
const POD_TO_ENDPOINTS_NODE: &str = "pod of n2, node port of the endpoint's node";
const POD_TO_OWN_NODE: &str = "pod of n2, node port of its own node";
const MACHINE_TO_ENDPOINTS_NODE: &str = "VM pod of n2, node port of the endpoint's node";
const MACHINE_BESIDE: &str = "VM pod of the same node, cluster IP";
const MACHINE_TO_IP: &str = "VM pod of n2, cluster IP";

/// kube-proxy's answers (y: answered) that are known, for each policy but the first. They show that the policies are
/// enforced at all.
const KNOWN: [(&str, &str); 9] = [
    (OUTSIDE_TO_CLUSTER, "nnyny"),
    (OUTSIDE_TO_LOCAL, "nnyny"),
    (OUTSIDE_TO_LOCAL_UDP, "nnyny"),
    (OUTSIDE_TO_IP, "nnyny"),
    (POD_TO_ENDPOINTS_NODE, "nynyn"),
    (MACHINE_TO_ENDPOINTS_NODE, "nynyn"),
    (MACHINE_BESIDE, "nynyn"),
    (MACHINE_TO_IP, "nynyn"),
    (POD_TO_OWN_NODE, "nnnyn"),
];

/// The dataplane's answers where they are not kube-proxy's: the connection is translated at the socket, so the policy
/// sees the pod. kube-proxy has masqueraded it as the node's.
const OURS: [(&str, &str); 1] = [(POD_TO_OWN_NODE, "nynyn")];

/// Whether each way was answered, by policy.
type Matrix = Vec<Vec<bool>>;

pub fn enforced(cluster: &Cluster) -> Result<String> {
    if let Some(why) = kube_router::missing() {
        return Ok(format!("skipped: {why}"));
    }
    agent::remove(cluster)?;
    let outcome = compared(cluster);
    kube_proxy::remove(cluster)?;
    agent::deploy(cluster, &Wanted::default())?;
    outcome
}

fn compared(cluster: &Cluster) -> Result<String> {
    kube_proxy::deploy(cluster)?;
    let world = World::new(cluster)?;
    let _enforcers = cluster
        .nodes
        .iter()
        .map(|node| kube_router::Process::start(*node))
        .collect::<Result<Vec<_>>>()?;
    let known = |policy: usize, way: usize| match policy {
        0 => Some(true),
        _ => letter(&KNOWN, policy, world.ways[way].name),
    };
    let judge = world.matrix(known)?;

    kube_proxy::remove(cluster)?;
    agent::deploy(cluster, &Wanted::default())?;
    for node in &cluster.nodes {
        eventually(SHORT, || through_the_stack(cluster, *node))?;
    }
    let expected = |policy: usize, way: usize| {
        let other = letter(&OURS, policy, world.ways[way].name);
        other.unwrap_or(judge[policy][way])
    };
    let ours = world.matrix(|policy, way| Some(expected(policy, way)))?;

    let table = world.table(&judge, &ours);
    let directory = workspace::target().join("cluster/netpol");
    fs::create_dir_all(&directory)?;
    fs::write(directory.join("policies.txt"), &table).context("cannot write the table")?;
    let of_judge = world.differences(&judge, known);
    let of_ours = world.differences(&ours, |policy, way| Some(expected(policy, way)));
    ensure!(
        of_judge.is_empty() && of_ours.is_empty(),
        "kube-proxy, not as known: {of_judge:?}; the dataplane, not as kube-proxy: {of_ours:?}\n{table}"
    );
    let cells = world.ways.len() * POLICIES.len();
    let allowed = ours.iter().flatten().zip(judge.iter().flatten());
    let allowed = allowed.filter(|(ours, judge)| ours != judge).count();
    Ok(format!(
        "{} ways by {} policies: {} of {cells} cells as with kube-proxy, and {allowed} that are known to differ",
        world.ways.len(),
        POLICIES.len(),
        cells - allowed
    ))
}

/// Returns the answer in such a list, if the list has the way.
fn letter(list: &[(&str, &str)], policy: usize, way: &str) -> Option<bool> {
    let (_, answers) = list.iter().find(|(name, _)| *name == way)?;
    let answer = answers.as_bytes().get(policy.checked_sub(1)?)?;
    Some(*answer == b'y')
}

/// Fails if packets of services do not pass kube-router's rules.
fn through_the_stack(cluster: &Cluster, node: Node) -> Result<()> {
    // `status` exits with 1 if the node is not healthy.
    let said = node
        .command(&cluster.dataplane)?
        .args(["status", "-o", "json"])
        .output()?;
    let status: Value = serde_json::from_slice(&said.stdout).context("status")?;
    ensure!(
        status["packet_path"] == "stack",
        "{}: packets of services take the path {}",
        node.name(),
        status["packet_path"]
    );
    Ok(())
}

/// A way from a client to the server.
struct Way {
    name: &'static str,
    from: From,
    words: &'static str,
    to: String,
    /// The cluster IP, and the node to which the outside routes it.
    via: Option<(String, Node)>,
}

impl Way {
    fn is_answered(&self, cluster: &Cluster) -> Result<bool> {
        if let Some((address, node)) = &self.via {
            network::route(address, *node)?;
        }
        let report = self.from.ask(cluster, self.words, &self.to);
        if let Some((address, _)) = &self.via {
            network::unroute(address)?;
        }
        Ok(report?.answered > 0)
    }
}

struct World<'a> {
    space: Space<'a>,
    ways: Vec<Way>,
}

impl<'a> World<'a> {
    /// Starts the server on the first node and clients on both, and makes two services of the server.
    fn new(cluster: &'a Cluster) -> Result<Self> {
        let [first, second] = two(cluster)?;
        let space = Space::new(cluster, "netpol", &json!({}))?;
        let pods = [
            ("web", "web", first),
            ("same", "client", first),
            ("other", "client", second),
            ("else", "else", second),
        ];
        for (name, app, node) in pods {
            space.apply(pod(name, app, node))?;
        }
        space.service("cluster", "web", &json!({ "type": "NodePort" }))?;
        let local = json!({ "type": "NodePort", "externalTrafficPolicy": "Local" });
        space.service("local", "web", &local)?;
        let ready = ["wait", "--for=condition=Ready", "--timeout=120s", "pod"];
        space.kubectl(&[&ready[..], &["--all"]].concat())?;
        let ways = ways(&space, first, second)?;
        Ok(Self { space, ways })
    }

    /// Applies one policy after the other, and looks which ways are answered. Looks again if an answer is not the one
    /// that is expected, because kube-router may need longer for a change.
    fn matrix(&self, expected: impl Fn(usize, usize) -> Option<bool>) -> Result<Matrix> {
        let mut matrix = Matrix::new();
        for policy in 0..POLICIES.len() {
            self.limit(policy)?;
            let mut answers = Vec::new();
            for _ in 0..LOOKS {
                thread::sleep(SYNC);
                let ways = self.ways.iter();
                let each = ways.map(|way| way.is_answered(self.space.cluster));
                answers = each.collect::<Result<Vec<bool>>>()?;
                let mut seen = answers.iter().enumerate();
                if seen.all(|(way, seen)| expected(policy, way).is_none_or(|it| it == *seen)) {
                    break;
                }
            }
            matrix.push(answers);
        }
        Ok(matrix)
    }

    /// Replaces the policy.
    fn limit(&self, policy: usize) -> Result<()> {
        self.space.kubectl(&["delete", "networkpolicy", "--all"])?;
        let Some(spec) = spec(policy) else {
            return Ok(());
        };
        self.space.apply(json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": { "name": "policy" },
            "spec": spec,
        }))
    }

    fn differences(
        &self,
        matrix: &[Vec<bool>],
        expected: impl Fn(usize, usize) -> Option<bool>,
    ) -> Vec<String> {
        let mut all = Vec::new();
        for (policy, answers) in matrix.iter().enumerate() {
            for (way, seen) in answers.iter().enumerate() {
                if expected(policy, way).is_some_and(|expected| expected != *seen) {
                    let seen = if *seen { "answered" } else { "not answered" };
                    all.push(format!(
                        "{}, {}: {seen}",
                        self.ways[way].name, POLICIES[policy]
                    ));
                }
            }
        }
        all
    }

    /// Returns both matrices as a text: for each policy, kube-proxy's answer and the dataplane's.
    fn table(&self, judge: &[Vec<bool>], ours: &[Vec<bool>]) -> String {
        let mut text = format!("{:<60}", "kube-proxy, dataplane");
        for policy in POLICIES {
            let _ = write!(text, "{policy:<21}");
        }
        text.push('\n');
        let letter = |answered: bool| if answered { 'y' } else { 'n' };
        for (way, Way { name, .. }) in self.ways.iter().enumerate() {
            let _ = write!(text, "{name:<60}");
            for (judge, ours) in judge.iter().zip(ours) {
                let both = format!("{} {}", letter(judge[way]), letter(ours[way]));
                let _ = write!(text, "{both:<21}");
            }
            text.push('\n');
        }
        text
    }
}

/// Returns a server's pod. The kubelet does not probe it: a policy must change no endpoints.
fn pod(name: &str, app: &str, node: Node) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "labels": { "app": app } },
        "spec": {
            "nodeName": node.name(),
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "probe",
                "image": images::LAB,
                "command": ["/usr/bin/probe"],
                "args": [
                    "serve", "--name", name,
                    "--tcp", format!("[::]:{TCP}"),
                    "--udp", format!("[::]:{UDP}"),
                ],
            }],
        },
    })
}

/// Returns a policy's spec.
fn spec(policy: usize) -> Option<Value> {
    let outside = [format!("{CONTROL_V4}/32"), format!("{CONTROL_V6}/128")];
    let ingress = |rules: Value| {
        let web = json!({ "matchLabels": { "app": "web" } });
        Some(json!({ "podSelector": web, "policyTypes": ["Ingress"], "ingress": rules }))
    };
    match policy {
        1 => ingress(json!([])),
        2 => {
            let clients = json!({ "podSelector": { "matchLabels": { "app": "client" } } });
            ingress(json!([{ "from": [clients], "ports": [{ "port": TCP }] }]))
        }
        3 => {
            let from = outside.map(|cidr| json!({ "ipBlock": { "cidr": cidr } }));
            ingress(json!([{ "from": from }]))
        }
        4 => {
            let all = ["0.0.0.0/0", "::/0"].iter().zip(outside);
            let from: Vec<Value> = all
                .map(|(all, one)| json!({ "ipBlock": { "cidr": all, "except": [one] } }))
                .collect();
            ingress(json!([{ "from": from }]))
        }
        5 => Some(json!({ "podSelector": {}, "policyTypes": ["Egress"] })),
        _ => None,
    }
}

fn ways(space: &Space<'_>, first: Node, second: Node) -> Result<Vec<Way>> {
    let port = |service: &str, index: usize| -> Result<u16> {
        let service = space.service_object(service)?;
        let port = service["spec"]["ports"][index]["nodePort"].as_u64();
        Ok(port.context("a node port")?.try_into()?)
    };
    let machine = |name: &str| -> Result<From> {
        match space.inside(name)? {
            From::Pod(node, pid) => Ok(From::Machine(node, pid)),
            from => Ok(from),
        }
    };
    let addresses = space.cluster_ips("cluster")?;
    let [ip, ip6] = addresses.as_slice() else {
        anyhow::bail!("a dual-stack service has {addresses:?}");
    };
    let pods = space.pods_addresses("web")?;
    let pod = at(pods.first().context("the server's address")?, TCP);
    let (vip, vip6) = (at(ip, 80), at(ip6, 80));
    let (cluster, local) = (port("cluster", 0)?, port("local", 0)?);
    let [v4, v6] = first.addresses().map(|address| address.to_string());
    let at_first = at(&v4, cluster);
    let at_second = at(&second.ipv4().to_string(), cluster);
    let way = |name, from: &From, to: &str| Way {
        name,
        from: from.clone(),
        words: CONNECT,
        to: to.to_owned(),
        via: None,
    };
    let via = |name, node| Way {
        via: Some((ip.clone(), node)),
        ..way(name, &From::Outside, &vip)
    };
    let (same, other) = (space.inside("same")?, space.inside("other")?);
    let (vm, vm_other) = (machine("same")?, machine("other")?);
    let outside = From::Outside;
    Ok(vec![
        way("outside, pod's address", &outside, &pod),
        way(OUTSIDE_TO_CLUSTER, &outside, &at_first),
        way(
            "outside, node port (Cluster) at another node",
            &outside,
            &at_second,
        ),
        way(OUTSIDE_TO_LOCAL, &outside, &at(&v4, local)),
        Way {
            words: DATAGRAM,
            ..way(OUTSIDE_TO_LOCAL_UDP, &outside, &at(&v4, port("local", 1)?))
        },
        way(
            "outside, node port (Local), IPv6",
            &outside,
            &at(&v6, local),
        ),
        via(OUTSIDE_TO_IP, first),
        via("outside, cluster IP routed to another node", second),
        way("pod of the same node, cluster IP", &same, &vip),
        way("pod of n2, cluster IP", &other, &vip),
        way("pod of n2, cluster IP, IPv6", &other, &vip6),
        way(
            "pod of another app, cluster IP",
            &space.inside("else")?,
            &vip,
        ),
        way(POD_TO_ENDPOINTS_NODE, &other, &at_first),
        way(POD_TO_OWN_NODE, &other, &at_second),
        way("VM pod of the same node, pod's address", &vm, &pod),
        way(MACHINE_BESIDE, &vm, &vip),
        way(MACHINE_TO_IP, &vm_other, &vip),
        way(MACHINE_TO_ENDPOINTS_NODE, &vm_other, &at_first),
        way("the server itself, cluster IP", &space.inside("web")?, &vip),
        way(
            "the server itself as a VM pod, cluster IP",
            &machine("web")?,
            &vip,
        ),
        way("the endpoint's node, cluster IP", &From::Node(first), &vip),
        way("another node, cluster IP", &From::Node(second), &vip),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_known_answer_is_about_one_policy() {
        for (way, answers) in KNOWN.iter().chain(&OURS) {
            assert_eq!(answers.len(), POLICIES.len() - 1, "{way}");
        }
        assert_eq!(letter(&KNOWN, 3, OUTSIDE_TO_LOCAL), Some(true));
        assert_eq!(letter(&KNOWN, 1, OUTSIDE_TO_LOCAL), Some(false));
        assert_eq!(letter(&KNOWN, 0, OUTSIDE_TO_LOCAL), None);
        assert_eq!(letter(&OURS, 3, OUTSIDE_TO_LOCAL), None);
    }

    #[test]
    fn each_policy_but_the_first_limits() {
        for (policy, name) in POLICIES.iter().enumerate() {
            assert_eq!(spec(policy).is_none(), policy == 0, "{name}");
        }
    }
}
