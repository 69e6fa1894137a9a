//! A node whose agent answers the DNS queries of a captured pod, with a real resolver behind it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Agent, Host, Lab, LabBuilder, Process, report::LookupReport};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::dns::{MANIFESTS, unbound};

/// A name that only this node's agent knows, as a service: the resolver has no such name.
pub const SERVICE: &str = "web.shop.svc.cluster.local.";
/// A name that only the resolver knows.
pub const OUTSIDE: &str = "db.corp.example.";

/// Where the agent shows what its socket shows.
pub const ADMIN: &str = "127.0.0.1:15000";
/// `dns.ttlSeconds` and `dns.cacheBytes`.
pub const TTL: u32 = 7;
pub const CACHE: u32 = 2 << 20;

/// A node with the pods `app`, whose resolver is a service, and `upstream`, the service's endpoint.
pub struct World {
    pub agent: Agent,
    directory: TempDir,
    pub unbound: Process,
    pub lab: Lab,
}

/// The cluster's DNS: `upstream`, which answers by IPv4 and IPv6.
const CLUSTER_DNS: &str = "\
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec:
  clusterIPs: [10.96.0.53, 'fd00:96::53']
  ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: dns-4, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv4
endpoints: [{addresses: [10.244.1.11]}]
ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: dns-6, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv6
endpoints: [{addresses: ['fd00:10:244:1::b']}]
ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
---
apiVersion: v1
kind: Pod
metadata: {name: upstream, namespace: kube-system, labels: {istio.io/dataplane-mode: none}}
spec: {nodeName: node1, dnsPolicy: Default}
status: {podIP: 10.244.1.11, podIPs: [{ip: 10.244.1.11}, {ip: 'fd00:10:244:1::b'}]}
";

impl World {
    /// `app`: adds to the manifest of the pod.
    pub fn start(rules: &Value, app: impl FnOnce(String) -> String) -> Result<Self> {
        Self::start_with(&json!({ "rules": rules }), app, "", None)
    }

    /// As [`World::start`], with these settings of the mesh, these of `unbound`, and so many open files.
    pub fn start_with(
        mesh: &Value,
        app: impl FnOnce(String) -> String,
        of_unbound: &str,
        files: Option<usize>,
    ) -> Result<Self> {
        let mut mesh = mesh.clone();
        mesh["rules"]["captured"] = true.into();
        let dns = json!({ "capture": "mesh" });
        Self::start_as(Some(&mesh), dns, app, of_unbound, files)
    }

    /// Starts the same node with this mesh or none, and with this configuration of DNS.
    pub fn start_as(
        mesh: Option<&Value>,
        mut dns: Value,
        app: impl FnOnce(String) -> String,
        of_unbound: &str,
        files: Option<usize>,
    ) -> Result<Self> {
        let lab = Lab::builder().node("node1");
        let by_packets = mesh.is_some_and(|mesh| mesh["rules"]["capturedBy"] == "packets");
        let with = if by_packets {
            LabBuilder::vm
        } else {
            LabBuilder::pod
        };
        let lab = with(lab, "node1", "app", "10.244.1.8")
            .pod("node1", "upstream", "10.244.1.11")
            .pod("node1", "other", "10.244.1.12")
            .build()?;
        let directory = tempfile::tempdir()?;
        let unbound = unbound(lab.pod("upstream"), directory.path(), of_unbound)?;
        let manifests = directory.path().join("cluster.yaml");
        let text = app(format!("{MANIFESTS}{CLUSTER_DNS}"));
        fs::write(&manifests, text)?;
        let resolv = directory.path().join("resolv.conf");
        fs::write(&resolv, "search corp.example\nnameserver 10.244.1.11\n")?;
        dns["resolvConf"] = json!(resolv);
        dns["ttlSeconds"] = TTL.into();
        dns["cacheBytes"] = CACHE.into();
        dns["staleSeconds"] = 0.into();
        let mut agent = lab
            .agent("node1")
            .in_the_nodes_cgroup()
            .manifests(&manifests)
            .args(["--dns", &dns.to_string()])
            .args(["--admin-addr", ADMIN]);
        if !by_packets {
            agent = agent.sockets_only();
        }
        if let Some(mesh) = mesh {
            agent = agent.args(["--mesh", &mesh.to_string()]);
        }
        if let Some(files) = files {
            agent = agent.open_files(files, files);
        }
        let agent = agent.start()?;
        Ok(Self {
            agent,
            directory,
            unbound,
            lab,
        })
    }

