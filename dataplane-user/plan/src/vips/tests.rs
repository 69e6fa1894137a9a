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
    let given_up = named("greedy", 57_000).0;
    assert!(vips.number(&given_up).is_some());
    for n in 0..1000 {
        let (host, age) = named("shop", n);
        vips.want(&host, age);
    }
    // The numbers that hosts of the greedy namespace give up stay reserved for a while; there is room beside them.
    vips.assign(NOW + 1);
    assert!(vips.is_over(&given_up) && vips.number(&given_up).is_none());
    for n in 0..1000 {
        assert!(vips.number(&named("shop", n).0).is_some(), "{n}");
    }
    // When the namespace has fewer hosts, the others get numbers as soon as enough numbers are free.
    for n in 0..20_000 {
        let (host, age) = named("greedy", n);
        vips.unwant(&host, &age);
    }
    let last = named("greedy", 69_999).0;
    vips.assign(NOW + 2);
    assert!(!vips.is_over(&last) && vips.number(&last).is_none() && vips.is_waiting());
    vips.assign(NOW + 2 + KEPT);
    assert!(vips.number(&last).is_some() && !vips.is_waiting());
}

/// Each line has stored records, such as `a=1` for a host that exists and `a=1@5` for one that was removed at time 5, and the
/// records that count.
#[test]
fn of_records_that_contradict_each_other_the_last_of_a_host_and_the_first_of_a_number_count() {
    let number = |number: &str| Number::new(number.parse().unwrap()).unwrap();
    for (stored, wanted) in [
        ("b=2 a=1 c=3@5", "a=1 b=2 c=3@5"),
        ("a=1 a=2", "a=2"),
        ("a=1@5 a=2", "a=2"),
        ("a=1 a=2@5", "a=2@5"),
        ("a=1@5 a=2@6", "a=2@6"),
        ("a=1 b=1", "a=1"),
        ("a=1 b=1@5", "a=1"),
        ("a=1@5 b=1", "b=1"),
        ("a=1@5 b=1@6", "b=1@6"),
        ("a=1 a=2 b=1", "a=2 b=1"),
    ] {
        let records = stored.split(' ').map(|record| {
            let (name, of) = record.split_once('=').unwrap();
            let (of, gone) = of
                .split_once('@')
                .map_or((of, None), |(of, at)| (of, Some(at)));
            Record {
                host: host("ns", name),
                number: number(of),
                gone: gone.map(|at| at.parse().unwrap()),
            }
        });
        let vips = Vips::new(records);
        let found = vips.records().into_iter().map(|record| {
            let gone = record.gone.map(|at| format!("@{at}"));
            format!(
                "{}={}{}",
                record.host.host,
                record.number.get(),
                gone.unwrap_or_default()
            )
        });
        assert_eq!(found.collect::<Vec<_>>().join(" "), wanted, "{stored}");
        let holders = (1..=3).filter_map(Number::new).filter_map(|of| {
            let [v4, v6] = of.addresses();
            assert_eq!(vips.holder(v4), vips.holder(v6));
            Some(format!("{}={}", vips.holder(v4)?.host, of.get()))
        });
        let mut holders: Vec<String> = holders.collect();
        holders.sort_unstable();
        let names = wanted
            .split(' ')
            .map(|of| of.split_once('@').map_or(of, |(of, _)| of));
        assert_eq!(holders, names.collect::<Vec<_>>(), "{stored}");
    }
}

#[test]
fn the_number_of_a_removed_host_is_free_after_ten_minutes() {
    let mut vips = Vips::new([]);
    let (host, age) = entry(1);
    vips.want(&host, age.clone());
    vips.assign(NOW);
    let number = vips.number(&host).unwrap();
    let [addr, _] = number.addresses();
    assert!(!vips.is_gone(addr) && vips.former(&host).is_none());
    assert_eq!(vips.entries(&host).collect::<Vec<_>>(), [age.entry()]);
    vips.unwant(&host, &age);
    vips.assign(NOW + 5);
    vips.assign(NOW + 5 + KEPT - 1);
    assert!(vips.is_gone(addr) && vips.holder(addr) == Some(&host));
    assert_eq!(vips.former(&host), Some((number, NOW + 5 + KEPT)));
    assert!(vips.take_free().is_empty() && vips.number(&host).is_none());
    vips.assign(NOW + 5 + KEPT);
    assert!(!vips.is_gone(addr) && vips.holder(addr).is_none());
    assert_eq!(vips.take_free(), [number]);
    assert!(vips.take_free().is_empty() && vips.records().is_empty());
}

