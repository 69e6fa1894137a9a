//! Isolation of tenants: changes by one tenant do not change the entries of other tenants in the tables or in DNS,
//! except for addresses that the tenant's claims win by rule. With the tenant or without
//! it, the agent's own sockets connect to the same servers, and the same entries decide about the cluster's names without
//! its domain. The tables hold no more for the tenant than its objects' size.

mod node;
mod steps;

use std::{collections::BTreeSet, num::NonZero, sync::Arc, thread};

use dataplane_common::{Port, tables::FrontendKey};
use dataplane_plan::Room;
use model::{EntryName, ServiceName, ServiceType};
use proptest::{
    prelude::*,
    test_runner::{RngSeed, TestRunner},
};
use source::ExternalIps;

use self::{
    node::Node,
    steps::{Step, admits, entry_name, steps},
};
use super::{
    clusters::apply,
    oracle::{self, Claim},
};

const HOSTILE: &str = "evil";

/// Large enough that each of the three namespaces may have as much as the other tenants' two ever want.
const ROOM: Room = Room {
    frontends: 900,
    pools: 600,
    endpoints: 1800,
    sources: 200,
};

/// The time of all steps, in seconds since the epoch: no number becomes free again within a run.
const NOW: u64 = 1_800_000_000;

fn run(admits: &ExternalIps, steps: Vec<Step>) {
    let (mut alone, mut beside) = (Node::new(admits), Node::new(admits));
    for step in steps {
        for node in [&mut alone, &mut beside] {
            for change in &step.others {
                apply(&mut node.said, change.clone());
            }
            for (index, entry) in &step.entries {
                node.put(entry_name(*index), entry.as_ref());
            }
        }
        for (index, service) in &step.hostile {
            let name = ServiceName::new(HOSTILE, &format!("e{index}"));
            match service {
                Some(service) => {
                    let mut service = service.clone();
                    service.name = name.clone();
                    beside.said.services.insert(name, Arc::new(service));
                }
                None => _ = beside.said.services.remove(&name),
            }
        }
        for (index, entry) in &step.hostile_entries {
            let name = EntryName::new(HOSTILE, &format!("x{index}"));
            beside.put(name, entry.as_ref());
        }
        alone.take(&step);
        beside.take(&step);
        assert!(alone.planner.left_out().is_empty(), "there is room for all");
        let given = &alone.given() | &beside.given();
        let claimed = oracle::claims(&beside.snapshot);
        let owner = |key: &FrontendKey| claimed.get(key)?.service();
        // An entry cannot have an address that a Service or an endpoint of a Service has, on any port.
        let services = beside.snapshot.services.values();
        let hostile = services.filter(|service| {
            service.name.namespace() == HOSTILE && service.kind != ServiceType::Entry
        });
        let mut taken = BTreeSet::new();
        for service in hostile {
            let endpoints = service.ports.iter().flat_map(|port| &port.endpoints);
            taken.extend(endpoints.map(|endpoint| endpoint.addr));
            let own = service.cluster_ips.iter().chain(&service.external_ips);
            taken.extend(own.chain(&service.load_balancer_ips));
        }
        let without = oracle::claims(&alone.snapshot);
        let of_entry = |key: &FrontendKey| {
            let owner = without.get(key).and_then(Claim::service);
            owner.is_some_and(|owner| owner.name().starts_with("serviceentry:"))
        };
        let by_rule = |key: &FrontendKey| {
            owner(key).is_some_and(|owner| owner.namespace() == HOSTILE)
                || (taken.contains(&key.addr.ip()) && of_entry(key))
        };
        let of_others = |node: &Node| {
            let mut resolved = node.sim.resolved();
            resolved.retain(|key, _| !by_rule(key) && !given.contains(&key.addr.ip()));
            resolved
        };
        assert_eq!(of_others(&beside), of_others(&alone));
        let hosts = |node: &Node| {
            let mut hosts = node.hosts();
            // A host has no answer if a Service's field or an older entry claims its address.
            hosts.retain(|_, resolved| resolved.is_some());
            hosts
        };
        let (mut with, mut alone_has) = (hosts(&beside), hosts(&alone));
        let lost: Vec<_> = beside
            .snapshot
            .entries
            .values()
            .flat_map(|entry| {
                let vips = entry.hosts.iter().flat_map(|host| {
                    let name = Arc::clone(&host.name);
                    host.vips.iter().map(move |vip| (Arc::clone(&name), *vip))
                });
                let name = entry.name.clone();
                let ports = entry.ports.clone();
                vips.flat_map(move |(host, vip)| {
                    let name = name.clone();
                    ports.clone().into_iter().map(move |port| {
                        let protocol = oracle::protocol(port.protocol);
                        let key = FrontendKey::new(vip.into(), Port::new(port.port), protocol);
                        (
                            key,
                            (name.clone(), Arc::clone(&host), vip.is_ipv4(), port.port),
                        )
                    })
                })
            })
            .filter(|(key, _)| owner(key).is_some_and(|owner| owner.namespace() == HOSTILE))
            .collect();
        for (_, name) in lost {
            with.remove(&name);
            alone_has.remove(&name);
        }
        assert_eq!(with, alone_has);
        assert_eq!(beside.names(), alone.names());
        assert_eq!(beside.short_names(), alone.short_names());
        assert_eq!(beside.of_agent(), alone.of_agent());
        beside.assert_agents_ports_are_free();
        beside.assert_bounded();
        let sizes = alone.sizes();
        for (name, [pools, endpoints]) in beside.sizes() {
            // Without a key that the tenant has won, a service may have fewer.
            let is_entry = name.name().starts_with("serviceentry:");
            if name.namespace() != HOSTILE && !is_entry {
                let [most_pools, most_endpoints] = sizes.get(&name).copied().unwrap_or_default();
                let is_same = pools <= most_pools && endpoints <= most_endpoints;
                assert!(is_same, "{name} has grown");
            }
        }
        for (name, left) in beside.planner.left_out() {
            assert_eq!(name.namespace(), HOSTILE, "{left:?}");
        }
    }
}

/// Number of runs (`DATAPLANE_TENANT_RUNS`).
fn runs() -> u32 {
    let given = std::env::var("DATAPLANE_TENANT_RUNS");
    given.map_or(500, |given| {
        given.parse().expect("DATAPLANE_TENANT_RUNS: a number")
    })
}

/// The runs are shared among as many threads as there are processors.
#[test]
fn a_tenant_changes_nothing_of_others() {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = u32::try_from(threads).expect("so many processors");
    let cases = runs().div_ceil(threads);
    thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let mut config = ProptestConfig {
                    cases,
                    source_file: Some(file!()),
                    ..ProptestConfig::default()
                };
                // With one seed, all threads would draw the same cases.
                if let RngSeed::Fixed(seed) = config.rng_seed {
                    config.rng_seed = RngSeed::Fixed(seed.wrapping_add(thread.into()));
                }
                let mut runner = TestRunner::new(config);
                let ended = runner.run(&(admits(), steps()), |(admits, steps)| {
                    run(&admits, steps);
                    Ok(())
                });
                if let Err(error) = ended {
                    panic!("{error}\n{runner}");
                }
            });
        }
    });
}
