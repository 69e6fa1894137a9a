//! How endpoints share the clients: by chance, in equal parts; or a client keeps its endpoint.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use dataplane_tests::Lab;

use super::{
    case::{At, Case, Numbered},
    compare::MODES,
    world::{Settings, Tries, Worker, World},
};

scenarios! {
    Dataplane:
    endpoints_share_equally,
    a_clients_endpoint_is_kept_by_its_address,
}

const WEB: Numbered = Numbered {
    name: "web",
    number: 1,
};
const STICKY: Numbered = Numbered {
    name: "sticky",
    number: 2,
};
const ENDPOINTS: [&str; 3] = ["e1", "e2", "e3"];

fn workers() -> impl Iterator<Item = Worker> {
    MODES
        .into_iter()
        .map(Worker::KubeProxy)
        .chain([Worker::Dataplane])
}

fn world(worker: Worker) -> Result<World> {
    let services = |lab: &Lab| {
        let endpoints = ENDPOINTS.map(|name| lab.pod(name));
        vec![
            WEB.service().endpoints(&endpoints),
            STICKY.service().affinity(600).endpoints(&endpoints),
        ]
    };
    World::start(worker, &Settings::base(), &services)
}

/// Each endpoint gets its third, within chance: with kube-proxy's rules and with the dataplane.
fn endpoints_share_equally() -> Result<()> {
    const TRIES: u32 = 900;
    // Five standard deviations of the number of hits among 900 of probability 1/3.
    const SPREAD: u64 = 71;
    let mut cases = Case::all(&["vm"], &[WEB], &[At::ClusterIp]);
    cases.extend(Case::all(&["ext"], &[WEB], &[At::NodePort]));
    for worker in workers() {
        let tries = Tries {
            count: TRIES,
            ..Tries::PATIENT
        };
        let reports = world(worker)?.reports(&cases, tries, 2)?;
        for (case, report) in cases.iter().zip(reports) {
            let counts: BTreeMap<_, _> = (report.endpoints.iter())
                .map(|(endpoint, report)| (endpoint.as_str(), report.answers))
                .collect();
            println!("{worker:?}: {case}: {counts:?}");
            ensure!(
                report.answered == report.attempts,
                "{worker:?}: {case}: {:?}",
                report.errors
            );
            let third = u64::from(TRIES / 3);
            ensure!(
                counts.keys().eq(&ENDPOINTS)
                    && counts.values().all(|count| count.abs_diff(third) <= SPREAD),
                "{worker:?}: {case}: {counts:?}"
            );
        }
    }
    Ok(())
}

/// A client has one endpoint of a service's port, at every address of the service, and another client may have another.
fn a_clients_endpoint_is_kept_by_its_address() -> Result<()> {
    let clients = ["vm", "ext", "ext2", "far"];
    let cases: Vec<Case> = Case::all(&clients, &[STICKY], &At::ALL)
        .into_iter()
        // Replies of node2's pods to each other need not come back to the translating node.
        .filter(|case| case.client != "far" || !case.is_at(At::ClusterIp))
        .collect();
    for worker in workers() {
        let world = world(worker)?;
        let tries = Tries {
            count: 8,
            ..Tries::PATIENT
        };
        // One after the other: of two connections at the same time, neither is the second.
        let reports = world.reports(&cases, tries, 1)?;
        let mut seen: BTreeMap<(&str, bool, bool), BTreeSet<String>> = BTreeMap::new();
        for (case, report) in cases.iter().zip(reports) {
            ensure!(
                report.answered == report.attempts,
                "{worker:?}: {case}: {:?}",
                report.errors
            );
            seen.entry((&case.client, case.to.is_ipv4(), case.udp))
                .or_default()
                .extend(report.endpoints.into_keys());
        }
        for (who, endpoints) in seen {
            ensure!(
                endpoints.len() == 1,
                "{worker:?}: {who:?} has {endpoints:?}"
            );
        }
    }
    Ok(())
}
