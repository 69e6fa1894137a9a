//! Assignment of addresses to hosts, and its stability.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const NOW: u64 = 1_800_000_000;

fn host(namespace: &str, host: &str) -> HostName {
    HostName {
        namespace: namespace.into(),
        host: host.into(),
    }
}

/// Returns entry `number` with one host. The number is the entry's age.
fn entry(number: u32) -> (HostName, Age) {
    let name = format!("e{number}");
    let namespace = format!("ns{}", number % 7);
    let age = Age::of(EntryName::new(&namespace, &name), Some(number.into()));
    (host(&namespace, &format!("{name}.example.com")), age)
}

fn want(vips: &mut Vips, numbers: impl IntoIterator<Item = u32>) {
    for number in numbers {
        let (host, age) = entry(number);
        vips.want(&host, age);
    }
}

fn all(vips: &Vips) -> BTreeMap<HostName, Number> {
    let numbers = vips.numbers.iter();
    numbers
        .map(|(host, number)| (host.clone(), *number))
        .collect()
}

/// Returns a fixed permutation for each `turn`.
fn order(of: u32, turn: u32) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..of).collect();
    numbers.sort_by_key(|number| number.wrapping_mul(0x9e37_79b1).rotate_left(turn * 7) ^ turn);
    numbers
}

#[test]
fn sixteen_thousand_hosts_have_as_many_addresses_on_three_agents() {
    const HOSTS: u32 = 16_000;
    let agents = [1, 2, 3].map(|turn| {
        let mut vips = Vips::new([]);
        want(&mut vips, order(HOSTS, turn));
        vips.assign(NOW);
        all(&vips)
    });
    assert_eq!(agents[0].len(), HOSTS as usize);
    let distinct: HashSet<_> = agents[0]
        .values()
        .map(|number| number.addresses())
        .collect();
    assert_eq!(distinct.len(), HOSTS as usize);
    assert!(agents[0] == agents[1] && agents[1] == agents[2]);
    // A node that heard of the entries one after the other, in the order of their creation.
    let mut vips = Vips::new([]);
    for number in 0..HOSTS {
        want(&mut vips, [number]);
        vips.assign(NOW);
    }
    assert!(all(&vips) == agents[0]);
}

#[test]
fn addresses_are_those_of_the_two_ranges() {
    let [first, last] = [1, NUMBERS].map(|n| Number::new(u16::try_from(n).unwrap()).unwrap());
    assert_eq!(
        first.addresses().map(|ip| ip.to_string()),
        ["240.240.0.1", "2001:2::f0f0:1"]
    );
    assert_eq!(
        last.addresses().map(|ip| ip.to_string()),
        ["240.240.255.241", "2001:2::f0f0:fff1"]
    );
    assert_eq!(Number::new(0), None);
    assert_eq!(Number::of("240.240.1.2".parse().unwrap()), Number::new(258));
    assert_eq!(
        Number::of("2001:2::f0f0:102".parse().unwrap()),
        Number::new(258)
    );
    assert_eq!(Number::of("240.241.1.2".parse().unwrap()), None);
}

#[test]
fn the_sequence_stays_what_it_is() {
    let numbers: Vec<u16> = sequence(&host("shop", "db.example.com"))
        .take(3)
        .map(Number::get)
        .collect();
    assert_eq!(numbers, [20_549, 55_860, 25_650]);
    let all: HashSet<_> = sequence(&host("shop", "db.example.com")).collect();
    assert_eq!(all.len(), NUMBERS as usize);
}

