//! Names in the practice node: a pod looks up a service and a host outside of the cluster, as pods do, and connects.

use std::{
    fmt, fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use dataplane_tests::{AgentBuilder, Lab, Process, report::Report};

use super::{ENDPOINT_PORT, NODE, SERVICE, captured};
use crate::style;

/// The pod whose DNS queries the agent answers, and its address.
pub const POD: &str = "cart";
pub const ADDRESS: &str = "10.244.2.12";
/// The server outside of the cluster. The ServiceEntry is for this server.
pub const OUTSIDE: &str = "partner";
/// The server's host name.
pub const HOST: &str = "api.partner.example";
/// The service's short name.
pub const SHORT: &str = "httpbin";
/// The pod's resolver. No host has this address.
const RESOLVER: &str = "10.96.0.10";

/// Files that the practice node needs for names.
pub struct Files {
    /// The ServiceEntry, and the pods.
    manifests: PathBuf,
    /// The pod's `resolv.conf`, as the kubelet writes it.
    pub resolv_conf: PathBuf,
    /// The node's `resolv.conf`.
    node: PathBuf,
}

impl Files {
    /// Writes the files. They are removed with the lab.
    pub fn write(lab: &Lab) -> Result<Self> {
        let file = |name: &str, text: String| {
            let path = lab.id().state_dir().join(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            anyhow::Ok(path)
        };
        let partner = lab.external(OUTSIDE).ipv4();
        let manifests = format!(
            "\
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: partner, namespace: default}}
spec:
  hosts: [{HOST}]
  location: MESH_EXTERNAL
  resolution: STATIC
  ports: [{{name: http, number: {ENDPOINT_PORT}, protocol: HTTP}}]
  endpoints: [{{address: {partner}}}]
---
apiVersion: v1
kind: Pod
metadata: {{name: {POD}, namespace: default, labels: {{istio.io/dataplane-mode: ambient}}}}
spec: {{nodeName: {NODE}}}
status: {{podIP: {ADDRESS}}}
---
{}",
            captured::manifest(NODE)
        );
        let resolv_conf = format!(
            "search default.svc.cluster.local svc.cluster.local cluster.local\n\
             nameserver {RESOLVER}\noptions ndots:5\n"
        );
        Ok(Self {
            manifests: file("names.yaml", manifests)?,
            resolv_conf: file("resolv.conf", resolv_conf)?,
            node: file("node-resolv.conf", "# no resolver\n".to_owned())?,
        })
    }

    /// Has the agent answer the pod's DNS queries, and serve the ServiceEntry.
    pub fn for_agent<'a>(&self, agent: AgentBuilder<'a>) -> AgentBuilder<'a> {
        let dns = serde_json::json!({
            "capture": "mesh",
            "clusterDns": [RESOLVER],
            "resolvConf": self.node,
        });
        agent.manifests(&self.manifests).args([
            "--mesh",
            "{rules: {mode: kernel}, proxy: {accessLog: json}}",
            "--dns",
            &dns.to_string(),
        ])
    }
}

/// Starts the server outside of the cluster, which has a route to the pods of the node.
pub fn serve(lab: &Lab) -> Result<Process> {
    let (outside, node) = (lab.external(OUTSIDE), lab.node(NODE).ipv4().to_string());
    let route = outside
        .command("ip")
        .args(["route", "add", "10.244.2.0/24", "via", &node]);
    route
        .run()
        .context("cannot give the server outside a route")?;
    let at = SocketAddr::new(outside.ipv4().into(), ENDPOINT_PORT).to_string();
    Ok(outside.serve(&["--http", &at])?)
}

/// A name that the pod looked up, and the result.
pub struct Lookup {
    name: &'static str,
    /// The address that the C library returned.
    address: Option<Ipv4Addr>,
    /// The name of the server that answered at this address, or the error.
    answer: Result<String, String>,
}

/// Prints one line, without columns.
impl fmt::Display for Lookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.name)?;
        match self.address {
            Some(address) => write!(f, "{address}: ")?,
            None => write!(f, "no address: ")?,
        }
        match &self.answer {
            Ok(endpoint) => write!(f, "reached {endpoint}"),
            Err(error) => f.write_str(error),
        }
    }
}

impl Lookup {
    pub fn is_answered(&self) -> bool {
        self.answer.is_ok()
    }
}

/// Looks up both names in the pod, and connects to the addresses.
pub fn look_up(lab: &Lab, resolv_conf: &Path) -> Result<Vec<Lookup>> {
    let names = [(SHORT, SERVICE.port()), (HOST, ENDPOINT_PORT)];
    names
        .into_iter()
        .map(|(name, port)| one(lab, resolv_conf, name, port))
        .collect()
}

fn one(lab: &Lab, resolv_conf: &Path, name: &'static str, port: u16) -> Result<Lookup> {
    let pod = lab.pod(POD);
    let getent = pod.command("getent").resolv_conf(resolv_conf);
    let output = getent.args(["ahostsv4", name]).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let first = text.split_whitespace().next();
    let Some(address) = first.and_then(|word| word.parse().ok()) else {
        let answer = Err(format!("not found ({})", output.status));
        return Ok(Lookup {
            name,
            address: None,
            answer,
        });
    };
    let to = SocketAddr::new(Ipv4Addr::into(address), port).to_string();
    let probe = pod
        .probe("http")
        .args(["--each", "--timeout-ms", "1000", "--to", &to]);
    let report: Report = probe.json()?;
    let attempt = report.each.into_iter().next().context("no attempt")?;
    let answer = match (attempt.endpoint, attempt.error) {
        (Some(endpoint), None) => Ok(endpoint),
        (_, error) => Err(error.unwrap_or_default()),
    };
    Ok(Lookup {
        name,
        address: Some(address),
        answer,
    })
}

/// Prints the table for people.
pub fn print(lookups: &[Lookup]) {
    let (bold, reset) = (style::BOLD, style::RESET);
    anstream::println!(
        "\nNames in the pod {POD}, whose resolv.conf says nameserver {RESOLVER}. Nobody has this address:\n\
         the agent answers. The node itself gave {HOST} an address in 240.240.0.0/16, which leads to the\n\
         endpoint of its ServiceEntry.\n"
    );
    anstream::println!(
        "{bold}{:<20} {:<15}  {}{reset}",
        "NAME",
        "ADDRESS",
        "REACHED"
    );
    for Lookup {
        name,
        address,
        answer,
    } in lookups
    {
        let address = address.map_or_else(|| "-".to_owned(), |address| address.to_string());
        let answer = match answer {
            Ok(endpoint) => endpoint.clone(),
            Err(error) => format!("{}{error}{reset}", style::ERROR),
        };
        anstream::println!("{name:<20} {address:<15}  {answer}");
    }
}

/// Returns commands for the user to try.
pub fn hints() -> String {
    format!(
        "    cargo xtask lab exec {POD} -- curl http://{SHORT}:{}/\n    \
             cargo xtask lab exec {POD} -- curl http://{HOST}/\n    \
             cargo xtask lab explain default/{POD} {HOST}.:{ENDPOINT_PORT}\n",
        SERVICE.port()
    )
}
