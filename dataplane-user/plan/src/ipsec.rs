//! IPsec policies of the kernel (XFRM), in the form in which the packet path's programs look them up: by a packet's
//! destination, and then, in a set of that destination's network, by its source.
//!
//! The result is exact for addresses: in each direction the kernel applies the first policy that covers a packet. The
//! programs ignore all other selectors (ports, a protocol, an interface, a mark). A policy with such a selector covers
//! all packets between its networks if it protects, and no packet if it lets packets pass. On the fast path, a pair of addresses that is
//! covered in any direction is refused in all directions. On the path through the stack, each direction counts for itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use dataplane_common::packet::SourceKey;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// A policy of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Direction (`XFRM_POLICY_IN` and so on) and type (main or sub). Only policies of one kind precede each other.
    pub kind: (u8, u8),
    /// Policies with a lower number come first.
    pub priority: u32,
    /// The network of sources.
    pub src: IpNet,
    /// The network of destinations.
    pub dst: IpNet,
    /// Whether it selects by more than addresses.
    pub narrow: bool,
    /// Whether its packets must be encrypted or dropped. Otherwise they may pass unencrypted.
    pub protects: bool,
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The names are those of `ip xfrm policy`; the numbers are in `include/uapi/linux/xfrm.h`.
        let direction = match self.kind.0 {
            0 => "in",
            1 => "out",
            _ => "fwd",
        };
        write!(f, "{direction} {} to {}", self.src, self.dst)
    }
}

/// Which policies protect packets, by the network of their destination and then of their source: bits of
/// [`SourceKey::PROTECTED`] and [`SourceKey::SURELY_FORWARD`]. The longest network decides.
pub type Selectors = BTreeMap<IpNet, BTreeMap<IpNet, u32>>;

/// Maximum number of networks. Beyond it, all packets are refused. A node with a policy to each of 10 000 other nodes
/// has about 40 000.
const ENOUGH: usize = 1 << 18;

/// Returns the refused networks. `None` if there are too many; then all packets must be refused.
pub fn selectors(policies: &[Policy]) -> Option<Selectors> {
    if !policies.iter().any(|policy| policy.protects) {
        return Some(Selectors::new());
    }
    let destinations: BTreeSet<IpNet> = policies.iter().map(|policy| policy.dst).collect();
    // Counts first, because the result grows with the square of the number of policies.
    let (mut entries, mut all) = (0, Vec::new());
    for dst in destinations {
        let covers = |policy: &&Policy| policy.dst.contains(&dst);
        let here: Vec<&Policy> = policies.iter().filter(covers).collect();
        let sources: BTreeSet<IpNet> = here.iter().map(|policy| policy.src).collect();
        entries += 1 + sources.len();
        if entries > ENOUGH {
            return None;
        }
        all.push((dst, here, sources));
    }
    let all = all.into_iter().map(|(dst, here, sources)| {
        let protection = |src: IpNet| {
            let covers = |policy: &&Policy| policy.src.contains(&src);
            let covering: Vec<&Policy> = here.iter().copied().filter(covers).collect();
            (src, protection(&covering))
        };
        (dst, sources.into_iter().map(protection).collect())
    });
    Some(all.collect())
}

/// Returns which policies protect, of policies that all cover the same packet: in each direction the first of each type.
fn protection(covering: &[&Policy]) -> u32 {
    let mut said = 0;
    let kinds: BTreeSet<(u8, u8)> = covering.iter().map(|policy| policy.kind).collect();
    for kind in kinds {
        // `narrow`: also policies that do not cover all packets of these addresses.
        let first = |protects, narrow| {
            let counts = |policy: &&&Policy| {
                policy.kind == kind && policy.protects == protects && (narrow || !policy.narrow)
            };
            let priorities = covering.iter().filter(counts).map(|policy| policy.priority);
            priorities.min()
        };
        // Of two policies with equal priority the kernel applies the older one, and does not report the age.
        let may = first(true, true)
            .is_some_and(|protects| first(false, false).is_none_or(|passes| protects <= passes));
        let surely = first(true, false)
            .is_some_and(|protects| first(false, true).is_none_or(|passes| protects < passes));
        let bit = 1 << kind.0 & SourceKey::PROTECTED;
        if may {
            said |= bit;
        }
        if surely && bit == SourceKey::PROTECTED_FORWARD {
            said |= SourceKey::SURELY_FORWARD;
        }
    }
    said
}

