use std::{fs, net::Ipv4Addr};

use model::{Egress, Identity, Place, WorkloadName};
use tempfile::NamedTempFile;
use threads::none_dies;

use super::*;
use crate::{
    AccessLog, Attachment, Baggage, Ledger, Limits, Log, Totals, attachment::KINDS, limits::Holders,
};

fn at(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// Runs sessions of a workload that may have one connection at a time. Returns their totals by flag, and their
/// lines in the access log.
fn account(sessions: impl FnOnce(&dyn Fn() -> Option<Session>)) -> (Vec<(Flag, Totals)>, String) {
    let file = NamedTempFile::new().unwrap();
    let (log, writer) = Log::start(AccessLog::Text, file.reopen().unwrap(), none_dies()).unwrap();
    let (limits, log) = (Arc::new(Limits::new(Some(1), None, 1024)), Arc::new(log));
    let workload = Workload::new(WorkloadName::new("a", "b"), Place::Elsewhere);
    let attachment = Attachment {
        workload: Arc::new(workload),
        namespace: None,
        outbound: vec![],
        inbound: vec![],
        tunnels: vec![],
        egress: Egress::Allow,
    };
    let shared = (limits, Holders::default(), Arc::clone(&log));
    let (attached, _) = Attached::new(0, attachment, Box::default(), shared).unwrap();
    sessions(&|| {
        let (outbound, now) = (Direction::Outbound, Instant::now());
        let permit = Permit::acquire(&attached, outbound)?;
        Some(Session::begin(permit, outbound, at(1), at(2), 3, now))
    });
    assert_eq!(attached.connections(), 0);
    let mut ledger = Ledger::default();
    attached.collect(&mut ledger, Instant::now());
    log.close();
    writer.unwrap().join().unwrap();
    let series = ledger.iter();
    let totals = series.map(|(labels, series)| (labels.key.flag, series.totals));
    (totals.collect(), fs::read_to_string(file.path()).unwrap())
}

#[test]
fn peers_with_many_descriptions_share_counters() {
    let identity = |account| Identity::new("cluster.local", "shop", account).unwrap();
    let count = KINDS + 100;
    let (totals, _) = account(|begin| {
        for number in 0..count {
            let baggage = Baggage::read(&format!("service.name=web-{number}"));
            let mut session = begin().unwrap();
            session.prove(identity("own"), identity("peer"), baggage.map(Arc::new));
            session.end(Flag::Denied);
        }
    });
    assert_eq!(totals.len(), KINDS + 1);
    let failed: u64 = totals.iter().map(|(_, totals)| totals.failed).sum();
    assert_eq!(failed, count as u64);
}

#[test]
fn a_session_that_is_dropped_has_accounted_for_itself() {
    let index = Index::default();
    let (totals, log) = account(|begin| {
        let mut session = begin().unwrap();
        assert!(begin().is_none(), "the only permit is taken");
        session.route(&index).unwrap();
        assert_eq!(session.next_endpoint(), Some(at(2)));
        session.reached(&index);
        session.bytes = [3, 4];
        session.count();
        session.bytes = [30, 40];
        drop(session);
        let mut session = begin().expect("the permit is back");
        session.reached(&index);
        session.end(Flag::None);
    });
    let both = Totals {
        opened: 2,
        closed: 2,
        failed: 0,
        received: 30,
        sent: 40,
    };
    assert_eq!(totals, [(Flag::None, both)]);
    let lines: Vec<&str> = log.lines().collect();
    let cut = "endpoint=127.0.0.1:2 bytes_received=30 bytes_sent=40";
    assert!(lines[0].contains(cut) && lines[0].ends_with("flags=DRAIN"));
    assert!(lines[1].contains(" bytes_received=0 ") && lines[1].ends_with("flags=-"));
}

#[test]
fn a_session_that_reached_nobody_is_a_failure() {
    let (totals, log) = account(|begin| {
        let mut session = begin().unwrap();
        assert_eq!(session.attempt(), Some(0));
        assert_eq!(session.next_endpoint(), Some(at(2)));
        session.failed(io::Error::other("no"));
        assert_eq!(session.attempt(), Some(1));
        assert_eq!(session.next_endpoint(), None, "there is one destination");
        session.end(Flag::ConnectFailure);
        begin().unwrap().end(Flag::ClientReset);
    });
    let one = Totals {
        failed: 1,
        ..Totals::default()
    };
    let failed = [(Flag::ConnectFailure, one), (Flag::ClientReset, one)];
    assert_eq!(totals, failed);
    let lines: Vec<&str> = log.lines().collect();
    assert!(lines[0].contains("endpoint=127.0.0.1:2"), "{log}");
    assert!(lines[0].ends_with("flags=UF error=\"no\""), "{log}");
    assert!(
        !lines[1].contains("endpoint="),
        "there was no attempt: {log}"
    );
}
