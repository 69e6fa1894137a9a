//! The endpoint that answers a client: session affinity, local policies, and the owner of an address that two services
//! claim.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Host, Lab, report::Report};

use crate::{
    cluster::{Cluster, TCP, UDP, eventually, fails, reaches, refused},
    manifest::{Condition, Service},
    outcome::run,
};

scenarios! {
    Dataplane:
    affinity_is_by_pod_and_by_service,
    affinity_holds_for_every_address_of_a_port,
    affinity_is_refreshed_by_use_and_expires,
    affinity_does_not_return_to_an_endpoint_that_left,
    a_local_policy_chooses_among_the_nodes_own,
    the_older_of_two_services_has_the_vip,
    names_and_headless_services_have_no_vip,
}

const ALL: [&str; 3] = ["far", "near", "near2"];

/// How many services choose independently of each other: that all of them make the same choice
/// twice by chance is one in 3^20.
const MANY: usize = 20;

fn vip(number: usize, v4: bool) -> String {
    if v4 {
        format!("10.96.1.{number}")
    } else {
        format!("fd00:96::1:{number}")
    }
}

/// Services with affinity and three endpoints.
fn many(lab: &Lab, seconds: u32) -> Vec<Service> {
    (1..=MANY)
        .map(|number| {
            Service::new(
                &format!("sticky-{number}"),
                &[&vip(number, true), &vip(number, false)],
            )
            .port("tcp", 80, TCP)
            .port("udp", 53, UDP)
            .endpoints(&ALL.map(|name| lab.pod(name)))
            .affinity(seconds)
        })
        .collect()
}

/// Returns the endpoint that each service has for a client. Asks every service `rounds` times, and fails
/// if an endpoint differs between two rounds.
fn choices(client: &Host, v4: bool, udp: bool, rounds: usize) -> Result<Vec<String>> {
    let (subcommand, port) = if udp { ("udp", 53) } else { ("connect", 80) };
    let mut probe = client.probe(subcommand).arg("--each");
    for number in 1..=MANY {
        let vip = vip(number, v4);
        let to = if v4 {
            format!("{vip}:{port}")
        } else {
            format!("[{vip}]:{port}")
        };
        probe = probe.args(["--to", &to]);
    }
    let report: Report = probe
        .args(["--count", &(rounds * MANY).to_string()])
        .json()?;
    ensure!(report.answered == report.attempts, "{report:?}");
    let endpoints: Vec<String> = report.each.into_iter().filter_map(|a| a.endpoint).collect();
    for round in endpoints.chunks(MANY) {
        ensure!(
            round == &endpoints[..MANY],
            "{} was given another endpoint: {endpoints:?}",
            client.name()
        );
    }
    Ok(endpoints[..MANY].to_vec())
}

/// A client is a pod (its network namespace), or the node; each port of each service has its own
/// choice for it, in each family.
fn affinity_is_by_pod_and_by_service() -> Result<()> {
    let cluster = Cluster::start(|lab| many(lab, 3600))?;
    let lab = &cluster.lab;
    let clients = [cluster.client(), lab.pod("near"), lab.node("node2")];
    let mut seen: Vec<Vec<String>> = Vec::new();
    for client in clients {
        for (v4, udp) in [(true, false), (false, false), (true, true), (false, true)] {
            let chosen = choices(client, v4, udp, 5)?;
            ensure!(
                chosen.iter().any(|endpoint| *endpoint != chosen[0]),
                "all services agree: {chosen:?}"
            );
            ensure!(
                !seen.contains(&chosen),
                "two clients, families or protocols agree: {chosen:?}"
            );
            // Choices for other clients in between change nothing.
            seen.push(chosen);
        }
    }
    let mut seen = seen.into_iter();
    for client in clients {
        for (v4, udp) in [(true, false), (false, false), (true, true), (false, true)] {
            ensure!(Some(choices(client, v4, udp, 1)?) == seen.next());
        }
    }
    Ok(())
}

/// Cluster IP, external IP and node port are ways to one port: affinity of a client that came by one of them holds for
/// the others, as with kube-proxy.
fn affinity_holds_for_every_address_of_a_port() -> Result<()> {
    let services = |lab: &Lab| {
        (1..=MANY)
            .map(|number| {
                Service::new(&format!("sticky-{number}"), &[&vip(number, true)])
                    .node_port(
                        "tcp",
                        80,
                        TCP,
                        30000 + u16::try_from(number).expect("small"),
                    )
                    .set("externalIPs", vec![format!("203.0.113.{number}")])
                    .endpoints(&ALL.map(|name| lab.pod(name)))
                    .affinity(3600)
            })
            .collect()
    };
    let cluster = Cluster::start_with(services, &["--nodeport-addresses", "192.168.77.0/24"])?;
    for client in [cluster.client(), cluster.lab.node("node2")] {
        let chosen = choices(client, true, false, 2)?;
        for (number, endpoint) in (1..).zip(&chosen) {
            for to in [
                format!("203.0.113.{number}:80"),
                format!("192.168.77.2:{}", 30000 + number),
            ] {
                reaches(client, &to, "connect --count 3", &[endpoint])?;
            }
        }
    }
    Ok(())
}

