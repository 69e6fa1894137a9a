//! Lists and watches.

use std::{thread, time::Duration};

use dataplane_source::kubernetes::{Kind, Patience, Scope};
use dataplane_tests::api::{Resource, objects};

use crate::site::{Site, endpoints, has, patience, server, slice_of, web};

#[test]
fn nothing_is_known_before_everything_was_listed() {
    for resource in [
        Resource::Services,
        Resource::EndpointSlices,
        Resource::Nodes,
    ] {
        let server = server(web(1, &[1]));
        server.faults().withhold(Some((resource, 403)));
        let site = Site::new(server);
        site.wait("the others were listed", |site| {
            let done = site.lists().into_iter().filter(|&n| n > 0).count();
            // EndpointSlices are read after the node.
            done == if resource == Resource::Nodes { 1 } else { 2 }
        });
        site.wait("it was refused several times", |site| {
            site.health.failure().is_some()
                && Kind::ALL
                    .iter()
                    .any(|&kind| site.health.of(kind).failures() > 3)
        });
        // Changes of other kinds do not complete the first view either.
        site.cluster().apply_all(web(2, &[2]));
        site.cluster().apply(objects::node("node1", "zone-c", &[]));
        thread::sleep(Duration::from_millis(50));
        assert!(site.untaken().is_none(), "{resource:?}");
        assert_eq!(site.health.heard(), 0);
        let (_, text) = site.health.failure().unwrap();
        assert!(text.contains("403") && text.contains("RBAC"), "{text}");
        site.server.faults().withhold(None);
        let view = site.view(|view| endpoints(view, "web-2") == [2]);
        assert_eq!(endpoints(&view, "web-1"), [1]);
        site.watching();
        assert_eq!(site.health.failure(), None);
        assert!(site.health.heard() > 0);
    }
}

/// A kind that stays forbidden is requested as rarely as after any other failure.
#[test]
fn a_server_that_forbids_is_not_asked_without_a_pause() {
    for (resource, scope) in [
        (Resource::Services, Scope::Services),
        (Resource::Pods, Scope::HostPorts),
    ] {
        let server = server(web(1, &[1]));
        server.faults().withhold(Some((resource, 403)));
        let site = Site::of(server, scope);
        // The longest pause. It is longer than the patience for a forbidden kind.
        let Patience {
            retry_max,
            forbidden,
            ..
        } = patience();
        thread::sleep(forbidden * 5);
        site.server.faults().note_requests(true);
        thread::sleep(retry_max * 20);
        let asked = site.server.faults().asked();
        let asked = asked
            .iter()
            .filter(|a| a.resource == Some(resource))
            .count();
        assert!((5..=20).contains(&asked), "{resource:?}: {asked} times");
    }
}

/// The first list comes from the server's cache, in one page. Later lists are of the newest version, because a known
/// change must not be lost.
#[test]
fn the_first_list_may_be_old_and_later_ones_are_read_by_pages_of_one_version() {
    let server = server((0..1_250).flat_map(|number| web(number, &[number])));
    let mut site = Site::new(server);
    site.view(|view| view.services.len() == 1_250);
    site.watching();
    let lists = |site: &Site, resource| {
        let asked = site.server.faults().asked().into_iter();
        asked
            .filter(|a| a.resource == Some(resource) && !a.watch)
            .map(|a| (a.version, a.continued))
            .collect::<Vec<_>>()
    };
    for resource in [
        Resource::Services,
        Resource::EndpointSlices,
        Resource::Nodes,
    ] {
        let first = [(Some("0".to_owned()), false)];
        assert_eq!(lists(&site, resource), first, "{resource:?}");
    }
    // The versions of the watches are no longer in the server's history.
    site.server.faults().note_requests(true);
    site.server.go_away();
    site.cluster().apply_all(web(4_999, &[1]));
    site.cluster().compact();
    // Slow enough for a change between the pages.
    site.server
        .faults()
        .slow(Some((64 * 1024, Duration::from_millis(2))));
    site.server.come_back().unwrap();
    site.wait("the first page was asked for", |site| {
        !lists(site, Resource::Services).is_empty()
    });
    let cluster = site.cluster();
    cluster.delete(Resource::Services, "default", "web-0");
    cluster.delete(Resource::Services, "default", "web-999");
    cluster.apply_all(web(5_000, &[5_000]));
    site.server.faults().slow(None);
    let view = site.view(|view| {
        let has_new = has(view, "web-5000") && !endpoints(view, "web-5000").is_empty();
        has_new && !has(view, "web-999")
    });
    assert_eq!(view.services.len(), 1_250);
    for (name, service) in &view.services {
        assert_eq!(service.ports[0].endpoints.len(), 1, "{name}");
    }
    let pages = [(None, false), (None, true), (None, true)];
    assert_eq!(lists(&site, Resource::Services), pages);
    // A view may come before the last page of slices.
    site.wait("the last page of slices", |site| {
        lists(site, Resource::EndpointSlices) == pages
    });
}

