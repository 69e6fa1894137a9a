//! Manifests that change, and manifests with faults, as the running agent sees them.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::Lab;

use crate::{
    cluster::{Cluster, TCP, eventually, fails, reaches, refused, serve},
    manifest::{Config, Manifests, Service},
    metrics::Metrics,
    outcome::{cannot_run, run},
};

scenarios! {
    Dataplane:
    faults_at_the_start_attach_nothing,
    a_wrong_cgroup_is_refused_before_anything_is_made,
    faults_in_one_file_change_nothing_of_the_others,
    a_config_map_is_swapped,
    files_of_a_directory_come_and_go,
    of_two_services_with_one_vip_one_serves,
    kinds_that_are_not_ours_are_counted_and_ignored,
    more_than_a_table_may_hold_is_said_and_the_rest_serves_on,
}

const TO: &str = "10.96.0.10:80";

fn web(lab: &Lab, pods: &[&str]) -> Service {
    let pods: Vec<_> = pods.iter().map(|name| lab.pod(name)).collect();
    Service::new("web", &["10.96.0.10"])
        .port("tcp", 80, TCP)
        .endpoints(&pods)
}

/// The agent names the file, the place in it and the fault, and ends; nothing was pinned or attached.
fn faults_at_the_start_attach_nothing() -> Result<()> {
    let lab = Cluster::lab()?;
    let manifests = Manifests::new(&[])?;
    let agent = lab.agent("node2").prepare()?;
    let file = manifests.path();
    let path = file.to_string_lossy().into_owned();
    let ports = r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec":
        {"clusterIP": "10.96.0.1", "ports": [{"port": 0}, {"port": 70000, "name": "b"}]}}"#;
    for (nonsense, words) in [
        ("{\n\n]", [":3", ""]),
        ("", ["empty", ""]),
        (
            ports,
            ["spec.ports[0].port: 0", "spec.ports[1].port: 70000"],
        ),
    ] {
        manifests.write_text(nonsense)?;
        let arguments = ["--manifests", &path];
        cannot_run(&agent, arguments)?.exits(1)?.says(&[
            &path,
            words[0],
            words[1],
            "nothing was changed",
        ])?;
        ensure!(!agent.bpffs().exists(), "something was pinned");
    }
    let missing = manifests.path().with_file_name("missing.yaml");
    let missing = missing.to_string_lossy();
    cannot_run(&agent, ["--manifests", &missing])?
        .exits(1)?
        .says(&[&missing])?;
    run(&agent, "status")?
        .exits(1)?
        .says(&["the agent is not running", "none of the programs"])
        .map(drop)
}

/// A path that is no directory of a cgroup v2, such as one of version 1, is named; nothing is pinned for it.
fn a_wrong_cgroup_is_refused_before_anything_is_made() -> Result<()> {
    let lab = Cluster::lab()?;
    let manifests = Manifests::new(&[])?;
    let agent = lab.agent("node2").prepare()?;
    let other = tempfile::tempdir()?;
    let (path, cgroup) = (manifests.path(), other.path().to_string_lossy());
    let arguments = ["--manifests", &path.to_string_lossy(), "--cgroup", &cgroup];
    cannot_run(&agent, arguments)?
        .exits(1)?
        .says(&[&cgroup, "cgroup"])?;
    ensure!(!agent.bpffs().exists(), "something was made on the bpffs");
    Ok(())
}

/// A directory of manifests that an agent watches.
struct Directory {
    directory: tempfile::TempDir,
}

impl Directory {
    fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        Ok(Self { directory })
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Writes services to a file in it.
    fn write(&self, name: &str, services: &[Service]) -> Result<PathBuf> {
        let manifests = Manifests::new(services)?;
        // Written beside and moved in: a reader sees the whole file or none.
        let (draft, file) = (self.path().join(".draft"), self.path().join(name));
        fs::create_dir_all(file.parent().context("a directory")?)?;
        fs::copy(manifests.path(), &draft)?;
        fs::rename(draft, &file)?;
        Ok(file)
    }
}

