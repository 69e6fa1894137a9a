//! Limits labels and annotations: they cannot loosen the rules of the configuration.

use ipnet::IpNet;
use model::{Egress, Mode, Policy, Rules};

use super::budgets::without_lists;

/// The configuration's rules for a workload.
pub(super) struct Bounds {
    /// All rules of the configuration.
    pub(super) stated: Rules,
    /// The rules that labels and annotations cannot change.
    pub(super) enforced: Rules,
}

impl Bounds {
    /// Returns the rules of the object `by` that remain in force, and for each other rule the reason.
    pub(super) fn bind(&self, by: &str, rules: &Rules) -> (Rules, Vec<String>) {
        let mut rules = rules.clone();
        let mut ineffective = Vec::new();
        if rules.captured == Some(false) && self.stated.captured == Some(true) {
            if self.enforced.captured == Some(true) {
                rules.captured = None;
                ineffective.push(format!(
                    "{by}: label istio.io/dataplane-mode: none has no effect: the configuration enforces the capture"
                ));
            } else if self.denies() {
                // The workload has no proxy, but the egress policy stays.
                rules.captured = None;
                rules.mode = Some(Mode::Kernel);
                ineffective.push(format!(
                    "{by}: label istio.io/dataplane-mode: none keeps connections from the proxy, but the configuration's \
                     egress: deny stays in force"
                ));
            }
        }
        if rules.egress == Some(Egress::Allow) && self.denies() {
            rules.egress = None;
            ineffective.push(format!(
                "{by}: annotation dataplane.io/egress: allow has no effect: the configuration says deny"
            ));
        }
        if let Some(asked) = rules.captured_by
            && asked != self.stated.captured_by.unwrap_or_default()
            && self.stated.allow_packets != Some(true)
        {
            rules.captured_by = None;
            ineffective.push(format!(
                "{by}: annotation dataplane.io/captured-by: {} has no effect: the configuration does not allow it \
                 (mesh.rules.allowPackets)",
                asked.word()
            ));
        }
        if self.enforced.captured == Some(true) {
            let without = without_lists(&rules);
            if without != rules {
                rules = without;
                ineffective.push(format!(
                    "{by}: annotations that exclude or include ports, ranges, interfaces or inbound connections have no \
                     effect: the configuration enforces the capture"
                ));
            }
        }
        (rules, ineffective)
    }

    /// Returns whether the configuration denies egress.
    pub(super) fn denies(&self) -> bool {
        self.stated.egress == Some(Egress::Deny)
    }

