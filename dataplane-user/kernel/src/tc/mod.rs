//! Our programs on network interfaces: by pinned TCX links if the kernel has them (Linux 6.6), otherwise by filters of
//! a clsact qdisc. Other owners' programs there are left alone.

mod attachments;
mod clsact;
mod egress;
mod order;
mod programs;
mod removal;

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya_obj::generated::bpf_attach_type::{self, BPF_TCX_EGRESS, BPF_TCX_INGRESS};

use self::clsact::{Clsact, Filter};
pub use self::{
    attachments::{InterfaceAttachment, attachments},
    egress::{egress_of_others, has_programs_after_ours, ingress_of_others},
    programs::{CaptureProgram, PacketPrograms},
};
use super::{
    error::{Doing, Error},
    pins::Pins,
    sys::{self, LinkInfo, LinkTarget},
};
pub(crate) use removal::{keep_no_capture, keep_none, remove_filters, remove_links};

/// The kinds of attachment to interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hook {
    /// TCX: links, several of which share an interface.
    Tcx,
    /// Filters of a clsact qdisc.
    Clsact,
}

impl Hook {
    /// The word that a person reads.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }

    /// Returns the hook of this kernel. It asks which programs TCX runs on the loopback interface: older kernels do not
    /// know the question.
    pub fn of_kernel() -> Self {
        match sys::tcx_programs(1, BPF_TCX_INGRESS) {
            Ok(_) => Self::Tcx,
            Err(_) => Self::Clsact,
        }
    }
}

/// The direction of packets, which selects one of our programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// They arrive.
    Ingress,
    /// They leave.
    Egress,
    /// They arrive from a workload that is captured by its packets, before [`Direction::Ingress`].
    Capture,
}

impl Direction {
    /// The directions of the packet path. The program for replies is attached first, so that no flow begins whose
    /// replies would be missed.
    pub const ALL: [Self; 2] = [Self::Egress, Self::Ingress];
    /// The directions of mesh capture.
    pub const CAPTURE: [Self; 1] = [Self::Capture];
    /// All directions.
    pub const EVERY: [Self; 3] = [Self::Egress, Self::Ingress, Self::Capture];

    /// The program's name, in the object, in the kernel and in its links' pins.
    pub const fn program(self) -> &'static str {
        match self {
            Self::Ingress => "packet_ingress",
            Self::Egress => "packet_egress",
            Self::Capture => "packet_capture",
        }
    }

    /// The word that a person reads.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ingress | Self::Capture => "ingress",
            Self::Egress => "egress",
        }
    }

    const fn tcx(self) -> bpf_attach_type {
        match self {
            Self::Ingress | Self::Capture => BPF_TCX_INGRESS,
            Self::Egress => BPF_TCX_EGRESS,
        }
    }

    /// The program and the interface that a pin's name tells.
    pub fn of_pin(name: &str) -> Option<(Self, u32)> {
        Self::EVERY.into_iter().find_map(|direction| {
            let ifindex = name.strip_prefix(direction.program())?.strip_prefix('-')?;
            Some((direction, ifindex.parse().ok()?))
        })
    }
}

/// Our filters, by interface and program.
type Filters = BTreeMap<(u32, Direction), Filter>;

/// Whether a filter of these programs is on an interface.
fn is_used(filters: &Filters, of: &[Direction], ifindex: u32) -> bool {
    of.iter()
        .any(|direction| filters.contains_key(&(ifindex, *direction)))
}

/// Whether a program of the packet path is on any interface.
pub(crate) fn any(pins: &Pins) -> Result<bool, Error> {
    for (path, direction, _) in links(&pins.layout()) {
        if Direction::ALL.contains(&direction)
            && ours(&path, direction)?.is_some_and(|(_, link)| link.is_attached())
        {
            return Ok(true);
        }
    }
    let filters = Clsact::open(pins.root())?.ours()?;
    Ok(filters
        .keys()
        .any(|(_, direction)| Direction::ALL.contains(direction)))
}

fn pin(pins: &Pins, direction: Direction, ifindex: u32) -> PathBuf {
    pins.link(&format!("{}-{ifindex}", direction.program()))
}

/// The pins of a layout that by their names are of TCX links.
fn links(layout: &Path) -> Vec<(PathBuf, Direction, u32)> {
    let Ok(entries) = fs::read_dir(layout.join("links")) else {
        return Vec::new();
    };
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let name = entry.file_name();
            let (direction, ifindex) = Direction::of_pin(name.to_str()?)?;
            Some((entry.path(), direction, ifindex))
        })
        .collect();
    found.sort();
    found
}

/// Opens a pinned TCX link and checks that it is ours. `None`: there is no such pin.
fn ours(path: &Path, direction: Direction) -> Result<Option<(OwnedFd, LinkInfo)>, Error> {
    let link = match sys::obj_get(path) {
        Ok(link) => link,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).doing(|| format!("cannot open {}", path.display())),
    };
    let foreign = |found: String| Error::Foreign {
        path: path.into(),
        found,
        wanted: format!("the TCX link of program {}", direction.program()),
    };
    let kind = sys::object_kind(link.as_fd())
        .doing(|| format!("cannot tell what {} is", path.display()))?;
    if kind != sys::ObjectKind::Link {
        return Err(foreign(format!("a {kind:?}").to_lowercase()));
    }
    let info =
        sys::link_info(link.as_fd()).doing(|| format!("cannot ask what {} is", path.display()))?;
    if !matches!(info.target, LinkTarget::Tcx(_)) || info.attach_type != direction.tcx() as u32 {
        return Err(foreign("a link of another kind".into()));
    }
    Ok(Some((link, info)))
}

fn detach(path: &Path) -> Result<(), Error> {
    let link = sys::obj_get(path).doing(|| format!("cannot open {}", path.display()))?;
    // Removing the last pin also detaches the link, but only later. A link whose interface is gone cannot be detached
    // again.
    let _ = sys::link_detach(link.as_fd());
    fs::remove_file(path).doing(|| format!("cannot remove {}", path.display()))
}

/// Returns an interface's name for messages, or its index if the interface is gone.
pub fn name(ifindex: u32) -> String {
    known_name(ifindex).unwrap_or_else(|| format!("interface {ifindex}"))
}

/// Returns an interface's name; `None` if the interface is gone. (nix's function then returns an empty name instead of
/// an error.)
fn known_name(ifindex: u32) -> Option<String> {
    let name = nix::net::if_::if_indextoname(ifindex).ok()?;
    let name = name.to_string_lossy().into_owned();
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_tell_program_and_interface() {
        let of = Direction::of_pin;
        assert_eq!(of("packet_ingress-12"), Some((Direction::Ingress, 12)));
        assert_eq!(of("packet_egress-3"), Some((Direction::Egress, 3)));
        assert_eq!(of("packet_egress-3-new"), None);
        assert_eq!(of("packet_egress"), None);
        assert_eq!(of("connect4"), None);
    }
}