/// Returns policies that block, for both families, all packets of a direction that no other policy covers (`ip xfrm
/// policy setdefault`).
pub fn block_by_default(direction: u8) -> [Policy; 2] {
    [IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())].map(|all| Policy {
        kind: (direction, 0),
        priority: u32::MAX,
        src: all,
        dst: all,
        narrow: false,
        protects: true,
    })
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use proptest::prelude::*;

    use super::*;

    fn policy(direction: u8, priority: u32, src: &str, dst: &str, protects: bool) -> Policy {
        Policy {
            kind: (direction, 0),
            priority,
            src: src.parse().unwrap(),
            dst: dst.parse().unwrap(),
            narrow: false,
            protects,
        }
    }

    fn longest<'a, T>(all: &'a BTreeMap<IpNet, T>, addr: &IpAddr) -> Option<&'a T> {
        let containing = all.iter().filter(|(net, _)| net.contains(addr));
        let longest = containing.max_by_key(|(net, _)| net.prefix_len());
        longest.map(|(_, value)| value)
    }

    /// Looks a packet up as the programs do.
    fn looked_up(selectors: &Selectors, src: IpAddr, dst: IpAddr) -> bool {
        protection_of(selectors, src, dst) & SourceKey::PROTECTED != 0
    }

    fn protection_of(selectors: &Selectors, src: IpAddr, dst: IpAddr) -> u32 {
        let sources = longest(selectors, &dst);
        let found = sources.and_then(|sources| longest(sources, &src));
        found.copied().unwrap_or_default()
    }

    fn is_looked_up(policies: &[Policy], src: &str, dst: &str) -> bool {
        let selectors = selectors(policies).unwrap();
        looked_up(&selectors, src.parse().unwrap(), dst.parse().unwrap())
    }

    #[test]
    fn the_first_of_a_direction_counts() {
        let mut policies = vec![
            policy(1, 50, "0.0.0.0/0", "10.0.0.0/8", true),
            policy(1, 10, "10.1.0.0/16", "10.2.0.0/16", false),
        ];
        assert!(is_looked_up(&policies, "10.3.0.1", "10.2.0.1"));
        assert!(is_looked_up(&policies, "10.1.0.1", "10.3.0.1"));
        assert!(!is_looked_up(&policies, "10.1.0.1", "10.2.0.1"));
        assert!(!is_looked_up(&policies, "10.1.0.1", "11.0.0.1"));
        assert!(!is_looked_up(&policies, "fd00::1", "fd00::2"));
        // A policy of another direction is compared separately.
        policies.push(policy(2, 90, "10.1.0.0/16", "10.2.9.0/24", true));
        assert!(is_looked_up(&policies, "10.1.0.1", "10.2.9.1"));
        assert!(!is_looked_up(&policies, "10.1.0.1", "10.2.8.1"));
        // A policy that selects ports never lets a packet pass for sure, and may protect any packet.
        policies[1].narrow = true;
        assert!(is_looked_up(&policies, "10.1.0.1", "10.2.8.1"));
    }

    #[test]
    fn each_direction_counts_for_itself() {
        const SURE: u32 = SourceKey::SURELY_FORWARD | SourceKey::PROTECTED_FORWARD;
        let narrow = |policy: Policy| Policy {
            narrow: true,
            ..policy
        };
        let of = |direction, priority, protects| {
            policy(direction, priority, "10.1.0.0/16", "10.2.0.0/16", protects)
        };
        for (wanted, policies) in [
            (1, vec![of(0, 5, true)]),
            (SourceKey::PROTECTED_OUT, vec![of(1, 5, true)]),
            (SURE, vec![of(2, 5, true)]),
            (SURE | 3, (0..3).map(|n| of(n, 5, true)).collect()),
            // A policy that may not cover the packet.
            (4, vec![narrow(of(2, 5, true))]),
            (SURE, vec![of(2, 5, true), narrow(of(2, 1, true))]),
            (4, vec![of(2, 5, true), narrow(of(2, 1, false))]),
            (SURE, vec![of(2, 5, true), narrow(of(2, 6, false))]),
            // The older one is first.
            (4, vec![of(2, 5, true), of(2, 5, false)]),
            (0, vec![of(2, 5, true), of(2, 4, false)]),
        ] {
            let selectors = selectors(&policies).unwrap();
            let [src, dst] = ["10.1.2.3", "10.2.3.4"].map(|addr| addr.parse().unwrap());
            assert_eq!(protection_of(&selectors, src, dst), wanted, "{policies:?}");
            assert_eq!(protection_of(&selectors, dst, src), 0, "{policies:?}");
        }
        // A narrow policy within another one's networks.
        let policies = [
            of(2, 5, true),
            narrow(policy(2, 1, "10.1.9.0/24", "10.2.9.0/24", false)),
        ];
        let selectors = selectors(&policies).unwrap();
        for (src, dst, wanted) in [
            ("10.1.9.1", "10.2.9.1", 4),
            ("10.1.8.1", "10.2.9.1", SURE),
            ("10.1.9.1", "10.2.8.1", SURE),
        ] {
            let [src, dst] = [src, dst].map(|addr| addr.parse().unwrap());
            assert_eq!(
                protection_of(&selectors, src, dst),
                wanted,
                "{src} to {dst}"
            );
        }
    }

    #[test]
    fn a_policy_has_the_words_of_ip_xfrm_policy() {
        for (direction, word) in [(0, "in"), (1, "out"), (2, "fwd")] {
            let policy = policy(direction, 1, "10.1.0.0/16", "10.2.0.0/16", true);
            assert_eq!(
                policy.to_string(),
                format!("{word} 10.1.0.0/16 to 10.2.0.0/16")
            );
        }
    }

    #[test]
    fn nothing_is_asked_where_nothing_is_protected() {
        let pass = policy(1, 10, "0.0.0.0/0", "0.0.0.0/0", false);
        assert_eq!(selectors(&[pass]), Some(Selectors::new()));
        let all = [
            block_by_default(2).to_vec(),
            vec![policy(2, 1, "::/0", "::/0", false)],
        ]
        .concat();
        assert!(is_looked_up(&all, "10.0.0.1", "10.0.0.2"));
        assert!(!is_looked_up(&all, "fd00::1", "fd00::2"));
    }

    #[test]
    fn what_is_too_much_is_everything() {
        let net = |high: u8, n: u16| {
            let [a, b] = n.to_be_bytes();
            format!("{high}.{a}.{b}.0/24")
        };
        let each = |n| policy(1, 1, &net(10, n), "0.0.0.0/0", true);
        let mut policies: Vec<Policy> = (0..600).map(each).collect();
        assert!(selectors(&policies).is_some());
        policies.extend((0..600).map(|n| policy(1, 1, "0.0.0.0/0", &net(11, n), true)));
        assert_eq!(selectors(&policies), None);
    }

    fn network() -> impl Strategy<Value = IpNet> {
        // Few addresses, so that networks contain each other.
        (0_u32..8, 29_u8..=32).prop_map(|(host, prefix)| {
            let addr = Ipv4Addr::from(0x0a00_0000 | host);
            IpNet::new(addr.into(), prefix).unwrap().trunc()
        })
    }

    fn any_policy() -> impl Strategy<Value = Policy> {
        let rest = (0_u8..3, 0_u32..4, any::<bool>(), any::<bool>());
        (network(), network(), rest).prop_map(
            |(src, dst, (direction, priority, narrow, protects))| Policy {
                kind: (direction, 0),
                priority,
                src,
                dst,
                narrow,
                protects,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Two lookups agree, for any addresses, with a search of all policies in order.
        #[test]
        fn two_lookups_are_enough(policies in prop::collection::vec(any_policy(), 0..8)) {
            let selectors = selectors(&policies).unwrap();
            for (src, dst) in (0_u32..8).flat_map(|src| (0_u32..8).map(move |dst| (src, dst))) {
                let [src, dst] = [src, dst].map(|n| IpAddr::V4(Ipv4Addr::from(0x0a00_0000 | n)));
                let wanted = (0..3).any(|direction| {
                    let covering = policies.iter().filter(|p| {
                        p.kind.0 == direction
                            && p.src.contains(&src)
                            && p.dst.contains(&dst)
                            && (p.protects || !p.narrow)
                    });
                    let first = covering.min_by_key(|p| (p.priority, !p.protects));
                    first.is_some_and(|p| p.protects)
                });
                prop_assert_eq!(looked_up(&selectors, src, dst), wanted, "{} to {}", src, dst);
            }
        }
    }
}
