//! The tables of services: they grow, their limits hold, and the filter of VIPs follows them.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use aya::maps::{Array, Map, MapData};
use dataplane_common::{
    Addr, Port, Protocol, VIP_ELEMENTS,
    decide::may_be_vip,
    tables::{Frontend, FrontendKey, Kind},
};
use dataplane_tests::report::Report;
use kernel::{
    Kernel,
    tables::{Limits, Tables},
};
use plan::Write;

use super::{Place, sorted, writes};

scenarios! {
    Dataplane:
    tables_grow_and_keep_what_they_hold,
    keys_that_change_owner_together_wait_together,
    a_full_table_names_its_knob,
    the_filter_follows_the_frontends,
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
