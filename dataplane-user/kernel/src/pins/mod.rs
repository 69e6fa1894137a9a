//! The pins and their places: one directory per layout, `<bpffs>/v<LAYOUT>/{maps,links}`.
//!
//! A pin is ours if it has the name, the kind and the shape that we use. The agent names any other object there and
//! leaves it alone.

mod maps;
mod secret;

use std::{
    fs::{self, File, Metadata, Permissions},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{MetadataExt, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

use dataplane_common::LAYOUT;
#[cfg(feature = "testing")]
pub use maps::slots_for;
pub use maps::{BYPASS_MAP, FLOW_MAPS, MAPS, MapSpec, spec};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    mount::MsFlags,
    sys::{
        stat,
        statfs::{BPF_FS_MAGIC, statfs},
    },
};
pub use secret::new_secret;

use super::{
    error::{Doing, Error},
    opener,
    programs::{PROGRAMS, Spec},
    sys::{self, LinkInfo, LinkTarget, MapInfo, ObjectKind},
};

/// Mounts a bpffs where it is usually.
///
/// # Errors
/// If the kernel refuses.
pub fn mount() -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | MsFlags::MS_RELATIME;
    let (bpf, mode) = (Some("bpf"), Some("mode=700"));
    Ok(nix::mount::mount(bpf, USUAL_BPFFS, bpf, flags, mode)?)
}

/// The usual mount point of a bpffs.
const USUAL_BPFFS: &str = "/sys/fs/bpf";

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

    /// Returns the pins of a layout, of this version or another.
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

    /// Returns the path of a map's pin.
    pub fn map(&self, name: &str) -> PathBuf {
        self.layout().join("maps").join(name)
    }

    /// Returns the path of the pin of a program's link.
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
        // A process that can open a directory can lock it ([`Pins::lock`]). All users of the node share the usual
        // directory, so we do not close it.
        if self.root != Path::new(USUAL_BPFFS) {
            fs::set_permissions(&self.root, Permissions::from_mode(0o700))
                .doing(|| format!("cannot close {} to others", self.root.display()))?;
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
        opener::mount()
            .unwrap_or_else(mount)
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

    /// Makes this process the only writer, until the lock is dropped or the process dies. The lock is on the directory
    /// itself, so there is no lock file that could become stale.
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

    /// Returns the present writer, if there is one and `/proc/locks` names it.
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

    /// Removes the existing pins of [`FLOW_MAPS`] and of [`BYPASS_MAP`] that are ours.
    pub fn remove_flow_maps(&self) -> Result<(), Error> {
        for name in FLOW_MAPS.into_iter().chain([BYPASS_MAP]) {
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
    pub fn open_link(&self, program: &Spec) -> Result<Option<(OwnedFd, LinkInfo)>, Error> {
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

/// Detaches a link's program, and removes its pin: whose last one is removed is detached too, but some time later.
pub fn remove_link(link: &OwnedFd, path: &Path) -> Result<(), Error> {
    match sys::link_detach(link.as_fd()) {
        // A tracepoint's link cannot be detached by this call; the removal of its pin detaches it.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
        result => result.doing(|| format!("cannot detach {}", path.display()))?,
    }
    fs::remove_file(path).doing(|| format!("cannot remove {}", path.display()))
}
