//! istiod's side of the comparison: its messages to a ztunnel, and how a ztunnel on a node uses them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context as _, Result};
use data_encoding::BASE64;
use serde_json::Value;

use super::{
    NODE, REGION, ZONE,
    compare::{Endpoints, Side},
    hosts, list, text,
};

/// Output of `workloads`: Istio's messages by their kind.
pub struct Messages(Vec<Value>);

impl Messages {
    pub fn read(lines: &str) -> Result<Self> {
        let lines = lines.lines().map(serde_json::from_str);
        Ok(Self(lines.collect::<serde_json::Result<_>>()?))
    }

    /// Returns the messages of a kind.
    pub fn all(&self, kind: &'static str) -> impl Iterator<Item = &Value> {
        self.0.iter().filter_map(move |line| line.get(kind))
    }

    /// Returns the endpoints of each address and port, and the addresses of each host.
    pub fn meaning(&self, objects: &Value) -> Result<Side> {
        let others = not_tcp(objects);
        let items = list(&objects["items"]).filter(|of| of["kind"] == "ServiceEntry");
        let entries: BTreeSet<String> = items.flat_map(hosts).collect();
        let mut side = Side::default();
        for service in self.all("service") {
            let key = format!(
                "{}/{}",
                text(&service["namespace"]),
                text(&service["hostname"])
            );
            let ports: Vec<u16> = list(&service["ports"])
                .map(|of| number(&of["servicePort"]))
                .collect();
            let mut names = BTreeSet::new();
            for of in list(&service["addresses"]) {
                let range = range(of)?;
                if let [address] = *range {
                    names.insert(address);
                }
                let passes = service["loadBalancing"]["mode"] == "PASSTHROUGH";
                for port in ports
                    .iter()
                    .filter(|port| !passes && !others.contains(&(key.clone(), **port)))
                {
                    for address in &range {
                        let endpoints = self.endpoints(service, &key, *port, address.is_ipv6())?;
                        side.add(SocketAddr::new(*address, *port), &key, endpoints);
                    }
                }
            }
            let any = ports.first().copied().unwrap_or_default();
            let (four, six) = (
                self.endpoints(service, &key, any, false)?,
                self.endpoints(service, &key, any, true)?,
            );
            let is_entry = entries.contains(&key);
            if !is_entry && names.is_empty() {
                // The name of a headless service leads to its endpoints, of its families.
                let of = |one: &'static str| service["ipFamilies"] != one;
                let four = four.keys().filter(|_| of("IPV6_ONLY"));
                let six = six.keys().filter(|_| of("IPV4_ONLY"));
                names.extend(four.chain(six).map(SocketAddr::ip));
            } else if is_entry && four.is_empty() != six.is_empty() {
                // The agent's DNS has no records of a family without endpoints, as docs/service-entries.md says.
                names.retain(|address| address.is_ipv6() == four.is_empty());
            }
            side.names.entry(key).or_default().extend(names);
        }
        Ok(side)
    }

