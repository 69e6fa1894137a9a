//! Situations in which people's nodes are: each is a row, and a row is tried in two equal labs, beside kube-proxy's
//! rules and beside the dataplane. The client's results must be equal in both.
//!
//! To add a row, add one line to the `ROWS` of the file whose idea it is (`sockets.rs` for what sockets do):
//!
//! ```ignore
//! row("a pod asks a node port", "c: udp --to 192.168.77.1:30054"),
//! row("the same beside a rule of the node", "c: udp --to 192.168.77.1:30054")
//!     .after(&["n: nft add table ip t"])         // shell commands, in both labs, before the client; `@vm` is vm's namespace
//!     .beside(&["x: serve --name y --udp ..."])  // `probe`s that run beside the client and print a line when they are ready
//!     .then(&["n: nft delete table ip t"])       // shell commands after the client: the rows of a file share their labs
//!     .with_source()                             // the address that the endpoint saw counts, too
//!     .differs("the row of docs/differences.md", "the observation with the dataplane")
//! ```
//!
//! A client is `HOST: SUBCOMMAND ARGUMENTS`, of a host of the [lab] and the lab's own program `probe`. The judge has to
//! serve it: if every attempt fails beside kube-proxy's rules, the row fails, unless the row [says so](Row::fails). A row
//! is tried again until both labs agree, because an agent needs some time to see what happens on its node.
//!
//! A new file of rows is a scenario below. A test that needs more than rows is a scenario, too: it uses [`Situation`]
//! and its labs.

mod answers;
mod interfaces;
mod node;
mod sockets;

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_peers::Mode;
use dataplane_tests::{Host, Lab, Process, patience, report::Report};

use crate::{
    cluster::eventually,
    differential::world::{Settings, Worker, World, unlimited_icmp},
    manifest::{Manifests, Service},
    outcome::run,
};

scenarios! {
    Dataplane:
    answers_belong_to_the_flow_that_asked,
    a_tenant_takes_no_answers_of_the_node,
    sockets_in_situations,
    packets_of_the_node,
    a_raw_socket_and_sendto_reach_one_endpoint,
    two_first_datagrams_of_the_node_are_both_answered,
    interfaces_of_nodes,
}

fn answers_belong_to_the_flow_that_asked() -> Result<()> {
    compare(answers::ROWS)
}

/// A Service claims 200 of the ports at which the node's processes get answers.
fn a_tenant_takes_no_answers_of_the_node() -> Result<()> {
    let tenant = |lab: &Lab| {
        let node = lab.node("n").addresses().map(|ip| ip.to_string());
        let service = Service::new("tenant", &["10.96.1.99", "fd00:96::199"])
            .in_namespace("tenant")
            .set("externalIPs", node.to_vec())
            .endpoints(&[lab.pod("b1")]);
        let ports = (0..200).map(|number| (format!("udp{number}"), 40_000 + number));
        let with_ports = ports.fold(service, |service, (name, port)| {
            service.port(&name, port, UDP)
        });
        vec![with_ports]
    };
    let situation = Situation::start_with(Worker::Dataplane, tenant)?;
    for port in 40_000..40_040 {
        for to in ["192.168.77.201:9000", "[fd77::201]:9000"] {
            let client = format!("n: udp --unconnected --local-port {port} --to {to}");
            let seen = situation.ask(&client, &row("", ""))?;
            ensure!(seen == format!("x as {to}"), "{client}: {seen}");
        }
    }
    let agent = situation.world.agent().context("an agent")?;
    run(agent, "status")?.says(&["tenant/tenant", "192.168.77.1:40000/udp"])?;
    Ok(())
}

fn sockets_in_situations() -> Result<()> {
    compare(sockets::ROWS)
}

fn packets_of_the_node() -> Result<()> {
    compare(node::ROWS)
}

/// Two processors send the first datagrams of a flow at once, from an address to which the endpoint's machine has no
/// route: the flow is masqueraded, also for the datagram whose processor was slower.
///
/// Without kube-proxy: the kernel's own conntrack drops one of two such datagrams if it has chosen two endpoints.
fn two_first_datagrams_of_the_node_are_both_answered() -> Result<()> {
    const ROUNDS: usize = 5;
    let far = |lab: &Lab| {
        let service = Service::new("far", &["10.96.1.98", "fd00:96::198"]);
        let service = service.port("udp", 53, UDP);
        vec![service.endpoints(&[lab.pod("r1")])]
    };
    let situation = Situation::start_with(Worker::Dataplane, far)?;
    situation.sh(node::BRIDGE)?;
    for (from, to) in [
        ("172.30.0.1", "10.96.1.98:53"),
        ("fd30::1", "[fd00:96::198]:53"),
    ] {
        let answered = |how: &str| -> Result<()> {
            let client = format!("n: udp --local {from} --to {to} --timeout-ms 500 {how}");
            let seen = situation.ask(&client, &row("", ""))?;
            ensure!(seen == format!("r1 as {to}"), "{client}: {seen}");
            Ok(())
        };
        // The agent needs some time to see the bridge.
        eventually(|| answered(""))?;
        // The kernel may stop the processor that makes a flow for longer than the other one waits, but not in each round.
        let mut outcome = Ok(());
        for _ in 0..ROUNDS {
            outcome = answered("--twice --count 100");
            if outcome.is_ok() {
                break;
            }
        }
        outcome?;
    }
    Ok(())
}

