//! Upgrades from one layout to the next: finds the pins of another version, and takes them over.

use std::{
    fs,
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use dataplane_common::LAYOUT;

use super::{
    error::{Doing, Error},
    pins::{BYPASS_MAP, FLOW_MAPS, Pins, spec},
    sys,
};

/// Tables of connections that exist, each with the layout since which it has its present form: an agent of a later
/// layout adopts the content of such a table. Tables in one line refer to each other, and go together. Their content
/// must mean the same thing to every agent that adopts them: addresses, ports and places in each other, no numbers of
/// pools or workloads, which each layout assigns anew.
const CONNECTIONS: [(u32, &[&[&str]]); 3] = [
    (12, &[&FLOW_MAPS, &["NODE_ADDRS"]]),
    (13, &[&[BYPASS_MAP]]),
    (12, &[&SOCKET_MAPS]),
];

const SOCKET_MAPS: [&str; 8] = [
    "PEERS",
    "PEER_PORTS",
    "MORE_PEERS",
    "FLOWS",
    "ORIGINS",
    "ACCEPTED",
    "ORIGIN_COUNTS",
    "ASKERS",
];

impl Pins {
    /// The directories of other layouts, older or newer.
    pub fn other_layouts(&self) -> Vec<PathBuf> {
        let mine = self.layout();
        layouts(self.root())
            .into_iter()
            .filter(|directory| *directory != mine)
            .collect()
    }

    /// Whether programs of another layout are attached.
    pub fn is_another_attached(&self) -> bool {
        let links = |layout: PathBuf| fs::read_dir(layout.join("links")).into_iter().flatten();
        self.other_layouts().into_iter().flat_map(links).count() > 0
    }

    /// Pins an older layout's tables of existing connections ([`CONNECTIONS`]) in this layout, if their content means
    /// the same in both. The programs of both layouts use the tables until the older layout's pins are removed. Returns
    /// the tables' names.
    ///
    /// A table of this layout that exists, but does not have the right shape, stays where it is.
    pub fn take_connections(&self, with_flows: bool) -> Result<Vec<&'static str>, Error> {
        let mut taken = Vec::new();
        let older = layouts(self.root());
        let older = older.iter().filter_map(|directory| version(directory));
        // The newest first: there are several only after agents that died early.
        for version in older.filter(|version| *version < LAYOUT).rev() {
            let other = Self::of_layout(self.root(), version);
            for (since, names) in CONNECTIONS {
                let names = names.concat();
                let wanted = |name: &&str| with_flows || !spec(name).is_of_flows();
                if version < since || !names.iter().all(wanted) || taken.contains(&names[0]) {
                    continue;
                }
                let open = |name: &&str| other.open_map(spec(name)).ok().flatten();
                let Some(maps) = names.iter().map(open).collect::<Option<Vec<_>>>() else {
                    continue;
                };
                for (name, (map, _)) in names.into_iter().zip(maps) {
                    let path = self.map(name);
                    sys::obj_pin(map.as_fd(), &path)
                        .doing(|| format!("cannot pin {}", path.display()))?;
                    taken.push(name);
                }
            }
        }
        Ok(taken)
    }

    /// Returns the pins of the newest older layout, if there is one.
    pub fn newest_older(&self) -> Option<Self> {
        let all = layouts(self.root());
        let mut older = all.iter().filter_map(|directory| version(directory));
        let newest = older.rfind(|version| *version < LAYOUT)?;
        Some(Self::of_layout(self.root(), newest))
    }

    /// Moves pins of links that are `wanted` by their names from other layouts' directories here, unless such a pin
    /// exists here: the code that attaches that program finds it, and swaps the program in place.
    pub fn take_links(&self, wanted: impl Fn(&str) -> bool) -> Result<(), Error> {
        for layout in self.other_layouts().into_iter().rev() {
            let entries = fs::read_dir(layout.join("links")).into_iter().flatten();
            for from in entries.flatten().map(|entry| entry.path()) {
                let Some(name) = from.file_name().and_then(|name| name.to_str()) else {
                    continue;
                };
                let to = self.link(name);
                if wanted(name) && !to.exists() {
                    fs::rename(&from, &to)
                        .doing(|| format!("cannot move {} to {}", from.display(), to.display()))?;
                }
            }
        }
        Ok(())
    }
}

/// The directories of all layouts, the oldest first.
pub fn layouts(root: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(root) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .filter(|path| version(path).is_some())
        .collect();
    found.sort_by_key(|path| version(path));
    found
}

/// Returns the version of a layout's directory.
fn version(directory: &Path) -> Option<u32> {
    let name = directory.file_name()?.to_str()?;
    name.strip_prefix('v')?.parse().ok()
}