/// The timeout runs from the last use.
fn affinity_is_refreshed_by_use_and_expires() -> Result<()> {
    const TIMEOUT: Duration = Duration::from_secs(2);
    let cluster = Cluster::start(|lab| many(lab, 2))?;
    let client = cluster.client();
    // On a machine that stands still for longer than the timeout, an entry rightly expires: such an attempt proves
    // nothing.
    'attempt: for _ in 0..20 {
        let mut used = Instant::now();
        let chosen = choices(client, true, false, 1)?;
        let begin = used;
        while begin.elapsed() < 2 * TIMEOUT {
            std::thread::sleep(TIMEOUT / 4);
            let asked = Instant::now();
            let again = choices(client, true, false, 1)?;
            if used.elapsed() >= TIMEOUT {
                continue 'attempt;
            }
            ensure!(again == chosen, "forgotten: {chosen:?}, {again:?}");
            used = asked;
        }
        std::thread::sleep(TIMEOUT + Duration::from_millis(500));
        let later = choices(client, true, false, 1)?;
        ensure!(later != chosen, "nothing expired: {chosen:?}");
        return Ok(());
    }
    bail!("this machine stood still for {TIMEOUT:?} in each of 20 attempts");
}

/// The endpoint of a client goes: the client gets a new one, which stays when the first comes back.
fn affinity_does_not_return_to_an_endpoint_that_left() -> Result<()> {
    let services = |lab: &Lab, names: &[&str]| {
        let endpoints: Vec<_> = names.iter().map(|name| lab.pod(name)).collect();
        let web = Service::new("web", &["10.96.0.10", "fd00:96::10"])
            .port("tcp", 80, TCP)
            .port("udp", 53, UDP)
            .endpoints(&endpoints)
            .affinity(3600);
        // Written after the other (in the order of their names), it shows when both are.
        let witness = Service::new("witness", &["10.96.0.11"])
            .port("tcp", 80, TCP)
            .endpoints(&endpoints);
        [web, witness]
    };
    let cluster = Cluster::start(|lab| services(lab, &ALL).into())?;
    let client = cluster.client();
    let change = |names: &[&str]| -> Result<()> {
        cluster.manifests.write(&services(&cluster.lab, names))?;
        eventually(|| reaches(client, "10.96.0.11:80", "connect --count 60", names).map(drop))
    };
    let all_reach = |endpoint| -> Result<()> {
        for (to, how) in [
            ("10.96.0.10:80", "connect --count 20"),
            ("[fd00:96::10]:80", "connect --count 20"),
            ("10.96.0.10:53", "udp --count 20"),
            ("[fd00:96::10]:53", "udp --count 20 --unconnected"),
        ] {
            reaches(client, to, how, &[endpoint])?;
        }
        Ok(())
    };
    // With one endpoint there is one choice.
    change(&["far"])?;
    all_reach("far")?;
    change(&ALL)?;
    all_reach("far")?;
    change(&["near"])?;
    all_reach("near")?;
    change(&ALL)?;
    all_reach("near")
}

/// `internalTrafficPolicy: Local`: only the node's own endpoints, by their own conditions; without an endpoint, a
/// refusal with that reason. Cluster IPs only.
fn a_local_policy_chooses_among_the_nodes_own() -> Result<()> {
    use Condition::{NotReady, Ready, ServingTerminating};
    let service = |lab: &Lab, conditions: [Condition; 3]| {
        let web = Service::new("web", &["10.96.0.10", "fd00:96::10"])
            .node_port("tcp", 80, TCP, 30080)
            .node_port("udp", 53, UDP, 30053)
            .set("externalIPs", vec!["203.0.113.50"])
            .set("internalTrafficPolicy", "Local");
        let pods = ALL.map(|name| lab.pod(name)).into_iter().zip(conditions);
        pods.fold(web, |web, (pod, condition)| web.endpoint(pod, condition))
    };
    let cluster = Cluster::start_with(
        |lab| vec![service(lab, [Ready; 3])],
        &["--nodeport-addresses", "192.168.77.0/24,fd77::/64"],
    )?;
    let clients = [cluster.client(), cluster.lab.node("node2")];
    let ways = [
        ("10.96.0.10:80", "connect --count 60"),
        ("[fd00:96::10]:80", "connect --count 60"),
        ("10.96.0.10:53", "udp --count 60"),
        ("[fd00:96::10]:53", "udp --count 60 --unconnected"),
    ];
    for (conditions, answer) in [
        ([Ready, Ready, Ready], &["near", "near2"][..]),
        ([Ready, Ready, NotReady], &["near"]),
        // A remote ready endpoint does not keep local ones that terminate from serving.
        ([Ready, ServingTerminating, NotReady], &["near"]),
        ([Ready, ServingTerminating, Ready], &["near2"]),
        ([Ready, NotReady, NotReady], &[]),
        // A state that serves, between two that refuse, so that each change can be seen.
        ([NotReady, Ready, NotReady], &["near"]),
        ([NotReady, NotReady, NotReady], &[]),
    ] {
        cluster
            .manifests
            .write(&[service(&cluster.lab, conditions)])?;
        for client in clients {
            for (to, how) in ways {
                eventually(|| {
                    if answer.is_empty() {
                        refused(client, to, how)
                    } else {
                        reaches(client, to, how, answer).map(drop)
                    }
                })?;
            }
        }
        if conditions == [Ready, NotReady, NotReady] {
            cluster.for_reason(Reason::NoLocalEndpoint, 3, || {
                refused(cluster.client(), "10.96.0.10:80", "connect --count 3")
            })?;
            for to in ["203.0.113.50:80", "192.168.77.2:30080", "[fd77::2]:30080"] {
                reaches(cluster.client(), to, "connect --count 5", &["far"])?;
            }
        }
    }
    cluster.for_reason(Reason::NoEndpoints, 3, || {
        refused(cluster.client(), "10.96.0.10:80", "connect --count 3")
    })?;
    Ok(())
}

