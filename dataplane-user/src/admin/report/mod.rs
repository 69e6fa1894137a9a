//! Health, as it is: everything that can be asked of the kernel is asked each time.

mod mesh;
mod others;
mod room;

use std::{collections::BTreeMap, fmt, fs};

use dataplane_common::{Reason, packet::Iface};
use serde::{Deserialize, Serialize};

use super::{
    api::{AgentStatus, Gravity, Source, SourceKind, Version},
    client,
};
use crate::{
    kernel::{self, conntrack::Conntrack, keep_nat},
    plan,
};
pub use mesh::Workload;

/// `GET /status`, and what `dataplane status` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Whether there is no [`Finding`] that is an error, but for those of objects.
    pub healthy: bool,
    /// What is wrong or worth a look; the worst first.
    pub findings: Vec<Finding>,
    /// What the agent knows; none if it does not answer.
    pub agent: Option<AgentStatus>,
    /// The programs, and whether the kernel runs them.
    pub programs: Vec<Program>,
    /// The interfaces that the packet path's programs belong on; none if it is off.
    #[serde(default)]
    pub interfaces: Vec<Interface>,
    /// Workloads whose connections are captured; none if there is no mesh.
    #[serde(default)]
    pub mesh: Vec<Workload>,
    /// How full the tables are.
    pub tables: Vec<Table>,
    /// Verdicts since the tables were made, by reason.
    pub verdicts: BTreeMap<String, u64>,
    /// Whether the nftables table of `dataplane keep-nat` is there; none if the kernel does not tell.
    #[serde(default)]
    pub keep_nat: Option<bool>,
    /// What runs here.
    pub versions: Versions,
}

/// How bad a [`Finding`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Something is not served as it should be, or will not be soon.
    Error,
    /// Worth a look.
    Warning,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "error",
            Self::Warning => "warning",
        })
    }
}

/// Something that is wrong or worth a look.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Finding {
    /// How bad.
    pub severity: Severity,
    /// What, and what to do.
    pub text: String,
    /// The object, if it is an object's own: its author has to act, and the node is healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
}

impl Finding {
    fn new(severity: Severity, text: String) -> Self {
        Self {
            severity,
            text,
            object: None,
        }
    }
}

/// A program at its hook.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Program {
    /// Its name, which is also its hook's.
    pub name: String,
    /// Whether the kernel says that it is attached where it should be.
    pub attached: bool,
    /// The kernel's number of its link (`bpftool link show id`).
    pub link_id: Option<u32>,
    /// The kernel's number of the program (`bpftool prog show id`).
    pub program_id: Option<u32>,
    /// What is wrong with it.
    pub problem: Option<String>,
}

/// An interface with the packet path's programs on it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Interface {
    /// The kernel's number of it.
    pub ifindex: u32,
    /// Its name.
    pub name: String,
    /// What it is: `uplink` or `pod`.
    pub role: String,
    /// The addresses that flows which leave by it are masqueraded to.
    pub masquerade: Vec<String>,
    /// The program for what arrives.
    pub ingress: OnInterface,
    /// The program for what leaves.
    pub egress: OnInterface,
}

/// A program on an interface.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OnInterface {
    /// Whether the kernel says that it runs.
    pub attached: bool,
    /// How: `tcx` or `clsact`.
    pub hook: Option<String>,
    /// The kernel's number of the program.
    pub program_id: Option<u32>,
    /// What is wrong with it.
    pub problem: Option<String>,
}

/// A table in the kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Table {
    /// Its name.
    pub name: String,
    /// How many entries are in use.
    pub used: u64,
    /// How many it has room for now; it is made larger when that is not enough.
    pub capacity: u64,
    /// How many it may at most be given room for.
    pub limit: u64,
    /// The memory that it takes.
    pub bytes: u64,
}

/// What runs here.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Versions {
    /// The running agent.
    pub agent: Option<String>,
    /// This command.
    pub command: String,
    /// The layout that this command reads.
    pub layout: u32,
    /// The kernel.
    pub kernel: String,
}

