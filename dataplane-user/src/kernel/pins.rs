//! What is pinned, and where: one directory per layout, `<bpffs>/v<LAYOUT>/{maps,links}`.
//!
//! A pin is ours if it has the name, the kind and the shape that we give it. Whatever else lies
//! there is named and left alone.

use std::{
    fs::{self, File, Metadata},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use aya_obj::generated::bpf_map_type::{
    self, BPF_MAP_TYPE_ARRAY_OF_MAPS, BPF_MAP_TYPE_HASH, BPF_MAP_TYPE_LPM_TRIE,
    BPF_MAP_TYPE_LRU_HASH, BPF_MAP_TYPE_PERCPU_ARRAY, BPF_MAP_TYPE_RINGBUF,
    BPF_MAP_TYPE_SK_STORAGE, BPF_MAP_TYPE_SOCKHASH,
};
use dataplane_common::{
    Addr, LAYOUT, Reason, VIP_ELEMENTS, VipWords,
    capture::{
        CaptureConfig, Enrolled, KNOWN, ListenerKey, Local, Meter, MeterSets, ORIGINS, Origin,
        RULES, RangeKey, RuleKey, TRAFFIC, Traffic, TrafficKey, Tuple, WORKLOADS,
    },
    cells::{Cell, Slots, cells_for},
    packet::{
        FRAGMENTS, Fragment, FragmentKey, IFACES, Iface, NODE_ADDRS, PacketConfig, SOURCES,
        SourceKey,
    },
    tables::{Config, PEER_PORTS, Peer, PeerSets, SOCKET_ELEMENTS, UdpFlows},
    tcp::Sequences,
};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    mount::MsFlags,
    sys::{
        stat,
        statfs::{BPF_FS_MAGIC, statfs},
    },
};

use super::{
    answers,
    error::{Doing, Error},
    keep_nat,
    layouts::layouts,
    map::{Hash, Mapped, Plain},
    programs::PROGRAMS,
    sys::{self, LinkInfo, LinkTarget, MapInfo, ObjectKind, Shape},
    tc,
};

/// Where a bpffs usually is.
const USUAL_BPFFS: &str = "/sys/fs/bpf";

/// A map that is pinned.
pub struct MapSpec {
    /// Its name in the object, and of its pin.
    pub name: &'static str,
    shape: Shape,
    /// Its capacity; `None` where that is the object's business.
    max_entries: Option<u32>,
}

const fn outer(name: &'static str) -> MapSpec {
    let shape = Shape {
        kind: BPF_MAP_TYPE_ARRAY_OF_MAPS,
        key_size: 4,
        value_size: 4,
        flags: 0,
    };
    MapSpec {
        name,
        shape,
        max_entries: Some(1),
    }
}

const NO_PREALLOC: u32 = 1; // BPF_F_NO_PREALLOC

/// A hash in which elements are made as they come; or a trie, which knows no other way.
const fn on_demand<K: Plain, V: Plain>(
    name: &'static str,
    kind: bpf_map_type,
    max_entries: u32,
) -> MapSpec {
    let shape = Shape {
        flags: NO_PREALLOC,
        ..Hash::<K, V>::shape(kind)
    };
    MapSpec {
        name,
        shape,
        max_entries: Some(max_entries),
    }
}

/// An array that is as large as the agent was told ([`MapSpec::entries`]): one of those of flows
/// ([`dataplane_common::cells`]).
const fn as_told<T: Plain>(name: &'static str) -> MapSpec {
    MapSpec {
        name,
        shape: Mapped::<T>::shape(false),
        max_entries: None,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "small")]
const fn storage<T>(name: &'static str) -> MapSpec {
    let shape = Shape {
        kind: BPF_MAP_TYPE_SK_STORAGE,
        key_size: 4,
        value_size: size_of::<T>() as u32,
        flags: NO_PREALLOC,
    };
    MapSpec {
        name,
        shape,
        max_entries: Some(0),
    }
}

