//! Recovery from failures.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use dataplane_source::{
    Notice,
    kubernetes::{Api, Kind, Patience, Scope, Settings, Target},
};
use dataplane_tests::api::{Cluster, Resource};
use model::{Node, ServiceName};

use crate::site::{Site, endpoints, has, patience, server, slice_of, web};

#[test]
fn broken_watches_go_on_and_miss_nothing() {
    let site = Site::new(server((0..50).flat_map(|number| web(number, &[1]))));
    site.view(|_| true);
    for round in 2..12 {
        for number in 0..50 {
            let name = format!("web-{number}");
            site.cluster()
                .apply(slice_of(&name, &format!("{name}-a"), &[round]));
            if number % 10 == 0 {
                site.server.faults().break_watches();
            }
        }
    }
    let last = |n: u16| move |view: &_| endpoints(view, &format!("web-{n}")) == [11];
    site.view(|view| (0..50).all(|number| last(number)(view)));
    assert_eq!(site.lists(), [1, 1, 1], "resumed, not listed anew");
}

/// A watch starts at a version that the server no longer has. The server reports this by an event, or by the status of
/// the answer.
fn forgotten(as_status: bool) {
    let mut site = Site::new(server((0..20).flat_map(|number| web(number, &[1]))));
    site.server.faults().gone_as_status(as_status);
    let view = site.view(|view| view.services.len() == 20);
    site.watching();
    let kept = view.services[&ServiceName::new("default", "web-7")].clone();
    site.server.go_away();
    let cluster = site.cluster();
    cluster.delete(Resource::Services, "default", "web-3");
    cluster.delete(Resource::EndpointSlices, "default", "web-4-a");
    cluster.apply(slice_of("web-5", "web-5-a", &[2]));
    cluster.apply_all(web(30, &[3]));
    cluster.compact();
    site.server.come_back().unwrap();
    let view = site.view(|view| !has(view, "web-3") && endpoints(view, "web-4").is_empty());
    // A list adds new objects at once, and removes missing objects at its end.
    let view = if has(&view, "web-30") && endpoints(&view, "web-5") == [2] {
        view
    } else {
        site.view(|view| has(view, "web-30") && endpoints(view, "web-5") == [2])
    };
    assert_eq!(view.services.len(), 20);
    let same = &view.services[&ServiceName::new("default", "web-7")];
    assert!(Arc::ptr_eq(same, &kept), "what did not change is shared");
    site.watching();
    assert_eq!(site.lists()[..2], [2, 2]);
}

#[test]
fn a_version_that_is_forgotten_told_by_an_event() {
    forgotten(false);
}

#[test]
fn a_version_that_is_forgotten_told_by_the_status() {
    forgotten(true);
}

#[test]
fn a_version_that_is_forgotten_between_pages() {
    let server = server((0..1_250).flat_map(|number| web(number, &[1])));
    let mut site = Site::new(server);
    site.view(|view| view.services.len() == 1_250);
    site.watching();
    // The first list is not read in pages, and this list is.
    site.server.faults().note_requests(true);
    site.server.go_away();
    site.cluster().apply_all(web(1_999, &[1]));
    site.cluster().compact();
    site.server
        .faults()
        .slow(Some((64 * 1024, Duration::from_millis(2))));
    site.server.come_back().unwrap();
    site.wait("the first page was asked for", |site| {
        let asked = site.server.faults().asked();
        asked
            .iter()
            .any(|a| a.resource == Some(Resource::Services) && !a.watch)
    });
    // The server always has its newest version.
    site.cluster().apply_all(web(2_000, &[1]));
    site.cluster().compact();
    site.server.faults().slow(None);
    site.view(|view| view.services.len() == 1_252);
    let asked = site.server.faults().asked();
    assert!(asked.iter().any(|a| a.continued && a.answered == 410));
}

#[test]
fn nothing_is_scaled_down_by_a_list_that_breaks_off() {
    let site = Site::new(server((0..1_000).flat_map(|number| web(number, &[1]))));
    site.view(|view| view.services.len() == 1_000);
    site.watching();
    // The history is gone, so all objects are listed again. The list breaks in the middle, several times.
    site.server.faults().cut_lists(8);
    site.server.faults().mute(true);
    site.cluster().apply_all(web(2_000, &[1]));
    site.cluster().apply(slice_of("web-2", "web-2-a", &[2]));
    site.cluster().compact();
    site.server.faults().mute(false);
    site.server.faults().break_watches();
    loop {
        let view = site.view(|_| true);
        assert!(view.services.len() >= 1_000, "{}", view.services.len());
        let empty = view
            .services
            .values()
            .find(|s| s.ports[0].endpoints.is_empty());
        assert!(
            empty.is_none_or(|s| s.name.name() == "web-2000"),
            "{empty:?} lost its endpoints"
        );
        if view.services.len() == 1_001 && endpoints(&view, "web-2") == [2] {
            break;
        }
    }
    let failures = Kind::ALL.map(|kind| site.health.of(kind).failures());
    assert!(failures.iter().sum::<u64>() >= 8, "{failures:?}");
}

