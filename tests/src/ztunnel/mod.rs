//! Istio's ztunnel in a Pod's network namespace, in its mode for one workload, and the authority that it asks for certificates.

mod authority;

use std::path::Path;

use serde_json::{Value, json};

pub use self::authority::{issue, serve};
use crate::{
    command::Command,
    error::Result,
    lab::{Host, Lab},
};

/// The mark of ztunnel's own packets, and of the connections to applications that it makes from clients' addresses.
const MARK: &str = "1337";
const CONNECTION_MARK: &str = "273";

/// Has connections of a Pod go to its ztunnel, by the rules of Istio's CNI plug-in.
///
/// # Errors
/// When iptables or ip refuses.
pub fn redirect(host: &Host) -> Result<()> {
    let run = |program: &str, line: &str| -> Result<()> {
        host.command(program)
            .args(line.split_whitespace())
            .run()
            .map(drop)
    };
    for (tables, family) in [("iptables", "-4"), ("ip6tables", "-6")] {
        for rule in [
            format!(
                "-w -t mangle -A PREROUTING -m mark --mark {MARK} -j CONNMARK --set-mark {CONNECTION_MARK}"
            ),
            format!(
                "-w -t mangle -A OUTPUT -m connmark --mark {CONNECTION_MARK} -j CONNMARK --restore-mark"
            ),
            format!(
                "-w -t nat -A OUTPUT -p tcp ! -o lo -m mark ! --mark {MARK} -m connmark ! --mark {CONNECTION_MARK} -j REDIRECT --to-ports 15001"
            ),
        ] {
            run(tables, &rule)?;
        }
        run(
            "ip",
            &format!("{family} rule add fwmark {CONNECTION_MARK} lookup 100"),
        )?;
        run(
            "ip",
            &format!("{family} route add local default dev lo table 100"),
        )?;
    }
    Ok(())
}

/// A Pod that speaks HBONE, in the form of ztunnel's `LOCAL_XDS_PATH`.
pub fn workload(of: &Host) -> Value {
    json!({
        "uid": of.name(),
        "name": of.name(),
        "namespace": "default",
        "trustDomain": "cluster.local",
        "serviceAccount": of.name(),
        "workloadIps": of.addresses(),
        "protocol": "HBONE",
        "node": of.node(),
        "network": "",
        "services": {},
    })
}

/// A Pod that speaks HBONE, as Kubernetes has it, for the agent.
pub fn pod(of: &Host) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": of.name(),
            "namespace": "default",
            "labels": { "istio.io/dataplane-mode": "ambient" },
            "annotations": { "ambient.istio.io/redirection": "enabled" },
        },
        "spec": {
            "nodeName": of.node(),
            "serviceAccountName": of.name(),
            "containers": [],
        },
        "status": {
            "phase": "Running",
            "podIPs": of.addresses().map(|ip| json!({ "ip": ip })),
        },
    })
}

/// Makes the root of an authority in `directory`, for the agent and for [`serve`].
///
/// # Errors
/// When `dataplane` is not built, or the directory cannot be made.
pub fn init(lab: &Lab, directory: &Path) -> Result<()> {
    let host = lab.hosts().first().expect("a lab has hosts");
    let init = host
        .command(lab.programs().dataplane()?)
        .args(["ca", "init"]);
    init.arg(directory).run().map(drop)
}

/// The program ztunnel for a Pod. `xds`: the file with its configuration; `authority`: the directory of [`serve`].
pub fn command(program: &Path, host: &Host, xds: &Path, authority: &Path) -> Command {
    let name = host.name();
    host.command(program)
        .env("PROXY_MODE", "dedicated")
        .env("PROXY_WORKLOAD_INFO", format!("default/{name}/{name}"))
        .env("LOCAL_XDS_PATH", xds)
        .env("XDS_ADDRESS", "")
        .env("CA_ADDRESS", "https://127.0.0.1:15012")
        .env("CA_ROOT_CA", authority.join("ca.crt"))
        .env("NODE_NAME", host.node().unwrap_or_default())
        .env("PACKET_MARK", MARK)
}