/// Every map that is pinned.
pub const MAPS: [MapSpec; 34] = [
    outer("FRONTENDS"),
    outer("POOLS"),
    outer("ENDPOINTS"),
    outer("STATS"),
    outer("AFFINITY"),
    MapSpec {
        name: "REASONS",
        shape: Shape {
            kind: BPF_MAP_TYPE_PERCPU_ARRAY,
            key_size: 4,
            value_size: 8,
            flags: 0,
        },
        max_entries: Some(Reason::SLOTS),
    },
    MapSpec {
        name: "EVENTS",
        shape: Shape {
            kind: BPF_MAP_TYPE_RINGBUF,
            key_size: 0,
            value_size: 0,
            flags: 0,
        },
        max_entries: None,
    },
    MapSpec {
        name: "CONFIG",
        shape: Mapped::<Config>::shape(false),
        max_entries: Some(1),
    },
    MapSpec {
        name: "PEERS",
        shape: Mapped::<PeerSets>::shape(false),
        max_entries: Some(SOCKET_ELEMENTS),
    },
    MapSpec {
        name: "PEER_PORTS",
        shape: Mapped::<u64>::shape(false),
        max_entries: Some(PEER_PORTS),
    },
    storage::<Peer>("MORE_PEERS"),
    storage::<UdpFlows>("FLOWS"),
    MapSpec {
        name: "VIPS",
        shape: Mapped::<VipWords>::shape(false),
        max_entries: Some(VIP_ELEMENTS),
    },
    on_demand::<u32, Iface>("IFACES", BPF_MAP_TYPE_HASH, IFACES),
    on_demand::<SourceKey, u32>("SOURCES", BPF_MAP_TYPE_LPM_TRIE, SOURCES),
    MapSpec {
        name: "NODE_ADDRS",
        shape: Mapped::<Addr>::shape(false),
        max_entries: Some(NODE_ADDRS),
    },
    MapSpec {
        name: "PACKET_CONFIG",
        shape: Mapped::<PacketConfig>::shape(false),
        max_entries: Some(1),
    },
    as_told::<Cell>("CONNTRACK"),
    as_told::<Slots>("ANSWERS"),
    as_told::<Sequences>("SEQUENCES"),
    // The least recently used entry makes room for a new one.
    MapSpec {
        name: "FRAGMENTS",
        shape: Hash::<FragmentKey, Fragment>::shape(BPF_MAP_TYPE_LRU_HASH),
        max_entries: Some(FRAGMENTS),
    },
    MapSpec {
        name: "CAPTURE",
        shape: Mapped::<CaptureConfig>::shape(false),
        max_entries: Some(1),
    },
    on_demand::<u64, Enrolled>("NAMESPACES", BPF_MAP_TYPE_HASH, WORKLOADS),
    on_demand::<u64, Enrolled>("CGROUPS", BPF_MAP_TYPE_HASH, WORKLOADS),
    on_demand::<Addr, Local>("LOCALS", BPF_MAP_TYPE_HASH, WORKLOADS * 4),
    on_demand::<RuleKey, u32>("RULES", BPF_MAP_TYPE_HASH, RULES),
    on_demand::<RangeKey, u32>("RANGES", BPF_MAP_TYPE_LPM_TRIE, RULES),
    on_demand::<Addr, u32>("KNOWN", BPF_MAP_TYPE_HASH, KNOWN),
    on_demand::<Tuple, Origin>("ORIGINS", BPF_MAP_TYPE_HASH, ORIGINS),
    storage::<Origin>("ACCEPTED"),
    MapSpec {
        name: "LISTENERS",
        shape: Shape {
            flags: 0,
            ..Hash::<ListenerKey, u32>::shape(BPF_MAP_TYPE_SOCKHASH)
        },
        max_entries: Some(WORKLOADS * 2),
    },
    MapSpec {
        name: "METERS",
        shape: Mapped::<MeterSets>::shape(false),
        max_entries: Some(SOCKET_ELEMENTS),
    },
    storage::<Meter>("MORE_METERS"),
    on_demand::<TrafficKey, Traffic>("TRAFFIC", BPF_MAP_TYPE_HASH, TRAFFIC),
];

/// Those of them that only the packet path needs, and that take memory: they are there where it is.
pub const FLOW_MAPS: [&str; 4] = ["CONNTRACK", "ANSWERS", "FRAGMENTS", "SEQUENCES"];

/// How many elements of `ANSWERS` there are for so many cells: two slots for each, sixteen in an element.
pub fn slots_for(cells: u32) -> u32 {
    (cells / 8).max(1)
}

