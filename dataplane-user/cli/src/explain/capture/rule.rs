//! The rules that decide, and their origins.

use admin::api;
use dataplane_common::{
    Addr, Port, Reason,
    capture::{self, CAPTURED, EXCLUDED, Enrolled, Local, RuleKey},
};
use serde::Serialize;

use super::Mesh;

/// A rule and its origin. Only a running agent knows the origin.
#[derive(Debug, Serialize)]
pub struct Rule {
    /// See [`api::MeshRule::about`].
    pub about: &'static str,
    /// See [`api::MeshRule::of`].
    pub of: String,
    /// See [`api::MeshRule::says`].
    pub says: String,
    /// See [`api::MeshRule::by`].
    pub by: Option<String>,
}

impl Mesh {
    /// Returns the workload of a number, if the agent reports it.
    pub(super) fn workload(&self, number: u32) -> Option<&api::MeshWorkload> {
        let mut workloads = self.workloads.iter().flatten();
        workloads.find(|workload| workload.number == number)
    }

    /// Returns the rule that decides about an outbound connection.
    pub(super) fn outbound_rule(
        &self,
        reason: Reason,
        enrolled: &Enrolled,
        (addr, port): (Addr, Port),
        (user, group): (u32, u32),
    ) -> Option<Rule> {
        let held = |kind, id| {
            let of = enrolled.policy;
            let said = capture::Rules::rule(&self.held, &RuleKey { of, kind, id });
            (said != 0).then_some(said)
        };
        let (about, of, says) = match reason {
            Reason::ExcludedUser if held(RuleKey::USER, user) == Some(EXCLUDED) => {
                ("user", user.to_string(), "excluded")
            }
            Reason::ExcludedUser if held(RuleKey::GROUP, group) == Some(EXCLUDED) => {
                ("group", group.to_string(), "excluded")
            }
            // Rules name the users and groups that are captured, and exclude all others.
            Reason::ExcludedUser => {
                let rules = self.workload(enrolled.workload).map(|w| w.rules.iter());
                let is_one = |rule: &&api::MeshRule| {
                    matches!(&*rule.about, "user" | "group") && rule.says == "captured"
                };
                return Some(Rule {
                    about: "other-users",
                    of: String::new(),
                    says: "excluded".to_owned(),
                    by: rules.and_then(|mut rules| Some(rules.find(is_one)?.by.clone())),
                });
            }
            Reason::ExcludedPort => ("outbound-port", port.host().to_string(), "excluded"),
            Reason::ExcludedRange | Reason::Captured => {
                let port = port.host();
                if held(RuleKey::OUTBOUND_PORT, port.into()) == Some(CAPTURED) {
                    ("outbound-port", port.to_string(), "captured")
                } else {
                    let (range, said) = self.held.longest_range(enrolled.policy, addr)?;
                    // A range of all addresses is the default, which needs no mention.
                    if said == CAPTURED && range.prefix_len() == 0 {
                        return None;
                    }
                    let says = if said == CAPTURED {
                        "captured"
                    } else {
                        "excluded"
                    };
                    ("outbound-range", range.to_string(), says)
                }
            }
            Reason::EgressDenied => ("egress", String::new(), "deny"),
            _ => return self.setting(reason, enrolled),
        };
        let by = self.said_by(enrolled.workload, about, &of);
        Some(Rule {
            about,
            of,
            says: says.to_owned(),
            by,
        })
    }

    /// Returns the rule that decides about an inbound connection.
    pub(super) fn inbound_rule(
        &self,
        reason: Reason,
        local: &Local,
        port: u16,
        interface: Option<&str>,
    ) -> Option<Rule> {
        let key = RuleKey {
            of: local.policy,
            kind: RuleKey::INBOUND_PORT,
            id: port.into(),
        };
        let listed = capture::Rules::rule(&self.held, &key) != 0;
        // With `auto`, listed ports count also while plain connections go direct.
        let takes_some = match local.flags & Enrolled::ONLY_HBONE {
            0 => Enrolled::INBOUND,
            _ => Enrolled::INBOUND | Enrolled::HAS_INBOUND_PORTS,
        };
        let (about, of, says) = match reason {
            Reason::ExcludedInterface => ("interface", interface?.to_owned(), "excluded"),
            Reason::ExcludedPort if listed => ("inbound-port", port.to_string(), "excluded"),
            Reason::ExcludedPort if local.flags & takes_some == 0 => {
                ("inbound", String::new(), "excluded")
            }
            Reason::ExcludedPort => ("inbound-others", String::new(), "excluded"),
            Reason::CapturedInbound if listed => ("inbound-port", port.to_string(), "captured"),
            _ => return self.setting(reason, &local.enrolled()),
        };
        let by = self.said_by(local.workload, about, &of);
        Some(Rule {
            about,
            of,
            says: says.to_owned(),
            by,
        })
    }

    /// Returns the setting that decides if no rule does.
    fn setting(&self, reason: Reason, enrolled: &Enrolled) -> Option<Rule> {
        let (has, workload) = (|flag| enrolled.flags & flag != 0, enrolled.workload);
        let (about, says) = match reason {
            Reason::Direct if has(Enrolled::ONLY_HBONE) => ("mode", "auto"),
            Reason::Direct => ("mode", "kernel"),
            Reason::ProxyDown => ("without-proxy", "refuse"),
            Reason::ProxyBypassed => ("without-proxy", "pass"),
            _ => return None,
        };
        let said = self.workload(workload).and_then(|w| {
            let mut rules = w.rules.iter();
            rules.find(|rule| rule.about == about)
        });
        Some(Rule {
            about,
            of: String::new(),
            // The rule's value may be auto, which has this effect here.
            says: said.map_or(says, |rule| &rule.says).to_owned(),
            by: self.said_by(workload, about, ""),
        })
    }

    fn said_by(&self, workload: u32, about: &str, of: &str) -> Option<String> {
        let mut rules = self.workload(workload)?.rules.iter();
        let rule = rules.find(|rule| rule.about == about && rule.of == of);
        Some(rule.map_or_else(|| "the default".to_owned(), |rule| rule.by.clone()))
    }
}
