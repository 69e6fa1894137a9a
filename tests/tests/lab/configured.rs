//! The agent with its whole configuration in a file, as in a DaemonSet.

use std::fs;

use anyhow::{Result, ensure};

use crate::{
    cluster::{Cluster, TCP, reaches, serve},
    manifest::{Manifests, Service},
    outcome::{cannot_run, http, run},
};

scenarios! {
    Dataplane:
    a_file_says_it_all_and_flags_override_it,
    a_faulty_file_changes_nothing,
}

fn a_file_says_it_all_and_flags_override_it() -> Result<()> {
    let lab = Cluster::lab()?;
    let _server = serve(lab.pod("near"))?;
    let web = Service::new("web", &["10.96.0.10"])
        .port("tcp", 80, TCP)
        .endpoints(&[lab.pod("near")]);
    let manifests = Manifests::new(&[web])?;
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("dataplane.yaml");
    let text = format!(
        "source:\n  manifests: [{}]\nlisten:\n  health: 0.0.0.0:25021\n  metrics: 0.0.0.0:25020\n  \
         admin: off\nlimits:\n  frontends: 5000\n",
        manifests.path().display()
    );
    fs::write(&file, text)?;
    let agent = lab
        .agent("node2")
        .args(["--config".as_ref(), file.as_os_str()])
        .args(["--metrics-addr", "0.0.0.0:35020"])
        .start()?;
    let (ext, node) = (lab.external("ext"), lab.node("node2"));
    reaches(
        lab.pod("sleep"),
        "10.96.0.10:80",
        "connect --count 9",
        &["near"],
    )?;
    let ask = |port: u16, path: &str| http(ext, &format!("http://{}:{port}{path}", node.ipv4()));
    ensure!(ask(25_021, "/healthz/ready")?.0 == 200);
    ensure!(ask(35_020, "/metrics")?.0 == 200);
    ensure!(ask(25_020, "/metrics").is_err(), "the flag should count");
    let status = run(&agent, "status -o json")?.exits(0)?.json()?;
    let tables = status["tables"].as_array().into_iter().flatten();
    let frontends: Vec<_> = tables.filter(|t| t["name"] == "FRONTENDS").collect();
    ensure!(frontends[0]["limit"] == 5000, "{status:#}");
    Ok(())
}

fn a_faulty_file_changes_nothing() -> Result<()> {
    let lab = Cluster::lab()?;
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("dataplane.yaml");
    fs::write(&file, "source: {manifest: [a]}\nlisten:\n  metrics: 9100\n")?;
    let agent = lab.agent("node2").prepare()?;
    let path = file.to_string_lossy().into_owned();
    cannot_run(&agent, ["--config", &path])?.exits(1)?.says(&[
        "nothing was done",
        "dataplane.yaml:1:",
        "source.manifest: unknown key; did you mean `manifests`?",
        "dataplane.yaml:3:12: listen.metrics: ",
    ])?;
    ensure!(
        !agent.bpffs().exists() || fs::read_dir(agent.bpffs())?.next().is_none(),
        "something is pinned"
    );
    run(&agent, &format!("config check {path}"))?
        .exits(1)?
        .says(&["source.manifest: unknown key"])?;
    Ok(())
}