/// The spec of a map that [`MAPS`] has.
pub fn spec(name: &str) -> &'static MapSpec {
    let found = MAPS.iter().find(|spec| spec.name == name);
    found.expect("the name of one of our maps")
}

impl MapSpec {
    /// How many elements it has if there is to be room for so many flows; `None` where that makes no difference.
    pub fn entries(&self, flows: u32) -> Option<u32> {
        match self.name {
            "CONNTRACK" | "SEQUENCES" => Some(cells_for(flows)),
            "ANSWERS" => Some(slots_for(cells_for(flows))),
            _ => None,
        }
    }

    /// Whether it is one of [`FLOW_MAPS`].
    pub fn is_of_flows(&self) -> bool {
        FLOW_MAPS.contains(&self.name)
    }

    /// Whether it takes memory for as many entries as it has room for.
    pub fn is_hash(&self) -> bool {
        matches!(self.shape.kind, BPF_MAP_TYPE_HASH | BPF_MAP_TYPE_LRU_HASH)
    }

    fn describe(kind: u32, key: u32, value: u32, flags: u32) -> String {
        let kind = bpf_map_type::try_from(kind)
            .map_or_else(|_| format!("type {kind}"), |kind| format!("{kind:?}"));
        format!("a map of {kind} with keys of {key} and values of {value} bytes, flags {flags:#x}")
    }

    fn check(&self, path: &Path, info: &MapInfo) -> Result<(), Error> {
        let shape = &self.shape;
        let same = info.name == self.name
            && info.kind == shape.kind as u32
            && info.key_size == shape.key_size
            && info.value_size == shape.value_size
            && info.flags == shape.flags
            && self.max_entries.is_none_or(|max| max == info.max_entries);
        if same {
            return Ok(());
        }
        Err(Error::Foreign {
            path: path.into(),
            found: format!(
                "`{}`, {}",
                info.name,
                Self::describe(info.kind, info.key_size, info.value_size, info.flags)
            ),
            wanted: format!(
                "`{}`, {}",
                self.name,
                Self::describe(
                    shape.kind as u32,
                    shape.key_size,
                    shape.value_size,
                    shape.flags
                )
            ),
        })
    }
}

/// The directories of one agent.
#[derive(Clone, Debug)]
pub struct Pins {
    root: PathBuf,
    version: u32,
}

impl Pins {
    /// Below `root`, a directory on a bpffs.
    pub fn new(root: &Path) -> Self {
        Self::of_layout(root, LAYOUT)
    }

    /// Those of a layout, this one's or another.
    pub fn of_layout(root: &Path, version: u32) -> Self {
        Self {
            root: root.into(),
            version,
        }
    }

    /// The directory with all layouts.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory of this layout.
    pub fn layout(&self) -> PathBuf {
        self.root.join(format!("v{}", self.version))
    }

    /// Where a map is pinned.
    pub fn map(&self, name: &str) -> PathBuf {
        self.layout().join("maps").join(name)
    }

    /// Where a program's link is pinned.
    pub fn link(&self, program: &str) -> PathBuf {
        self.layout().join("links").join(program)
    }

    /// Makes the directories, and mounts the bpffs where it is usually and is not.
    pub fn create_directories(&self) -> Result<(), Error> {
        self.mount_if_missing()?;
        for directory in [self.layout().join("maps"), self.layout().join("links")] {
            fs::create_dir_all(&directory)
                .doing(|| format!("cannot create {}", directory.display()))?;
        }
        Ok(())
    }

    fn mount_if_missing(&self) -> Result<(), Error> {
        if self.is_on_bpffs()? {
            return Ok(());
        }
        if !self.root.starts_with(USUAL_BPFFS) {
            return Err(Error::NotBpffs {
                path: self.root.clone(),
            });
        }
        nix::mount::mount(
            Some("bpf"),
            USUAL_BPFFS,
            Some("bpf"),
            MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | MsFlags::MS_RELATIME,
            Some("mode=700"),
        )
        .doing(|| format!("cannot mount a BPF filesystem on {USUAL_BPFFS}"))
    }