    /// Where files of the scenario may be.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn manifests(&self) -> PathBuf {
        self.directory.path().join("cluster.yaml")
    }

    pub fn resolv_conf(&self) -> PathBuf {
        self.directory.path().join("resolv.conf")
    }

    pub fn app(&self) -> &Host {
        self.lab.pod("app")
    }

    /// The whole of what `dig` prints, of the pod.
    pub fn told(&self, question: &str) -> Result<String> {
        let dig = self.app().command("dig").args(["+tries=1", "+time=4"]);
        Ok(dig.args(question.split(' ')).run()?)
    }

    /// Checks that a resolver, by its own address, gives these answers.
    pub fn dig(&self, resolver: &str, question: &str, wanted: &str) -> Result<()> {
        let text = self.told(&format!("@{resolver} {question}"))?;
        let answers = text.lines().filter(|line| !line.starts_with(';'));
        let answers: Vec<_> = answers
            .filter_map(|line| line.split_whitespace().last())
            .collect();
        let found = answers.join(" ");
        ensure!(found == wanted, "{question}: {found}, not {wanted}\n{text}");
        let server = format!("SERVER: {resolver}#53");
        ensure!(text.contains(&server), "not from {resolver}:\n{text}");
        Ok(())
    }

    pub fn verdicts(&self, reason: Reason) -> Result<u64> {
        let output = self.agent.dataplane(["status", "-o", "json"]).output()?;
        let status: Value = serde_json::from_slice(&output.stdout)?;
        Ok(status["verdicts"][reason.word()]
            .as_u64()
            .unwrap_or_default())
    }

    pub fn captured(&self) -> Result<u64> {
        self.verdicts(Reason::CapturedDns)
    }

    /// Begins to look up a name, 200 times a second.
    pub fn look_up(&self, name: &str, more: &[&str]) -> Result<Process> {
        let probe = self.app().probe("dns");
        let probe = probe.args(["--to", "10.96.0.53:53", "--name", name]);
        let probe = probe.args(more).stdin_piped().stdout_piped();
        let mut process = probe.spawn()?;
        process.wait_for_line()?;
        Ok(process)
    }

    /// Checks that 200 queries to a resolver are answered, each within the time that glibc waits: a busy machine has
    /// answers take 2 s.
    pub fn all_answered(&self, resolver: &str, sockets: &str) -> Result<()> {
        let probe = self.app().probe("dns").args(["--to", resolver]);
        let probe = probe.args(["--name", OUTSIDE, "--count", "200", "--sockets", sockets]);
        let probe = probe.args(["--timeout-ms", "5000"]);
        let mut process = probe.stdout_piped().spawn()?;
        process.wait_for_line()?;
        let report: LookupReport = process.wait_json()?;
        ensure!(
            report.answered == 200,
            "{sockets} to {resolver}: {report:?}"
        );
        Ok(())
    }

    /// Returns the addresses that the C library finds, with the pod's `resolv.conf`.
    pub fn getent(&self, name: &str) -> Result<String> {
        self.with_resolv_conf(&["getent", "ahosts", name])
    }

    /// Returns the output of a command, with the pod's `resolv.conf`.
    pub fn with_resolv_conf(&self, command: &[&str]) -> Result<String> {
        self.with_resolver("10.96.0.53", command)
    }

    /// Returns the output of a command that has a `resolv.conf` with the pod's search list and this resolver.
    pub fn with_resolver(&self, resolver: &str, command: &[&str]) -> Result<String> {
        let file = self.directory.path().join("pod.conf");
        fs::write(
            &file,
            format!(
                "search shop.svc.cluster.local svc.cluster.local cluster.local corp.example\n\
                 nameserver {resolver}\noptions ndots:5\n"
            ),
        )?;
        let (program, arguments) = command.split_first().context("no program")?;
        let command = self.app().command(program).resolv_conf(file);
        Ok(command.args(arguments).run()?)
    }
}
