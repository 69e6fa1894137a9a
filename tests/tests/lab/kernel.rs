//! The crate `kernel` against the real kernel: which objects it adopts, refuses and leaves alone. Next to no traffic:
//! the programs are mostly attached to cgroups in which nothing runs.

use std::{
    fs,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Instant,
};

use anyhow::{Context as _, Result, bail, ensure};
use aya::maps::{Array, Map, MapData};
use dataplane_common::{
    Addr, LAYOUT, Port, Protocol, Reason, VIP_ELEMENTS,
    decide::may_be_vip,
    tables::{
        Block, Endpoint, Frontend, FrontendKey, Kind, PeerSets, Pool, SOCKET_ELEMENTS, SOCKET_SETS,
        SOCKET_WAYS,
    },
};
use dataplane_tests::{Command, Lab, report::Report};
use kernel::{Error, Kernel, Limits, Paths, Tables};
use plan::{Contents, Demand, Write};

scenarios! {
    Dataplane:
    a_second_agent_adopts_what_the_first_wrote,
    two_agents_do_not_write_at_once,
    a_foreign_pin_is_named_and_left_alone,
    a_pin_of_another_kind_is_named,
    damaged_pins_are_refused_and_cleaned_up,
    half_made_pins_are_made_anew,
    another_cgroup_is_attached_to_anew,
    tables_grow_and_keep_what_they_hold,
    keys_that_change_owner_together_wait_together,
    a_full_table_names_its_knob,
    an_older_layout_is_retired,
    a_directory_on_no_bpffs_is_refused,
    a_dangling_reference_is_refused_counted_and_logged,
    what_is_kept_for_a_socket_goes_with_it,
    the_filter_follows_the_frontends,
}

/// A lab for its directories: a bpffs and a cgroup of its own.
struct Place {
    paths: Paths,
    lab: Lab,
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Err(error) = kernel::cleanup(&self.paths.bpffs, false) {
            eprintln!("cannot clean up {}: {error}", self.paths.bpffs.display());
        }
    }
}

impl Place {
    fn new() -> Result<Self> {
        let lab = Lab::builder().node("node1").build()?;
        let paths = Paths {
            bpffs: lab.bpffs()?.join("node1"),
            cgroup: lab.node_cgroup("node1"),
        };
        Ok(Self { paths, lab })
    }

    fn open(&self) -> Result<Kernel, Error> {
        Kernel::open(&self.paths, Limits::default())
    }

    fn map(&self, name: &str) -> PathBuf {
        self.paths.bpffs.join(format!("v{LAYOUT}/maps/{name}"))
    }

    fn link(&self, name: &str) -> PathBuf {
        self.paths.bpffs.join(format!("v{LAYOUT}/links/{name}"))
    }

    fn assert_attached(&self) -> Result<()> {
        for attachment in kernel::attachments(&self.paths)? {
            ensure!(attachment.problem.is_none(), "{attachment:?}");
        }
        Ok(())
    }
}

/// `services` services with one port and three endpoints each.
fn writes(services: u32) -> (Demand, Vec<Write>) {
    let mut writes = Vec::new();
    for service in 0..services {
        let [_, b, c, d] = service.to_be_bytes();
        let endpoint = |n| Endpoint::new(Addr::from_v4([10, 128 + b, c, d]), Port::new(n));
        let (index, base) = (service + 1, service * 4);
        writes.push(Write::Endpoints {
            base,
            endpoints: [1, 2, 3].map(endpoint).into(),
        });
        let block = Block::new(base, 3, 0);
        let pool = Pool {
            block,
            affinity_seconds: 0,
            affinity_group: index,
            ..Pool::default()
        };
        writes.push(Write::Pool {
            index,
            pool,
            fresh: true,
        });
    }
    for service in 0..services {
        let [_, b, c, d] = service.to_be_bytes();
        let vip = Addr::from_v4([11, b, c, d]);
        let key = FrontendKey::new(vip, Port::new(80), Protocol::TCP);
        writes.push(Write::Insert {
            key,
            frontend: Frontend::new(service + 1, Kind::CLUSTER_IP),
        });
    }
    let demand = Demand {
        frontends: services,
        pools: services + 1,
        endpoints: services * 4,
        affinity_groups: 0,
        sources: 0,
    };
    (demand, writes)
}

