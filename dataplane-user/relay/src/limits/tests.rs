//! Tests of limits: of one workload, one client and one namespace.

use super::{
    Direction::{Inbound, Outbound},
    *,
};

#[test]
fn limits_hold_in_all_and_for_each_workload() {
    let limits = Limits::new(Some(3), Some(2), 1024);
    let (a, b) = (Holders::default(), Holders::default());
    assert!(limits.acquire(&a, Outbound) && limits.acquire(&a, Outbound));
    assert!(!limits.acquire(&a, Outbound), "two of one workload");
    assert!(limits.acquire(&b, Outbound));
    assert!(!limits.acquire(&b, Outbound), "three in all");
    limits.release(&a, Outbound);
    assert!(limits.acquire(&b, Outbound));
    let has = (limits.open(), a.connections(), b.connections());
    assert_eq!(has, (3, 1, 2));
}

#[test]
fn one_workload_leaves_room_for_others() {
    let limits = Limits::new(Some(1000), None, 10_000);
    let (hog, other, third) = (Holders::default(), Holders::default(), Holders::default());
    let fill = |workload: &Holders| while limits.acquire(workload, Outbound) {};
    let now = Holders::connections;
    // One workload alone gets all.
    limits.reserve(1, 1);
    fill(&hog);
    assert_eq!(now(&hog), 1000);
    while now(&hog) > 0 {
        limits.release(&hog, Outbound);
    }
    limits.reserve(3, 1);
    fill(&hog);
    assert_eq!(now(&hog), 800);
    assert!(limits.is_reached(&hog) && !limits.is_reached(&other));
    // A later workload gets connections at once, and the first workload's share shrinks as its connections end.
    fill(&other);
    assert_eq!(now(&other), 160);
    fill(&third);
    assert_eq!(now(&third), 32);
    while now(&hog) > 0 {
        limits.release(&hog, Outbound);
        assert!(!limits.acquire(&hog, Outbound) || now(&hog) < 800);
        fill(&other);
        fill(&third);
        if now(&hog) <= now(&other) {
            break;
        }
    }
    let shares = [now(&hog), now(&other), now(&third)];
    assert!(
        shares.iter().all(|share| (290..=320).contains(share)),
        "{shares:?}"
    );
}

/// Idle connections to a workload, from any client.
#[test]
fn what_others_connect_to_a_workload_takes_nothing_from_its_own_connections() {
    for workloads in [1, 3] {
        let limits = Limits::new(Some(1000), Some(600), 10_000);
        limits.reserve(workloads, 1);
        let victim = Holders::default().of_both(true);
        while limits.acquire(&victim, Inbound) {}
        assert_eq!(victim.connections(), 600);
        assert!(limits.is_reached(&victim));
        for _ in 0..300 {
            assert!(limits.acquire(&victim, Outbound), "{workloads}: {victim:?}");
        }
    }
    // Also where nothing else bounds them.
    let limits = Limits::new(Some(1000), None, 10_000);
    limits.reserve(1, 1);
    let victim = Holders::default().of_both(true);
    while limits.acquire(&victim, Inbound) {}
    assert_eq!(victim.connections(), 800);
    assert!(limits.acquire(&victim, Outbound));
}

/// One client holds connections to a workload and says nothing.
#[test]
fn one_client_leaves_room_for_others() {
    for (limit, most) in [(Some(500), 400), (None, 762)] {
        let limits = Limits::new(Some(1000), limit, 10_000);
        limits.reserve(2, 1);
        let victim = Holders::default().of_both(true);
        let connects = |client: &Client| {
            let acquired = limits.acquire(&victim, Inbound);
            let admitted = acquired && limits.admit(&victim, client);
            if acquired && !admitted {
                limits.release(&victim, Inbound);
            }
            admitted
        };
        let fill = |client: &Client| (0..1000).filter(|_| connects(client)).count();
        let address = |text: &str| Client::Address(text.parse().unwrap());
        let hog = address("2001:db8::7");
        assert_eq!(fill(&hog), most);
        let other = Client::Workload(WorkloadName::new("default", "web"));
        let part = fill(&other);
        assert!((30..=most / 4).contains(&part), "{part}");
        assert!(connects(&address("192.0.2.7")));
        for _ in 0..most {
            limits.release(&victim, Inbound);
            victim.forget(&hog);
        }
        assert!(fill(&other) > part);
    }
    // Few connections are one client's, too.
    let limits = Limits::new(Some(1000), Some(2), 10_000);
    let (victim, client) = (Holders::default(), Client::Address([192, 0, 2, 7].into()));
    for _ in 0..2 {
        assert!(limits.acquire(&victim, Inbound) && limits.admit(&victim, &client));
    }
}

