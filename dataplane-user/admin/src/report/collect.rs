//! Reads the kernel's state, and joins it with the agent's.

use std::{collections::BTreeMap, fs};

use dataplane_common::{
    Reason,
    packet::Iface,
    tables::by_packets::{NESTED, RULES},
};
use kernel::{conntrack::Conntrack, keep_nat};

use super::{
    ByPackets, Finding, Interface, OnInterface, Program, Report, Severity, Table, Versions,
    Workload,
    judge::{healthy, judge},
    listeners, mesh, others, queries, room,
};
use crate::{
    api::{AgentStatus, Version},
    client,
};

/// Looks at the kernel. `agent`: the agent's status, or why it gave none.
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
    let mut live = Vec::new();
    let mut tables = Vec::new();
    let mut verdicts = BTreeMap::new();
    match kernel::Tables::open(&paths.bpffs) {
        Ok(open) => {
            live = listeners::findings(&open);
            live.extend(open.queries_are_bypassed().map(queries::finding));
            // The agent has counted them. Without an agent, this runs rarely.
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
                     connections to them are left alone; restart the agent, which computes the filter \
                     anew, and please report this",
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
                         example {vip}: requests of these flows are left alone; restart the agent, \
                         which computes the filter anew, and please report this",
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
                "the programs serve from the agent's last tables; changes are not served"
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
    findings.extend(others::egress_chains(&interfaces));
    let named = agent.as_ref().map_or(&[][..], |agent| &agent.mesh);
    let mesh = match mesh::workloads(paths, named) {
        Ok(mesh) => mesh,
        Err(e) => {
            findings.push(Finding::new(
                Severity::Error,
                format!("cannot read which workloads are captured: {e}"),
            ));
            Vec::new()
        }
    };
    // If a problem is known, the report shows the problem instead.
    let silent = |w: &&Workload| !matches!(&*w.proxy, "ready" | "-") && w.problem.is_none();
    for workload in mesh.iter().filter(silent) {
        let name = workload.name.as_ref().unwrap_or(&workload.place);
        findings.push(Finding::new(
            Severity::Warning,
            format!(
                "mesh: the proxy of {name} does not listen ({}): until it does, withoutProxy decides \
                 about the workload's connections ({})",
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
    findings.extend(live);
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
        by_packets: by_packets(paths).unwrap_or_default(),
        mesh,
        tables,
        verdicts,
    }
}

/// Returns the interfaces that the packet path's programs belong on, and whether they run there.
fn interfaces(paths: &kernel::Paths) -> Result<Vec<Interface>, kernel::Error> {
    if !kernel::Tables::exist(&paths.bpffs)? {
        return Ok(Vec::new());
    }
    let tables = kernel::PacketTables::open(&paths.bpffs)?;
    let attachments = kernel::interface_attachments(&paths.bpffs)?;
    let mut found = Vec::new();
    let all = tables.ifaces()?;
    let pods = all.iter().filter(|(_, i)| i.flags & Iface::LOCAL != 0);
    let mut others =
        kernel::egress_of_others(&paths.bpffs, &pods.map(|(index, _)| *index).collect())?;
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
            delivery: if iface.flags & Iface::PEER != 0 {
                "peer"
            } else {
                "egress"
            }
            .to_owned(),
            egress_of_others: others.remove(&ifindex).unwrap_or_default(),
            ingress: on(kernel::Direction::Ingress),
            egress: on(kernel::Direction::Egress),
        });
    }
    Ok(found)
}

/// Returns the network namespaces whose sockets are left alone.
fn by_packets(paths: &kernel::Paths) -> Result<Vec<ByPackets>, kernel::Error> {
    let all = kernel::ByPackets::open(&paths.bpffs, false)?.all()?;
    let named = all.into_iter().map(|(netns_cookie, said)| {
        let (why, interface) = (said >> 32, said & u64::from(u32::MAX));
        let reason = match u32::try_from(why).unwrap_or_default() {
            RULES => "its network namespace has NAT rules at the output hook",
            NESTED => "a network namespace that is nested in the pod's",
            _ => "packets.packetsOnly, or the pod's annotation",
        };
        ByPackets {
            netns_cookie,
            interface: kernel::interface_name(u32::try_from(interface).unwrap_or_default()),
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
        Finding::new(
            Severity::Warning,
            format!(
                "{name} is 0: the node does not forward packets to endpoints at other addresses than \
                 its own; run `sysctl -w {name}=1`"
            ),
        )
    })
    .collect()
}