/// A pod's raw socket, and `sendto()` of the same source port: as IKE beside the kernel's ESP in UDP.
fn a_raw_socket_and_sendto_reach_one_endpoint() -> Result<()> {
    const PORTS: u16 = 8;
    for worker in [Worker::KubeProxy(Mode::IptablesNft), Worker::Dataplane] {
        let situation = Situation::start(worker)?;
        let raw = "c: udp --raw --local 10.244.1.10 --local-port 4400 --to 10.96.1.12:53 --until-stdin-closes";
        let _raw = situation.start_probe(raw)?;
        if let Some(agent) = situation.world.agent() {
            eventually(|| {
                run(agent, "status")?
                    .says(&["raw sockets for UDP, or IPsec"])
                    .map(drop)
            })?;
        }
        for (from, to) in [
            ("10.244.1.10", "10.96.1.11:53"),
            ("fd00:10:244:1::10", "[fd00:96::111]:53"),
        ] {
            for number in 0..PORTS {
                let port = 4401 + number;
                eventually(|| {
                    let client = format!(
                        "c: udp --raw --alternate --local {from} --local-port {port} --to {to} --count 8"
                    );
                    let seen = situation.ask(&client, &row("", ""))?;
                    let one = ["b1", "b2", "r1"].map(|name| format!("{name} as {to}"));
                    ensure!(one.contains(&seen), "{client}: {seen}");
                    Ok(())
                })?;
            }
        }
    }
    Ok(())
}

fn interfaces_of_nodes() -> Result<()> {
    compare(interfaces::ROWS)
}

/// The documentation of the differences.
const DOCS: &str = include_str!("../../../../docs/differences.md");

/// The ports of endpoints, and of the outside host.
const TCP: u16 = 8080;
const UDP: u16 = 5353;
const OUTSIDE: u16 = 9000;

/// One situation.
#[derive(Clone, Copy)]
pub struct Row {
    what: &'static str,
    client: &'static str,
    after: &'static [&'static str],
    beside: &'static [&'static str],
    then: &'static [&'static str],
    with_source: bool,
    by_anybody: bool,
    fails: bool,
    differs: Option<(&'static str, &'static str)>,
}

/// A row with nothing but a client.
pub const fn row(what: &'static str, client: &'static str) -> Row {
    Row {
        what,
        client,
        after: &[],
        beside: &[],
        then: &[],
        with_source: false,
        by_anybody: false,
        fails: false,
        differs: None,
    }
}

impl Row {
    /// Shell commands before the client: `HOST: COMMAND`.
    pub const fn after(mut self, commands: &'static [&'static str]) -> Self {
        self.after = commands;
        self
    }

    /// `probe`s beside the client: `HOST: SUBCOMMAND ARGUMENTS`.
    pub const fn beside(mut self, probes: &'static [&'static str]) -> Self {
        self.beside = probes;
        self
    }

    /// Shell commands after the client.
    pub const fn then(mut self, commands: &'static [&'static str]) -> Self {
        self.then = commands;
        self
    }

    /// The address that the endpoint saw counts, too.
    pub const fn with_source(mut self) -> Self {
        self.with_source = true;
        self
    }

    /// Any endpoint may answer: the labs need not agree on the endpoint.
    pub const fn by_anybody(mut self) -> Self {
        self.by_anybody = true;
        self
    }

    /// The client is not served by the judge.
    pub const fn fails(mut self) -> Self {
        self.fails = true;
        self
    }

    /// The expected observation with the dataplane, and the first cell of the difference's row in docs/differences.md.
    pub const fn differs(mut self, difference: &'static str, seen: &'static str) -> Self {
        self.differs = Some((difference, seen));
        self
    }
}

/// A lab in which kube-proxy's rules or the dataplane serve the [services] at node `n`.
pub struct Situation {
    world: World,
    _manifests: Manifests,
}