/// Looks at the kernel. `agent`: what the agent says of itself, or why it says nothing.
pub fn examine(
    paths: &kernel::Paths,
    limits: kernel::Limits,
    agent: Result<AgentStatus, client::Error>,
) -> Report {
    let mut findings = Vec::new();
    let mut error = |text: String| findings.push(Finding::new(Severity::Error, text));

    let programs: Vec<Program> = kernel::attachments(paths).map_or_else(
        |e| {
            error(format!(
                "cannot ask the kernel for the attached programs: {e}"
            ));
            Vec::new()
        },
        |all| {
            all.into_iter()
                .map(|a| Program {
                    name: a.program.to_owned(),
                    attached: a.problem.is_none(),
                    link_id: a.link_id,
                    program_id: a.program_id,
                    problem: a.problem,
                })
                .collect()
        },
    );
    let attached = programs.iter().filter(|p| p.attached).count();
    if !programs.is_empty() && programs.iter().all(|p| p.link_id.is_none()) {
        error("none of the programs is attached".to_owned());
    } else {
        for program in programs.iter().filter(|p| !p.attached) {
            let problem = program.problem.as_deref().unwrap_or("nothing is attached");
            error(format!("{}: {problem}", program.name));
        }
    }

    let interfaces = interfaces(paths).unwrap_or_else(|e| {
        error(format!(
            "cannot ask the kernel what runs on the interfaces: {e}"
        ));
        Vec::new()
    });
    for interface in &interfaces {
        for (word, on) in [
            ("ingress", &interface.ingress),
            ("egress", &interface.egress),
        ] {
            if let Some(problem) = &on.problem {
                error(format!("{} {word}: {problem}", interface.name));
            }
        }
    }

    let mut scarce = Vec::new();
    let mut tables = Vec::new();
    let mut verdicts = BTreeMap::new();
    match kernel::Tables::open(&paths.bpffs) {
        Ok(open) => {
            // The agent has counted them. Without it, nobody asks often.
            let counted = agent.as_ref().ok().and_then(|agent| agent.flows.as_ref());
            let flows = Conntrack::open(&paths.bpffs).map(|conntrack| {
                let conntrack = conntrack?;
                let flows = counted.map_or_else(|| conntrack.count(), |flows| flows.total);
                Some(conntrack.usage(flows))
            });
            match open.usage(limits).and_then(|usage| Ok((usage, flows?))) {
                Ok((usage, flows)) => {
                    scarce.extend(usage.iter().filter_map(room::of_clients));
                    tables.extend(usage.into_iter().chain(flows).map(|t| Table {
                        name: t.table.to_owned(),
                        used: t.used.into(),
                        capacity: t.capacity.into(),
                        limit: t.limit.into(),
                        bytes: t.bytes,
                    }));
                }
                Err(e) => error(format!("cannot read how full the tables are: {e}")),
            }
            match open.filtered_out() {
                Ok(missed) if missed.is_empty() => {}
                Ok(missed) => error(format!(
                    "the filter VIPS does not let {} of the frontends through, for example {}: \
                     connections to them are left alone; start the agent anew, which mends it, and \
                     please report it",
                    missed.len(),
                    plan::key_text(&missed[0]),
                )),
                Err(e) => error(format!("cannot check the filter: {e}")),
            }
            if let Ok(Some(conntrack)) = Conntrack::open(&paths.bpffs) {
                let missed = open.filtered_flows(&conntrack.vips());
                if let Some(vip) = missed.first() {
                    error(format!(
                        "the filter VIPS does not let {} of the addresses through that flows go to, for \
                         example {vip}: requests of these flows are left alone; start the agent anew, \
                         which mends it, and please report it",
                        missed.len(),
                    ));
                }
            }
            match open.reasons() {
                Ok(counts) => verdicts.extend(
                    Reason::ALL
                        .iter()
                        .map(|&reason| (reason.word().to_owned(), counts[reason as usize])),
                ),
                Err(e) => error(format!("cannot read the verdicts: {e}")),
            }
        }
        Err(e) => error(format!("cannot open the tables: {e}")),
    }

    let agent = match agent {
        Ok(agent) => {
            judge(&agent, &mut findings);
            Some(agent)
        }
        Err(why) => {
            let meanwhile = if attached > 0 {
                "traffic is served from the tables as it left them, changes are not seen"
            } else {
                "and no program is attached: services are not served"
            };
            error(match why {
                client::Error::NotRunning { .. } => {
                    format!("the agent is not running ({why}); {meanwhile}")
                }
                _ => format!("{why}; {meanwhile}"),
            });
            None
        }
    };
    let flows = agent.as_ref().and_then(|agent| agent.flows.as_ref());
    findings.extend(flows.and_then(room::of_ports));
    findings.extend(agent.as_ref().and_then(others::pods_elsewhere));
    if !interfaces.is_empty() {
        findings.extend(forwarding());
    }
    let named = agent.as_ref().map_or(&[][..], |agent| &agent.mesh);
    let mesh = match mesh::workloads(paths, named) {
        Ok(mesh) => mesh,
        Err(e) => {
            findings.push(Finding::new(
                Severity::Error,
                format!("cannot read whose connections are captured: {e}"),
            ));
            Vec::new()
        }
    };
    // Where a problem is known, that is said instead.
    let silent = |w: &&Workload| !matches!(&*w.proxy, "ready" | "-") && w.problem.is_none();
    for workload in mesh.iter().filter(silent) {
        let name = workload.name.as_ref().unwrap_or(&workload.place);
        findings.push(Finding::new(
            Severity::Warning,
            format!(
                "mesh: the proxy of {name} does not listen ({}): until it does, withoutProxy says \
                 what becomes of connections ({})",
                workload.proxy, workload.without_proxy
            ),
        ));
    }
    if verdicts
        .get(Reason::Dangling.word())
        .is_some_and(|&n| n > 0)
    {
        findings.push(Finding::new(
            Severity::Warning,
            Reason::Dangling.text().to_owned(),
        ));
    }
    findings.extend(scarce);
    if !interfaces.is_empty() {
        findings.extend(others::findings());
    }

    let keep_nat = match keep_nat::is_there() {
        Ok(is_there) => Some(is_there),
        Err(e) => {
            findings.push(Finding::new(
                Severity::Warning,
                format!(
                    "cannot ask the kernel for nftables table inet {} (dataplane keep-nat): {e}",
                    keep_nat::TABLE
                ),
            ));
            None
        }
    };

    findings.sort();
    Report {
        healthy: healthy(&findings),
        findings,
        keep_nat,
        versions: Versions {
            agent: agent.as_ref().map(|a| a.version.version.clone()),
            command: Version::own().version,
            layout: dataplane_common::LAYOUT,
            kernel: nix::sys::utsname::uname()
                .map(|u| u.release().to_string_lossy().into_owned())
                .unwrap_or_default(),
        },
        agent,
        programs,
        interfaces,
        mesh,
        tables,
        verdicts,
    }
}