    /// If the configuration denies egress, applies the egress policy to all ranges and ports that only labels and
    /// annotations exclude.
    pub(super) fn judge(&self, policy: &mut Policy) {
        if !self.denies() {
            return;
        }
        let is_excluded = |range: &IpNet| {
            let mut wider = Some(*range);
            while let Some(range) = wider {
                if let Some(is_captured) = self.stated.outbound_ranges.get(&range) {
                    return !is_captured;
                }
                wider = range.supernet();
            }
            false
        };
        let ranges = policy.outbound_ranges.iter();
        let ranges = ranges.filter(|(range, is_captured)| !**is_captured && !is_excluded(range));
        policy.judged_ranges = ranges.map(|(range, _)| *range).collect();
        let ports = policy.outbound_ports.iter();
        let ports = ports.filter(|(port, is_captured)| {
            !**is_captured && self.stated.outbound_ports.get(port) != Some(&false)
        });
        policy.judged_ports = ports.map(|(port, _)| *port).collect();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dataplane_common::{
        Port, Reason,
        capture::{self, CaptureConfig, Circumstances, Enrolled, RuleKey},
    };
    use model::{
        CapturedBy, Egress, Exempt, Layers, Mode, Place, Rules, Snapshot, Workload, WorkloadName,
    };
    use proptest::prelude::*;

    use crate::{
        Captured,
        enrol::{Enroller, Home, Member, MeshStatements, members},
    };

    fn captured(captured: bool) -> Rules {
        Rules {
            captured: Some(captured),
            ..Rules::default()
        }
    }

    fn denying() -> Rules {
        Rules {
            egress: Some(Egress::Deny),
            ..captured(true)
        }
    }

    /// Returns the member for a pod with the rules `own` under the configuration `all` and `enforced`.
    fn member(all: Rules, enforced: Rules, own: Rules, place: Place) -> Option<Member> {
        let namespace = Rules::default();
        layered(all, enforced, Layers { own, namespace }, place)
    }

    fn layered(all: Rules, enforced: Rules, rules: Layers, place: Place) -> Option<Member> {
        let pod = Workload {
            rules: Arc::new(rules),
            ..Workload::new(WorkloadName::new("shop", "web"), place)
        };
        let said = MeshStatements {
            all: vec![("mesh.rules".to_owned(), all)],
            enforced: ("mesh.enforced".to_owned(), enforced),
            ..MeshStatements::default()
        };
        let snapshot = Snapshot {
            workloads: [(pod.name.clone(), Arc::new(pod))].into_iter().collect(),
            ..Snapshot::default()
        };
        members(&said, &snapshot).pop()
    }

    #[test]
    fn a_pod_does_not_opt_out_of_what_the_configuration_denies() {
        let none = Rules::default;
        let allow = Rules {
            egress: Some(Egress::Allow),
            ..none()
        };
        for (own, place) in [
            (captured(false), Place::Address),
            (allow.clone(), Place::Address),
            (captured(true), Place::Exempt(Exempt::Sidecar)),
        ] {
            let member = member(denying(), none(), own, place).expect("it is captured");
            assert_eq!(member.policy.egress, Egress::Deny);
            assert!(member.denied_by_operator);
            assert_eq!(member.workload.place, Place::Address);
        }
        // The pod's label keeps its connections from the proxy. The pod's own egress policy has the same result.
        let member_of = |own| member(denying(), none(), own, Place::Address).unwrap();
        let label = member_of(captured(false));
        assert!(!label.policy.mode.is_proxied(true));
        assert!(label.ineffective[0].contains("Pod shop/web: label istio.io/dataplane-mode"));
        assert!(member_of(allow.clone()).ineffective[0].contains("dataplane.io/egress: allow"));
        assert!(member_of(captured(true)).ineffective.is_empty());
        // Its own label counts, and that of its namespace does not.
        let labels = Layers {
            own: captured(true),
            namespace: captured(false),
        };
        let labelled = layered(denying(), none(), labels, Place::Address).unwrap();
        assert!(labelled.policy.mode.is_proxied(true) && labelled.ineffective.is_empty());
        let allowed = member(captured(true), none(), allow, Place::Address).unwrap();
        assert!(allowed.ineffective.is_empty());
        // The pod may decide about a setting that the configuration only allows.
        assert!(member(captured(true), none(), captured(false), Place::Address).is_none());
        let strict = member(captured(true), none(), denying(), Place::Address).unwrap();
        assert_eq!(strict.policy.egress, Egress::Deny);
        assert!(!strict.denied_by_operator);
        // The pod may not decide about an enforced setting.
        let whole = member(none(), captured(true), captured(false), Place::Address).unwrap();
        assert_eq!(whole.ineffective.len(), 1);
    }

    #[test]
    fn only_where_the_configuration_allows_it_a_pod_asks_for_capture_by_packets() {
        let own = Rules {
            captured_by: Some(CapturedBy::Packets),
            ..captured(true)
        };
        let none = Rules::default;
        let refused = member(none(), none(), own.clone(), Place::Address).unwrap();
        assert!(!refused.is_by_packets());
        assert!(refused.ineffective[0].contains("captured-by: packets has no effect"));
        let allowed = Rules {
            allow_packets: Some(true),
            ..none()
        };
        let allowed = member(allowed, none(), own, Place::Address).unwrap();
        assert!(allowed.is_by_packets() && allowed.ineffective.is_empty());
        // And the label does not open egress.
        let by_packets = Rules {
            captured_by: Some(CapturedBy::Packets),
            ..none()
        };
        let own = Rules {
            captured_by: Some(CapturedBy::Sockets),
            ..captured(true)
        };
        assert!(
            member(by_packets, none(), own, Place::Address)
                .unwrap()
                .is_by_packets()
        );
    }

    /// Circumstances of a connection to a destination that is not in the tables.
    struct Unknown<'a>(&'a Captured);