/// The lab: node `n` (192.168.77.1, fd77::1; its default route leads to `x`) with the pods `c` (10.244.1.10), `b1` (.101) and
/// `b2` (.102) and the virtual machine `vm` (.11), of which n's programs see packets only; node `m` (192.168.77.2) with the
/// pod `r1` (10.244.2.101); and the host `x` outside (192.168.77.201), which serves at port 9000 and routes VIPs to `n`. A
/// pod's IPv6 address ends in the same number, in hexadecimal: fd00:10:244:1::101 is b1's.
fn lab() -> Result<Lab> {
    let lab = Lab::builder()
        .node("n")
        .node("m")
        .pod("n", "c", "10.244.1.10")
        .vm("n", "vm", "10.244.1.11")
        .pod("n", "b1", "10.244.1.101")
        .pod("n", "b2", "10.244.1.102")
        .pod("m", "r1", "10.244.2.101")
        .external("x")
        .build()?;
    let (node, outside) = (lab.node("n"), lab.external("x"));
    node.ip(&format!("route add default via {}", outside.ipv4()))?;
    node.ip(&format!("-6 route add default via {}", outside.ipv6()))?;
    unlimited_icmp(node)?;
    for (net, net6) in [
        ("10.96.0.0/12", "fd00:96::/108"),
        ("203.0.113.0/24", "2001:db8:113::/64"),
    ] {
        outside.ip(&format!("route add {net} via {}", node.ipv4()))?;
        outside.ip(&format!("-6 route add {net6} via {}", node.ipv6()))?;
    }
    Ok(lab)
}

/// Service `one` has the endpoint b1, cluster IPs 10.96.1.12 and fd00:96::112, node ports 30081 (TCP) and 30054 (UDP), the
/// load balancer's addresses 203.0.113.12 and 2001:db8:113::12, the external IP 198.51.100.12; `web` has the endpoints b1, b2 and r1, 10.96.1.11,
/// fd00:96::111, 30080 and 30053, 203.0.113.11 and 2001:db8:113::11, 198.51.100.11; `own` has n itself, and the number 13.
/// All serve 80/tcp and 53/udp. Nobody serves at n, unless a row does.
fn services(lab: &Lab) -> Vec<Service> {
    let service = |name: &str, number: u16, endpoints: &[&Host]| {
        Service::new(
            name,
            &[&format!("10.96.1.{number}"), &format!("fd00:96::1{number}")],
        )
        .node_port("tcp", 80, TCP, 30_069 + number)
        .node_port("udp", 53, UDP, 30_042 + number)
        .load_balancer(&format!("203.0.113.{number}"))
        .load_balancer(&format!("2001:db8:113::{number}"))
        .set("externalIPs", vec![format!("198.51.100.{number}")])
        .endpoints(endpoints)
    };
    let [b1, b2, r1] = ["b1", "b2", "r1"].map(|name| lab.pod(name));
    vec![
        service("one", 12, &[b1]),
        service("web", 11, &[b1, b2, r1]),
        service("own", 13, &[lab.node("n")]),
    ]
}

impl Situation {
    /// Builds the lab, and has `worker` serve node n.
    pub fn start(worker: Worker) -> Result<Self> {
        Self::start_with(worker, |_| Vec::new())
    }

    /// Likewise, with more services.
    pub fn start_with(worker: Worker, more: impl Fn(&Lab) -> Vec<Service>) -> Result<Self> {
        let lab = lab()?;
        let manifests = Manifests::new(&[services(&lab), more(&lab)].concat())?;
        let mut servers = Vec::new();
        for (host, tcp, udp) in [
            (lab.pod("b1"), TCP, UDP),
            (lab.pod("b2"), TCP, UDP),
            (lab.pod("r1"), TCP, UDP),
            (lab.external("x"), OUTSIDE, OUTSIDE),
        ] {
            let at = |port| {
                host.addresses()
                    .map(|ip| std::net::SocketAddr::new(ip, port).to_string())
            };
            let arguments: Vec<_> = at(tcp)
                .into_iter()
                .flat_map(|at| ["--tcp".into(), at])
                .collect();
            let more = at(udp).into_iter().flat_map(|at| ["--udp".into(), at]);
            let arguments: Vec<String> = arguments.into_iter().chain(more).collect();
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            servers.push(host.serve(&arguments)?);
        }
        let world = World::start_in(lab, worker, &Settings::base(), &manifests.path(), servers)?;
        Ok(Self {
            world,
            _manifests: manifests,
        })
    }

    /// The kube-proxy of the scenarios, and the dataplane.
    pub fn both() -> Result<[Self; 2]> {
        let judge = Self::start(Worker::KubeProxy(Mode::IptablesNft))?;
        Ok([judge, Self::start(Worker::Dataplane)?])
    }

