//! The DNS server alone: `dig`, the C library's own resolver, and unbound behind it.

use std::{fmt::Write as _, fs, path::Path};

use anyhow::{Result, ensure};
use dataplane_tests::{Host, Lab, Process};
use tempfile::TempDir;

use crate::cluster::eventually;

scenarios! {
    Lab:
    clients_get_the_names_of_services,
    a_pods_search_list_is_gone_through_at_once,
    other_names_come_from_resolvers_and_the_cache,
}

/// A server in the pod `dns`, unbound in the pod `upstream`, and a client in the pod `app`.
struct World {
    directory: TempDir,
    _server: Process,
    unbound: Option<Process>,
    lab: Lab,
}

/// The names that unbound knows: all others do not exist.
const ZONE: [&str; 5] = [
    ". 300 IN SOA ns.example. host.example. 1 3600 1200 604800 300",
    "www.example.com. 2 IN A 192.0.2.80",
    "db.corp.example. 60 IN A 192.0.2.90",
    "text.example.com. 60 IN A 192.0.2.81",
    "text.example.com.corp.example. 60 IN TXT text",
];

impl World {
    fn start() -> Result<Self> {
        let lab = Lab::builder()
            .node("node1")
            .pod("node1", "app", "10.244.1.8")
            .pod("node1", "dns", "10.244.1.10")
            .pod("node1", "upstream", "10.244.1.11")
            .build()?;
        let directory = tempfile::tempdir()?;
        let unbound = unbound(lab.pod("upstream"), directory.path(), "")?;
        let (manifests, resolv) = (
            directory.path().join("cluster.yaml"),
            directory.path().join("resolv.conf"),
        );
        fs::write(&manifests, MANIFESTS)?;
        fs::write(&resolv, "search corp.example\nnameserver 10.244.1.11\n")?;
        let server = lab
            .pod("dns")
            .command(lab.programs().dataplane()?)
            .args(["dns", "serve", "--node-name", "node1", "--manifests"])
            .arg(&manifests)
            .arg("--resolv-conf")
            .arg(&resolv)
            // There is no listener at the first: the next is asked.
            .args([
                "--listen",
                "10.244.1.10:53",
                "--resolver",
                "10.244.1.8:53",
                "10.244.1.11",
            ])
            .args(["--metrics-addr", "10.244.1.10:9253"])
            .spawn()?;
        let world = Self {
            directory,
            _server: server,
            unbound: Some(unbound),
            lab,
        };
        eventually(|| world.dig("dns-version.cluster.local. TXT", "\"1.1.0\""))?;
        Ok(world)
    }

    fn app(&self) -> &Host {
        self.lab.pod("app")
    }

    /// The whole of what `dig` prints.
    fn told(&self, question: &str) -> Result<String> {
        let dig = self
            .app()
            .command("dig")
            .args(["@10.244.1.10", "+tries=1", "+time=6"]);
        Ok(dig.args(question.split(' ')).run()?)
    }

    /// Checks the records that `dig` gets: sorted, with blanks between them.
    fn dig(&self, question: &str, wanted: &str) -> Result<()> {
        let text = self.told(&format!("+short {question}"))?;
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        let found = lines.join(" ");
        ensure!(found == wanted, "{question}: {found}, not {wanted}");
        Ok(())
    }

    /// Returns the addresses that the C library finds, with a pod's `resolv.conf`.
    fn getent(&self, name: &str) -> Result<String> {
        let file = self.directory.path().join("pod.conf");
        fs::write(
            &file,
            "search shop.svc.cluster.local svc.cluster.local cluster.local corp.example\n\
             nameserver 10.244.1.10\noptions ndots:5\n",
        )?;
        let script = "mount --bind \"$1\" /etc/resolv.conf && exec getent ahostsv4 \"$2\"";
        let getent = self
            .app()
            .command("unshare")
            .args(["-m", "sh", "-c", script, "sh"]);
        Ok(getent.arg(file).arg(name).run()?)
    }