/// Whether no error is the node's own.
fn healthy(findings: &[Finding]) -> bool {
    findings
        .iter()
        .all(|finding| finding.severity != Severity::Error || finding.object.is_some())
}

/// The interfaces that the packet path's programs belong on, and whether they run there.
fn interfaces(paths: &kernel::Paths) -> Result<Vec<Interface>, kernel::Error> {
    if !kernel::Tables::exist(&paths.bpffs)? {
        return Ok(Vec::new());
    }
    let tables = kernel::PacketTables::open(&paths.bpffs)?;
    let attachments = kernel::interface_attachments(&paths.bpffs)?;
    let mut found = Vec::new();
    for (ifindex, iface) in tables.ifaces()? {
        if iface.flags & Iface::ATTACHED == 0 {
            continue;
        }
        let on = |direction| {
            let found = attachments
                .iter()
                .find(|a| a.ifindex == ifindex && a.direction == direction);
            OnInterface {
                attached: found.is_some_and(|a| a.problem.is_none()),
                hook: found
                    .and_then(|a| a.hook)
                    .map(|hook| hook.word().to_owned()),
                program_id: found.and_then(|a| a.program_id),
                problem: match found {
                    Some(attachment) => attachment.problem.clone(),
                    None => Some("not attached".to_owned()),
                },
            }
        };
        found.push(Interface {
            ifindex,
            name: kernel::interface_name(ifindex),
            role: if iface.flags & Iface::LOCAL != 0 {
                "pod"
            } else {
                "uplink"
            }
            .to_owned(),
            masquerade: [iface.masquerade_v4, iface.masquerade_v6]
                .into_iter()
                .filter_map(|index| Some(tables.node_addr(index)?.to_string()))
                .collect(),
            ingress: on(kernel::Direction::Ingress),
            egress: on(kernel::Direction::Egress),
        });
    }
    Ok(found)
}

/// What keeps the kernel from sending on what is not its own. Said and not changed: it is the
/// node's administrator's decision.
fn forwarding() -> Vec<Finding> {
    [
        ("net.ipv4.ip_forward", "ipv4/ip_forward"),
        ("net.ipv6.conf.all.forwarding", "ipv6/conf/all/forwarding"),
    ]
    .into_iter()
    .filter(|(_, file)| {
        // A kernel without the family has no such setting, and none of its packets.
        fs::read_to_string(format!("/proc/sys/net/{file}")).is_ok_and(|value| value.trim() == "0")
    })
    .map(|(name, _)| {
        Finding::new(
            Severity::Warning,
            format!(
                "{name} is 0: packets for endpoints that are not on this node's own addresses are \
                 not sent on (`sysctl -w {name}=1`)"
            ),
        )
    })
    .collect()
}

