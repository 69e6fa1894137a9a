//! `dataplane doctor`.

mod tunnels;

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use admin::api::PodCgroups;
use agent::roles::Role;
use clap::Args;
use dns::ResolvConf;
use kernel::{
    probe::{self, Feature},
    sockets::{own_elsewhere, pod_cgroups},
};
use serde::Serialize;
use settings::{Mesh, Settings};
use takeover::path;
use terminal::{
    PathArgs,
    output::{self, BAD, Cell, DIM, Format, GOOD, Table, WARN},
};

/// Show which features this machine has and lacks for the dataplane.
///
/// Tests every feature; does not rely on the kernel's version. Exits with 1 if a required feature
/// is missing.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,

    /// Also name the NetworkPolicies that keep tunnels (HBONE, port 15008) from enrolled Pods: of the objects in this file,
    /// as `kubectl get networkpolicies,pods,namespaces -A -o json` prints them; `-` is standard input. With --config, Pods that
    /// the agent's configuration enrols count, too
    #[arg(long, value_name = "FILE")]
    network_policies: Option<PathBuf>,

    #[command(flatten)]
    paths: PathArgs,

    /// The configuration file's `mesh:`.
    #[arg(skip)]
    mesh: Option<Box<Mesh>>,
}

/// The remedy if programs do not see sockets that they should see.
const WIDER_CGROUP: &str = "set kernel.cgroup (--cgroup, DATAPLANE_CGROUP) to a cgroup that holds all pods and, with a \
     mesh, the agent; best the root of the cgroup v2 hierarchy";

#[derive(Serialize)]
struct Row<'a> {
    feature: &'a str,
    needed_for: &'a str,
    required: bool,
    present: bool,
    without: &'a str,
    detail: &'a str,
    remedy: &'a str,
}

impl DoctorArgs {
    pub(super) fn fill_from(&mut self, file: &Settings) {
        self.paths.fill_from(file);
        self.mesh = file.mesh.clone().map(Box::new);
    }

    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let file = self.network_policies.as_deref();
        let policies = file.map(|file| tunnels::read(file, self.mesh.as_deref()));
        let policies = policies.transpose()?.unwrap_or_default();
        let mut features = probe::features(&self.paths.or_guess());
        features.push(fast_path(&self.paths.bpffs()));
        features.push(pods(&self.paths.or_guess()));
        features.push(agent(&self.paths.or_guess()));
        features.push(resolvers());
        features.extend(guard(&self.paths.or_guess()));
        let mut out = output::stdout();
        match self.output {
            Format::Json => {
                let policies: Vec<[String; 3]> = policies.iter().map(tunnels::texts).collect();
                let rows: Vec<Row<'_>> = features
                    .iter()
                    .map(|f| Row {
                        feature: f.name,
                        needed_for: f.needed_for,
                        required: f.required,
                        present: f.present,
                        without: &f.without,
                        detail: &f.detail,
                        remedy: f.remedy,
                    })
                    .chain(policies.iter().map(|[policy, detail, patch]| Row {
                        feature: policy,
                        needed_for: tunnels::NEEDED_FOR,
                        required: false,
                        present: false,
                        without: tunnels::WITHOUT,
                        detail,
                        remedy: patch,
                    }))
                    .collect();
                output::json(&mut out, &rows)?;
            }
            Format::Text => {
                text(&mut out, &features)?;
                if let Some(file) = &self.network_policies {
                    tunnels::text(&mut out, file, &policies)?;
                }
            }
        }
        let missing = features.iter().any(|f| f.required && !f.present);
        Ok(if missing {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        })
    }
}

/// Checks that packets of services may take the fast path: with `packets.path: auto` rules of others decide.
fn fast_path(bpffs: &Path) -> Feature {
    let (present, detail) = match path::look(bpffs) {
        Ok(None) => (true, "no rules of others must see packets".to_owned()),
        Ok(Some(because)) => (false, because),
        Err(error) => (false, error.to_string()),
    };
    Feature {
        name: "fast path",
        needed_for: "speed of services by packets",
        present,
        required: false,
        without: "packets of services go through the stack (packets.path: auto)".into(),
        detail,
        remedy: "nothing, if these rules must see packets of services; otherwise remove the rules, or set packets.path: \
                 fast (--packet-path fast)",
    }
}

/// Checks that the pods of this node are in the cgroup to which the programs are attached.
fn pods(paths: &kernel::Paths) -> Feature {
    let found = kernel::interfaces::interfaces().and_then(|all| {
        let pods = all.iter().filter(|i| i.up && Role::of(i) == Role::Pod);
        pod_cgroups(&paths.cgroup, &pods.map(|i| i.index).collect())
    });
    let (present, detail) = match found {
        Ok(found) => {
            let detail = format!(
                "{} pods are in {}, {} in other cgroups, {} not seen",
                found.inside,
                paths.cgroup.display(),
                found.outside,
                found.unknown
            );
            let others = found.others.iter().take(PodCgroups::NAMED);
            let others: Vec<_> = others.map(|path| path.display().to_string()).collect();
            let others = if others.is_empty() {
                String::new()
            } else {
                format!(": {}", others.join(", "))
            };
            (found.outside == 0, detail + &others)
        }
        Err(error) => (false, error.to_string()),
    };
    Feature {
        name: "pods in the cgroup",
        needed_for: "services at pods' sockets",
        present,
        required: false,
        without: "only the packet path serves pods in other cgroups".into(),
        detail,
        remedy: WIDER_CGROUP,
    }
}