    /// Whether the directory, or the nearest one above it that exists, is on a bpffs.
    pub fn is_on_bpffs(&self) -> Result<bool, Error> {
        for directory in self.root.ancestors() {
            match statfs(directory) {
                Ok(found) => return Ok(found.filesystem_type() == BPF_FS_MAGIC),
                Err(Errno::ENOENT) => {}
                Err(error) => {
                    return Err(error).doing(|| format!("cannot look at {}", directory.display()));
                }
            }
        }
        Ok(false)
    }

    /// Makes this process the one writer, until the lock is dropped or the process dies. The lock is
    /// on the directory itself, so there is no lock file to go stale.
    pub fn lock(&self) -> Result<Flock<File>, Error> {
        let directory =
            File::open(&self.root).doing(|| format!("cannot open {}", self.root.display()))?;
        let metadata = directory
            .metadata()
            .doing(|| format!("cannot look at {}", self.root.display()))?;
        Flock::lock(directory, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| match error {
            Errno::EWOULDBLOCK => Error::Busy {
                directory: self.root.clone(),
                pid: holder(&metadata),
            },
            error => Error::Io {
                what: format!("cannot lock {}", self.root.display()),
                source: error.into(),
            },
        })
    }

    /// Who is the writer now, if there is one and `/proc/locks` names it.
    pub fn writer(&self) -> Option<u32> {
        holder(&fs::metadata(&self.root).ok()?)
    }

    /// Opens a pinned map and checks that it is ours. `None`: there is no such pin.
    pub fn open_map(&self, spec: &MapSpec) -> Result<Option<(OwnedFd, MapInfo)>, Error> {
        let path = self.map(spec.name);
        let Some(fd) = get(&path)? else {
            return Ok(None);
        };
        let kind = kind(&path, &fd)?;
        if kind != ObjectKind::Map {
            return Err(Error::Foreign {
                path,
                found: format!("a {kind:?}").to_lowercase(),
                wanted: "a map".into(),
            });
        }
        let info =
            sys::map_info(fd.as_fd()).doing(|| format!("cannot ask what {} is", path.display()))?;
        spec.check(&path, &info)?;
        Ok(Some((fd, info)))
    }

    /// Removes the pins of [`FLOW_MAPS`], as far as they are there and ours.
    pub fn remove_flow_maps(&self) -> Result<(), Error> {
        for name in FLOW_MAPS {
            if self.open_map(spec(name))?.is_some() {
                let path = self.map(name);
                fs::remove_file(&path).doing(|| format!("cannot remove {}", path.display()))?;
            }
        }
        Ok(())
    }

    /// Creates and pins a map of maps that are like `inner`.
    pub fn create_map_of_maps(
        &self,
        spec: &MapSpec,
        inner: BorrowedFd<'_>,
    ) -> Result<OwnedFd, Error> {
        let entries = spec.max_entries.unwrap_or(1);
        let map = sys::map_of_maps_create(spec.name, &spec.shape, entries, inner)
            .doing(|| format!("cannot create {}", spec.name))?;
        let path = self.map(spec.name);
        sys::obj_pin(map.as_fd(), &path).doing(|| format!("cannot pin {}", path.display()))?;
        Ok(map)
    }

    /// Opens a program's pinned link and checks that it is ours. `None`: there is no such pin.
    pub fn open_link(
        &self,
        program: &super::programs::Spec,
    ) -> Result<Option<(OwnedFd, LinkInfo)>, Error> {
        let path = self.link(program.name);
        let Some(fd) = get(&path)? else {
            return Ok(None);
        };
        let foreign = |found: String| Error::Foreign {
            path: path.clone(),
            found,
            wanted: format!("the link of program {}", program.name),
        };
        let kind = kind(&path, &fd)?;
        if kind != ObjectKind::Link {
            return Err(foreign(format!("a {kind:?}").to_lowercase()));
        }
        let info = sys::link_info(fd.as_fd())
            .doing(|| format!("cannot ask what {} is", path.display()))?;
        let is_like_it = match info.target {
            LinkTarget::Cgroup(_) => info.attach_type == program.hook as u32,
            LinkTarget::Tracepoint => program.is_traced(),
            _ => false,
        };
        if !is_like_it {
            return Err(foreign("a link of another kind".into()));
        }
        let loaded = sys::prog_by_id(info.program)
            .and_then(|fd| sys::prog_info(fd.as_fd()))
            .doing(|| format!("cannot ask which program {} holds", path.display()))?;
        if loaded.name != program.name {
            return Err(foreign(format!("a link of program {}", loaded.name)));
        }
        Ok(Some((fd, info)))
    }

