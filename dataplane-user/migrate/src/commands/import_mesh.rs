//! `dataplane-migrate import-mesh`.

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use settings::{
    Dns, DnsCapture, DnsDestinations, Mesh, MeshProxy, MeshRules, Range, Settings, config,
};
use terminal::output;

use super::WhereArgs;
use crate::rules::{
    capture::{self, AMBIENT, Capture},
    collect,
    ruleset::{Form, Text},
};

/// Print the configuration that captures the same connections as a mesh's rules in a pod.
///
/// Reads the rules of Istio's sidecar or ambient mode, or of Open Service Mesh, and prints `mesh` of the configuration file, and
/// `dns` if DNS queries are captured. The agent's proxy takes the sidecar's place. A rule that the configuration cannot express
/// is an error with its line. Changes nothing.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane-migrate import-mesh --netns pid:4711     a pod's rules
  dataplane-migrate import-mesh --file saved.txt     rules that iptables-save printed in the pod")]
pub struct ImportMeshArgs {
    #[command(flatten)]
    place: WhereArgs,

    /// Read rules from this file in place of the kernel's: output of iptables-save and ip6tables-save, or of nft list ruleset.
    /// With --netns, the network namespace's routes are read as well
    #[arg(long, value_name = "FILE", conflicts_with = "host_root")]
    file: Option<PathBuf>,
}

impl ImportMeshArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let capture = if let Some(path) = &self.file {
            let text = fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            let origin = path.display().to_string();
            let capture = capture::read(&[Text {
                origin: &origin,
                form: Form::of(&text),
                text: &text,
            }]);
            capture.map_err(|fault| anyhow!("{fault}"))?
        } else {
            let namespace = self.place.namespace()?;
            let root = self.place.host_root.as_deref();
            let capture = namespace.inside(|| Ok(of_namespace(root)));
            capture.with_context(|| format!("cannot look into {namespace}"))??
        };
        let has_namespace = self.file.is_none() || self.place.netns.is_some();
        let ways = if capture.at_interfaces.is_empty() || !has_namespace {
            None
        } else {
            let namespace = self.place.namespace()?;
            let ways = namespace.inside(|| kernel::routing::ways_out().map_err(io::Error::other));
            ways.with_context(|| format!("cannot look into {namespace}"))?
        };
        let capture = capture.by_routes(ways.as_deref());
        let capture = capture.map_err(|fault| anyhow!("{fault}"))?;
        let settings = settings(&capture);
        let faults = settings.mesh.as_ref().map(Mesh::faults);
        if let Some((key, text)) = faults.unwrap_or_default().first() {
            bail!("{key}: {text}");
        }
        let mut out = output::stdout();
        for note in notes(&capture) {
            writeln!(out, "# {note}")?;
        }
        write!(out, "{}", config::to_yaml(&settings))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Determines the connections that all rules in the network namespace of this thread capture.
///
/// # Errors
/// If some rules cannot be read, or [`capture::read`] fails.
pub(crate) fn of_namespace(root: Option<&Path>) -> anyhow::Result<Capture> {
    let collected = collect::all(root)?;
    if !collected.missing.is_empty() {
        bail!("{}", collected.missing.join("\n"));
    }
    let texts = collected.texts.iter().map(collect::Printed::as_text);
    let capture = capture::read(&texts.collect::<Vec<_>>());
    capture.map_err(|fault| anyhow!("{fault}"))
}