/// Checks that an agent that is started like this process is in the cgroup to which the programs are attached.
fn agent(paths: &kernel::Paths) -> Feature {
    let cgroup = paths.cgroup.display();
    let (present, detail) = match own_elsewhere(&paths.cgroup) {
        Ok(None) => (true, format!("sockets made here are in {cgroup}")),
        Ok(Some(elsewhere)) => {
            let own = elsewhere.own.map_or_else(
                || "a cgroup that is not mounted here".into(),
                |own| own.display().to_string(),
            );
            let detail = format!("sockets made here are in {own}, which is outside of {cgroup}");
            (false, detail)
        }
        Err(error) => (false, error.to_string()),
    };
    Feature {
        name: "agent in the cgroup",
        needed_for: "mesh: the agent's proxy",
        present,
        required: false,
        without: "with a mesh, an agent that is started like this resets the connections that captured pods open".into(),
        detail,
        remedy: WIDER_CGROUP,
    }
}

/// Names the guard of `dataplane guard` if it stands: pods' connections are refused until an agent has taken over.
fn guard(paths: &kernel::Paths) -> Option<Feature> {
    let detail = match kernel::boot::stands(&paths.bpffs) {
        Ok(false) => return None,
        Ok(true) => match kernel::writer(&paths.bpffs) {
            None => "the guard of `dataplane guard` stands, and no agent runs".to_owned(),
            Some(agent) => format!(
                "the guard of `dataplane guard` stands until the agent (process {agent}) has found all pods"
            ),
        },
        Err(error) => error.to_string(),
    };
    Some(Feature {
        name: "pods may connect",
        needed_for: "connections of pods",
        present: false,
        required: false,
        without: "connections are refused from all network namespaces except the node's".into(),
        detail,
        remedy: "start the agent, which ends the guard (`dataplane status` says when); `dataplane cleanup` removes the guard",
    })
}

/// Checks that the node has resolvers, by the rules of its C library.
fn resolvers() -> Feature {
    const FILE: &str = "/etc/resolv.conf";
    let (present, detail) = match fs::read_to_string(FILE) {
        Ok(text) => {
            let found = ResolvConf::parse(&text).resolvers;
            let all: Vec<String> = found.iter().map(|at| at.ip().to_string()).collect();
            if all.is_empty() {
                (false, format!("{FILE} names no resolver"))
            } else {
                (true, all.join(", "))
            }
        }
        Err(error) => (false, format!("cannot read {FILE}: {error}")),
    };
    Feature {
        name: "node's resolvers",
        needed_for: "dns: names outside of the cluster",
        present,
        required: false,
        without: "the agent finds no name outside of the cluster for pods with dnsPolicy Default, and for endpoints of \
                  ServiceEntries"
            .into(),
        detail,
        remedy: "with dns.capture or ServiceEntries whose endpoints are names: name the file with the node's resolvers in \
                 dns.resolvConf; in a container, mount it",
    }
}

fn text(out: &mut dyn Write, features: &[Feature]) -> io::Result<()> {
    let mut table = Table::new(&["FEATURE", "PRESENT", "NEEDED FOR", "DETAIL"]);
    for f in features {
        let present = match (f.present, f.required) {
            (true, _) => Cell::new("yes", GOOD),
            (false, true) => Cell::new("NO", BAD),
            (false, false) => Cell::new("no (optional)", WARN),
        };
        table.row([
            f.name.into(),
            present,
            f.needed_for.into(),
            Cell::new(f.detail.as_str(), DIM),
        ]);
    }
    table.write(out)?;
    writeln!(out)?;
    let missing: Vec<&Feature> = features.iter().filter(|f| !f.present).collect();
    if missing.is_empty() {
        return writeln!(
            out,
            "Everything is there: `dataplane run` works on this machine."
        );
    }
    // One remedy may apply to several features.
    let mut remedies: Vec<(&str, bool, Vec<&str>)> = Vec::new();
    for f in &missing {
        match remedies
            .iter_mut()
            .find(|(text, required, _)| *text == f.remedy && *required == f.required)
        {
            Some((_, _, names)) => names.push(f.name),
            None => remedies.push((f.remedy, f.required, vec![f.name])),
        }
    }
    for (remedy, required, names) in remedies {
        let style = if required { BAD } else { WARN };
        let names = output::styled(style, names.join(", "));
        writeln!(out, "{names}: {remedy}")?;
    }
    for f in missing.iter().filter(|f| !f.required) {
        writeln!(out, "Without {}: {}", f.name, f.without)?;
    }
    writeln!(out)?;
    if missing.iter().any(|f| f.required) {
        writeln!(
            out,
            "`dataplane run` does not work on this machine. Correct the lines above, from the top."
        )
    } else {
        writeln!(out, "`dataplane run` works on this machine without these.")
    }
}
