//! Compares how istiod and the dataplane serve the objects, and separates intended differences from
//! others.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
};

use super::known::KNOWN;

/// Endpoints, each with its share of the connections.
pub type Endpoints = BTreeMap<SocketAddr, f64>;

/// The services and names that one side makes from the objects.
#[derive(Debug, Default)]
pub struct Side {
    /// The services of each address and port, with their endpoints. istiod's services are named
    /// `NAMESPACE/HOST`.
    table: BTreeMap<SocketAddr, BTreeMap<String, Endpoints>>,
    /// The addresses of each host (`NAMESPACE/HOST`).
    pub names: BTreeMap<String, BTreeSet<IpAddr>>,
}

impl Side {
    pub fn add(&mut self, vip: SocketAddr, service: &str, endpoints: Endpoints) {
        let services = self.table.entry(vip).or_default();
        services.insert(service.to_owned(), endpoints);
    }
}

/// Something that the two sides do differently.
struct Difference {
    /// `NAMESPACE/HOST`, or the name of the service in the plan.
    of: String,
    /// The address and port, or `name`.
    at: String,
    istiod: String,
    dataplane: String,
}

/// Maximum rounding error of a share in the kernel's table, as docs/service-entries.md says.
const ROUNDED: f64 = 0.01;

/// Returns all differences as text, and whether they are exactly the known ones.
pub fn judge(theirs: &Side, ours: &Side) -> (String, bool) {
    let differences = differences(theirs, ours);
    let (mut text, mut used, mut new) = (String::new(), BTreeSet::new(), 0);
    for Difference {
        of,
        at,
        istiod,
        dataplane,
    } in &differences
    {
        let known = KNOWN
            .iter()
            .position(|known| known.of == *of && at.ends_with(known.at));
        let reason = known.map_or("NOT KNOWN", |index| KNOWN[index].reason);
        new += usize::from(known.is_none());
        used.extend(known);
        let _ = writeln!(
            text,
            "{of} {at}\n    istiod:    {istiod}\n    dataplane: {dataplane}\n    {reason}"
        );
    }
    for (_, known) in KNOWN
        .iter()
        .enumerate()
        .filter(|(index, _)| !used.contains(index))
    {
        let _ = writeln!(
            text,
            "{} {}: no difference any more: take it out of known.rs",
            known.of, known.at
        );
    }
    let _ = writeln!(
        text,
        "{} addresses and ports, {} hosts: {} differences, {new} not known",
        keys(&theirs.table, &ours.table).len(),
        keys(&theirs.names, &ours.names).len(),
        differences.len(),
    );
    (text, new == 0 && used.len() == KNOWN.len())
}

fn differences(theirs: &Side, ours: &Side) -> Vec<Difference> {
    let mut found = Vec::new();
    for vip in keys(&theirs.table, &ours.table) {
        let (told, planned) = (theirs.table.get(vip), ours.table.get(vip));
        let same = |(told, planned): (&BTreeMap<_, _>, &BTreeMap<_, _>)| {
            // If istiod lists several services at an address, a ztunnel uses one of them.
            planned
                .values()
                .all(|one| told.values().any(|other| alike(one, other)))
        };
        if !told.zip(planned).is_some_and(same) {
            let services = told.or(planned).into_iter().flat_map(BTreeMap::keys);
            found.push(Difference {
                of: services.cloned().collect::<Vec<_>>().join(" and "),
                at: vip.to_string(),
                istiod: shown(told),
                dataplane: shown(planned),
            });
        }
    }
    let none = BTreeSet::new();
    for host in keys(&theirs.names, &ours.names) {
        let [told, answered] = [theirs, ours].map(|side| side.names.get(host).unwrap_or(&none));
        if told != answered {
            let [istiod, dataplane] =
                [told, answered].map(|all| joined(all.iter().map(IpAddr::to_string), "no address"));
            let (of, at) = (host.clone(), "name".to_owned());
            found.push(Difference {
                of,
                at,
                istiod,
                dataplane,
            });
        }
    }
    found
}

fn keys<'a, K: Ord, A, B>(one: &'a BTreeMap<K, A>, other: &'a BTreeMap<K, B>) -> BTreeSet<&'a K> {
    one.keys().chain(other.keys()).collect()
}

fn alike(one: &Endpoints, other: &Endpoints) -> bool {
    let is = |((a, part), (b, of)): ((_, &f64), (_, &f64))| a == b && (part - of).abs() <= ROUNDED;
    one.len() == other.len() && one.iter().zip(other).all(is)
}

fn shown(services: Option<&BTreeMap<String, Endpoints>>) -> String {
    let part = |(at, part): (&SocketAddr, &f64)| format!("{at} {:.1} %", part * 100.0);
    let one = |endpoints: &Endpoints| joined(endpoints.iter().map(part), "no endpoint");
    joined(
        services.into_iter().flat_map(BTreeMap::values).map(one),
        "not there",
    )
}

fn joined(parts: impl Iterator<Item = String>, none: &str) -> String {
    let parts: Vec<String> = parts.collect();
    if parts.is_empty() {
        none.to_owned()
    } else {
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_parts_and_addresses_are_compared() {
        let side = |vip: &str, endpoints: &[(&str, f64)]| {
            let endpoints = endpoints
                .iter()
                .map(|(at, part)| (at.parse().unwrap(), *part));
            let mut side = Side::default();
            side.add(vip.parse().unwrap(), "shop/web", endpoints.collect());
            side
        };
        let vip = "10.96.0.1:80";
        let both = side(vip, &[("10.0.0.1:80", 0.75), ("10.0.0.2:80", 0.25)]);
        let count = |other: &Side| differences(&both, other).len();
        assert_eq!(
            count(&side(
                vip,
                &[("10.0.0.1:80", 0.745), ("10.0.0.2:80", 0.255)]
            )),
            0
        );
        assert_eq!(count(&side(vip, &[("10.0.0.1:80", 0.75)])), 1);
        assert_eq!(
            count(&side(vip, &[("10.0.0.1:80", 0.5), ("10.0.0.2:80", 0.5)])),
            1
        );
        assert_eq!(
            count(&side(vip, &[("10.0.0.1:80", 0.75), ("10.0.0.2:81", 0.25)])),
            1
        );
        assert_eq!(count(&side("10.96.0.2:80", &[])), 2);
        assert_eq!(count(&Side::default()), 1);
    }
}