#[test]
fn the_older_of_two_that_want_one_number_has_it_and_the_younger_never_moves_it() {
    let rivals = rivals();
    for names in [rivals.clone(), rivals.iter().rev().cloned().collect()] {
        let mut vips = Vips::new([]);
        let ages = [5, 6].map(|at| Age::of(EntryName::new("ns", "e"), Some(at)));
        for (host, age) in names.iter().zip(&ages) {
            vips.want(host, age.clone());
        }
        vips.assign(NOW);
        let first = |host| sequence(host).next();
        assert_eq!(vips.number(&names[0]), first(&names[0]));
        assert_ne!(vips.number(&names[1]), first(&names[1]));
        // When the older host is removed, the younger keeps its number.
        let before = vips.number(&names[1]);
        vips.unwant(&names[0], &ages[0]);
        vips.assign(NOW + 1);
        vips.assign(NOW + 2 * KEPT);
        assert_eq!(vips.number(&names[1]), before);
    }
}

/// Two hosts whose sequences begin with the same number.
fn rivals() -> Vec<HostName> {
    let mut known = HashMap::new();
    (0..)
        .find_map(|n| {
            let new = host("ns", &format!("h{n}.example.com"));
            let other = known.insert(sequence(&new).next()?, new.clone())?;
            Some(vec![other, new])
        })
        .unwrap()
}

#[test]
fn a_tenant_with_too_many_hosts_loses_its_youngest_and_the_others_lose_nothing() {
    let mut vips = Vips::new([]);
    let named = |namespace: &str, n: u32| {
        let age = Age::of(EntryName::new(namespace, "e"), Some(n.into()));
        (host(namespace, &format!("h{n}.example.com")), age)
    };
    for n in 0..70_000 {
        let (host, age) = named("greedy", n);
        vips.want(&host, age);
    }
    vips.assign(NOW);
    assert!(vips.is_over(&named("greedy", 69_999).0));
    assert!(!vips.is_over(&named("greedy", 0).0));
    for n in 0..1000 {
        let (host, age) = named("shop", n);
        vips.want(&host, age);
    }
    // The numbers that hosts of the greedy namespace give up stay reserved for a while; there is room beside them.
    vips.assign(NOW + 1);
    for n in 0..1000 {
        assert!(vips.number(&named("shop", n).0).is_some(), "{n}");
    }
}

proptest! {
    /// After any changes no host has moved, no number has two hosts or a new host within ten minutes, and the stored
    /// records equal the state, whenever the agent restarts.
    #[test]
    fn nobody_moves_and_no_number_is_anothers_too_early(
        steps in prop::collection::vec((0u32..60, any::<bool>(), 0u64..400, prop::bool::weighted(0.1)), 1..80),
        foreign in prop::collection::vec(1u16..=200, 0..20),
    ) {
        let mut vips = Vips::new([]);
        for number in &foreign {
            for address in Number::new(*number).unwrap().addresses() {
                vips.foreign(address, true);
            }
        }
        let mut kept: Vec<Record> = Vec::new();
        let mut now = NOW;
        let mut last: HashMap<Number, (HostName, u64)> = HashMap::new();
        let mut there: BTreeSet<u32> = BTreeSet::new();
        for (number, comes, later, restarts) in steps {
            now += later;
            if restarts {
                vips = Vips::new(kept.clone());
                for number in &foreign {
                    for address in Number::new(*number).unwrap().addresses() {
                        vips.foreign(address, true);
                    }
                }
                want(&mut vips, there.iter().copied());
            }
            let before = all(&vips);
            if comes {
                want(&mut vips, [number]);
                there.insert(number);
            } else {
                let (host, age) = entry(number);
                vips.unwant(&host, &age);
                there.remove(&number);
            }
            kept.extend(vips.assign(now));
            let after = all(&vips);
            prop_assert_eq!(after.len(), there.len());
            let distinct: HashSet<_> = after.values().collect();
            prop_assert_eq!(distinct.len(), after.len());
            for (host, number) in &after {
                prop_assert!(before.get(host).is_none_or(|before| before == number));
                prop_assert!(!foreign.contains(&number.get()));
                if let Some((other, at)) = last.get(number) {
                    prop_assert!(other == host || now - at >= KEPT);
                }
            }
            for (host, number) in after {
                last.insert(number, (host, now));
            }
        }
    }
}
