//! The programs on tables that the agent writes: a fault in the tables, and what is kept for a socket.

use std::sync::{Mutex, PoisonError};

use anyhow::{Result, ensure};
use aya::maps::{Array, Map, MapData};
use dataplane_common::{
    Addr, Port, Protocol, Reason,
    tables::{
        Block, Endpoint, Frontend, FrontendKey, Kind, PeerSets, Pool, SOCKET_ELEMENTS, SOCKET_SETS,
        SOCKET_WAYS,
    },
};
use dataplane_tests::{Command, report::Report};
use plan::Write;

use super::Place;

scenarios! {
    Dataplane:
    a_dangling_reference_is_refused_counted_and_logged,
    what_is_kept_for_a_socket_goes_with_it,
}

/// Messages of the programs, as the agent's log would get them.
struct Captured(Mutex<Vec<String>>);

static CAPTURED: Captured = Captured(Mutex::new(Vec::new()));

impl log::Log for Captured {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = format!("{} {}", record.level(), record.args());
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(line);
    }

    fn flush(&self) {}
}

/// A fault that the plan never makes: a key whose pool is missing. The programs refuse the connection instead of
/// passing it on, and count it, and the agent logs it.
fn a_dangling_reference_is_refused_counted_and_logged() -> Result<()> {
    log::set_logger(&CAPTURED).map_err(|error| anyhow::anyhow!("{error}"))?;
    log::set_max_level(log::LevelFilter::Info);
    let place = Place::new()?;
    let mut kernel = place.open()?;
    let key = FrontendKey::new(Addr::from_v4([10, 96, 0, 1]), Port::new(80), Protocol::TCP);
    kernel.apply(&[Write::Insert {
        key,
        frontend: Frontend::new(4_000_000, Kind::CLUSTER_IP),
    }])?;
    let report: Report = place
        .lab
        .node("node1")
        .probe("connect")
        .args(["--to", "10.96.0.1:80", "--count", "2"])
        .json()?;
    ensure!(report.answered == 0, "{report:?}");
    ensure!(report.errors.get("ECONNREFUSED") == Some(&2), "{report:?}");
    ensure!(kernel.tables().reasons()?[Reason::Dangling as usize] == 2);
    kernel.pass_on_log();
    let lines = CAPTURED.0.lock().unwrap_or_else(PoisonError::into_inner);
    let wanted = "ERROR pool 4000000 or its block is not there";
    ensure!(
        lines.iter().filter(|line| *line == wanted).count() == 2,
        "{lines:?}"
    );
    Ok(())
}

/// A socket's VIP, of a connected socket or of an unconnected UDP socket, is in its set of PEERS while the socket is open,
/// and in the socket's own storage when the set is full.
fn what_is_kept_for_a_socket_goes_with_it() -> Result<()> {
    let place = Place::new()?;
    let mut kernel = place.open()?;
    let node = place.lab.node("node1");
    let _server = node.serve(&[
        "--tcp",
        "127.0.0.1:7",
        "--udp",
        "127.0.0.1:7",
        "--udp",
        "127.0.0.1:8",
    ])?;
    let key = FrontendKey::new(Addr::from_v4([10, 96, 0, 1]), Port::new(80), Protocol::TCP);
    let endpoint = Endpoint::new(Addr::from_v4([127, 0, 0, 1]), Port::new(7));
    kernel.apply(&[
        Write::Endpoints {
            base: 0,
            endpoints: vec![endpoint],
        },
        Write::Pool {
            index: 1,
            pool: Pool {
                block: Block::new(0, 1, 0),
                affinity_seconds: 0,
                affinity_group: 1,
                ..Pool::default()
            },
            fresh: true,
        },
        Write::Insert {
            key,
            frontend: Frontend::new(1, Kind::CLUSTER_IP),
        },
        Write::Insert {
            key: FrontendKey::new(key.addr, key.port, Protocol::UDP),
            frontend: Frontend::new(1, Kind::CLUSTER_IP),
        },
    ])?;
    let connect = || -> Result<()> {
        let report: Report = node
            .probe("connect")
            .args(["--to", "10.96.0.1:80", "--count", "5"])
            .json()?;
        ensure!(report.answered == 5, "{report:?}");
        ensure!(report.peers == ["10.96.0.1:80".parse()?], "{report:?}");
        send_unconnected(node.probe("udp"), "10.96.0.1:80")
    };
    // An element as words: first whose its places are, then their contents.
    let peers = Map::Array(MapData::from_pin(place.map("PEERS"))?);
    let mut peers = Array::<MapData, [u64; size_of::<PeerSets>() / 8]>::try_from(peers)?;
    connect()?;
    // A socket that is closed while it is connected to another address, at a port that no endpoint has.
    let report: Report = node
        .probe("udp")
        .args([
            "--to",
            "10.96.0.1:80",
            "--to",
            "127.0.0.1:8",
            "--count",
            "2",
        ])
        .args(["--one-socket", "--reconnect", "--each"])
        .json()?;
    let peers_seen: Vec<_> = report
        .each
        .iter()
        .filter_map(|attempt| attempt.peer)
        .collect();
    ensure!(
        report.answered == 2 && peers_seen == ["10.96.0.1:80".parse()?, "127.0.0.1:8".parse()?],
        "{report:?}"
    );
    let left: Vec<u64> = peers
        .iter()
        .flat_map(|sets| {
            sets.map(|words| words[..SOCKET_SETS * SOCKET_WAYS].to_vec())
                .unwrap_or_default()
        })
        .filter(|owner| *owner != 0)
        .collect();
    ensure!(
        left.is_empty(),
        "sockets {left:?} are closed and still there"
    );
    // Cookies count up from 1, so no socket has these.
    let mut full = [0; size_of::<PeerSets>() / 8];
    full[..SOCKET_SETS * SOCKET_WAYS].fill(u64::MAX);
    for set in 0..SOCKET_ELEMENTS {
        peers.set(set, full, 0)?;
    }
    connect()?;
    ensure!(kernel.tables().reasons()?[Reason::PeerNotKept as usize] == 0);
    Ok(())
}

/// Asks a VIP by one unconnected socket, and wants all answers to come from it.
fn send_unconnected(probe: Command, vip: &str) -> Result<()> {
    let probe = probe.args(["--unconnected", "--one-socket", "--each", "--to", vip]);
    let report: Report = probe.args(["--count", "3"]).json()?;
    let vip = Some(vip.parse()?);
    ensure!(
        report.answered == 3 && report.each.iter().all(|attempt| attempt.from == vip),
        "{report:?}"
    );
    Ok(())
}