fn sorted(mut contents: Contents) -> Contents {
    contents.frontends.sort_by_key(|(key, _)| *key);
    contents
}

/// The next agent finds all that one wrote, and the links are still those of the first, with new programs in them.
fn a_second_agent_adopts_what_the_first_wrote() -> Result<()> {
    let place = Place::new()?;
    let mut first = place.open()?;
    ensure!(!first.adopted(), "there was nothing to adopt");
    let (demand, writes) = writes(5);
    first.reserve(&demand)?;
    first.apply(&writes)?;
    let wrote = sorted(first.contents()?);
    ensure!(
        wrote.frontends.len() == 5 && wrote.pools.len() == 6,
        "{wrote:?}"
    );
    let before = kernel::attachments(&place.paths)?;
    drop(first);
    place.assert_attached()?;
    let second = place.open()?;
    ensure!(second.adopted(), "not adopted");
    ensure!(
        sorted(second.contents()?) == wrote,
        "adopted something else"
    );
    place.assert_attached()?;
    for (before, after) in before.iter().zip(kernel::attachments(&place.paths)?) {
        ensure!(
            before.link_id == after.link_id,
            "not the same link: {before:?} {after:?}"
        );
        ensure!(
            before.program_id != after.program_id,
            "not swapped: {before:?} {after:?}"
        );
    }
    Ok(())
}

/// Only one agent writes. The second agent's error names the first agent, whose programs stay attached.
fn two_agents_do_not_write_at_once() -> Result<()> {
    let place = Place::new()?;
    let first = place.open()?;
    match place.open() {
        Err(Error::Busy { pid, .. }) => ensure!(pid == Some(std::process::id()), "{pid:?}"),
        other => bail!("{other:?}"),
    }
    match kernel::cleanup(&place.paths.bpffs, false) {
        Err(Error::Busy { .. }) => {}
        other => bail!("{other:?}"),
    }
    drop(first);
    place.assert_attached()
}

/// Another program's map under the name of one of ours is named, and stays.
fn a_foreign_pin_is_named_and_left_alone() -> Result<()> {
    let place = Place::new()?;
    drop(place.open()?);
    kernel::cleanup(&place.paths.bpffs, false)?;
    fs::create_dir_all(place.map("POOLS").parent().context("a directory")?)?;
    let foreign = Array::<MapData, u64>::create(7, 0)?;
    foreign.pin(place.map("POOLS"))?;
    match place.open() {
        Err(error @ Error::Foreign { .. }) => {
            let text = error.to_string();
            for part in [
                "maps/POOLS",
                "standalone_arra",
                "BPF_MAP_TYPE_ARRAY_OF_MAPS",
            ] {
                ensure!(text.contains(part), "`{part}` is not in: {text}");
            }
        }
        other => bail!("{other:?}"),
    }
    for dry_run in [true, false] {
        let items = kernel::cleanup(&place.paths.bpffs, dry_run)?;
        let item = items
            .iter()
            .find(|item| item.path == place.map("POOLS"))
            .context("named")?;
        ensure!(!item.ours, "{item:?}");
    }
    ensure!(place.map("POOLS").exists(), "a foreign pin was removed");
    fs::remove_file(place.map("POOLS"))?;
    place.open()?;
    Ok(())
}

/// A foreign link in the place of one of ours is named, and stays, too.
fn a_pin_of_another_kind_is_named() -> Result<()> {
    let place = Place::new()?;
    drop(place.open()?);
    let (link, aside) = (place.link("connect4"), place.paths.bpffs.join("aside"));
    fs::rename(&link, &aside)?;
    fs::rename(place.link("connect6"), &link)?;
    match place.open() {
        Err(error @ Error::Foreign { .. }) => {
            ensure!(error.to_string().contains("links/connect4"), "{error}");
        }
        other => bail!("{other:?}"),
    }
    fs::rename(&link, place.link("connect6"))?;
    fs::rename(&aside, &link)?;
    drop(place.open()?);
    place.assert_attached()
}