/// One client holds connections to two workloads of a namespace.
#[test]
fn one_client_leaves_room_for_others_in_a_namespace() {
    let limits = Limits::new(Some(1000), None, 10_000);
    limits.reserve(2, 2);
    let one = Holders::default().of_both(true);
    let two = one.beside().of_both(true);
    let connects = |victim: &Holders, client: &Client| {
        let acquired = limits.acquire(victim, Inbound);
        let admitted = acquired && limits.admit(victim, client);
        if acquired && !admitted {
            limits.release(victim, Inbound);
        }
        admitted
    };
    let fill = |client: &Client| {
        let to = |victim| (0..1000).filter(|_| connects(victim, client)).count();
        to(&one) + to(&two)
    };
    let hog = Client::Address([192, 0, 2, 7].into());
    let most = fill(&hog);
    assert!((700..770).contains(&most), "{most}");
    let others = fill(&Client::Address([192, 0, 2, 8].into()));
    assert!(others >= 30, "{others}");
    assert!(connects(&two, &Client::Address([192, 0, 2, 9].into())));
}

/// One tenant has fifty pods on the node, and each pod opens as many connections as it can.
#[test]
fn one_namespace_leaves_room_for_the_workloads_of_others() {
    let limits = Limits::new(Some(1000), None, 10_000);
    let first = Holders::default();
    let hogs: Vec<_> = (0..50).map(|_| first.beside()).collect();
    let (other, third) = (Holders::default(), Holders::default());
    limits.reserve(52, 3);
    let fill = |workload: &Holders| while limits.acquire(workload, Outbound) {};
    hogs.iter().for_each(fill);
    assert_eq!(limits.open(), 800);
    assert!(hogs.iter().any(|hog| limits.is_reached(hog)));
    fill(&other);
    assert_eq!(other.connections(), 160);
    assert!(!limits.is_reached(&third));
    // As the first workloads' connections end, the others get more, and the first workloads do not get them back.
    for hog in &hogs {
        while hog.connections() > 0 {
            limits.release(hog, Outbound);
            fill(&other);
            fill(&third);
            hogs.iter().for_each(fill);
            if limits.open() - other.connections() - third.connections() < 320 {
                break;
            }
        }
    }
    let has = [other.connections(), third.connections()];
    assert!(has.iter().all(|share| *share >= 290), "{has:?}");
    // One workload alone.
    let alone = Limits::new(Some(1000), None, 10_000);
    alone.reserve(1, 1);
    let workload = Holders::default();
    while alone.acquire(&workload, Outbound) {}
    assert_eq!(workload.connections(), 1000);
}

#[test]
fn open_files_allow_half_as_many_connections_beside_workloads() {
    let none = DnsFiles::default();
    assert_eq!(Limits::connections(1024, 0, none), 384);
    assert_eq!(Limits::connections(1024, 40, none), 64);
    assert_eq!(Limits::connections(10, 0, none), 1);
    // With one workload, the files suffice for exactly the requested connections.
    assert_eq!(Limits::connections(Limits::files(144), 1, none), 144);
}

#[test]
fn what_workloads_need_connections_do_not_get() {
    let limits = Limits::new(None, None, 20_000);
    limits.reserve(250, 9);
    assert_eq!((limits.max(), limits.per_workload()), (7872, 7872));
    assert_eq!(limits.shortage(250), None);
    limits.reserve(0, 0);
    assert_eq!(limits.max(), 9872);
    // Reservations exceed the files: `shortage` reports it, with and without a configured number of connections.
    let short = Limits::new(None, None, 1024);
    short.reserve(64, 1);
    assert_eq!(short.max(), 1);
    assert!(short.shortage(64).unwrap().contains("at least 1282"));
    let asked = Limits::new(Some(300), None, 1024);
    asked.reserve(1, 1);
    assert_eq!((asked.max(), asked.shortage(1)), (300, None));
    asked.reserve(40, 1);
    assert_eq!(asked.max(), 64);
    assert!(asked.shortage(40).unwrap().contains("at least 1496"));
}

#[test]
fn the_dns_servers_files_are_not_for_connections() {
    let dns = DnsFiles {
        shared: 3000,
        per_workload: 12,
    };
    let limits = Limits::new(None, None, 20_000).beside(dns);
    limits.reserve(10, 1);
    assert_eq!(limits.max(), (20_000 - 3000 - 256 - 10 * (16 + 12)) / 2);
    assert_eq!(limits.shortage(10), None);
    let said = Limits::new(None, None, 3300).beside(dns).shortage(10);
    let text = "10 workloads, its DNS server and the agent itself take 3536 of the 3300 files";
    assert!(said.unwrap().contains(text));
}

#[test]
fn the_files_of_tunnels_are_not_for_connections() {
    let limits = Limits::new(None, None, 20_000);
    limits.keep_for_tunnels(2500, 10);
    limits.reserve(250, 9);
    assert_eq!(limits.max(), (20_000 - 2500 - 256 - 250 * (16 + 10)) / 2);
    let short = Limits::new(None, None, 3000);
    short.keep_for_tunnels(2500, 10);
    let said = short.shortage(10).unwrap();
    let text = "10 workloads, tunnels and the agent itself take 3016 of the 3000 files";
    assert!(said.contains(text), "{said}");
}
