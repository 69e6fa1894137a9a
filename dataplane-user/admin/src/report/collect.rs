//! Reads the kernel's state, and joins it with the agent's.

use std::fs;

use dataplane_common::{
    packet::Iface,
    tables::by_packets::{NESTED, RAW, RULES},
};
use kernel::netfilter::keep_nat;

use super::{
    ByPackets, Finding, Interface, OnInterface, Program, Report, Versions, Workload,
    judge::{healthy, judge},
    mesh, others, room,
    tables::{self, Contents},
};
use crate::{
    api::{AgentStatus, MeshWorkload, Version},
    client,
};

/// Looks at the kernel. `agent`: the agent's status, or why it gave none.
pub fn examine(
    paths: &kernel::Paths,
    limits: kernel::tables::Limits,
    agent: Result<AgentStatus, client::Error>,
) -> Report {
    let mut findings = Vec::new();
    let programs = programs(paths, &mut findings);
    let interfaces = checked_interfaces(paths, &mut findings);
    // The agent has counted the flows. Without an agent, this runs rarely.
    let counted = agent.as_ref().ok().and_then(|agent| agent.flows.as_ref());
    let Contents { tables, verdicts } = tables::read(paths, limits, counted, &mut findings);
    let is_attached = programs.iter().any(|p| p.attached);
    let agent = judged(agent, is_attached, &mut findings);
    if agent.is_none() {
        findings.extend(boot_guard(paths));
    }
    let path = (!interfaces.is_empty()).then(|| packet_path(paths));
    if path.is_some() {
        findings.extend(forwarding());
    }
    if path == Some(FAST) {
        findings.extend(others::findings());
        findings.extend(others::egress_chains(&interfaces));
    }
    let named = agent.as_ref().map_or(&[][..], |agent| &agent.mesh);
    let mesh = workloads(paths, named, &mut findings);
    let keep_nat = keep_nat(&mut findings);

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
        packet_path: path.map(str::to_owned),
        bypass: kernel::packet::PacketTables::open(&paths.bpffs)
            .is_ok_and(|tables| tables.is_bypassed()),
        by_packets: by_packets(paths).unwrap_or_default(),
        mesh,
        tables,
        verdicts,
    }
}

/// The path past the stack.
const FAST: &str = "fast";

/// Returns the path of packets of services, as the programs know it. Call this if the packet path is on.
pub fn packet_path(paths: &kernel::Paths) -> &'static str {
    let tables = kernel::packet::PacketTables::open(&paths.bpffs);
    if tables.is_ok_and(|tables| tables.is_through_stack()) {
        "stack"
    } else {
        FAST
    }
}

/// Returns the programs at their hooks, and adds their problems.
fn programs(paths: &kernel::Paths, findings: &mut Vec<Finding>) -> Vec<Program> {
    let all = match kernel::attachments(paths) {
        Ok(all) => all,
        Err(e) => {
            findings.push(Finding::error(format!(
                "cannot ask the kernel for the attached programs: {e}"
            )));
            return Vec::new();
        }
    };
    let programs = all.into_iter().map(|a| Program {
        name: a.program.to_owned(),
        attached: a.problem.is_none(),
        link_id: a.link_id,
        program_id: a.program_id,
        problem: a.problem,
    });
    let programs: Vec<Program> = programs.collect();
    if !programs.is_empty() && programs.iter().all(|p| p.link_id.is_none()) {
        let text = "none of the programs is attached".to_owned();
        findings.push(Finding::error(text));
    } else {
        for program in programs.iter().filter(|p| !p.attached) {
            let problem = program.problem.as_deref().unwrap_or("nothing is attached");
            findings.push(Finding::error(format!("{}: {problem}", program.name)));
        }
    }
    programs
}

/// Returns the interfaces of the packet path, and adds their problems.
fn checked_interfaces(paths: &kernel::Paths, findings: &mut Vec<Finding>) -> Vec<Interface> {
    let interfaces = interfaces(paths).unwrap_or_else(|e| {
        findings.push(Finding::error(format!(
            "cannot ask the kernel what runs on the interfaces: {e}"
        )));
        Vec::new()
    });
    for interface in &interfaces {
        for (word, on) in [
            ("ingress", &interface.ingress),
            ("egress", &interface.egress),
        ] {
            if let Some(problem) = &on.problem {
                let text = format!("{} {word}: {problem}", interface.name);
                findings.push(Finding::error(text));
            }
        }
    }
    interfaces
}

/// Returns the agent's status, and adds the problems in it. `is_attached`: whether a program runs.
fn judged(
    agent: Result<AgentStatus, client::Error>,
    is_attached: bool,
    findings: &mut Vec<Finding>,
) -> Option<AgentStatus> {
    let why = match agent {
        Ok(agent) => {
            judge(&agent, findings);
            findings.extend(agent.flows.as_ref().and_then(room::of_ports));
            findings.extend(others::pods_elsewhere(&agent));
            return Some(agent);
        }
        Err(why) => why,
    };
    let meanwhile = if is_attached {
        "the programs serve from the agent's last tables; changes are not served"
    } else {
        "and no program is attached: services are not served"
    };
    findings.push(Finding::error(match why {
        client::Error::NotRunning { .. } => {
            format!("the agent is not running ({why}); {meanwhile}")
        }
        _ => format!("{why}; {meanwhile}"),
    }));
    None
}