/// Two services with one VIP and port: the older serves it, `status` names the other, which takes
/// over when the older goes.
fn the_older_of_two_services_has_the_vip() -> Result<()> {
    let young = |lab: &Lab| {
        Service::new("a-young", &["10.96.0.10"])
            .port("tcp", 80, TCP)
            .port("tcp2", 81, TCP)
            .endpoints(&[lab.pod("near")])
            .created("2026-01-02T00:00:00Z")
    };
    let old = |lab: &Lab| {
        Service::new("b-old", &["10.96.0.10"])
            .port("tcp", 80, TCP)
            .endpoints(&[lab.pod("far")])
            .created("2026-01-01T00:00:00Z")
    };
    let cluster = Cluster::start(|lab| vec![young(lab), old(lab)])?;
    let (client, lab) = (cluster.client(), &cluster.lab);
    reaches(client, "10.96.0.10:80", "connect --count 20", &["far"])?;
    // A port that only the younger has is still its own.
    reaches(client, "10.96.0.10:81", "connect --count 20", &["near"])?;
    let status = cluster.status()?;
    let conflicts = status["agent"]["conflicts"].as_array();
    let found = conflicts.into_iter().flatten().any(|conflict| {
        conflict["frontend"] == "10.96.0.10:80/tcp"
            && conflict["winner"] == "default/b-old"
            && conflict["losers"] == serde_json::json!(["default/a-young"])
    });
    ensure!(found, "{status:#}");
    let text = String::from_utf8(cluster.agent.status()?.stdout)?;
    ensure!(
        text.contains("a-young") && text.contains("b-old"),
        "not named: {text}"
    );
    // The list of services shows it at both.
    for (service, marked) in [
        ("a-young", "10.96.0.10:80/tcp (of default/b-old)"),
        ("b-old", "10.96.0.10:80/tcp (not of default/a-young)"),
    ] {
        let listed = run(&cluster.agent, &format!("services {service}"))?;
        listed.exits(0)?.says(&[marked])?;
    }
    cluster.manifests.write(&[young(lab)])?;
    eventually(|| reaches(client, "10.96.0.10:80", "connect --count 20", &["near"]).map(drop))?;
    // Of two services of one age, the first by name.
    let (young, old) = (young(lab), old(lab).created("2026-01-02T00:00:00Z"));
    cluster.manifests.write(&[old, young])?;
    eventually(|| {
        let status = cluster.status()?;
        let conflicts = status["agent"]["conflicts"].to_string();
        ensure!(
            conflicts.contains(r#""winner":"default/a-young""#),
            "{conflicts}"
        );
        Ok(())
    })?;
    reaches(client, "10.96.0.10:80", "connect --count 20", &["near"]).map(drop)
}

/// A headless service and an `ExternalName` have no VIP, even if their specs name cluster IPs or external IPs.
fn names_and_headless_services_have_no_vip() -> Result<()> {
    let cluster = Cluster::start(|lab| {
        vec![
            Service::new("headless", &[])
                .port("tcp", 80, TCP)
                .set("externalIPs", vec!["203.0.113.51"])
                .endpoints(&[lab.pod("near")]),
            Service::new("name", &["10.96.0.41"])
                .port("tcp", 80, TCP)
                .set("type", "ExternalName")
                .set("externalName", "example.org")
                .set("externalIPs", vec!["203.0.113.52"])
                .endpoints(&[lab.pod("near")]),
            Service::new("web", &["10.96.0.10"])
                .port("tcp", 80, TCP)
                .endpoints(&[lab.pod("near")]),
        ]
    })?;
    let client = cluster.client();
    reaches(client, "10.96.0.10:80", "connect --count 3", &["near"])?;
    for address in ["203.0.113.51:80", "203.0.113.52:80", "10.96.0.41:80"] {
        let how = "connect --timeout-ms 300";
        cluster.for_reason(Reason::NotService, 1, || {
            fails(client, address, how, "TIMEOUT")
        })?;
    }
    Ok(())
}
