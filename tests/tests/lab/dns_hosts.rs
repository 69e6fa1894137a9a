//! Hosts of ServiceEntries by name: a client that knows nothing but the name reaches the entry's endpoints.

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::Process;
use serde_json::{Value, json};

use crate::{
    cluster::{TCP, eventually},
    dns_world::World,
};

scenarios! {
    Dataplane:
    hosts_of_entries_are_reached_by_name,
}

/// The port of both databases.
const PORT: u16 = 5432;

/// A database of a namespace, with further fields.
pub fn database(namespace: &str, name: &str, more: &str, endpoint: &str) -> String {
    format!(
        "---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: {name}, namespace: {namespace}}}
spec:
  hosts: [{name}.db.example.com]
  resolution: STATIC{more}
  ports: [{{name: sql, number: {PORT}, protocol: TCP, targetPort: {TCP}}}]
  endpoints: [{{address: {endpoint}}}]
"
    )
}

/// The hosts, and the pods that answer for them.
const DATABASES: [(&str, &str); 2] = [
    ("orders.db.example.com", "upstream"),
    ("users.db.example.com", "other"),
];

fn serve(world: &World) -> Result<Vec<Process>> {
    let mut servers = Vec::new();
    for (_, pod) in DATABASES {
        let pod = world.lab.pod(pod);
        let at = format!("{}:{TCP}", pod.ipv4());
        servers.push(pod.serve(&["--tcp", &at])?);
    }
    Ok(servers)
}

fn hosts_of_entries_are_reached_by_name() -> Result<()> {
    let entries = [
        database("shop", "orders", "", "10.244.1.11"),
        database("other", "users", "", "10.244.1.12"),
        // A fault that `dns query` names.
        database("shop", "wrong", "\n  exportTo: [.]", "127.0.0.1"),
        // The namespace exports this one to itself only.
        database("other", "hidden", "\n  exportTo: [.]", "10.244.1.12"),
    ];
    let world = World::start(&json!({}), |text| text + &entries.concat())?;
    let _servers = serve(&world)?;
    let mut given = Vec::new();
    for (host, pod) in DATABASES {
        eventually(|| world.getent(host).map(drop))?;
        let found = world.getent(host)?;
        let vip = found.split_whitespace().next().context("nothing found")?;
        // The endpoint has IPv4 only, and so has the host.
        ensure!(
            vip.starts_with("240.240.") && !found.contains("2001:2:"),
            "{host}: {found}"
        );
        let told = world.told(&format!("@10.96.0.53 {host}. A"))?;
        let record = format!("{host}. 30 IN A {vip}");
        ensure!(
            told.lines()
                .any(|line| line.split_whitespace().eq(record.split(' '))),
            "{told}"
        );
        ensure!(told.contains("flags: qr aa"), "{told}");
        // Of a program that looks up the name by itself, at the port that both hosts have.
        let script = format!("exec 3<>/dev/tcp/{host}/{PORT} && read -r -u 3 line && echo $line");
        let greeting = world.with_resolv_conf(&["bash", "-c", &script])?;
        ensure!(
            greeting.starts_with(&format!("{pod} ")),
            "{host}: {greeting}"
        );
        given.push(vip.to_owned());
    }
    ensure!(given[0] != given[1], "{given:?}");
    // A namespace that does not see the entry does not get it, and a pod that is not captured does not either.
    for name in ["hidden.db.example.com.", "none.db.example.com."] {
        let told = world.told(&format!("@10.96.0.53 {name}"))?;
        ensure!(told.contains("status: NXDOMAIN"), "{told}");
    }
    let other = world.lab.pod("upstream").command("dig");
    let other = other
        .args(["@10.96.0.53", "orders.db.example.com."])
        .run()?;
    ensure!(other.contains("status: NXDOMAIN"), "{other}");
    // The resolver knows no mail exchanger, and not even the host; but the host exists.
    let told = world.told("@10.96.0.53 orders.db.example.com. MX")?;
    ensure!(
        told.contains("status: NOERROR") && told.contains("ANSWER: 0"),
        "{told}"
    );
    let query = |name: &str| -> Result<Value> {
        let query = world.agent.dataplane(["dns", "query", name, "-o", "json"]);
        let args = ["--from", "shop/app", "--node-name", "node1", "--manifests"];
        let mut query = query.args(args).arg(world.manifests());
        query = query.arg("--resolv-conf").arg(world.resolv_conf());
        Ok(query.json()?)
    };
    let told = query("orders.db.example.com.")?;
    let last = told["steps"].as_array().and_then(|steps| steps.last());
    let last = last.context("no step")?;
    ensure!(
        last["rule"] == "service-entry"
            && last["object"] == "ServiceEntry shop/orders, host orders.db.example.com"
            && last["records"][0]
                .as_str()
                .is_some_and(|record| record.ends_with(&given[0])),
        "{told}"
    );
    let problem = told["problems"][0].as_str().unwrap_or_default();
    ensure!(problem.contains("ServiceEntry shop/wrong: "), "{told}");
    Ok(())
}
