//! Finds problems in the agent's status.

use super::{Finding, Severity};
use crate::api::{AgentStatus, Gravity, Source, SourceKind};

/// Whether the node itself has no error.
pub fn healthy(findings: &[Finding]) -> bool {
    findings
        .iter()
        .all(|finding| finding.severity != Severity::Error || finding.object.is_some())
}

/// Adds the problems in the agent's status.
pub fn judge(agent: &AgentStatus, findings: &mut Vec<Finding>) {
    for problem in &agent.problems {
        let text = format!("{}: {}", problem.place, problem.text);
        findings.push(match problem.gravity {
            Gravity::Object => Finding {
                object: Some(problem.place.clone()),
                ..Finding::error(text)
            },
            Gravity::Node => Finding::error(text),
            Gravity::Warning => Finding::warning(text),
        });
    }
    let mut add = |severity, text| findings.push(Finding::new(severity, text));
    if let Some(seconds) = agent.late_seconds {
        add(
            Severity::Error,
            format!(
                "a change has been waiting for {seconds} s to be written to the kernel, so /healthz \
                 and /livez answer 503; the agent's log says what it does instead"
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

/// A broken connection is made anew in a moment, and an API server is away for a minute when it is upgraded.
const AWAY: u64 = 60;
/// The server sends an event every minute or so; five minutes is the longest that a watch may last.
const STALE: u64 = 360;

/// Adds the problems of reading a source.
fn source(source: &Source, inherited: bool, add: &mut impl FnMut(Severity, String)) {
    match source.kind {
        SourceKind::Manifests => {
            if let Some(failure) = &source.error {
                let text = &failure.text;
                let text = format!(
                    "the manifests have errors; the agent still serves the last valid manifests:\n{text}"
                );
                add(Severity::Error, text);
            }
        }
        SourceKind::Kubernetes => {
            if let Some((severity, text)) = kubernetes(source, inherited, crate::now()) {
                add(severity, text);
            }
        }
    }
}

/// Returns the problem of reading the API.
fn kubernetes(source: &Source, inherited: bool, now: u64) -> Option<(Severity, String)> {
    let age = |at: u64| now.saturating_sub(at);
    match (&source.error, source.read) {
        (Some(failure), 0) => Some((
            Severity::Error,
            format!(
                "the agent has not read all of the Kubernetes API yet, so it serves {}: {}",
                if inherited {
                    "the tables of an earlier agent"
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
                "the agent cannot read the Kubernetes API for {} s; it serves the state of {} s ago, \
                 without later changes: {}",
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
    use crate::api::{Conflict, Failure, Learnt, Problem, Version};

    fn agent() -> AgentStatus {
        AgentStatus {
            version: Version::own(),
            started: 0,
            ready: true,
            node: "node".to_owned(),
            node_port_addresses: Vec::new(),
            pod_networks: Vec::new(),
            cgroup: Learnt::default(),
            pods: None,
            stack_because: None,
            leaving: None,
            late_seconds: None,
            inherited: true,
            source: Source {
                kind: SourceKind::Manifests,
                paths: Vec::new(),
                read: 0,
                error: None,
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
            dns: None,
            tunnels: Vec::new(),
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
        // The name of the node is the operator's responsibility.
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
            text.contains("for 10 s")
                && text.contains("the state of 20 s ago")
                && text.contains("it is"),
            "{text}"
        );
        assert_eq!(kubernetes(&source, true, 1_100).unwrap().0, Severity::Error);
        source.read = 0;
        let (severity, text) = kubernetes(&source, true, 1_020).unwrap();
        assert_eq!(severity, Severity::Error);
        assert!(text.contains("an earlier agent"), "{text}");
        let (_, text) = kubernetes(&source, false, 1_020).unwrap();
        assert!(text.contains("it serves nothing"), "{text}");
    }

    #[test]
    fn an_agent_that_starts_is_not_healthy_yet() {
        let mut starting = agent();
        starting.ready = false;
        assert_eq!(judged(&starting)[0].0, Severity::Error);
    }
}
