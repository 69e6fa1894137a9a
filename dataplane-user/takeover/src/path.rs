//! Decides whether packets of services must go through the node's network stack: rules, IPsec policies, routing rules
//! or filters of others must see them.

use std::path::Path;

use kernel::{netfilter, routing::MarkRule};
use plan::ipsec::Policy;

use super::{
    bypassed,
    owners::{self, FOREIGN, OURS},
};

/// Maximum number of chains that a reason names.
const NAMED: usize = 3;

/// Returns the reason for the path through the stack in this network namespace; `None`: packets may take the fast path.
///
/// # Errors
/// If a query to the kernel fails.
pub fn look(bpffs: &Path) -> Result<Option<String>, kernel::Error> {
    match look_at_chains()?.because {
        None => {
            let filtered = kernel::tc::ingress_of_others(bpffs)?;
            of_the_rest(&kernel::routing::ipsec_policies()?, filtered.as_deref())
        }
        because => Ok(because),
    }
}

/// Returns the reason that is no chain of netfilter: an IPsec policy, a routing rule, or filters on the way in of the
/// interface `filtered` ([`kernel::tc::ingress_of_others`]).
///
/// # Errors
/// If a query to the kernel fails.
pub fn of_the_rest(
    policies: &[Policy],
    filtered: Option<&str>,
) -> Result<Option<String>, kernel::Error> {
    let of_routing = of_routing(policies, &kernel::routing::mark_rules()?);
    let of_filters = || Some(format!("filters on the way in of interface {}", filtered?));
    Ok(of_routing.or_else(of_filters))
}

/// What chains of others do with packets that the stack forwards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chains {
    /// The chains that are a reason for the path through the stack.
    pub because: Option<String>,
    /// Whether they bar packets of no service from the bypass of the stack ([`bypassed::bar_bypass`]).
    pub bar_bypass: bool,
}

/// Looks at the chains that the kernel has now.
///
/// # Errors
/// If a query to the kernel fails.
pub fn look_at_chains() -> Result<Chains, kernel::Error> {
    let chains = netfilter::bypassed_chains()?;
    let because = match of_chains(&chains) {
        None => of_interfaces(&netfilter::interface_chains()?),
        because => because,
    };
    let bar_bypass = bypassed::bar_bypass(&chains);
    Ok(Chains {
        because,
        bar_bypass,
    })
}

/// Returns the chain at an interface that is a reason: any, since it sees no packet that a TC program sends on.
fn of_interfaces(chains: &[netfilter::InterfaceChain]) -> Option<String> {
    let first = chains.iter().find(|chain| !chain.is_on_none())?;
    Some(first.name().to_owned())
}

/// Returns the chains that are a reason.
///
/// A base chain of any family at prerouting, forward or postrouting is a reason, except those of type `nat`, if packets
/// can be dropped there, rejected, queued, marked, changed, logged or kept from conntrack: by its policy, by its rules, or
/// by chains that they jump to. kube-proxy's chains and our own are none, because the dataplane does their work.
pub fn of_chains(chains: &[netfilter::Chain]) -> Option<String> {
    let mut named = bypassed::busy(chains);
    let more = match named.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    named.truncate(NAMED);
    (!named.is_empty()).then(|| named.join(", ") + &more)
}

/// Returns the IPsec policy or the routing rule that is a reason: a policy that protects packets, because only the stack
/// can encrypt them, or a rule of others that asks for a mark, because rules of netfilter set marks.
fn of_routing(policies: &[Policy], rules: &[MarkRule]) -> Option<String> {
    // The kernel returns policies in no particular order.
    let policies = policies.iter().filter(|policy| policy.protects);
    if let Some(policy) = policies.map(ToString::to_string).min() {
        return Some(format!("IPsec policy {policy}"));
    }
    let mut of_owners = rules
        .iter()
        .map(|rule| (rule, owners::of_routing_rule(rule)));
    let (rule, owner) = of_owners.find(|(_, owner)| *owner != OURS)?;
    let family = if rule.v4 { "IPv4" } else { "IPv6" };
    let name = if owner == FOREIGN {
        "owner unknown"
    } else {
        owner.name
    };
    Some(format!("{family} routing rule {rule} ({name})"))
}

#[cfg(test)]
mod tests {
    use kernel::{
        capture::OUR_TABLE,
        netfilter::{Base, Chain, Rule, Verdict},
    };
    use plan::ipsec;

    use super::*;

    fn base(table: &str, drops: bool, does: &[Verdict]) -> Chain {
        Chain {
            table: table.to_owned(),
            name: "FORWARD".to_owned(),
            base: Some(Base {
                hook: "forward",
                drops,
            }),
            rules: vec![Rule {
                does: does.to_vec(),
            }],
        }
    }

    #[test]
    fn chains_that_only_accept_are_no_reason() {
        let jump = Verdict::Jump("KUBE-FORWARD".to_owned());
        let mut kube = base("nft ip filter", false, &[Verdict::Refuse, Verdict::Act]);
        kube.name = "KUBE-FORWARD".to_owned();
        kube.base = None;
        let accepts = base("nft ip filter", false, &[jump]);
        assert_eq!(of_chains(&[accepts, kube]), None);
        for chain in [
            base("nft ip a", true, &[]),
            base("nft ip a", false, &[Verdict::Act]),
            base("nft ip a", false, &[Verdict::Refuse]),
        ] {
            assert_eq!(
                of_chains(&[chain]).as_deref(),
                Some("nft ip a FORWARD (owner unknown)")
            );
        }
        let many = ["a", "b", "c", "d", "e"].map(|name| base(name, true, &[]));
        let text = of_chains(&many).unwrap();
        assert!(
            text.ends_with("c FORWARD (owner unknown) and 2 more"),
            "{text}"
        );
    }

    #[test]
    fn policies_and_marks_are_reasons() {
        let rule = |table| MarkRule {
            v4: true,
            priority: 1024,
            mark: 0x80,
            bits: 0x80,
            table,
        };
        assert_eq!(of_routing(&[], &[rule(OUR_TABLE)]), None);
        assert_eq!(
            of_routing(&[], &[rule(OUR_TABLE), rule(254)]).as_deref(),
            Some("IPv4 routing rule fwmark 0x80/0x80 lookup 254 (owner unknown)")
        );
        let block = ipsec::block_by_default(2);
        assert_eq!(
            of_routing(&block, &[rule(254)]).as_deref(),
            Some("IPsec policy fwd 0.0.0.0/0 to 0.0.0.0/0")
        );
        let pass = block.map(|policy| Policy {
            protects: false,
            ..policy
        });
        assert_eq!(of_routing(&pass, &[]), None);
    }
}
