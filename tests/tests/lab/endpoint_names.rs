//! ServiceEntries whose endpoints are DNS names: the agent looks the names up, and connections follow.

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::report::LoadReport;
use serde_json::{Value, json};

use crate::{
    cluster::{TCP, ask, eventually},
    dns::unbound,
    dns_world::World,
    outcome::run,
};

scenarios! {
    Dataplane:
    connections_follow_the_name_of_an_endpoint,
}

const PORT: u16 = 5432;
const HOST: &str = "ledger.example.org";

/// A host that is its own endpoint, and one whose endpoint has a name.
fn entries() -> String {
    format!(
        "---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: ledger, namespace: shop}}
spec:
  hosts: [{HOST}]
  resolution: DNS
  ports: [{{name: sql, number: {PORT}, protocol: TCP, targetPort: {TCP}}}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: alias, namespace: shop}}
spec:
  hosts: [alias.example.net]
  resolution: DNS_ROUND_ROBIN
  ports: [{{name: sql, number: {PORT}, protocol: TCP, targetPort: {TCP}}}]
  endpoints: [{{address: Alias.example.org}}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: metadata, namespace: shop}}
spec:
  hosts: [metadata.example.org]
  resolution: DNS
  ports: [{{name: http, number: 80, protocol: TCP}}]
"
    )
}

/// The resolver's records: the host and an alias at an address, and a name with the address of the cloud's metadata.
fn records(address: &str) -> String {
    format!(
        " local-data: '{HOST}. 1 IN A {address}'\n local-data: 'alias.example.org. 1 IN A {address}'\n \
         local-data: 'metadata.example.org. 1 IN A 169.254.169.254'\n"
    )
}

/// Returns the endpoints of an entry, from `services`.
fn endpoints(world: &World, name: &str) -> Result<Vec<String>> {
    let services = run(
        &world.agent,
        &format!("services serviceentry:{name} -o json"),
    )?
    .json()?;
    let endpoints = services[0]["ports"][0]["endpoints"]
        .as_array()
        .context("no list")?;
    let address = |endpoint: &Value| Some(endpoint["address"].as_str()?.to_owned());
    Ok(endpoints.iter().filter_map(address).collect())
}

fn connections_follow_the_name_of_an_endpoint() -> Result<()> {
    let (first, second) = ("10.244.1.11", "10.244.1.12");
    let mut world = World::start_with(
        &json!({ "rules": {} }),
        |text| text + &entries(),
        &records(first),
        None,
    )?;
    let mut servers = Vec::new();
    for pod in ["upstream", "other"] {
        let pod = world.lab.pod(pod);
        servers.push(pod.serve(&["--tcp", &format!("{}:{TCP}", pod.ipv4())])?);
    }
    let greets = |world: &World, host: &str, pod: &str| -> Result<()> {
        let found = world.getent(host)?;
        let vip = found.split_whitespace().next().context("nothing found")?;
        ensure!(vip.starts_with("240.240."), "{host}: {found}");
        let report = ask(world.app(), &format!("{vip}:{PORT}"), "connect")?;
        ensure!(report.endpoints.keys().eq([pod]), "{host}: {report:?}");
        Ok(())
    };
    eventually(|| greets(&world, HOST, "upstream"))?;
    eventually(|| greets(&world, "alias.example.net", "upstream"))?;
    // A resolver's answer does not lead to the cloud's metadata.
    let says = |words: &[&str]| run(&world.agent, "status")?.says(words).map(drop);
    eventually(|| {
        says(&[
            "ServiceEntry shop/metadata",
            "169.254.169.254",
            "a link-local address",
        ])
    })?;
    let none = endpoints(&world, "metadata")?;
    ensure!(none.is_empty(), "{none:?}");

    // From here on, no connection fails: while the name's address changes, while no resolver answers, and while another agent
    // takes over.
    let found = world.getent(HOST)?;
    let vip = found.split_whitespace().next().context("nothing found")?;
    let load = world
        .app()
        .probe("load")
        .args(["--to", &format!("{vip}:{PORT}")]);
    let load = load.args(["--until-stdin-closes", "--pause-us", "5000"]);
    let mut load = load.stdin_piped().stdout_piped().spawn()?;
    load.wait_for_line()?;
    world.unbound.kill();
    let directory = tempfile::tempdir()?;
    world.unbound = unbound(
        world.lab.pod("upstream"),
        directory.path(),
        &records(second),
    )?;
    for host in [HOST, "alias.example.net"] {
        eventually(|| greets(&world, host, "other"))?;
    }
    world.unbound.kill();
    eventually(|| {
        let words = [
            "ServiceEntry shop/ledger",
            "its last addresses stay endpoints",
        ];
        run(&world.agent, "status")?.says(&words).map(drop)
    })?;
    greets(&world, HOST, "other")?;
    let before = world.agent.replace()?;
    drop(before);
    world.agent.kill();
    world.agent.start()?;
    greets(&world, HOST, "other")?;
    let report: LoadReport = load.wait_json()?;
    println!("{} connections", report.answered);
    ensure!(report.answered > 500, "{report:?}");
    ensure!(report.errors.is_empty(), "{report:?}");
    Ok(())
}
