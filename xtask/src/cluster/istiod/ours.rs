//! The dataplane's side of the comparison: its plan and DNS answers, by `dataplane plan` and `dataplane dns query`.

use std::{collections::BTreeSet, net::IpAddr, path::Path, process::Command};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::{NODE, compare::Side, hosts, list, text};
use crate::{
    cluster::place::{CONTROL, control_directory, in_netns},
    command::shown,
};

/// Reads the plan for [`NODE`] of the objects in this file, and the addresses of their hosts. A Pod of its namespace
/// asks for each host. Also returns the problems in the plan.
pub fn read(dataplane: &Path, objects: &Value, file: &Path) -> Result<(Side, Vec<String>)> {
    let command = |words: &[&str]| {
        let mut command = in_netns(CONTROL, dataplane);
        let node = ["--node-name", NODE, "--output=json", "--manifests"];
        command.args(words).args(node).arg(file);
        command
    };
    let mut side = Side::default();
    // There are no tables, so the plan contains everything that is served.
    let plan = ask(command(&["plan"]).arg("--bpffs").arg(control_directory()))?;
    for change in list(&plan["changes"]) {
        let (key, owner, after) = (
            text(&change["key"]),
            text(&change["service"]),
            &change["after"],
        );
        let Ok(vip) = key.trim_end_matches("/tcp").parse() else {
            continue;
        };
        // istiod sends ztunnels only cluster IPs and addresses of entries.
        if after["kind"] != "ClusterIP" && !owner.contains("/serviceentry:") {
            continue;
        }
        let endpoints: Vec<_> = list(&after["endpoints"])
            .map(|at| text(at).parse())
            .collect::<Result<_, _>>()?;
        let equal = 1.0 / f64::from(u32::try_from(endpoints.len().max(1))?);
        let mut parts = list(&after["parts"]).map(|part| part.as_f64().unwrap_or_default());
        let endpoints = endpoints
            .into_iter()
            .map(|at| (at, parts.next().unwrap_or(equal)));
        side.add(vip, &owner, endpoints.collect());
    }
    let pods = || {
        list(&objects["items"])
            .filter(|of| of["kind"] == "Pod" && of["status"]["phase"] == "Running")
    };
    for host in list(&objects["items"]).flat_map(hosts) {
        let (namespace, name) = host.split_once('/').context("NAMESPACE/HOST")?;
        let pod = pods().find(|of| of["metadata"]["namespace"] == namespace);
        let mut found = BTreeSet::new();
        for of_type in ["A", "AAAA"] {
            let mut command = command(&["dns", "query", &format!("{name}."), "--type", of_type]);
            if let Some(pod) = pod {
                command
                    .arg("--from")
                    .arg(format!("{namespace}/{}", text(&pod["metadata"]["name"])));
            }
            for step in list(&ask(&mut command)?["steps"]) {
                let addresses = list(&step["addresses"]).map(|at| text(at).parse::<IpAddr>());
                found.extend(addresses.collect::<Result<Vec<_>, _>>()?);
            }
        }
        side.names.insert(host, found);
    }
    Ok((side, list(&plan["problems"]).map(text).collect()))
}

/// Returns the JSON document that the command prints. Ignores the exit code, which has no more information: `plan`
/// exits with 2 if something changes, `dns query` with 1 if a name does not exist.
fn ask(command: &mut Command) -> Result<Value> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {}", shown(command)))?;
    serde_json::from_slice(&output.stdout).with_context(|| {
        format!(
            "{}: {}",
            shown(command),
            String::from_utf8_lossy(&output.stderr).trim()
        )
    })
}