/// While programs are attached, a missing table is damage: it is named, and nothing is changed.
fn damaged_pins_are_refused_and_cleaned_up() -> Result<()> {
    let place = Place::new()?;
    drop(place.open()?);
    fs::remove_file(place.map("STATS"))?;
    match place.open() {
        Err(error @ Error::Damaged { .. }) => {
            let text = error.to_string();
            ensure!(
                text.contains("maps/STATS") && text.contains("dataplane cleanup"),
                "{text}"
            );
        }
        other => bail!("{other:?}"),
    }
    place.assert_attached()?;
    let dry = kernel::cleanup(&place.paths.bpffs, true)?;
    ensure!(
        place.link("connect4").exists(),
        "a dry run removed something"
    );
    let removed = kernel::cleanup(&place.paths.bpffs, false)?;
    ensure!(
        dry == removed,
        "the dry run said otherwise: {dry:?} {removed:?}"
    );
    ensure!(!place.paths.bpffs.exists(), "something is left");
    drop(place.open()?);
    place.assert_attached()
}

/// An agent that died while it made the pins attached nothing yet: the next starts over.
fn half_made_pins_are_made_anew() -> Result<()> {
    let place = Place::new()?;
    drop(place.open()?);
    let links = place.link("connect4");
    for link in fs::read_dir(links.parent().context("a directory")?)? {
        fs::remove_file(link?.path())?;
    }
    fs::remove_file(place.map("EVENTS"))?;
    let kernel = place.open()?;
    ensure!(!kernel.adopted(), "adopted what served nobody");
    place.assert_attached()
}

/// A link whose cgroup is gone, or that is on another cgroup than is asked for, is made anew.
fn another_cgroup_is_attached_to_anew() -> Result<()> {
    let mut place = Place::new()?;
    let first = place.paths.cgroup.join("first");
    fs::create_dir(&first)?;
    let old = std::mem::replace(&mut place.paths.cgroup, first.clone());
    drop(place.open()?);
    place.assert_attached()?;
    fs::remove_dir(&first)?;
    place.paths.cgroup = old;
    let problems = kernel::attachments(&place.paths)?;
    ensure!(problems.iter().all(|a| a.problem.is_some()), "{problems:?}");
    drop(place.open()?);
    place.assert_attached()?;
    let other = place.paths.cgroup.join("other");
    fs::create_dir(&other)?;
    place.paths.cgroup = other;
    drop(place.open()?);
    place.assert_attached()
}

/// Growing keeps every entry and every count, and the next agent finds the larger tables.
fn tables_grow_and_keep_what_they_hold() -> Result<()> {
    let place = Place::new()?;
    let mut kernel = place.open()?;
    let small: u64 = kernel
        .tables()
        .usage(Limits::default())?
        .iter()
        .map(|u| u.bytes)
        .sum();
    ensure!(small < 1 << 20, "a node with nothing pins {small} bytes");
    let (demand, few) = writes(10);
    kernel.reserve(&demand)?;
    kernel.apply(&few)?;
    let before = sorted(kernel.contents()?);
    // Nothing is behind this service, but a connection to it is counted.
    let dial: Report = place
        .lab
        .node("node1")
        .probe("connect")
        .args(["--to", "11.0.0.1:80", "--count", "3", "--timeout-ms", "100"])
        .json()?;
    ensure!(dial.answered == 0, "{dial:?}");
    let (demand, _) = writes(20_000);
    let grown = kernel.reserve(&demand)?;
    let names: Vec<_> = grown.iter().map(|growth| growth.table).collect();
    ensure!(names == ["FRONTENDS", "ENDPOINTS", "POOLS"], "{grown:?}");
    ensure!(
        sorted(kernel.contents()?) == before,
        "growing changed the tables"
    );
    let counted = kernel.tables().pool_stats(2).translated;
    ensure!(
        counted == 3,
        "{counted} connections counted after growing, not 3"
    );
    ensure!(
        kernel.reserve(&demand)?.is_empty(),
        "grew twice for one demand"
    );
    let (_, many) = writes(20_000);
    kernel.apply(&many)?;
    let counted = kernel.tables().pool_stats(2).translated;
    ensure!(
        counted == 0,
        "a pool that came anew counts on from {counted}"
    );
    drop(kernel);
    ensure!(
        Tables::open(&place.paths.bpffs)?
            .contents()?
            .frontends
            .len()
            == 20_000
    );
    let kernel = place.open()?;
    ensure!(kernel.adopted() && kernel.contents()?.frontends.len() == 20_000);
    Ok(())
}