/// Returns the configuration that captures these connections.
pub(crate) fn settings(capture: &Capture) -> Settings {
    let ranges = |ranges: &std::collections::BTreeSet<ipnet::IpNet>| -> Vec<Range> {
        ranges.iter().copied().map(Range).collect()
    };
    let ports = |ports: &std::collections::BTreeSet<u16>| ports.iter().copied().collect();
    if !capture.captures_something() {
        let mut mesh = Mesh::default();
        mesh.rules.captured = Some(false);
        return Settings {
            mesh: Some(mesh),
            ..Settings::default()
        };
    }
    let defaults = (15001, 15006);
    let mesh = Mesh {
        proxy: MeshProxy {
            outbound: Some(capture.outbound).filter(|port| *port != defaults.0),
            inbound: Some(capture.inbound)
                .filter(|port| capture.takes_inbound && *port != defaults.1),
            ..MeshProxy::default()
        },
        rules: MeshRules {
            captured: Some(true),
            inbound: (!capture.takes_inbound).then_some(false),
            include_outbound_ip_ranges: ranges(&capture.include_ranges),
            exclude_outbound_ip_ranges: ranges(&capture.exclude_ranges),
            include_outbound_ports: ports(&capture.include_ports),
            exclude_outbound_ports: ports(&capture.exclude_ports),
            include_inbound_ports: ports(&capture.include_inbound),
            exclude_inbound_ports: ports(&capture.exclude_inbound),
            include_uids: capture.include_uids.iter().copied().collect(),
            include_gids: capture.include_gids.iter().copied().collect(),
            exclude_uids: capture.uids.iter().copied().collect(),
            exclude_gids: capture.gids.iter().copied().collect(),
            exclude_interfaces: capture.exclude_interfaces.iter().cloned().collect(),
            virtual_interfaces: capture.virtual_interfaces.iter().cloned().collect(),
            ..MeshRules::default()
        },
        ..Mesh::default()
    };
    let dns = capture.dns.map(|dns| Dns {
        capture: Some(DnsCapture::Mesh),
        destinations: dns.any.then_some(DnsDestinations::Any),
        port: Some(dns.port).filter(|port| *port != 15053),
        ..Dns::default()
    });
    Settings {
        mesh: Some(mesh),
        dns,
        ..Settings::default()
    }
}

/// Returns comments on rules that concern only the sidecar. The configuration omits these rules.
fn notes(capture: &Capture) -> Vec<String> {
    let place = if capture.owner == AMBIENT {
        "ztunnel's place, so remove the pod from ambient mode"
    } else {
        "the sidecar's place: remove the sidecar from the pod, or keep it and set mesh.proxy.uid to its user"
    };
    let mut notes = vec![format!(
        "By the rules of {}. The agent's proxy takes {place}.",
        capture.owner
    )];
    if !capture.captures_something() {
        notes.push("The rules capture no connection.".to_owned());
        return notes;
    }
    if capture.by_tproxy {
        notes.push(
            "The rules capture inbound connections by TPROXY. The application sees the client's address, as it does with the \
             agent's proxy (mesh.proxy.keepSource)."
                .to_owned(),
        );
    }
    if capture.drops_invalid {
        notes.push(
            "Left out: the rule that drops packets which conntrack calls invalid. The agent captures without conntrack."
                .to_owned(),
        );
    }
    if !capture.probes.is_empty() {
        let sources: Vec<String> = capture.probes.iter().map(ToString::to_string).collect();
        notes.push(format!(
            "Left out: probes of the kubelet, from {}, are not captured by the rules. The agent's proxy relays them.",
            sources.join(", ")
        ));
    }
    if !capture.own_ports.is_empty() {
        let ports: Vec<String> = capture.own_ports.iter().map(u16::to_string).collect();
        notes.push(format!(
            "Left out: ports {} are the mesh's own.",
            ports.join(", ")
        ));
    }
    if !capture.reached_by.is_empty() {
        let names: Vec<&str> = capture.reached_by.iter().map(String::as_str).collect();
        notes.push(format!(
            "The excluded ranges have what is reached by {} now: the rules leave these connections alone.",
            names.join(", ")
        ));
    }
    if !capture.resolvers.is_empty() {
        let servers: Vec<String> = capture.resolvers.iter().map(ToString::to_string).collect();
        notes.push(format!(
            "DNS queries to the pod's resolvers are captured. The rules name {}.",
            servers.join(", ")
        ));
    }
    let loops = |net: &ipnet::IpNet| net.addr().is_loopback();
    notes.push(if capture.include_ranges.iter().any(loops) {
        "Connections of the pod to itself are not captured, and of loopback only the ranges that are named.".to_owned()
    } else {
        "Connections of the pod to itself and to loopback are not captured.".to_owned()
    });
    if let Some(family) = capture.missing {
        notes.push(format!(
            "{family} has no rules. Rules for ports apply to both families."
        ));
    }
    notes
}