    /// A counter of the server's.
    fn counted(&self, name: &str) -> Result<u64> {
        let curl = self
            .app()
            .command("curl")
            .args(["-s", "http://10.244.1.10:9253/metrics"]);
        let page = curl.run()?;
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok())
            .ok_or_else(|| anyhow::anyhow!("no {name} in\n{page}"))
    }
}

/// Starts unbound, which can ask only the servers that `more` of its configuration names.
pub fn unbound(host: &Host, directory: &Path, more: &str) -> Result<Process> {
    let mut conf = format!(
        "server:\n directory: \"{0}\"\n chroot: \"\"\n username: \"\"\n pidfile: \"\"\n use-syslog: no\n \
         logfile: \"\"\n do-daemonize: no\n interface: {1}\n interface: {2}\n \
         access-control: 0.0.0.0/0 allow\n access-control: ::/0 allow\n \
         module-config: \"iterator\"\n local-zone: \".\" static\n",
        directory.display(),
        host.ipv4(),
        host.ipv6(),
    );
    let long = "x".repeat(200);
    let big = format!(
        "big.example.com. 60 IN TXT {}",
        [long.as_str(); 15].join(" ")
    );
    for line in ZONE.into_iter().chain([big.as_str()]) {
        writeln!(conf, " local-data: '{line}'")?;
    }
    conf += more;
    conf += "remote-control:\n control-enable: no\n";
    unbound_with(host, directory, &conf)
}

/// Starts unbound with this configuration.
pub fn unbound_with(host: &Host, directory: &Path, conf: &str) -> Result<Process> {
    let file = directory.join("unbound.conf");
    fs::write(&file, conf)?;
    Ok(host
        .command("unbound")
        .args(["-d", "-c"])
        .arg(file)
        .spawn()?)
}

