//! A cluster that is never at rest.

use std::net::{IpAddr, Ipv4Addr};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng, seq::IndexedRandom as _};
use serde_json::{Value, json};

use super::{Cluster, Resource, objects};

/// Endpoints of each service at the beginning.
const ENDPOINTS: u32 = 3;
/// Pods of a /16; where there are more endpoints than that, they have other ports.
const PODS: u32 = 60_000;

/// A cluster of many services, and changes to it as they happen in clusters: above all pods that
/// come and go, and now and then a service.
#[derive(Debug)]
pub struct Churn {
    cluster: Cluster,
    /// The services that there are, by number.
    services: Vec<u32>,
    next: u32,
    random: StdRng,
}

impl Churn {
    /// A cluster of so many services with three endpoints each. Equal values of `seed` make equal
    /// changes.
    pub fn new(cluster: Cluster, services: u32, seed: u64) -> Self {
        cluster.apply_all((0..services).flat_map(Self::objects));
        Self {
            cluster,
            services: (0..services).collect(),
            next: services,
            random: StdRng::seed_from_u64(seed),
        }
    }

    /// The cluster that it changes.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// A service's cluster IP.
    pub fn vip(service: u32) -> IpAddr {
        Ipv4Addr::from_bits(Ipv4Addr::new(10, 96, 1, 0).to_bits() + service).into()
    }

    /// A pod's address.
    pub fn pod(number: u32) -> IpAddr {
        let base = Ipv4Addr::new(10, 244, 16, 0).to_bits();
        Ipv4Addr::from_bits(base + number % PODS).into()
    }

    /// A service and its slice, as they are at the beginning.
    pub fn objects(service: u32) -> [Value; 2] {
        let first = service * ENDPOINTS;
        [
            objects::service(&name(service), Self::vip(service)),
            slice(service, &[first, first + 1, first + 2]),
        ]
    }

    /// The slice of a service, with its first endpoint replaced by the pod with this number.
    pub fn slice_with(service: u32, pod: u32) -> Value {
        let first = service * ENDPOINTS;
        slice(service, &[pod, first + 1, first + 2])
    }

    /// Makes a change.
    pub fn step(&mut self) {
        let Some(&service) = self.services.choose(&mut self.random) else {
            return self.create();
        };
        match self.random.random_range(0..100) {
            // A rollout, a crash, a node that is removed.
            0..70 => {
                let count = self.random.random_range(0..=5);
                let pods: Vec<u32> = (0..count)
                    .map(|_| self.random.random_range(0..PODS))
                    .collect();
                self.cluster.apply(slice(service, &pods));
            }
            // A pod that is not ready, or ends.
            70..85 => {
                let first = service * ENDPOINTS;
                let mut slice = slice(service, &[first, first + 1, first + 2]);
                let ready = self.random.random_bool(0.5);
                slice["endpoints"][0]["conditions"] =
                    json!({ "ready": ready, "serving": true, "terminating": !ready });
                self.cluster.apply(slice);
            }
            85..90 => {
                let [mut object, _] = Self::objects(service);
                let port = self.random.random_range(1..1000);
                object["spec"]["ports"][0]["port"] = json!(port);
                self.cluster.apply(object);
            }
            90..95 => self.create(),
            _ => {
                self.services.retain(|&known| known != service);
                let name = name(service);
                self.cluster.delete(Resource::Services, "default", &name);
                self.cluster
                    .delete(Resource::EndpointSlices, "default", &format!("{name}-a"));
            }
        }
    }

    fn create(&mut self) {
        let service = self.next;
        self.next += 1;
        self.services.push(service);
        // As a rule, a service is there before its endpoints; here, now and then, after them.
        let mut objects = Self::objects(service);
        if self.random.random_bool(0.2) {
            objects.reverse();
        }
        for object in objects {
            self.cluster.apply(object);
        }
    }
}

fn name(service: u32) -> String {
    format!("service-{service:06}")
}

fn slice(service: u32, pods: &[u32]) -> Value {
    let name = name(service);
    let endpoints: Vec<Value> = pods
        .iter()
        .map(|pod| {
            let node = if pod % 10 == 0 { "node2" } else { "elsewhere" };
            objects::endpoint(Churn::pod(*pod), node)
        })
        .collect();
    let port = 8080 + pods.first().map_or(0, |pod| pod / PODS);
    let port = u16::try_from(port).unwrap_or(8080);
    objects::slice(&name, &format!("{name}-a"), port, &endpoints)
}