/// A key that changes owner waits for the programs that run. Thousands that change together, as when a Service goes whose
/// addresses another Service claims, do not wait for each other.
fn keys_that_change_owner_together_wait_together() -> Result<()> {
    const KEYS: u32 = 2000;
    let place = Place::new()?;
    let mut kernel = place.open()?;
    let (demand, first) = writes(KEYS);
    kernel.reserve(&demand)?;
    kernel.apply(&first)?;
    let mut wanted = sorted(kernel.contents()?);
    for (_, frontend) in &mut wanted.frontends {
        *frontend = Frontend::new(frontend.pool() % KEYS + 1, Kind::CLUSTER_IP);
    }
    let changes: Vec<_> = wanted
        .frontends
        .iter()
        .map(|&(key, frontend)| Write::Replace { key, frontend })
        .collect();
    let (alone, together) = changes.split_at(20);
    let start = Instant::now();
    for change in alone {
        kernel.apply(std::slice::from_ref(change))?;
    }
    let alone = start.elapsed();
    let start = Instant::now();
    kernel.apply(together)?;
    let together = start.elapsed();
    // Each by itself, they would take 99 times as long as the 20.
    ensure!(together < 20 * alone, "{together:?}; 20 took {alone:?}");
    ensure!(sorted(kernel.contents()?) == wanted);
    let filtered = kernel.tables().filtered_out()?;
    ensure!(filtered.is_empty(), "the filter hides {filtered:?}");
    drop(kernel);
    ensure!(sorted(Tables::open(&place.paths.bpffs)?.contents()?) == wanted);
    Ok(())
}

/// A limit names the table, its size and the option, and nothing changes.
fn a_full_table_names_its_knob() -> Result<()> {
    let place = Place::new()?;
    let limits = Limits {
        frontends: 300,
        endpoints: 2000,
        ..Limits::default()
    };
    let mut kernel = Kernel::open(&place.paths, limits)?;
    let (demand, few) = writes(100);
    kernel.reserve(&demand)?;
    kernel.apply(&few)?;
    let before = sorted(kernel.contents()?);
    for (services, words) in [
        (400, ["FRONTENDS", "400", "300", "limits.frontends"]),
        (299, ["", "", "", ""]),
    ] {
        let (mut demand, _) = writes(services);
        match kernel.reserve(&demand) {
            Ok(_) if services == 299 => {
                demand.endpoints = 2001;
                let text = kernel
                    .reserve(&demand)
                    .expect_err("too many endpoints")
                    .to_string();
                for word in ["ENDPOINTS", "2001", "2000", "limits.endpoints"] {
                    ensure!(text.contains(word), "`{word}` is not in: {text}");
                }
            }
            Err(error) => {
                let text = error.to_string();
                ensure!(words.iter().all(|word| text.contains(word)), "{text}");
            }
            Ok(grown) => bail!("{grown:?}"),
        }
        ensure!(sorted(kernel.contents()?) == before, "the tables changed");
    }
    Ok(())
}

/// The pins of an agent with another layout go once this one serves; others' do not.
fn an_older_layout_is_retired() -> Result<()> {
    let place = Place::new()?;
    drop(place.open()?);
    let layout = |version: u32| place.paths.bpffs.join(format!("v{version}"));
    fs::rename(layout(LAYOUT), layout(LAYOUT + 1))?;
    fs::create_dir(place.paths.bpffs.join("vault"))?;
    let mut kernel = place.open()?;
    ensure!(!kernel.adopted(), "adopted another layout");
    ensure!(
        kernel.waits() && !place.link("connect4").exists(),
        "attached before there is anything to serve"
    );
    let removed = kernel.replace_other_layouts()?;
    place.assert_attached()?;
    ensure!(
        removed
            .iter()
            .any(|item| item.path.ends_with("maps/PEERS") && item.ours)
    );
    ensure!(!layout(LAYOUT + 1).exists(), "still there: {removed:?}");
    ensure!(
        place.paths.bpffs.join("vault").exists(),
        "not ours, but removed"
    );
    fs::remove_dir(place.paths.bpffs.join("vault"))?;
    place.assert_attached()
}