pub const MANIFESTS: &str = "\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIPs: [10.96.0.10, 'fd00:96::10'], ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: api, namespace: other}
spec: {clusterIP: 10.96.0.11, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: shop}
spec: {clusterIP: None, ports: [{name: sql, port: 5432}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: db-1
  namespace: shop
  labels: {kubernetes.io/service-name: db, service.kubernetes.io/headless: ''}
addressType: IPv4
endpoints:
  - {addresses: [10.244.1.21], hostname: db-0}
  - {addresses: [10.244.1.22], hostname: db-1}
ports: [{name: sql, port: 5432}]
---
apiVersion: v1
kind: Service
metadata: {name: outside, namespace: shop}
spec: {type: ExternalName, externalName: www.example.com}
---
apiVersion: v1
kind: Pod
metadata: {name: app, namespace: shop}
spec: {nodeName: node1}
status: {podIP: 10.244.1.8}
";

fn clients_get_the_names_of_services() -> Result<()> {
    let world = World::start()?;
    for (question, wanted) in [
        ("web.shop.svc.cluster.local. A", "10.96.0.10"),
        ("web.shop.svc.cluster.local. AAAA", "fd00:96::10"),
        ("+tcp web.shop.svc.cluster.local. A", "10.96.0.10"),
        ("+noedns web.shop.svc.cluster.local. A", "10.96.0.10"),
        ("db.shop.svc.cluster.local. A", "10.244.1.21 10.244.1.22"),
        ("db-1.db.shop.svc.cluster.local. A", "10.244.1.22"),
        (
            "_sql._tcp.db.shop.svc.cluster.local. SRV",
            "0 100 5432 db-0.db.shop.svc.cluster.local. 0 100 5432 db-1.db.shop.svc.cluster.local.",
        ),
        ("-x 10.96.0.10", "web.shop.svc.cluster.local."),
        ("-x 10.244.1.22", "db-1.db.shop.svc.cluster.local."),
        (
            "outside.shop.svc.cluster.local. A",
            "192.0.2.80 www.example.com.",
        ),
    ] {
        world.dig(question, wanted)?;
    }
    let missing = world.told("nothing.shop.svc.cluster.local. A")?;
    ensure!(
        missing.contains("status: NXDOMAIN") && missing.contains("SOA\tns.dns.cluster.local."),
        "{missing}"
    );
    // A change on disk is answered without a restart.
    let changed = MANIFESTS.replace("10.96.0.11", "10.96.0.12");
    fs::write(world.directory.path().join("cluster.yaml"), changed)?;
    eventually(|| world.dig("api.other.svc.cluster.local. A", "10.96.0.12"))
}

fn a_pods_search_list_is_gone_through_at_once() -> Result<()> {
    let world = World::start()?;
    for (name, addr) in [
        ("web", "10.96.0.10"),
        ("api.other", "10.96.0.11"),
        ("api.other.svc", "10.96.0.11"),
        ("www.example.com", "192.0.2.80"),
        ("db.corp.example", "192.0.2.90"),
    ] {
        let before = world.counted("istio_dns_requests_total")?;
        let found = world.getent(name)?;
        ensure!(found.contains(addr), "{name}: {found}");
        let asked = world.counted("istio_dns_requests_total")? - before;
        // Addresses of one family: the first query of the list has the answer.
        ensure!(asked == 1, "{name}: {asked} queries");
    }
    ensure!(world.getent("nothing.example").is_err(), "it exists");
    // The list has a name before it that exists, and has no address.
    let found = world.getent("text.example.com")?;
    ensure!(found.contains("192.0.2.81"), "{found}");
    Ok(())
}

fn other_names_come_from_resolvers_and_the_cache() -> Result<()> {
    let mut world = World::start()?;
    world.dig("www.example.com. A", "192.0.2.80")?;
    let asked = world.counted("istio_dns_upstream_requests_total")?;
    ensure!(
        asked >= 2,
        "the first resolver does not answer: {asked} queries"
    );
    world.dig("db.corp.example. A", "192.0.2.90")?;
    let asked = world.counted("istio_dns_upstream_requests_total")?;
    // Also in other letters, and by TCP.
    world.dig("DB.Corp.Example. A", "192.0.2.90")?;
    world.dig("+tcp db.corp.example. A", "192.0.2.90")?;
    ensure!(
        world.counted("istio_dns_upstream_requests_total")? == asked,
        "asked again"
    );
    ensure!(
        world.counted("dataplane_dns_cache_hits_total")? >= 2,
        "not from the cache"
    );
    let missing = world.told("missing.example. A")?;
    ensure!(missing.contains("status: NXDOMAIN"), "{missing}");
    // Longer than datagrams are: by TCP on both sides.
    let big = world.told("+short big.example.com. TXT")?;
    ensure!(big.matches("xxx\"").count() == 15, "{big}");
    // Equal to the resolver's answers, except for times to live and the servers' own EDNS data.
    for question in [
        "www.example.com. A",
        "www.example.com. AAAA",
        "missing.example. MX",
        "example.com. NS",
    ] {
        let strip = |text: String| -> Vec<String> {
            let lines = text
                .lines()
                .filter(|line| !line.is_empty() && !line.starts_with(';'));
            let records = lines.map(|line| line.split_whitespace().collect::<Vec<_>>());
            let mut records: Vec<_> = records
                .map(|words| [&words[..1], &words[2..]].concat().join(" "))
                .collect();
            records.sort();
            records
        };
        let direct = world.app().command("dig").arg("@10.244.1.11");
        let direct = direct.args(question.split(' ')).run()?;
        let (direct, ours) = (strip(direct), strip(world.told(question)?));
        ensure!(direct == ours, "{question}: {ours:?}, not {direct:?}");
    }
    // While no resolver answers, answers that are over are served, for thirty seconds.
    drop(world.unbound.take());
    std::thread::sleep(std::time::Duration::from_secs(3));
    let stale = world.told("www.example.com. A")?;
    ensure!(stale.contains("30\tIN\tA\t192.0.2.80"), "{stale}");
    ensure!(
        world.counted("dataplane_dns_stale_answers_total")? >= 1,
        "not counted"
    );
    let failed = world.told("other.example.com. A")?;
    ensure!(failed.contains("status: SERVFAIL"), "{failed}");
    Ok(())
}