/// What is wrong in what the agent says of itself.
fn judge(agent: &AgentStatus, findings: &mut Vec<Finding>) {
    for problem in &agent.problems {
        let text = format!("{}: {}", problem.place, problem.text);
        findings.push(match problem.gravity {
            Gravity::Object => Finding {
                object: Some(problem.place.clone()),
                ..Finding::new(Severity::Error, text)
            },
            Gravity::Node => Finding::new(Severity::Error, text),
            Gravity::Warning => Finding::new(Severity::Warning, text),
        });
    }
    let mut add = |severity, text| findings.push(Finding::new(severity, text));
    if let Some(seconds) = agent.late_seconds {
        add(
            Severity::Error,
            format!(
                "a change has been waiting for {seconds} s to be written to the kernel, so /healthz \
                 and /livez answer 503; the log says what the agent does instead"
            ),
        );
    }
    if let Some(why) = &agent.leaving {
        add(
            Severity::Warning,
            format!(
                "Node {}: {why}, so /healthz answers 503 and load balancers send new connections \
                 elsewhere; existing connections go on",
                agent.node
            ),
        );
    }
    if let Some(failure) = &agent.sync_error {
        add(
            Severity::Error,
            format!(
                "the tables are not in line with the source: {}",
                failure.text
            ),
        );
    } else if !agent.ready {
        add(
            Severity::Error,
            "the agent is starting: nothing was written yet".to_owned(),
        );
    }
    source(&agent.source, agent.inherited, &mut add);
    for conflict in &agent.conflicts {
        add(
            Severity::Warning,
            format!(
                "{} is claimed by several services: {} serves it, {} not",
                conflict.frontend,
                conflict.winner,
                conflict.losers.join(", "),
            ),
        );
    }
}

/// A connection that breaks is made anew in a moment, and an API server is away for a minute when it
/// is upgraded.
const AWAY: u64 = 60;
/// The server sends word every minute or so; five minutes is the longest that a watch may last.
const STALE: u64 = 360;

/// Adds what is wrong with reading a source.
fn source(source: &Source, inherited: bool, add: &mut impl FnMut(Severity, String)) {
    match source.kind {
        SourceKind::Manifests => {
            if let Some(failure) = &source.error {
                let text = &failure.text;
                let text = format!(
                    "the manifests have errors; what was read before is still served:\n{text}"
                );
                add(Severity::Error, text);
            }
        }
        SourceKind::Kubernetes => {
            if let Some((severity, text)) = kubernetes(source, inherited, crate::admin::now()) {
                add(severity, text);
            }
        }
        SourceKind::Combined => {
            for part in &source.parts {
                self::source(part, inherited, add);
            }
        }
    }
}