/// All paths are one view: a fault in one file stops changes in another too, and says so.
fn faults_in_one_file_change_nothing_of_the_others() -> Result<()> {
    let lab = Cluster::lab()?;
    let _servers = [serve(lab.pod("near"))?, serve(lab.pod("near2"))?];
    let directory = Directory::new()?;
    directory.write("web.json", &[web(&lab, &["near"])])?;
    let agent = lab
        .agent("node2")
        .sockets_only()
        .manifests(directory.path())
        .start()?;
    let client = lab.pod("sleep");
    reaches(client, TO, "connect --count 5", &["near"])?;
    let bad = directory.path().join("bad.yaml");
    fs::write(&bad, "apiVersion: v1\nkind: Service\nmetadata: 7\n")?;
    directory.write("web.json", &[web(&lab, &["near2"])])?;
    eventually(|| {
        run(&agent, "status")?
            .exits(1)?
            .says(&["bad.yaml:3", "still serves"])
            .map(drop)
    })?;
    reaches(client, TO, "connect --count 5", &["near"])?;
    fs::remove_file(bad)?;
    eventually(|| reaches(client, TO, "connect --count 5", &["near2"]).map(drop))?;
    eventually(|| run(&agent, "status")?.exits(0).map(drop))
}

/// As the kubelet updates a mounted ConfigMap: a link to a directory is replaced by another.
fn a_config_map_is_swapped() -> Result<()> {
    let lab = Cluster::lab()?;
    let _servers = [serve(lab.pod("near"))?, serve(lab.pod("near2"))?];
    let volume = Directory::new()?;
    let swap = |version: &str, pods: &[&str]| -> Result<()> {
        volume.write(&format!("..{version}/services.json"), &[web(&lab, pods)])?;
        let (next, data) = (
            volume.path().join("..data_tmp"),
            volume.path().join("..data"),
        );
        symlink(format!("..{version}"), &next)?;
        let before = fs::read_link(&data);
        fs::rename(next, data)?;
        if let Ok(before) = before {
            fs::remove_dir_all(volume.path().join(before))?;
        }
        Ok(())
    };
    swap("1", &["near"])?;
    symlink("..data/services.json", volume.path().join("services.json"))?;
    let agent = lab
        .agent("node2")
        .sockets_only()
        .manifests(volume.path())
        .start()?;
    let client = lab.pod("sleep");
    reaches(client, TO, "connect --count 5", &["near"])?;
    // Twice: the watch must follow the link.
    for (version, pod) in [("2", "near2"), ("3", "near")] {
        swap(version, &[pod])?;
        eventually(|| reaches(client, TO, "connect --count 5", &[pod]).map(drop))
            .with_context(|| format!("version {version}: {}", agent.log()))?;
    }
    run(&agent, "status")?.exits(0).map(drop)
}

fn files_of_a_directory_come_and_go() -> Result<()> {
    let lab = Cluster::lab()?;
    let _server = serve(lab.pod("near"))?;
    let directory = Directory::new()?;
    let first = directory.write("first.json", &[web(&lab, &["near"])])?;
    let agent = lab
        .agent("node2")
        .sockets_only()
        .manifests(directory.path())
        .start()?;
    let client = lab.pod("sleep");
    let other = Service::new("other", &["10.96.0.11"]).port("tcp", 80, TCP);
    let other = other.endpoints(&[lab.pod("near")]);
    directory.write("deep/second.json", &[other])?;
    eventually(|| {
        reaches(
            client,
            "10.96.0.11:80",
            "connect --timeout-ms 300",
            &["near"],
        )
        .map(drop)
    })?;
    fs::remove_file(first)?;
    eventually(|| fails(client, TO, "connect --timeout-ms 300", "TIMEOUT"))?;
    reaches(client, "10.96.0.11:80", "connect --count 5", &["near"])?;
    // Nothing at all is more often a mistake than intended, so `status` reports it.
    fs::remove_dir_all(directory.path().join("deep"))?;
    eventually(|| {
        run(&agent, "status")?
            .exits(1)?
            .says(&["still serves"])
            .map(drop)
    })?;
    reaches(client, "10.96.0.11:80", "connect --count 5", &["near"]).map(drop)
}

