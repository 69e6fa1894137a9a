//! The agent as the DaemonSet in `deploy/` runs it: with the capabilities that are written there,
//! and no others.

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::Agent;
use serde_json::Value;

use crate::{
    cluster::{Cluster, TCP, UDP, ask, eventually, reaches, serve},
    manifest::{Manifests, Service},
    metrics::Metrics,
    outcome::{cannot_run, run},
};

scenarios! {
    Dataplane:
    its_capabilities_are_enough,
    bpf_and_perfmon_are_not_enough,
    it_can_set_what_a_mesh_needs,
}

const DAEMON_SET: &str = include_str!("../../../deploy/kustomize/base/daemonset.yaml");

const FOREIGN_PROXY: &str =
    include_str!("../../../deploy/kustomize/foreign-proxy/kustomization.yaml");

/// What the DaemonSet adds to nothing.
pub fn capabilities() -> Result<Vec<String>> {
    let object: Value = serde_saphyr::from_str(DAEMON_SET)?;
    let capabilities =
        &object["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"];
    ensure!(capabilities["drop"][0] == "ALL", "{capabilities:#}");
    let names = capabilities["add"].as_array().context("add")?;
    names
        .iter()
        .map(|name| Ok(name.as_str().context("a name")?.to_owned()))
        .collect()
}

/// What kustomize's component `foreign-proxy` adds to these.
pub fn for_foreign_proxies() -> Result<Vec<String>> {
    let component: Value = serde_saphyr::from_str(FOREIGN_PROXY)?;
    let patch = component["patches"][0]["patch"]
        .as_str()
        .context("a patch")?;
    let changes: Vec<Value> = serde_saphyr::from_str(patch)?;
    let added = changes.iter().filter(|change| {
        let place = change["path"].as_str();
        place.is_some_and(|place| place.ends_with("/capabilities/add/-"))
    });
    added
        .map(|change| Ok(change["value"].as_str().context("a name")?.to_owned()))
        .collect()
}

fn web(lab: &dataplane_tests::Lab) -> Service {
    Service::new("web", &["10.96.0.10"])
        .port("tcp", 80, TCP)
        .port("udp", 53, UDP)
        .endpoints(&[lab.pod("far"), lab.pod("near")])
}

fn its_capabilities_are_enough() -> Result<()> {
    let lab = Cluster::lab()?;
    let _servers = [serve(lab.pod("far"))?, serve(lab.pod("near"))?];
    let manifests = Manifests::new(&[web(&lab)])?;
    let mut agent = lab
        .agent("node2")
        .manifests(manifests.path())
        .capabilities(&capabilities()?)
        .start()?;
    let client = lab.pod("sleep");
    let works = |agent: &Agent| -> Result<()> {
        reaches(
            client,
            "10.96.0.10:80",
            "connect --count 20",
            &["far", "near"],
        )?;
        ask(client, "10.96.0.10:53", "udp --count 5")?;
        for command in ["status", "services", "explain node 10.96.0.10:80"] {
            run(agent, command)?.exits(0)?;
        }
        Ok(())
    };
    works(&agent)?;
    // A socket in another network namespace, connected to an endpoint that goes.
    let near = |pods: &[&str]| {
        let service = Service::new("near", &["10.96.0.11"]).port("udp", 53, UDP);
        let pods: Vec<_> = pods.iter().map(|pod| lab.pod(pod)).collect();
        service.endpoints(&pods)
    };
    manifests.write(&[web(&lab), near(&["near"])])?;
    eventually(|| reaches(client, "10.96.0.11:53", "udp", &["near"]).map(drop))?;
    let resolver = client.probe("udp").args([
        "--one-socket",
        "--until-stdin-closes",
        "--to",
        "10.96.0.11:53",
    ]);
    let mut resolver = resolver.stdin_piped().stdout_piped().spawn()?;
    resolver.wait_for_line()?;
    manifests.write(&[web(&lab), near(&["far"])])?;
    eventually(|| {
        let metrics = Metrics::scrape(lab.node("node2"))?;
        let destroyed = metrics.sum("dataplane_sockets_destroyed_total", &[("protocol", "udp")]);
        ensure!(destroyed > 0.5, "no socket was destroyed");
        Ok(())
    })?;
    drop(resolver);
    // More than the tables have room for: they grow.
    let mut many: Vec<Service> = (0..1500)
        .map(|n| {
            Service::new(
                &format!("s{n}"),
                &[&format!("10.97.{}.{}", n / 250, n % 250 + 1)],
            )
            .port("tcp", 80, TCP)
            .endpoints(&[lab.pod("near")])
        })
        .collect();
    many.push(web(&lab));
    manifests.write(&many)?;
    eventually(|| reaches(client, "10.97.5.250:80", "connect --count 2", &["near"]).map(drop))?;
    // The next one adopts what this one leaves.
    agent.stop()?;
    reaches(
        client,
        "10.96.0.10:80",
        "connect --count 20",
        &["far", "near"],
    )?;
    agent.start()?;
    works(&agent)
}

/// If this fails, the DaemonSet can do with less.
fn bpf_and_perfmon_are_not_enough() -> Result<()> {
    let lab = Cluster::lab()?;
    let manifests = Manifests::new(&[web(&lab)])?;
    let less = ["BPF", "NET_ADMIN", "PERFMON"].map(str::to_owned);
    let agent = lab.agent("node2").capabilities(&less).prepare()?;
    let path = manifests.path();
    let path = path.to_str().context("a path in UTF-8")?;
    cannot_run(&agent, ["--manifests", path])?
        .exits(1)?
        .says(&["missing CAP_SYS_ADMIN", "What to do: run as root"])?;
    Ok(())
}

/// In a container that is not privileged, /proc/sys is read-only; kustomize's component `mesh` mounts
/// the node's /proc/sys/net elsewhere.
fn it_can_set_what_a_mesh_needs() -> Result<()> {
    let lab = Cluster::lab()?;
    let directory = tempfile::tempdir()?;
    let found = |mount: &str| -> Result<Value> {
        let script = format!(
            "mount --make-rprivate / && {mount} && mount --bind /proc/sys /proc/sys && \
             mount -o remount,bind,ro /proc/sys && exec \"$0\" doctor -o json"
        );
        let program = lab.programs().dataplane()?;
        let doctor = lab.node("node2").command("unshare");
        let doctor = doctor.args(["--mount", "sh", "-c", &script]).arg(program);
        let output = doctor.capabilities(&capabilities()?).output()?;
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        let row = rows
            .into_iter()
            .find(|row| row["feature"] == "tcp_fwmark_accept");
        row.context("tcp_fwmark_accept")
    };
    let without = found("true")?;
    let detail = without["detail"].as_str().unwrap_or_default();
    ensure!(
        without["present"] == false
            && detail.contains("cannot set /proc/sys/net/ipv4/tcp_fwmark_accept: Read-only")
            && detail.contains("component `mesh`"),
        "{without:#}"
    );
    let place = directory.path().display();
    let with = found(&format!("mount --bind /proc/sys/net {place}"))?;
    ensure!(with["present"] == true, "{with:#}");
    Ok(())
}