#[test]
fn a_server_that_is_away_is_told_and_waited_for() {
    let mut site = Site::new(server(web(1, &[1])));
    let view = site.view(|_| true);
    let kept = view.services[&ServiceName::new("default", "web-1")].clone();
    site.watching();
    site.server.go_away();
    site.wait("it is told", |site| site.health.failure().is_some());
    let (since, text) = site.health.failure().unwrap();
    assert!(text.contains(&site.server.url()), "{text}");
    assert!(text.contains("refused"), "{text}");
    assert!(since > 0 && site.health.heard() > 0 && !site.health.is_watching());
    site.wait("it is tried again", |site| {
        site.health.of(Kind::Service).failures() > 3
    });
    assert_eq!(
        site.health.failure().unwrap().0,
        since,
        "since when, not when last"
    );
    assert!(site.untaken().is_none(), "nothing has changed");
    site.cluster().apply_all(web(2, &[2]));
    site.server.come_back().unwrap();
    let view = site.view(|view| endpoints(view, "web-2") == [2]);
    let same = &view.services[&ServiceName::new("default", "web-1")];
    assert!(Arc::ptr_eq(same, &kept));
    site.watching();
    assert_eq!(site.health.failure(), None);
    assert_eq!(site.lists(), [1, 1, 1], "it went on where it was");
}

#[test]
fn a_server_that_is_away_from_the_beginning_is_waited_for() {
    let mut server = server(web(1, &[1]));
    server.go_away();
    let mut site = Site::new(server);
    site.wait("it is told", |site| site.health.failure().is_some());
    assert!(site.untaken().is_none());
    site.server.come_back().unwrap();
    site.view(|view| endpoints(view, "web-1") == [1]);
}

#[test]
fn a_connection_on_which_nothing_comes_is_given_up() {
    let patience = Patience {
        idle: Duration::from_millis(300),
        ..patience()
    };
    let site = Site::with(
        server(web(1, &[1])),
        patience,
        |target, directory, server| {
            target.kubeconfig = Some(server.kubeconfig(directory.path()).unwrap());
        },
    );
    site.view(|_| true);
    site.watching();
    // The server is known to send bookmarks.
    thread::sleep(Duration::from_millis(600));
    let watches = site.health.of(Kind::Slice).watches();
    site.server.faults().mute(true);
    site.cluster().apply(slice_of("web-1", "web-1-a", &[2]));
    site.wait("slices are watched anew", |site| {
        site.health.of(Kind::Slice).watches() > watches
    });
    site.server.faults().mute(false);
    site.view(|view| endpoints(view, "web-1") == [2]);
    assert_eq!(site.lists(), [1, 1, 1]);
}

#[test]
fn a_cluster_that_is_restored_from_a_backup_is_listed_anew() {
    let mut site = Site::new(server(web(1, &[1])));
    site.view(|_| true);
    let backup: Cluster = site.cluster().backup();
    site.cluster()
        .apply_all((10..40).flat_map(|number| web(number, &[1])));
    site.view(|view| view.services.len() == 31);
    site.watching();
    site.server.go_away();
    site.cluster().restore(&backup);
    site.cluster().apply_all(web(2, &[2]));
    site.server.come_back().unwrap();
    site.view(|view| view.services.len() == 2 && endpoints(view, "web-2") == [2]);
}

#[test]
fn a_busy_server_is_left_alone_as_long_as_it_asks_for() {
    let server = server(web(1, &[1]));
    server.faults().refuse(1, 429, Some(1));
    let site = Site::new(server);
    site.view(|view| endpoints(view, "web-1") == [1]);
    let asked = site.server.faults().asked();
    let busy = asked.iter().position(|a| a.answered == 429).unwrap();
    let again = asked[busy + 1..]
        .iter()
        .find(|a| a.resource == asked[busy].resource)
        .unwrap();
    assert!(again.at - asked[busy].at >= Duration::from_secs(1));
}

/// A panic in the reading thread is reported as the end of reading.
#[test]
fn a_reader_that_panics_is_told_of() {
    let server = server(web(1, &[1]));
    let directory = tempfile::tempdir().unwrap();
    let target = Target {
        kubeconfig: Some(server.kubeconfig(directory.path()).unwrap()),
        ..Target::default()
    };
    let settings = Settings {
        target,
        wanted: Scope::Services.into(),
        patience: patience(),
    };
    let (sender, died) = mpsc::channel();
    let notify = move |notice| match notice {
        // Runs on the reader's own thread.
        Notice::Changed => panic!("something is wrong"),
        Notice::Died { thread, why } => sender.send((thread, why)).unwrap(),
    };
    let _feed = Api::open(settings, &Arc::new(Node::default()), notify).unwrap();
    let (thread, why) = died.recv_timeout(Duration::from_secs(20)).unwrap();
    assert_eq!((thread, &*why), ("kubernetes", "something is wrong"));
}