/// The first by name, as both are of one age. `status` and `services` say so, and the other takes over when the first
/// goes.
fn of_two_services_with_one_vip_one_serves() -> Result<()> {
    let late = |lab: &Lab| {
        let late = Service::new("zebra", &["10.96.0.10"]).port("tcp", 80, TCP);
        late.endpoints(&[lab.pod("near2")])
    };
    let cluster = Cluster::start(|lab| vec![late(lab), web(lab, &["near"])])?;
    let client = cluster.client();
    reaches(client, TO, "connect --count 10", &["near"])?;
    run(&cluster.agent, "status")?.exits(0)?.says(&[
        "10.96.0.10:80/tcp is claimed by several services",
        "default/web serves it, default/zebra not",
    ])?;
    run(&cluster.agent, "services zebra")?
        .exits(0)?
        .says(&["(of default/web)"])?;
    cluster.manifests.write(&[late(&cluster.lab)])?;
    eventually(|| reaches(client, TO, "connect --count 10", &["near2"]).map(drop))?;
    let status = run(&cluster.agent, "status -o json")?.exits(0)?.json()?;
    ensure!(status["findings"] == serde_json::json!([]), "{status:#}");
    Ok(())
}

fn kinds_that_are_not_ours_are_counted_and_ignored() -> Result<()> {
    let lab = Cluster::lab()?;
    let directory = Directory::new()?;
    directory.write("web.json", &[web(&lab, &[])])?;
    fs::write(
        directory.path().join("others.yaml"),
        "apiVersion: v1\nkind: Secret\nmetadata: {name: a}\n---\n\
         apiVersion: v1\nkind: Secret\nmetadata: {name: b}\n---\n\
         apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: c}\n",
    )?;
    let agent = lab
        .agent("node2")
        .sockets_only()
        .manifests(directory.path())
        .start()?;
    let log = agent.log();
    ensure!(
        log.contains("ignored 3 objects")
            && log.contains("Secret (2)")
            && log.contains("Deployment"),
        "{log}"
    );
    refused(lab.pod("sleep"), TO, "connect")
}

/// A service beyond a limit is left out by itself, named with the table and the option, and served as soon as there is
/// room. Everything else follows its changes meanwhile, also over a restart.
fn more_than_a_table_may_hold_is_said_and_the_rest_serves_on() -> Result<()> {
    let old = |lab: &Lab, pods: &[&str]| web(lab, pods).created("2025-01-15T09:21:07Z");
    let few = |lab: &Lab| vec![old(lab, &["near"])];
    let config = Config::new("limits: {frontends: 12}")?;
    let mut cluster = Cluster::start_with(few, &config.arguments())?;
    let many = |lab: &Lab, count: u8| {
        let service = |n| Service::new(&format!("s{n:02}"), &[&format!("10.96.1.{n}")]);
        let services = (0..count).map(|n| service(n).port("tcp", 80, TCP));
        let services = services.map(|s| s.endpoints(&[lab.pod("near2")]));
        let web = old(lab, &["near2"]);
        services.chain([web]).collect::<Vec<_>>()
    };
    cluster.manifests.write(&many(&cluster.lab, 20))?;
    // Half of the table is for three services of two entries each: the oldest, then the first by name.
    let left_out = |cluster: &Cluster| {
        let status = run(&cluster.agent, "status")?.exits(0)?;
        let status = status.says(&[
            "service default/s02: is not served",
            "service default/s19: is not served",
            "2 entries of table POOLS",
            "limits.frontends",
        ])?;
        let says = |service: &str| {
            status
                .stdout
                .contains(&format!("service default/{service}:"))
        };
        ensure!(!says("s01") && !says("web"), "{}", status.stdout);
        let client = cluster.client();
        reaches(client, TO, "connect --count 10", &["near2"])?;
        reaches(client, "10.96.1.1:80", "connect --count 10", &["near2"])?;
        fails(
            client,
            "10.96.1.19:80",
            "connect --timeout-ms 300",
            "TIMEOUT",
        )
    };
    eventually(|| left_out(&cluster).map(drop))?;
    cluster.agent.kill();
    cluster.agent.start()?;
    eventually(|| left_out(&cluster).map(drop))?;
    let metrics = Metrics::scrape(cluster.lab.node("node2"))?;
    metrics.is("dataplane_services_left_out", &[], 18.0)?;
    metrics.is("dataplane_sync_errors_total", &[], 0.0)?;

    cluster.manifests.write(&many(&cluster.lab, 1))?;
    let client = cluster.client();
    eventually(|| reaches(client, "10.96.1.0:80", "connect --count 10", &["near2"]).map(drop))?;
    reaches(client, TO, "connect --count 10", &["near2"])?;
    eventually(|| {
        let status = run(&cluster.agent, "status")?.exits(0)?;
        ensure!(!status.stdout.contains("not served"), "{}", status.stdout);
        Ok(())
    })
}