    /// Whether any of our programs is attached by this layout's links.
    pub fn any_link(&self) -> Result<bool, Error> {
        for program in &PROGRAMS {
            if self
                .open_link(program)?
                .is_some_and(|(_, link)| link.is_attached())
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn get(path: &Path) -> Result<Option<OwnedFd>, Error> {
    match sys::obj_get(path) {
        Ok(fd) => Ok(Some(fd)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // Not a pin at all: a directory, or a file on another filesystem.
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EINVAL))
                && path.exists() =>
        {
            Err(Error::Foreign {
                path: path.into(),
                found: format!("something that cannot be opened as a BPF object ({error})"),
                wanted: "one of our pins".into(),
            })
        }
        Err(error) => Err(error).doing(|| format!("cannot open {}", path.display())),
    }
}

fn kind(path: &Path, fd: &OwnedFd) -> Result<ObjectKind, Error> {
    sys::object_kind(fd.as_fd()).doing(|| format!("cannot tell what {} is", path.display()))
}

/// The process that holds a flock on a file, by `/proc/locks` (`proc_locks(5)`).
fn holder(file: &Metadata) -> Option<u32> {
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let (major, minor) = (stat::major(file.dev()), stat::minor(file.dev()));
    let wanted = format!("{major:02x}:{minor:02x}:{}", file.ino());
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, "WRITE", pid, place, ..] = fields[..] else {
            return None;
        };
        (place == wanted).then(|| pid.parse().ok()).flatten()
    })
}

/// What `cleanup` found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CleanupItem {
    /// The pin, or the directory; `tc:INTERFACE` for filters and qdiscs, `netns:PATH` for rules and
    /// routes of a workload's network namespace, `nft:TABLE` for a table of nf_tables.
    pub path: PathBuf,
    /// What it is.
    pub what: String,
    /// Whether it is ours, and so is (or would be) removed.
    pub ours: bool,
}

/// Removes everything of ours below `bpffs`, on interfaces and in workloads' network namespaces, and
/// only that: links first, which detaches the programs. With `dry_run`, says what it would remove.
///
/// # Errors
/// [`Error::Busy`] while an agent runs; otherwise if a pin cannot be looked at or removed.
pub fn cleanup(bpffs: &Path, dry_run: bool) -> Result<Vec<CleanupItem>, Error> {
    let pins = Pins::new(bpffs);
    if !bpffs.exists() {
        return remove_keep_nat(dry_run);
    }
    if !pins.is_on_bpffs()? {
        return Err(Error::NotBpffs { path: bpffs.into() });
    }
    // Looking is allowed while an agent runs.
    let _lock = if dry_run { None } else { Some(pins.lock()?) };
    let mut items = remove_keep_nat(dry_run)?;
    // First of the pins: the tables tell where there may be something.
    items.extend(answers::remove(&pins, dry_run)?);
    for layout in layouts(bpffs) {
        items.extend(remove_layout(&layout, dry_run)?);
    }
    items.extend(tc::remove_filters(bpffs, dry_run)?);
    remove_directory(bpffs, dry_run, &mut items)?;
    Ok(items)
}

/// Removes the table of `dataplane keep-nat`.
fn remove_keep_nat(dry_run: bool) -> Result<Vec<CleanupItem>, Error> {
    let result = if dry_run {
        keep_nat::is_there()
    } else {
        keep_nat::remove()
    };
    let name = format!("inet {}", keep_nat::TABLE);
    let found = result.doing(|| format!("cannot remove nftables table {name}"))?;
    Ok(Vec::from_iter(found.then(|| CleanupItem {
        path: format!("nft:{name}").into(),
        what: "table of `dataplane keep-nat`".to_owned(),
        ours: true,
    })))
}

