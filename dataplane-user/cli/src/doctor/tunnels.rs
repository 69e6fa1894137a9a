//! NetworkPolicies that keep tunnels from enrolled Pods.

use std::{
    fs,
    io::{self, Read as _, Write},
    path::Path,
};

use anyhow::Context as _;
use model::HBONE;
use serde_json::Value;
use settings::{Enrols, Mesh};
use source::network_policies::{Blocking, blocking};

/// The purpose of the port.
pub const NEEDED_FOR: &str = "mesh: tunnels (HBONE)";
/// The effect of a policy without it.
pub const WITHOUT: &str = "clients that tunnel connections cannot reach the Pods: agents with mesh.identity, and Istio's \
     components";
/// The largest number of Pods that a line names.
const NAMED: usize = 5;

/// Reads a list of objects, and returns the policies that keep tunnels out. `mesh`: the configuration, which may enrol Pods.
pub fn read(file: &Path, mesh: Option<&Mesh>) -> anyhow::Result<Vec<Blocking>> {
    let what = || format!("cannot read {}", file.display());
    let text = if file == Path::new("-") {
        let mut text = String::new();
        let read = io::stdin().read_to_string(&mut text);
        read.map(|_| text)
    } else {
        fs::read_to_string(file)
    };
    let list: Value = serde_json::from_str(&text.with_context(what)?).with_context(what)?;
    let configured = |namespace: &str, pod: &str| {
        let enrols = mesh.map_or_else(Enrols::default, |mesh| mesh.enrols(namespace, pod));
        [enrols.enforced, enrols.without_label]
    };
    blocking(&list, &configured)
        .map_err(anyhow::Error::msg)
        .with_context(what)
}

/// Returns a policy's name, the Pods, and the command that lets tunnels in.
pub fn texts(of: &Blocking) -> [String; 3] {
    let (namespace, name) = (&of.namespace, &of.name);
    let named: Vec<&str> = of.pods.iter().take(NAMED).map(String::as_str).collect();
    let more = match of.pods.len() - named.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    [
        format!("NetworkPolicy {namespace}/{name}"),
        format!(
            "lets clients in, but not to TCP port {HBONE} of enrolled Pods: {}{more}",
            named.join(", ")
        ),
        format!(
            "kubectl patch networkpolicy {name} -n {namespace} --type=json -p '{}'",
            of.patch
        ),
    ]
}

/// Writes the policies, each with its remedy.
pub fn text(out: &mut dyn Write, file: &Path, policies: &[Blocking]) -> io::Result<()> {
    writeln!(out)?;
    if policies.is_empty() {
        let file = file.display();
        return writeln!(
            out,
            "No NetworkPolicy in {file} keeps tunnels from enrolled Pods."
        );
    }
    writeln!(
        out,
        "Do not apply these patches unless agents with mesh.identity or Istio components tunnel to these Pods. A patch opens all ports of the Pod to tunnels."
    )?;
    for policy in policies {
        let [name, detail, patch] = texts(policy);
        writeln!(out, "{name} {detail}\n  {patch}")?;
    }
    writeln!(out, "Without these rules, {WITHOUT}.")
}
