//! Settings of others on the node that the fast path does not follow.

use kernel::netfilter;
use plan::ipsec::Policy;
use takeover::bypassed;

use super::{super::api::AgentStatus, Finding, Interface};

/// How many policies are named.
const NAMED: usize = 3;

/// Returns the findings. Call this if packets take the fast path.
pub fn findings() -> Vec<Finding> {
    let mut findings = Vec::new();
    match kernel::routing::ipsec_policies() {
        Ok(policies) => findings.extend(ipsec(&policies)),
        Err(why) => findings.push(Finding::error(why.to_string())),
    }
    match netfilter::bypassed_chains() {
        Ok(chains) => findings.extend(bypassed::warning(&chains).map(Finding::warning)),
        Err(why) => findings.push(Finding::warning(why.to_string())),
    }
    findings
}

/// Reports packets of services that bypass chains of nf_tables on the way out of interfaces, which see all other
/// packets.
pub fn egress_chains(interfaces: &[Interface]) -> Vec<Finding> {
    let chains = match netfilter::interface_chains() {
        Ok(chains) => chains,
        Err(why) => {
            return vec![Finding::warning(why.to_string())];
        }
    };
    let mut findings = Vec::new();
    for interface in interfaces {
        let on =
            |chain: &&netfilter::InterfaceChain| chain.is_egress() && chain.is_on(&interface.name);
        for chain in chains.iter().filter(on) {
            findings.push(Finding::warning(format!(
                "interface {}: packets of services that the packet path sends on do not pass {} (the kernel skips the hook \
                 egress of netfilter for them); use a program or a filter of TC there, or rules in the pod's network \
                 namespace",
                interface.name,
                chain.name()
            )));
        }
    }
    findings
}

/// Reports pods of this node that are outside of the cgroup that the programs are attached to.
pub fn pods_elsewhere(agent: &AgentStatus) -> Option<Finding> {
    let pods = agent.pods.as_ref().filter(|pods| pods.outside > 0)?;
    let example = match &pods.others[..] {
        [] => "which are not mounted where the agent sees them".to_owned(),
        others => format!("for example {}", others.join(", ")),
    };
    let root = pods.root.as_ref().map_or_else(
        || "the root of the cgroup v2 hierarchy, mounted where the agent sees it".to_owned(),
        |root| format!("{root}, the root of the hierarchy"),
    );
    Some(Finding::warning(format!(
        "kernel.cgroup is {}, and {} of {} pods have their sockets in other cgroups, {example}: only the packet \
         path serves these pods; set kernel.cgroup (--cgroup, DATAPLANE_CGROUP) to {root}, or to a cgroup that holds all \
         pods, and restart the agent",
        agent.cgroup.value,
        pods.outside,
        pods.inside + pods.outside + pods.unknown,
    )))
}

fn ipsec(policies: &[Policy]) -> Option<Finding> {
    let protecting: Vec<&Policy> = policies.iter().filter(|policy| policy.protects).collect();
    if protecting.is_empty() {
        return None;
    }
    let mut named: Vec<String> = protecting.iter().map(ToString::to_string).collect();
    named.sort();
    named.dedup();
    let more = named.len().saturating_sub(NAMED);
    named.truncate(NAMED);
    let more = match more {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Some(Finding::error(format!(
        "IPsec policies protect packets that the packet path would send on without encryption: {}{more}; it \
         refuses flows to services that they cover (ipsec-policy); set \
         `packets.path` to auto or stack (--packet-path), or have the packets encrypted by an interface (WireGuard, an XFRM \
         interface)",
        named.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use plan::ipsec;

    use super::*;

    #[test]
    fn policies_are_named_once_each() {
        assert_eq!(ipsec(&[]), None);
        let block = ipsec::block_by_default(2);
        let text = ipsec(&block).unwrap().text;
        assert!(
            text.contains("fwd 0.0.0.0/0 to 0.0.0.0/0, fwd ::/0 to ::/0;"),
            "{text}"
        );
        let pass = block.clone().map(|policy| Policy {
            protects: false,
            ..policy
        });
        assert_eq!(ipsec(&pass), None);
        let many: Vec<Policy> = (0..8)
            .map(|n| Policy {
                kind: (1, 0),
                dst: format!("10.{n}.0.0/16").parse().unwrap(),
                ..block[0].clone()
            })
            .collect();
        let text = ipsec(&[many.clone(), many].concat()).unwrap().text;
        assert!(text.contains("to 10.2.0.0/16 and 5 more;"), "{text}");
    }
}