/// What is wrong with reading the API.
fn kubernetes(source: &Source, inherited: bool, now: u64) -> Option<(Severity, String)> {
    let age = |at: u64| now.saturating_sub(at);
    match (&source.error, source.read) {
        (Some(failure), 0) => Some((
            Severity::Error,
            format!(
                "not everything was read from the Kubernetes API yet, so {} is what is served: {}",
                if inherited {
                    "what an earlier agent left"
                } else {
                    "nothing"
                },
                failure.text
            ),
        )),
        (Some(failure), read) => Some((
            if age(failure.at) > AWAY {
                Severity::Error
            } else {
                Severity::Warning
            },
            format!(
                "the Kubernetes API cannot be read for {} s; what was read {} s ago is still \
                 served, later changes are not: {}",
                age(failure.at),
                age(read),
                failure.text
            ),
        )),
        (None, read) if read > 0 && age(read) > STALE => Some((
            Severity::Error,
            format!(
                "the Kubernetes API has been silent for {} s: later changes are not served",
                age(read)
            ),
        )),
        (None, _) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::api::{Conflict, Failure, Learnt, Problem};

    fn agent() -> AgentStatus {
        AgentStatus {
            version: Version::own(),
            started: 0,
            ready: true,
            node: "node".to_owned(),
            node_addresses: Vec::new(),
            node_port_addresses: Vec::new(),
            pod_networks: Vec::new(),
            cgroup: Learnt::default(),
            pods: None,
            leaving: None,
            late_seconds: None,
            inherited: true,
            source: Source {
                kind: SourceKind::Manifests,
                paths: Vec::new(),
                read: 0,
                error: None,
                parts: Vec::new(),
            },
            services: 1,
            endpoints: 1,
            last_sync: None,
            syncs: 1,
            sync_errors: 0,
            sync_error: None,
            conflicts: Vec::new(),
            problems: Vec::new(),
            mesh: Vec::new(),
            flows: None,
        }
    }

    fn judged(agent: &AgentStatus) -> Vec<(Severity, String)> {
        let mut findings = Vec::new();
        judge(agent, &mut findings);
        findings.into_iter().map(|f| (f.severity, f.text)).collect()
    }

    #[test]
    fn a_ready_agent_without_errors_is_fine() {
        assert_eq!(judged(&agent()), []);
    }

    #[test]
    fn failures_are_errors_and_conflicts_are_warnings() {
        let failure = Failure {
            at: 1,
            text: "it broke".to_owned(),
        };
        let mut sick = agent();
        sick.sync_error = Some(failure.clone());
        sick.source.error = Some(failure);
        sick.conflicts.push(Conflict {
            frontend: "10.96.0.1:80/tcp".to_owned(),
            winner: "a/b".to_owned(),
            losers: vec!["c/d".to_owned()],
        });
        let found = judged(&sick);
        assert_eq!(
            found.iter().filter(|(s, _)| *s == Severity::Error).count(),
            2
        );
        assert!(found[0].1.contains("it broke"));
        assert_eq!(found[2].0, Severity::Warning);
        assert!(found[2].1.contains("a/b serves it, c/d not"));
    }

    #[test]
    fn an_objects_error_is_named_and_the_node_is_healthy() {
        let mut agent = agent();
        let problem = |gravity, place: &str| Problem {
            gravity,
            place: place.to_owned(),
            text: "spec: no".to_owned(),
        };
        agent.problems = vec![
            problem(Gravity::Object, "Service shop/web"),
            problem(Gravity::Warning, "Service shop/db"),
        ];
        let mut findings = Vec::new();
        judge(&agent, &mut findings);
        assert_eq!(findings[0].severity, Severity::Error);
        assert_eq!(findings[0].object.as_deref(), Some("Service shop/web"));
        assert_eq!(findings[1].severity, Severity::Warning);
        assert!(healthy(&findings));
        // The name of the node is the operator's.
        agent.problems = vec![problem(Gravity::Node, "Node here")];
        findings.clear();
        judge(&agent, &mut findings);
        assert!(!healthy(&findings));
    }

    #[test]
    fn what_healthz_says_has_its_reason_in_status() {
        let mut agent = agent();
        agent.leaving = Some("it is being deleted from the cluster".to_owned());
        let [(severity, text)] = &judged(&agent)[..] else {
            panic!("{:?}", judged(&agent))
        };
        assert_eq!(*severity, Severity::Warning);
        assert!(text.contains("Node node") && text.contains("503"), "{text}");
        agent.late_seconds = Some(61);
        assert_eq!(judged(&agent)[0].0, Severity::Error);
    }

    #[test]
    fn an_api_that_is_away_is_a_warning_first() {
        let mut source = Source {
            kind: SourceKind::Kubernetes,
            parts: Vec::new(),
            paths: Vec::new(),
            read: 1_000,
            error: None,
        };
        assert_eq!(kubernetes(&source, true, 1_070), None);
        assert_eq!(kubernetes(&source, true, 1_400).unwrap().0, Severity::Error);
        source.error = Some(Failure {
            at: 1_010,
            text: "it is away".to_owned(),
        });
        let (severity, text) = kubernetes(&source, true, 1_020).unwrap();
        assert_eq!(severity, Severity::Warning);
        assert!(
            text.contains("for 10 s") && text.contains("read 20 s ago") && text.contains("it is"),
            "{text}"
        );
        assert_eq!(kubernetes(&source, true, 1_100).unwrap().0, Severity::Error);
        source.read = 0;
        let (severity, text) = kubernetes(&source, true, 1_020).unwrap();
        assert_eq!(severity, Severity::Error);
        assert!(text.contains("an earlier agent"), "{text}");
        let (_, text) = kubernetes(&source, false, 1_020).unwrap();
        assert!(text.contains("nothing is what is served"), "{text}");
    }

    #[test]
    fn an_agent_that_starts_is_not_healthy_yet() {
        let mut starting = agent();
        starting.ready = false;
        assert_eq!(judged(&starting)[0].0, Severity::Error);
    }
}