    /// The host and the words of `HOST: WORDS`.
    fn split<'a>(&self, text: &'a str) -> Result<(&Host, &'a str)> {
        let (host, words) = text
            .split_once(": ")
            .with_context(|| format!("no host: {text}"))?;
        Ok((self.world.host(host), words))
    }

    /// Runs shell commands. `@HOST` in a command is the name of a host's network namespace.
    pub fn sh(&self, commands: &[&str]) -> Result<()> {
        for command in commands {
            let (host, script) = self.split(command)?;
            let hosts = self.world.lab.hosts().iter();
            let script = hosts.fold(script.to_owned(), |script, host| {
                script.replace(&format!("@{}", host.name()), host.netns())
            });
            host.command("sh").args(["-ec", &script]).run()?;
        }
        Ok(())
    }

    /// Starts a `probe` that prints a line when it is ready.
    pub fn start_probe(&self, text: &str) -> Result<Process> {
        let (host, words) = self.split(text)?;
        let mut words = words.split_whitespace();
        let subcommand = words.next().context("a subcommand")?;
        let probe = host.probe(subcommand).args(words);
        let mut process = probe.stdin_piped().stdout_piped().spawn()?;
        process.wait_for_line()?;
        Ok(process)
    }

    /// Runs a client, and returns its observations.
    fn ask(&self, client: &str, row: &Row) -> Result<String> {
        let (host, words) = self.split(client)?;
        let mut words = words.split_whitespace();
        let subcommand = words.next().context("a subcommand")?;
        let probe = host.probe(subcommand).arg("--each").args(words);
        Ok(seen(&probe.json()?, row))
    }

    /// Makes the situation of a row. It ends with the processes that this returns.
    fn begin(&self, row: &Row) -> Result<Vec<Process>> {
        self.sh(row.after)?;
        let beside = row.beside.iter().map(|probe| self.start_probe(probe));
        beside.collect()
    }
}

/// The observations of a client, each once: which endpoint answered, from which address, and which errors occurred.
fn seen(report: &Report, row: &Row) -> String {
    let mut seen = BTreeSet::new();
    for attempt in &report.each {
        let text = match (&attempt.error, &attempt.endpoint) {
            (Some(error), _) => error.clone(),
            (None, endpoint) => {
                let endpoint = endpoint.as_deref().filter(|_| !row.by_anybody);
                let endpoint = endpoint.unwrap_or("somebody");
                let peer = attempt.from.or(attempt.peer);
                let peer = peer.map_or_else(|| "nobody".into(), |peer| peer.to_string());
                match attempt.source.filter(|_| row.with_source) {
                    Some(source) => format!("{endpoint} as {peer} saw {}", source.ip()),
                    None => format!("{endpoint} as {peer}"),
                }
            }
        };
        seen.insert(text);
    }
    Vec::from_iter(seen).join(", ")
}

/// Tries rows in two equal labs.
pub fn compare(rows: &[Row]) -> Result<()> {
    let [judge, dataplane] = Situation::both()?;
    let mut wrong = Vec::new();
    for row in rows {
        let what = || format!("{} ({})", row.what, row.client);
        if let Err(error) = agree(row, &judge, &dataplane).with_context(what) {
            wrong.push(format!("{error:#}"));
        }
    }
    ensure!(
        wrong.is_empty(),
        "kube-proxy -> here:\n{}",
        wrong.join("\n")
    );
    println!("{} situations", rows.len());
    Ok(())
}

/// Makes a row's situation in both labs, tries its client, and ends the situation.
fn agree(row: &Row, judge: &Situation, dataplane: &Situation) -> Result<()> {
    let both = [judge, dataplane];
    let beside = both.map(|lab| lab.begin(row));
    let beside = beside.into_iter().collect::<Result<Vec<_>>>()?;
    let agreed = try_until_agreed(row, judge, dataplane);
    drop(beside);
    both.into_iter().try_for_each(|lab| lab.sh(row.then))?;
    agreed
}

fn try_until_agreed(row: &Row, judge: &Situation, dataplane: &Situation) -> Result<()> {
    let limit = Instant::now() + patience(Duration::from_secs(10));
    loop {
        let there = judge.ask(row.client, row).context("kube-proxy")?;
        let here = dataplane.ask(row.client, row).context("the dataplane")?;
        let served = there.contains(" as ");
        if let Some((difference, seen)) = row.differs {
            ensure!(
                DOCS.contains(&format!("| {difference} |")),
                "not in docs/differences.md: {difference}"
            );
            if here == seen && there != seen {
                return Ok(());
            }
        } else if here == there && served != row.fails {
            return Ok(());
        }
        ensure!(Instant::now() < limit, "{there} -> {here}");
        std::thread::sleep(Duration::from_millis(300));
    }
}
