//! The crate `kernel` against the real kernel: which objects it adopts, refuses and leaves alone. Next to no traffic:
//! the programs are mostly attached to cgroups in which nothing runs.

mod programs;
mod tables;

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use aya::maps::{Array, MapData};
use dataplane_common::{
    Addr, LAYOUT, Port, Protocol,
    tables::{Block, Endpoint, Frontend, FrontendKey, Kind, Pool},
};
use dataplane_tests::Lab;
use kernel::{
    Error, Kernel, Paths, capture::CaptureOptions, packet::PacketOptions, tables::Limits, trial,
};
use plan::{Contents, Demand, Write};

pub use self::{programs::SCENARIOS as PROGRAMS, tables::SCENARIOS as TABLES};

scenarios! {
    Dataplane:
    a_second_agent_adopts_what_the_first_wrote,
    two_agents_do_not_write_at_once,
    a_foreign_pin_is_named_and_left_alone,
    a_pin_of_another_kind_is_named,
    damaged_pins_are_refused_and_cleaned_up,
    half_made_pins_are_made_anew,
    another_cgroup_is_attached_to_anew,
    nothing_stays_between_capture_and_services,
    an_older_layout_is_retired,
    a_directory_on_no_bpffs_is_refused,
}

/// A lab for its directories: a bpffs and a cgroup of its own.
struct Place {
    paths: Paths,
    lab: Lab,
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Err(error) = kernel::cleanup::cleanup(&self.paths.bpffs, false) {
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
    match kernel::cleanup::cleanup(&place.paths.bpffs, false) {
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
    kernel::cleanup::cleanup(&place.paths.bpffs, false)?;
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
        let items = kernel::cleanup::cleanup(&place.paths.bpffs, dry_run)?;
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
    let dry = kernel::cleanup::cleanup(&place.paths.bpffs, true)?;
    ensure!(
        place.link("connect4").exists(),
        "a dry run removed something"
    );
    let removed = kernel::cleanup::cleanup(&place.paths.bpffs, false)?;
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

/// If only the link of `connect4` is lost while another owner has a program at the hook, capture's program is attached again, too:
/// otherwise the other program would run between the two.
fn nothing_stays_between_capture_and_services() -> Result<()> {
    let place = Place::new()?;
    let options = CaptureOptions {
        outbound: 15001,
        inbound: 15006,
        mark: 0x39,
        foreign: false,
        denies: true,
        dns: None,
    };
    let open = || {
        let packet = PacketOptions::default();
        Kernel::open_with(
            &place.paths,
            Limits::default(),
            packet,
            Some(options),
            |_, _| (),
        )
    };
    drop(open()?);
    place.assert_attached()?;
    let connects = |name: &str| -> Result<Option<u32>> {
        let mut all = kernel::attachments(&place.paths)?.into_iter();
        Ok(all
            .find(|a| a.program == name)
            .context("no program")?
            .link_id)
    };
    let before = [connects("capture4")?, connects("capture6")?];
    fs::remove_file(place.link("connect4"))?;
    let _other = trial::admit_connects(&place.paths.cgroup)?;
    drop(open()?);
    place.assert_attached()?;
    let after = [connects("capture4")?, connects("capture6")?];
    ensure!(
        after[0] != before[0] && after[1] == before[1],
        "{before:?} {after:?}"
    );
    // In order, nothing is attached again.
    drop(open()?);
    ensure!([connects("capture4")?, connects("capture6")?] == after);
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
