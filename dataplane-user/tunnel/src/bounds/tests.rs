//! Tests of the bounds on tunnels.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::SystemTime,
};

use super::*;
use crate::{
    tests::fixture::{HOUR, identity},
    tls::VerifiedPeer,
    tunnel::Registry,
};

/// Returns an established tunnel that has had no stream yet.
fn new_tunnel() -> Arc<Tunnel> {
    let at = SystemTime::now();
    let peer = VerifiedPeer {
        identity: identity("client"),
        chain: [].into(),
        at,
        until: at + HOUR,
    };
    let from = (Ipv4Addr::LOCALHOST, 1).into();
    let entry = Arc::new(Registry::default()).add(peer, from, (1, None), Arc::default());
    Arc::clone(&entry.tunnel)
}

/// Returns an established tunnel whose streams have ended.
fn tunnel() -> Arc<Tunnel> {
    let tunnel = new_tunnel();
    drop(tunnel.lease());
    tunnel
}

fn client(number: u8) -> Client {
    Client::Address(IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)))
}

fn bounds(unfinished: usize, all: usize) -> Arc<Bounds> {
    let settings = Settings {
        unfinished,
        ..Settings::default()
    };
    Arc::new(Bounds::new(&settings, all))
}

/// Takes free places until the bounds allow no more.
fn fill(bounds: &Arc<Bounds>, socket: &Socket, client: &Client, is_finished: bool) -> Vec<Place> {
    let mut places = Vec::new();
    while let Admission::Admitted(place) = bounds.admit(socket, client, true) {
        if is_finished {
            place.finish(&tunnel());
        }
        places.push(place);
    }
    places
}

/// Returns the holder whose share makes a tunnel wait.
fn waits_for(bounds: &Arc<Bounds>, socket: &Socket, client: &Client) -> &'static str {
    match bounds.admit(socket, client, true) {
        Admission::Wait(exceeded) => exceeded.holder,
        Admission::Admitted(_) | Admission::Refused(..) => "",
    }
}

#[test]
fn each_leaves_room_for_others() {
    for (unfinished, all, is_finished) in [(100, 1000, false), (1000, 100, true)] {
        let bounds = bounds(unfinished, all);
        let [first, second] = [(); 2].map(|()| bounds.socket("shop"));
        let hog = fill(&bounds, &first, &client(1), is_finished);
        assert!((70..80).contains(&hog.len()), "{}", hog.len());
        let refused = bounds.admit(&first, &client(1), true);
        assert!(matches!(refused, Admission::Refused(has, _) if has == hog.len()));
        let same_socket = fill(&bounds, &first, &client(2), is_finished);
        assert!(!same_socket.is_empty(), "another client of the workload");
        let blog = bounds.socket("blog");
        assert!(matches!(
            bounds.admit(&blog, &client(1), true),
            Admission::Admitted(_)
        ));
        // Many clients fill the socket. Its tunnels wait, and other sockets still have room.
        let rest: Vec<_> = (3..100)
            .flat_map(|number| fill(&bounds, &first, &client(number), is_finished))
            .collect();
        assert_eq!(waits_for(&bounds, &first, &client(200)), "its listener");
        let other = fill(&bounds, &second, &client(200), is_finished);
        assert!(!other.is_empty(), "another workload of the namespace");
        // Many workloads fill the namespace. Other namespaces still have room.
        let sockets: Vec<_> = (0..20).map(|_| bounds.socket("shop")).collect();
        let of_all = |number: u8| {
            let (bounds, sockets) = (&bounds, &sockets);
            let all = sockets.iter();
            all.flat_map(move |socket| fill(bounds, socket, &client(number), is_finished))
        };
        let many: Vec<_> = (3..100).flat_map(of_all).collect();
        let new = bounds.socket("shop");
        assert_eq!(waits_for(&bounds, &new, &client(201)), "its namespace");
        let others = fill(&bounds, &blog, &client(201), is_finished);
        assert!(others.len() > 5, "{}", others.len());
        drop((hog, same_socket, rest, other, many, others));
        let table = bounds.lock();
        let is_empty = table.counts.is_empty() && table.held.is_empty();
        assert!(is_empty, "all places are back");
    }
}

/// A client that fills the sockets of a namespace leaves room for the namespace's other clients.
#[test]
fn one_client_leaves_room_for_others_of_a_namespace() {
    let bounds = bounds(1000, 100);
    let sockets: Vec<_> = (0..20).map(|_| bounds.socket("shop")).collect();
    let all = sockets.iter();
    let hog: Vec<_> = all
        .flat_map(|socket| fill(&bounds, socket, &client(1), true))
        .collect();
    assert!(hog.len() > 70, "{}", hog.len());
    let new = bounds.socket("shop");
    assert!(matches!(
        bounds.admit(&new, &client(1), true),
        Admission::Refused(..)
    ));
    assert!(matches!(
        bounds.admit(&new, &client(2), true),
        Admission::Admitted(_)
    ));
}

#[test]
fn a_finished_handshake_gives_its_place_back() {
    let bounds = bounds(9, 1000);
    let socket = bounds.socket("shop");
    let first = fill(&bounds, &socket, &client(1), false);
    let most = first.len();
    assert!((1..9).contains(&most), "{most}");
    first[0].finish(&tunnel());
    assert_eq!(fill(&bounds, &socket, &client(1), false).len(), 1);
    for place in &first {
        place.finish(&tunnel());
    }
    assert_eq!(fill(&bounds, &socket, &client(1), false).len(), most);
}