/// Elsewhere than on a bpffs nothing is made.
fn a_directory_on_no_bpffs_is_refused() -> Result<()> {
    let mut place = Place::new()?;
    let directory = tempfile::tempdir()?;
    let right = std::mem::replace(&mut place.paths.bpffs, directory.path().join("dataplane"));
    let result = place.open();
    let made = place.paths.bpffs.exists();
    place.paths.bpffs = right;
    match result {
        Err(error @ Error::NotBpffs { .. }) => {
            ensure!(error.to_string().contains("mount -t bpf"), "{error}");
        }
        other => bail!("{other:?}"),
    }
    ensure!(!made, "a directory was made");
    Ok(())
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
pub fn a_dangling_reference_is_refused_counted_and_logged() -> Result<()> {
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
pub fn what_is_kept_for_a_socket_goes_with_it() -> Result<()> {
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

/// The agent sets a frontend's bit before it adds the frontend, and clears the bit after the last frontend of the
/// prefix is gone. If an agent dies in between, the next one puts missing and superfluous bits right.
fn the_filter_follows_the_frontends() -> Result<()> {
    let place = Place::new()?;
    let mut kernel = place.open()?;
    let addr = |last| Addr::from_v4([10, 96, 0, last]);
    let key = |last| FrontendKey::new(addr(last), Port::new(80), Protocol::TCP);
    let insert = |last, kind| Write::Insert {
        key: key(last),
        frontend: Frontend::new(1, kind),
    };
    let remove = |last, kind| Write::Remove {
        key: key(last),
        frontend: Frontend::new(1, kind),
    };
    let seen = |kernel: &Kernel| [1, 2, 3].map(|last| may_be_vip(&*kernel.tables(), addr(last)));

    ensure!(seen(&kernel) == [false; 3], "an empty table");
    kernel.apply(&[insert(1, Kind::CLUSTER_IP), insert(2, Kind::CLUSTER_IP)])?;
    ensure!(
        seen(&kernel) == [true; 3],
        "a cluster IP stands for its prefix"
    );
    kernel.apply(&[remove(1, Kind::CLUSTER_IP)])?;
    ensure!(seen(&kernel) == [true; 3], "one is left");
    kernel.apply(&[remove(2, Kind::CLUSTER_IP)])?;
    ensure!(seen(&kernel) == [false; 3], "none is left");

    // Other kinds stand for themselves, and a key that changes its kind takes its bit along.
    kernel.apply(&[insert(1, Kind::LOAD_BALANCER), insert(3, Kind::CLUSTER_IP)])?;
    ensure!(seen(&kernel) == [true; 3]);
    kernel.apply(&[Write::Replace {
        key: key(3),
        frontend: Frontend::new(1, Kind::EXTERNAL_IP),
    }])?;
    ensure!(seen(&kernel) == [true, false, true]);
    ensure!(kernel.tables().filtered_out()?.is_empty());

    // An agent that dies between a bit and its frontend leaves a wrong filter; these are worse.
    drop(kernel);
    let vips = Map::Array(MapData::from_pin(place.map("VIPS"))?);
    let mut vips = Array::<MapData, [u64; 4]>::try_from(vips)?;
    for (left, missing, what) in [
        ([u64::MAX; 4], 0, "every bit"),
        ([0; 4], 2, "no bit"),
        // As if they were the node's, and had no ports of their own.
        ([0, 0, u64::MAX, 0], 2, "every node's"),
    ] {
        for index in 0..VIP_ELEMENTS {
            vips.set(index, left, 0)?;
        }
        let missed = Tables::open(&place.paths.bpffs)?.filtered_out()?;
        ensure!(missed.len() == missing, "{what} is set: {missed:?}");
        let kernel = place.open()?;
        ensure!(kernel.adopted(), "not adopted");
        ensure!(seen(&kernel) == [true, false, true], "{what} was set");
        ensure!(kernel.tables().filtered_out()?.is_empty(), "{what} was set");
    }

    // The counts are adopted too.
    let mut kernel = place.open()?;
    kernel.apply(&[remove(1, Kind::LOAD_BALANCER)])?;
    ensure!(seen(&kernel) == [false, false, true]);
    Ok(())
}