#[test]
fn answers_in_small_pieces() {
    let server = server(web(1, &[1, 2, 3]));
    server.faults().slow(Some((7, Duration::ZERO)));
    let site = Site::new(server);
    site.view(|view| endpoints(view, "web-1") == [1, 2, 3]);
    for number in 4..20 {
        site.cluster()
            .apply(slice_of("web-1", "web-1-a", &[number]));
        site.view(|view| endpoints(view, "web-1") == [number]);
    }
}

#[test]
fn changes_that_come_together_are_seen_together() {
    let site = Site::new(server((0..500).flat_map(|number| web(number, &[1]))));
    site.view(|view| view.services.len() == 500);
    site.watching();
    let changes = (0..500).map(|number| {
        let name = format!("web-{number}");
        slice_of(&name, &format!("{name}-a"), &[2])
    });
    site.cluster().apply_all(changes);
    // A slow reader finds the last view, with the time of the first change.
    site.wait("all were told", |site| {
        site.health.of(Kind::Slice).events() == 500
    });
    let view = site.view(|view| (0..500).all(|n| endpoints(view, &format!("web-{n}")) == [2]));
    assert!(view.since.is_some());
}

#[test]
fn a_watch_that_ends_in_order_is_begun_anew_where_it_was() {
    let site = Site::new(server(web(1, &[1])));
    site.view(|_| true);
    for number in 2..12 {
        site.watching();
        site.cluster()
            .apply(slice_of("web-1", "web-1-a", &[number]));
        site.server.faults().end_watches();
        site.view(|view| endpoints(view, "web-1") == [number]);
    }
    assert_eq!(site.lists(), [1, 1, 1]);
    assert_eq!(site.health.failure(), None);
    let failures = Kind::ALL.map(|kind| site.health.of(kind).failures());
    assert_eq!(failures, [0; Kind::ALL.len()], "that is how watches end");
    let from = site.watched_from(Resource::EndpointSlices);
    assert!(from.is_sorted() && from.len() >= 5, "{from:?}");
}

#[test]
fn bookmarks_carry_a_watch_over_what_is_forgotten() {
    let site = Site::new(server(web(1, &[1])));
    site.view(|_| true);
    site.watching();
    let before = site.cluster().version();
    for number in 0..10 {
        site.cluster()
            .apply(objects::node(&format!("other-{number}"), "zone-b", &[]));
    }
    // Services did not change: only bookmarks carry the newer version. Two bookmarks, because the first may have been
    // sent before.
    for _ in 0..2 {
        let heard = site.cluster().version();
        thread::sleep(Duration::from_millis(500));
        assert_eq!(site.cluster().version(), heard);
    }
    site.cluster().compact();
    site.server.faults().note_requests(true);
    site.server.faults().break_watches();
    site.wait("services are watched anew", |site| {
        !site.watched_from(Resource::Services).is_empty()
    });
    assert!(site.watched_from(Resource::Services)[0] > before);
    site.watching();
    assert_eq!(site.lists(), [1, 1, 1], "nothing had to be listed again");
}