/// Removes what is ours in one layout's directory.
pub fn remove_layout(layout: &Path, dry_run: bool) -> Result<Vec<CleanupItem>, Error> {
    let mut items = Vec::new();
    items.extend(tc::remove_links(layout, dry_run)?);
    // Before layout 5, which qdiscs are ours was noted here.
    let (notes, now) = (layout.join("qdiscs"), layout.with_file_name("qdiscs"));
    if notes.exists() && !now.exists() && !dry_run {
        fs::rename(&notes, &now)
            .doing(|| format!("cannot move {} to {}", notes.display(), now.display()))?;
    }
    for (sub, wanted) in [("links", ObjectKind::Link), ("maps", ObjectKind::Map)] {
        let directory = layout.join(sub);
        let Ok(entries) = fs::read_dir(&directory) else {
            continue;
        };
        let mut paths: Vec<PathBuf> = entries.filter_map(Result::ok).map(|e| e.path()).collect();
        paths.sort();
        for path in paths {
            // Of an interface: listed above, with the interface.
            if items.iter().any(|item: &CleanupItem| item.path == path) {
                continue;
            }
            let (what, ours) = classify(&path, wanted);
            if ours && !dry_run {
                if wanted == ObjectKind::Link {
                    let link =
                        sys::obj_get(&path).doing(|| format!("cannot open {}", path.display()))?;
                    remove_link(&link, &path)?;
                } else {
                    fs::remove_file(&path).doing(|| format!("cannot remove {}", path.display()))?;
                }
            }
            items.push(CleanupItem { path, what, ours });
        }
        remove_directory(&directory, dry_run, &mut items)?;
    }
    remove_directory(layout, dry_run, &mut items)?;
    Ok(items)
}

/// Detaches a link's program, and removes its pin: whose last one is removed is detached too, but some time later.
pub fn remove_link(link: &OwnedFd, path: &Path) -> Result<(), Error> {
    match sys::link_detach(link.as_fd()) {
        // Of a tracepoint, which cannot be detached in another way.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
        result => result.doing(|| format!("cannot detach {}", path.display()))?,
    }
    fs::remove_file(path).doing(|| format!("cannot remove {}", path.display()))
}

fn remove_directory(
    directory: &Path,
    dry_run: bool,
    items: &mut Vec<CleanupItem>,
) -> Result<(), Error> {
    if !directory.exists() {
        return Ok(());
    }
    if dry_run {
        let kept = items
            .iter()
            .any(|item| !item.ours && item.path.starts_with(directory));
        items.push(CleanupItem {
            path: directory.into(),
            what: "directory".into(),
            ours: !kept,
        });
        return Ok(());
    }
    let ours = match fs::remove_dir(directory) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => false,
        Err(error) => {
            return Err(error).doing(|| format!("cannot remove {}", directory.display()));
        }
    };
    items.push(CleanupItem {
        path: directory.into(),
        what: "directory".into(),
        ours,
    });
    Ok(())
}

/// What a pin is, and whether it is ours: of the right kind, and the map or the program in it has
/// the name of the pin. (Other layouts' shapes are not known here.)
fn classify(path: &Path, wanted: ObjectKind) -> (String, bool) {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // Links that replace another, or are of one namespace of several, have more after a hyphen.
    let name = name.split('-').next().unwrap_or(&name);
    let fd = match sys::obj_get(path) {
        Ok(fd) => fd,
        Err(error) => return (format!("not a BPF object ({error})"), false),
    };
    let found = match sys::object_kind(fd.as_fd()) {
        Ok(ObjectKind::Map) => sys::map_info(fd.as_fd()).map(|map| {
            (
                ObjectKind::Map,
                map.name.clone(),
                format!("map {}", map.name),
            )
        }),
        Ok(ObjectKind::Link) => sys::link_info(fd.as_fd()).and_then(|link| {
            let program =
                sys::prog_by_id(link.program).and_then(|fd| sys::prog_info(fd.as_fd()))?;
            let what = format!("link {} of program {}", link.id, program.name);
            Ok((ObjectKind::Link, program.name, what))
        }),
        Ok(kind) => return (format!("a {kind:?}").to_lowercase(), false),
        Err(error) => Err(error),
    };
    match found {
        Ok((kind, inner, what)) => (what, kind == wanted && inner == name),
        Err(error) => (format!("unknown ({error})"), false),
    }
}
