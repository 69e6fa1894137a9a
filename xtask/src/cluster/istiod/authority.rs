//! Asks istiod's certificate authority for certificates, by a test of the agent's client that runs beside it.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, ensure};
use data_encoding::BASE64;
use serde_json::{Value, json};

use super::{NODE, text};
use crate::{
    cluster::{
        Cluster, identity,
        kubectl::eventually,
        place::{CONTROL, control_directory, in_netns},
    },
    command::{cargo, output},
    progress::note,
};

const NAMESPACE: &str = "istio-system";
/// The service account that istiod trusts (`CA_TRUSTED_NODE_ACCOUNTS`), and a Pod of it on [`NODE`].
const TRUSTED: &str = "dataplane";
/// A service account that istiod does not trust.
const OTHER: &str = "other";
const TEST: &str = "the_real_istiod_signs_and_refuses";
/// Requests: a token, the cluster, a service account of the namespace [`PODS`], and a part of the refusal, or `signed`.
const CASES: &[(&str, &str, &str, &str)] = &[
    (TRUSTED, "Kubernetes", "here", "signed"),
    (TRUSTED, "Kubernetes", "elsewhere", IMPERSONATION),
    (TRUSTED, "Kubernetes", "failed", IMPERSONATION),
    (TRUSTED, "Kubernetes", "nobody", IMPERSONATION),
    (TRUSTED, "other", "here", TOKEN),
    (OTHER, "Kubernetes", "here", IMPERSONATION),
    ("unbound", "Kubernetes", "here", IMPERSONATION),
    ("audience", "Kubernetes", "here", TOKEN),
    ("garbage", "Kubernetes", "here", TOKEN),
];
const IMPERSONATION: &str =
    "request impersonation authentication failure (not authenticated); istiod must have";
const TOKEN: &str = "request authenticate failure (not authenticated); istiod must have";
const PODS: &str = "plain";

/// Fails if istiod refuses a request that it should sign, or signs one that it should refuse.
pub fn judge(cluster: &Cluster) -> Result<()> {
    let directory = control_directory().join("authority");
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let write = |name: &str, bytes: &[u8]| {
        let path = directory.join(name);
        fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))
    };
    make_pods(cluster)?;
    for (file, account, audience, pod) in [
        (TRUSTED, TRUSTED, "istio-ca", Some(TRUSTED)),
        (OTHER, OTHER, "istio-ca", Some(OTHER)),
        ("unbound", TRUSTED, "istio-ca", None),
        ("audience", TRUSTED, "elsewhere", Some(TRUSTED)),
    ] {
        let mut words = vec![
            "create",
            "token",
            account,
            "-n",
            NAMESPACE,
            "--audience",
            audience,
        ];
        if let Some(pod) = pod {
            words.extend(["--bound-object-kind", "Pod", "--bound-object-name", pod]);
        }
        write(file, cluster.kubectl.run(&words)?.as_bytes())?;
    }
    write("garbage", b"garbage")?;
    let secret = ["-n", NAMESPACE, "secret", "istio-ca-secret"];
    let secret = eventually(Duration::from_mins(1), || cluster.kubectl.get(&secret))?;
    let root = text(&secret["data"]["ca-cert.pem"]);
    write("root.crt", &BASE64.decode(root.as_bytes())?)?;
    let cases = CASES.iter().map(|(token, name, account, wanted)| {
        format!("{token} {name} spiffe://cluster.local/ns/{PODS}/sa/{account} = {wanted}\n")
    });
    write("cases", cases.collect::<String>().as_bytes())?;

    let cargo = cargo();
    let mut test = in_netns(CONTROL, cargo.get_program());
    test.current_dir(crate::workspace::root())
        .args([
            "test",
            "--offline",
            "--package=dataplane-identity",
            "--lib",
            TEST,
        ])
        .args(["--", "--nocapture"])
        .env("DATAPLANE_ISTIO_CA", &directory);
    for (name, value) in cargo.get_envs() {
        if value.is_none() {
            test.env_remove(name);
        }
    }
    let printed = output(&mut test)?;
    let count = format!("{} requests", CASES.len());
    ensure!(printed.contains(&count), "{TEST} did not run: {printed}");
    note(&format!(
        "istiod's authority: {count} of the agent's client, as expected; its log: {}",
        identity::file("istiod.log").display()
    ));
    Ok(())
}

/// Makes the Pods of the service accounts.
fn make_pods(cluster: &Cluster) -> Result<()> {
    let pods = [
        (NAMESPACE, TRUSTED, NODE, "Running"),
        (NAMESPACE, OTHER, NODE, "Running"),
        (PODS, "here", NODE, "Running"),
        (PODS, "elsewhere", "n2", "Running"),
        (PODS, "failed", NODE, "Failed"),
    ];
    let list = |items: Vec<Value>| json!({ "apiVersion": "v1", "kind": "List", "items": items });
    let metadata = |namespace, name| json!({ "namespace": namespace, "name": name });
    let accounts = pods.map(|(namespace, name, ..)| {
        json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(namespace, name) })
    });
    let pods = pods.map(|(namespace, name, node, phase)| {
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": metadata(namespace, name),
            "spec": {
                "nodeName": node, "serviceAccountName": name,
                "containers": [{ "name": "main", "image": "none" }],
            },
            "status": { "phase": phase },
        })
    });
    let pods = list(pods.into());
    cluster.kubectl.apply(&list(accounts.into()))?;
    cluster.kubectl.apply(&pods)?;
    let status = [
        "apply",
        "--server-side",
        "--force-conflicts",
        "-f",
        "-",
        "--subresource=status",
    ];
    cluster.kubectl.feed(&status, &pods.to_string()).map(drop)
}