/// A number stays a control plane's until it has withdrawn both addresses, and all other numbers are not its own.
#[test]
fn no_host_gets_the_number_of_an_address_that_a_control_plane_has_assigned() {
    let (host, age) = entry(1);
    let [first, second] = [0, 1].map(|at| sequence(&host).nth(at));
    let [v4, v6] = first.unwrap().addresses();
    let other = "192.0.2.1".parse().unwrap();
    for (withdrawn, wanted) in [
        (&[][..], second),
        (&[v4], second),
        (&[other, v4], second),
        (&[v4, v6], first),
    ] {
        let mut vips = Vips::new([]);
        vips.foreign(v4, true);
        vips.foreign(v6, true);
        for addr in withdrawn {
            vips.foreign(*addr, false);
        }
        vips.want(&host, age.clone());
        vips.assign(NOW);
        assert_eq!(vips.number(&host), wanted, "{withdrawn:?}");
    }
}

/// Each line has the numbers of hosts, of removed hosts, and of a control plane, and how many numbers they are.
#[test]
fn a_number_that_is_taken_twice_is_one_number() {
    let number = |number: &u16| Number::new(*number).unwrap();
    for (held, gone, foreign, taken) in [
        (&[][..], &[][..], &[][..], 0),
        (&[1, 2, 3], &[4, 5], &[6], 6),
        (&[1, 2, 3], &[4, 5], &[3, 6], 6),
        (&[1, 2, 3], &[4, 5], &[4, 6], 6),
    ] {
        let mut vips = Vips::new([]);
        for of in held {
            vips.holders.insert(number(of), entry((*of).into()).0);
        }
        for of in gone {
            vips.gone.insert(number(of), entry((*of).into()).0, NOW);
        }
        for of in foreign {
            vips.foreign(number(of).addresses()[0], true);
        }
        let mut left = vips.left();
        assert_eq!(
            left,
            NUMBERS as usize - taken,
            "{held:?} {gone:?} {foreign:?}"
        );
        // The caller counts on.
        assert!(vips.free(&entry(9).0, &mut left).is_some());
        assert_eq!(left, NUMBERS as usize - taken - 1);
    }
}

/// Each line has the age of an entry in seconds, for how long its host has waited, whether the host had a number a moment ago, and
/// whether it waits.
#[test]
fn a_new_host_waits_for_a_control_plane() {
    for (age, waited, is_known, waits) in [
        (Some(0), 0, false, true),
        (Some(59), 0, false, true),
        (Some(60), 0, false, false),
        (None, 0, false, true),
        (None, 4, false, true),
        (None, 5, false, false),
        (None, 0, true, false),
    ] {
        let (host, _) = entry(1);
        let created = age.map(|age| i64::try_from(NOW).unwrap() - age);
        let age = Age::of(EntryName::new("ns1", "e1"), created);
        let mut vips = Vips::new(is_known.then(|| Record {
            host: host.clone(),
            number: Number::new(7).unwrap(),
            gone: Some(NOW - 1),
        }));
        vips.defer(true);
        vips.want(&host, age.clone());
        vips.assign(NOW);
        vips.assign(NOW + waited);
        let case = format!("{age:?} {waited} {is_known}");
        assert_eq!(vips.is_deferred(&host), waits, "{case}");
        assert_eq!([vips.defers(), vips.is_waiting()], [waits; 2], "{case}");
        assert_eq!(vips.number(&host).is_none(), waits, "{case}");
        vips.defer(false);
        vips.assign(NOW + waited);
        assert!(vips.number(&host).is_some() && !vips.defers(), "{case}");
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