    /// Returns the endpoints of a family from which a ztunnel on [`NODE`] chooses, each with its share.
    fn endpoints(&self, service: &Value, key: &str, port: u16, v6: bool) -> Result<Endpoints> {
        let how = &service["loadBalancing"];
        let scopes: Vec<&str> = list(&how["routingPreference"])
            .filter_map(Value::as_str)
            .collect();
        let target = |ports: &Value| {
            let port = list(ports).find(|of| number(&of["servicePort"]) == port)?;
            Some(number(&port["targetPort"]))
        };
        let mut best = if how["mode"] == "STRICT" {
            scopes.len()
        } else {
            0
        };
        let mut chosen = Vec::new();
        for workload in self.all("workload") {
            // An endpoint without this port does not serve the port.
            let Some(own) = workload["services"]
                .get(key)
                .and_then(|of| target(&of["ports"]))
            else {
                continue;
            };
            let addresses = list(&workload["addresses"])
                .map(address)
                .collect::<Result<Vec<_>>>()?;
            let Some(address) = addresses.into_iter().find(|of| of.is_ipv6() == v6) else {
                continue;
            };
            // A ztunnel looks at the other scopes, too, if the first is the network and another one. Then all of them
            // are less than the network.
            let is_by_network = how["mode"] != "STRICT" && scopes.first() == Some(&"NETWORK");
            let others = &scopes[usize::from(is_by_network)..];
            let near = others
                .iter()
                .take_while(|scope| is_near(workload, scope))
                .count();
            let rank = if is_by_network && is_near(workload, "NETWORK") {
                scopes.len() + near
            } else {
                near
            };
            let usable = workload["status"] != "UNHEALTHY" || how["healthPolicy"] == "ALLOW_ALL";
            if !usable || rank < best {
                continue;
            }
            if rank > best {
                chosen.clear();
            }
            best = rank;
            let numbers = [Some(own), target(&service["ports"]), Some(port)];
            let target = numbers.into_iter().flatten().find(|number| *number > 0);
            let weight = workload["capacity"].as_f64().unwrap_or(1.0);
            chosen.push((SocketAddr::new(address, target.unwrap_or(port)), weight));
        }
        let sum: f64 = chosen.iter().map(|(_, weight)| weight).sum();
        let mut endpoints = Endpoints::new();
        for (endpoint, weight) in chosen {
            *endpoints.entry(endpoint).or_default() += weight / sum;
        }
        Ok(endpoints)
    }
}

/// Returns whether a workload is in the same scope as [`NODE`], which has no subzone. All are in one cluster, whose
/// network has no name.
fn is_near(workload: &Value, scope: &str) -> bool {
    match scope {
        "NODE" => workload["node"] == NODE,
        "REGION" => workload["locality"]["region"] == REGION,
        "ZONE" => workload["locality"]["zone"] == ZONE,
        "SUBZONE" => text(&workload["locality"]["subzone"]).is_empty(),
        "NETWORK" => text(&workload["network"]).is_empty(),
        _ => true,
    }
}

fn number(value: &Value) -> u16 {
    value
        .as_u64()
        .and_then(|number| number.try_into().ok())
        .unwrap_or_default()
}

fn address(base64: &Value) -> Result<IpAddr> {
    let bytes = BASE64.decode(text(base64).as_bytes())?;
    let four = <[u8; 4]>::try_from(&*bytes).map(IpAddr::from);
    four.or_else(|_| <[u8; 16]>::try_from(&*bytes).map(IpAddr::from))
        .context("an address")
}

/// Returns the addresses in a range of IPv4, or a single address.
fn range(of: &Value) -> Result<Vec<IpAddr>> {
    let address = address(&of["address"])?;
    let length = of["length"].as_u64().unwrap_or(32);
    Ok(match address {
        IpAddr::V4(first) if length < 32 => {
            let first = u32::from(first);
            (first..first + (1 << (32 - length)))
                .map(|of| IpAddr::V4(of.into()))
                .collect()
        }
        _ => vec![address],
    })
}

/// Returns the ports of hosts that are not TCP. istiod sends ztunnels these ports without their protocol, and a ztunnel
/// carries only TCP.
fn not_tcp(objects: &Value) -> BTreeSet<(String, u16)> {
    let mut found = BTreeSet::new();
    for object in list(&objects["items"]) {
        let mut tcp = BTreeMap::<u16, bool>::new();
        for port in list(&object["spec"]["ports"]) {
            let is = !["UDP", "SCTP"].contains(&text(&port["protocol"]).as_str());
            *tcp.entry(number(&port["port"]).max(number(&port["number"])))
                .or_default() |= is;
        }
        for host in hosts(object) {
            let others = tcp.iter().filter(|(_, is)| !**is);
            found.extend(others.map(|(port, _)| (host.clone(), *port)));
        }
    }
    found
}