/// Returns how many of the places are lost.
fn lost(bounds: &Arc<Bounds>, places: &[Place]) -> usize {
    let table = bounds.lock();
    let is_lost = |place: &&Place| !table.held.contains_key(&place.number);
    places.iter().filter(is_lost).count()
}

/// Many clients use up the share of a listening socket, of a namespace or of the process. Another client gets places, at the
/// cost of the client with the most, until it has about as many.
#[test]
fn a_client_with_few_tunnels_takes_the_place_of_one_with_many() {
    for (unfinished, all, is_finished) in [(40, 1000, false), (1000, 40, true)] {
        for sockets in 1..=4 {
            let bounds = bounds(unfinished, all);
            let names = ["shop", "shop", "blog", "news"];
            let sockets: Vec<_> = names[..sockets]
                .iter()
                .map(|of| bounds.socket(of))
                .collect();
            let mut hogs = Vec::new();
            for (number, socket) in (1..60).zip(sockets.iter().cycle()) {
                hogs.extend(fill(&bounds, socket, &client(number), is_finished));
            }
            let (first, used) = (&sockets[0], bounds.lock().held.len());
            assert_ne!(waits_for(&bounds, first, &client(200)), "");
            let mut new = Vec::new();
            while let Admission::Admitted(place) = bounds.admit(first, &client(200), false) {
                new.push(place);
            }
            assert_eq!(new.len(), FEW);
            assert_eq!(lost(&bounds, &hogs), new.len());
            assert_eq!(bounds.lock().held.len(), used, "no further place is used");
            // No client takes places without end.
            let takes = |number| {
                matches!(
                    bounds.admit(first, &client(number), false),
                    Admission::Admitted(_)
                )
            };
            assert!(!takes(200));
            drop((hogs, new));
            assert!(bounds.lock().counts.is_empty(), "each place is back once");
        }
    }
}

#[test]
fn tunnels_with_connections_keep_their_places() {
    let bounds = bounds(1000, 40);
    let socket = bounds.socket("shop");
    let busy: Vec<_> = (1..60)
        .flat_map(|number| fill(&bounds, &socket, &client(number), false))
        .map(|place| {
            let tunnel = tunnel();
            place.finish(&tunnel);
            (place, tunnel.lease())
        })
        .collect();
    let admit = |number| bounds.admit(&socket, &client(number), false);
    assert!(matches!(admit(200), Admission::Wait(_)));
    assert!(
        matches!(admit(1), Admission::Refused(..)),
        "others need not wait behind it"
    );
    drop(busy);
    assert!(matches!(admit(200), Admission::Admitted(_)));
}

#[test]
fn clients_do_not_take_places_from_each_other_without_end() {
    let bounds = bounds(1000, 12);
    let socket = bounds.socket("shop");
    let mut places = fill(&bounds, &socket, &client(1), true);
    let before = places.len();
    for _ in 0..100 {
        for number in 1..50 {
            if let Admission::Admitted(place) = bounds.admit(&socket, &client(number), false) {
                place.finish(&tunnel());
                places.push(place);
            }
        }
    }
    let taken = places.len() - before;
    assert!(
        (before - 1..=before).contains(&taken),
        "{taken} of {before}"
    );
}

/// A client of a namespace that has used up its share takes no place of a namespace that has fewer tunnels.
#[test]
fn a_namespace_takes_no_place_of_a_smaller_one() {
    let bounds = bounds(1000, 40);
    let [blog, shop] = ["blog", "shop"].map(|of| bounds.socket(of));
    let mut gateway = fill(&bounds, &blog, &client(1), true);
    gateway.truncate(8);
    let mut others = Vec::new();
    for (name, numbers) in [("shop", 2..100), ("a", 100..150), ("b", 150..200)] {
        for number in numbers {
            // Each client has one tunnel.
            let socket = bounds.socket(name);
            if let Admission::Admitted(place) = bounds.admit(&socket, &client(number), true) {
                place.finish(&tunnel());
                others.push(place);
            }
        }
    }
    assert_eq!(
        gateway.len() + others.len(),
        40,
        "the process has no place left"
    );
    assert!(matches!(
        bounds.admit(&shop, &client(200), false),
        Admission::Wait(_)
    ));
    assert_eq!(lost(&bounds, &gateway), 0);
    // A namespace with fewer tunnels takes a place of the client with the most.
    let new = bounds.socket("new");
    assert!(matches!(
        bounds.admit(&new, &client(201), false),
        Admission::Admitted(_)
    ));
    assert_eq!(lost(&bounds, &gateway), 1);
}

#[test]
fn a_new_tunnel_keeps_its_place_until_its_first_stream() {
    let bounds = bounds(1000, 40);
    let socket = bounds.socket("shop");
    let tunnel = new_tunnel();
    let mut places = Vec::new();
    for number in 1..60 {
        for place in fill(&bounds, &socket, &client(number), false) {
            place.finish(&tunnel);
            places.push(place);
        }
    }
    let admit = |number| bounds.admit(&socket, &client(number), false);
    assert!(matches!(admit(200), Admission::Wait(_)));
    drop(tunnel.lease());
    assert!(matches!(admit(201), Admission::Admitted(_)));
    assert_eq!(bounds.lock().failed.len(), 1, "the search of 200");
}