    impl capture::Rules for Unknown<'_> {
        fn rule(&self, key: &RuleKey) -> u32 {
            self.0.rule(key)
        }
        fn range(&self, policy: u32, addr: dataplane_common::Addr) -> u32 {
            self.0.range(policy, addr)
        }
    }

    impl Circumstances for Unknown<'_> {
        fn is_own(&self) -> bool {
            false
        }
        fn is_itself(&self) -> bool {
            false
        }
        fn is_known(&self) -> bool {
            false
        }
        fn is_refused(&self) -> bool {
            false
        }
        fn speaks_hbone(&self) -> bool {
            false
        }
        fn listens(&self) -> bool {
            true
        }
    }

    fn reason(member: &Member, addr: [u8; 4], port: u16) -> Reason {
        let mut tables = Captured::default();
        let enrolled: Enrolled =
            Enroller::after(&Captured::default(), false, false).enrol(member, &mut tables);
        let to = (dataplane_common::Addr::from_v4(addr), Port::new(port));
        let asked = Unknown(&tables);
        let (datagram, _) = capture::decide_datagram(&asked, &enrolled, to, false);
        let config = CaptureConfig::default();
        let (reason, _) = capture::decide_outbound(&asked, &config, &enrolled, to, false);
        let denied = |reason| reason == Reason::EgressDenied;
        assert_eq!(denied(reason), denied(datagram));
        reason
    }

    #[test]
    fn only_the_configurations_exclusions_pass_its_egress_policy() {
        let excluding = |rules: Rules| Rules {
            outbound_ports: [(22, false)].into(),
            outbound_ranges: [("10.0.0.0/8".parse().unwrap(), false)].into(),
            ..rules
        };
        let member = |all, own| member(all, Rules::default(), own, Place::Address).unwrap();
        let of_pod = member(denying(), excluding(captured(true)));
        assert_eq!(reason(&of_pod, [10, 1, 1, 1], 80), Reason::EgressDenied);
        assert_eq!(reason(&of_pod, [192, 0, 2, 1], 22), Reason::EgressDenied);
        let of_all = member(excluding(denying()), captured(true));
        assert_eq!(reason(&of_all, [10, 1, 1, 1], 80), Reason::ExcludedRange);
        assert_eq!(reason(&of_all, [192, 0, 2, 1], 22), Reason::ExcludedPort);
        // A narrower and a wider range than the configuration excludes.
        let own = |range: &str| Rules {
            outbound_ranges: [(range.parse().unwrap(), false)].into(),
            ..captured(true)
        };
        let narrow = member(excluding(denying()), own("10.1.0.0/16"));
        assert_eq!(reason(&narrow, [10, 1, 1, 1], 80), Reason::ExcludedRange);
        let wide = member(excluding(denying()), own("0.0.0.0/0"));
        assert_eq!(reason(&wide, [10, 1, 1, 1], 80), Reason::ExcludedRange);
        assert_eq!(reason(&wide, [11, 1, 1, 1], 80), Reason::EgressDenied);
        // A pod that denies egress to itself may also make exceptions.
        let itself = member(captured(true), excluding(denying()));
        assert_eq!(reason(&itself, [10, 1, 1, 1], 80), Reason::ExcludedRange);
    }

    /// A port of the proxy.
    const PROXYS: u16 = 15001;
    /// Interface of machines inside the workload: its name in the rules, and its index in the network namespace.
    const INTERFACE: (&str, u32) = ("virt0", 7);

    /// Returns the reason for a connection that arrives at [`INTERFACE`]. `None` if the workload does not capture such
    /// connections, or does not capture this destination.
    fn by_interface(member: &Member, addr: [u8; 4], port: u16, foreign: bool) -> Option<Reason> {
        let mut tables = Captured::default();
        let mut enroller = Enroller::after(&Captured::default(), foreign, false);
        let interfaces = [(INTERFACE.0.to_owned(), INTERFACE.1)].into();
        let home = Home {
            cookie: 1,
            interfaces: &interfaces,
        };
        let entry = enroller.enrol_namespace(member, home, &mut tables);
        let mut ranges = member.policy.ranges_of_interfaces(true).into_iter();
        if !ranges.any(|range| range.contains(&std::net::IpAddr::from(addr))) {
            return None;
        }
        let config = CaptureConfig {
            flags: if foreign { CaptureConfig::FOREIGN } else { 0 },
            outbound: Port::new(PROXYS),
            inbound: Port::new(PROXYS),
            ..CaptureConfig::default()
        };
        let asked = Unknown(&tables);
        let port = Port::new(port);
        let reason = capture::by_interface(&asked, &config, &entry, port, INTERFACE.1);
        (reason != Reason::NotService).then_some(reason)
    }

    /// Returns whether a connection from [`INTERFACE`] is relayed only after the agent's proxy has judged it.
    fn is_judged(reason: Option<Reason>, foreign: bool) -> bool {
        match reason {
            Some(Reason::EgressDenied | Reason::Recursive) => true,
            Some(Reason::Captured) => !foreign,
            _ => false,
        }
    }

    #[test]
    fn without_the_agents_proxy_nobody_judges_what_comes_by_an_interface() {
        let all = || Rules {
            virtual_interfaces: [INTERFACE.0.into()].into(),
            mode: Some(Mode::Proxy),
            ..denying()
        };
        let said = |own: Rules, port, foreign| {
            let member = member(all(), Rules::default(), own, Place::Address).unwrap();
            by_interface(&member, [10, 1, 1, 1], port, foreign)
        };
        let kernel = || Rules {
            mode: Some(Mode::Kernel),
            ..captured(true)
        };
        assert_eq!(said(captured(true), 80, false), Some(Reason::Captured));
        assert_eq!(said(captured(true), PROXYS, false), Some(Reason::Recursive));
        for port in [80, PROXYS] {
            assert_eq!(said(captured(true), port, true), Some(Reason::EgressDenied));
            for own in [kernel(), captured(false)] {
                assert_eq!(said(own, port, false), Some(Reason::EgressDenied));
            }
        }
    }

    fn rules() -> impl Strategy<Value = Rules> {
        // A range of all addresses, because lists of included ranges often exclude all others.
        let bits = prop_oneof![1 => Just(0), 3 => 6u8..=32];
        let range = (0u8..4, bits).prop_map(|(net, bits)| {
            let addr = std::net::Ipv4Addr::new(10 + net, 1, 1, 1);
            ipnet::IpNet::new(addr.into(), bits).unwrap().trunc()
        });
        (
            any::<Option<bool>>(),
            prop::option::of(prop_oneof![Just(Egress::Allow), Just(Egress::Deny)]),
            prop::collection::btree_map(prop_oneof![Just(22u16), Just(80)], any::<bool>(), 0..2),
            prop::collection::btree_map(range, any::<bool>(), 0..4),
            prop::option::of(prop_oneof![
                Just(Mode::Auto),
                Just(Mode::Kernel),
                Just(Mode::Proxy)
            ]),
            any::<bool>(),
        )
            .prop_map(
                |(captured, egress, outbound_ports, outbound_ranges, mode, has_machines)| Rules {
                    captured,
                    egress,
                    outbound_ranges,
                    outbound_ports,
                    mode,
                    virtual_interfaces: has_machines
                        .then(|| INTERFACE.0.into())
                        .into_iter()
                        .collect(),
                    ..Rules::default()
                },
            )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// A pod's rules cannot open a destination that the configuration alone denies.
        #[test]
        fn nothing_that_a_pod_says_opens_what_the_configuration_denies(
            all in rules(), own in rules(), net in 0u8..4,
            port in prop_oneof![Just(22u16), Just(80), Just(PROXYS)], foreign: bool,
        ) {
            let place = || Place::Address;
            let to = [10 + net, 1, 1, 1];
            let Some(alone) = member(all.clone(), Rules::default(), Rules::default(), place()) else {
                return Ok(());
            };
            if reason(&alone, to, port) == Reason::EgressDenied {
                let with = member(all, Rules::default(), own, place());
                prop_assert!(with.is_some());
                let with = with.unwrap();
                prop_assert_eq!(reason(&with, to, port), Reason::EgressDenied);
                // They cannot open it for a machine inside the pod either, however the configuration treats the
                // destination.
                let comes = by_interface(&alone, to, port, foreign);
                if comes.is_some() {
                    prop_assert!(is_judged(comes, foreign), "{comes:?}");
                    let comes = by_interface(&with, to, port, foreign);
                    prop_assert!(is_judged(comes, foreign), "{comes:?}");
                }
            }
        }
    }
}