/// Returns the captured workloads, and adds the problems of their proxies. `named`: the workloads that the agent knows.
fn workloads(
    paths: &kernel::Paths,
    named: &[MeshWorkload],
    findings: &mut Vec<Finding>,
) -> Vec<Workload> {
    let mesh = mesh::workloads(paths, named).unwrap_or_else(|e| {
        findings.push(Finding::error(format!(
            "cannot read which workloads are captured: {e}"
        )));
        Vec::new()
    });
    // If a problem is known, the report shows the problem instead.
    let silent = |w: &&Workload| !matches!(&*w.proxy, "ready" | "-") && w.problem.is_none();
    for workload in mesh.iter().filter(silent) {
        let name = workload.name.as_ref().unwrap_or(&workload.place);
        findings.push(Finding::warning(format!(
            "mesh: the proxy of {name} does not listen ({}): until it does, {} (withoutProxy: {})",
            workload.proxy, workload.consequence, workload.without_proxy
        )));
    }
    mesh
}

/// Names the guard of `dataplane guard`, if it stands and no agent has taken over.
fn boot_guard(paths: &kernel::Paths) -> Option<Finding> {
    match kernel::boot::is_in_force(&paths.bpffs) {
        Ok(false) => None,
        Ok(true) => Some(Finding::error(
            "the guard of `dataplane guard` stands, and no agent has taken over: connections are refused from all network \
             namespaces except the node's. Start the agent; `dataplane cleanup` removes the guard"
                .to_owned(),
        )),
        Err(error) => Some(Finding::warning(format!(
            "cannot find out whether the guard of `dataplane guard` stands: {error}"
        ))),
    }
}

/// Returns whether the table of `dataplane keep-nat` exists, if the kernel returns it.
fn keep_nat(findings: &mut Vec<Finding>) -> Option<bool> {
    let is_there = keep_nat::is_there().map_err(|e| {
        findings.push(Finding::warning(format!(
            "cannot ask the kernel for nftables table inet {} (dataplane keep-nat): {e}",
            keep_nat::TABLE
        )));
    });
    is_there.ok()
}

/// Returns the interfaces that the packet path's programs belong on, and whether they run there.
fn interfaces(paths: &kernel::Paths) -> Result<Vec<Interface>, kernel::Error> {
    if !kernel::tables::Tables::exist(&paths.bpffs)? {
        return Ok(Vec::new());
    }
    let tables = kernel::packet::PacketTables::open(&paths.bpffs)?;
    let attachments = kernel::packet::interface_attachments(&paths.bpffs)?;
    let mut found = Vec::new();
    let all = tables.ifaces()?;
    let pods = all.iter().filter(|(_, i)| i.flags & Iface::LOCAL != 0);
    let mut others =
        kernel::tc::egress_of_others(&paths.bpffs, &pods.map(|(index, _)| *index).collect())?;
    for (ifindex, iface) in all {
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
            name: kernel::tc::name(ifindex),
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
            delivery: if iface.flags & Iface::PEER != 0 {
                "peer"
            } else {
                "egress"
            }
            .to_owned(),
            egress_of_others: others.remove(&ifindex).unwrap_or_default(),
            ingress: on(kernel::tc::Direction::Ingress),
            egress: on(kernel::tc::Direction::Egress),
        });
    }
    Ok(found)
}

/// Returns the network namespaces whose sockets are left alone.
fn by_packets(paths: &kernel::Paths) -> Result<Vec<ByPackets>, kernel::Error> {
    let all = kernel::pods::ByPackets::open(&paths.bpffs, false)?.all()?;
    let named = all.into_iter().map(|(netns_cookie, said)| {
        let (why, interface) = (said >> 32, said & u64::from(u32::MAX));
        let reason = match u32::try_from(why).unwrap_or_default() {
            RULES => "its network namespace has NAT rules at the output hook",
            NESTED => "a network namespace that is nested in the pod's",
            RAW => "its network namespace has raw sockets for UDP, or IPsec",
            _ => "packets.packetsOnly, or the pod's annotation",
        };
        ByPackets {
            netns_cookie,
            interface: kernel::tc::name(u32::try_from(interface).unwrap_or_default()),
            reason: reason.to_owned(),
        }
    });
    Ok(named.collect())
}

/// Returns settings that keep the kernel from forwarding packets of others. They are reported and not changed: this is
/// the decision of the node's administrator.
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
        Finding::warning(format!(
            "{name} is 0: the node does not forward packets to endpoints at other addresses than \
             its own; run `sysctl -w {name}=1`"
        ))
    })
    .collect()
}
