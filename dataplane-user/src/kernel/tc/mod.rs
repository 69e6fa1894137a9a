//! Our programs on network interfaces: by pinned TCX links where the kernel has them (Linux 6.6), by
//! filters of a clsact qdisc where it has not. What others have there is left alone.

mod clsact;
mod order;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya_obj::generated::bpf_attach_type::{self, BPF_TCX_EGRESS, BPF_TCX_INGRESS};

use tracing::warn;

use self::clsact::{Clsact, Filter};
pub use self::order::Order;
use super::{
    cleanup::CleanupItem,
    error::{Doing, Error},
    pins::Pins,
    programs::REPLACEMENT,
    sys::{self, LinkInfo, LinkTarget},
};

/// How programs are put on interfaces.
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

    /// What this kernel has, by asking which programs TCX runs on the loopback interface: older
    /// kernels do not know the question.
    pub fn of_kernel() -> Self {
        match sys::tcx_programs(1, BPF_TCX_INGRESS) {
            Ok(_) => Self::Tcx,
            Err(_) => Self::Clsact,
        }
    }
}

/// Which way packets go, and so which of our programs sees them.
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
    /// Those of the packet path; replies' first, so that no flow begins whose replies are not seen.
    pub const ALL: [Self; 2] = [Self::Egress, Self::Ingress];
    /// Those of mesh capture.
    pub const CAPTURE: [Self; 1] = [Self::Capture];
    /// Those of both.
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

/// The packet path's loaded programs, to be put on interfaces.
#[derive(Debug)]
pub struct PacketPrograms {
    ingress: Program,
    egress: Program,
}

impl PacketPrograms {
    /// Takes loaded programs; `hook`: none for what this kernel has.
    pub fn new(
        ingress: OwnedFd,
        egress: OwnedFd,
        hook: Option<Hook>,
        order: Order,
    ) -> Result<Self, Error> {
        let hook = hook.unwrap_or_else(Hook::of_kernel);
        if hook == Hook::Clsact && order.is_relative() {
            return Err(io::Error::from(io::ErrorKind::Unsupported)).doing(|| {
                format!(
                    "cannot put programs at the place {order}: it takes TCX (Linux 6.6), and here they are \
                     filters; use --tc-order first or last"
                )
            });
        }
        Ok(Self {
            ingress: Program::new(ingress, Direction::Ingress, hook, order)?,
            egress: Program::new(egress, Direction::Egress, hook, order)?,
        })
    }

    /// How they are put on interfaces.
    pub fn hook(&self) -> Hook {
        self.ingress.hook
    }

    /// Lets the programs be on exactly these interfaces. Where older ones of ours are, they are
    /// swapped in place; where somebody removed ours, they are put back. Answers what did not work,
    /// which does not keep the rest from being done.
    pub fn attach(&self, pins: &Pins, wanted: &BTreeSet<u32>) -> Result<Vec<String>, Error> {
        let mut clsact = Clsact::open(pins.root())?;
        let filters = clsact.ours()?;
        let mut failed = Vec::new();
        for &ifindex in wanted {
            for direction in Direction::ALL {
                let program = match direction {
                    Direction::Egress => &self.egress,
                    _ => &self.ingress,
                };
                if let Err(error) = program.attach(pins, &mut clsact, ifindex, &filters) {
                    // Pods go while we are at it, and their interfaces with them.
                    if known_name(ifindex).is_some() {
                        failed.push(error.to_string());
                    }
                    break;
                }
            }
        }
        // Those of the other kind are removed above, where ours are then twice.
        let kept = |ifindex: u32| wanted.contains(&ifindex);
        failed.extend(remove_elsewhere(
            pins,
            &mut clsact,
            &filters,
            &Direction::ALL,
            kept,
        )?);
        if self.hook() == Hook::Tcx {
            clsact.remove_qdiscs(|ifindex| !is_used(&filters, &Direction::CAPTURE, ifindex))?;
        }
        Ok(failed)
    }
}

/// The loaded program for workloads that are captured by their packets, to be put on their
/// interfaces.
#[derive(Debug)]
pub struct CaptureProgram(Program);

impl CaptureProgram {
    /// Takes a loaded program; `hook`: none for what this kernel has.
    pub fn new(program: OwnedFd, hook: Option<Hook>) -> Result<Self, Error> {
        let hook = hook.unwrap_or_else(Hook::of_kernel);
        // Whatever the packet path's order: it has to be before that one.
        let program = Program::new(program, Direction::Capture, hook, Order::First)?;
        Ok(Self(program))
    }

    /// Lets the program be on exactly these interfaces, before the packet path's. Answers where it
    /// could not be put, and why.
    pub fn attach(
        &self,
        pins: &Pins,
        wanted: &BTreeSet<u32>,
    ) -> Result<BTreeMap<u32, String>, Error> {
        let mut clsact = Clsact::open(pins.root())?;
        let filters = clsact.ours()?;
        let mut failed = BTreeMap::new();
        for &ifindex in wanted {
            if let Err(error) = self.0.attach(pins, &mut clsact, ifindex, &filters)
                && known_name(ifindex).is_some()
            {
                failed.insert(ifindex, error.to_string());
            }
        }
        let kept = |ifindex: u32| wanted.contains(&ifindex);
        let of = &Direction::CAPTURE;
        for text in remove_elsewhere(pins, &mut clsact, &filters, of, kept)? {
            warn!("{text}");
        }
        Ok(failed)
    }
}

#[derive(Debug)]
struct Program {
    fd: OwnedFd,
    id: u32,
    direction: Direction,
    hook: Hook,
    order: Order,
}

impl Program {
    fn new(fd: OwnedFd, direction: Direction, hook: Hook, order: Order) -> Result<Self, Error> {
        let id = sys::prog_info(fd.as_fd())
            .doing(|| "cannot ask for a loaded program's number".to_owned())?
            .id;
        Ok(Self {
            fd,
            id,
            direction,
            hook,
            order,
        })
    }

    fn attach(
        &self,
        pins: &Pins,
        clsact: &mut Clsact,
        ifindex: u32,
        filters: &Filters,
    ) -> Result<(), Error> {
        let direction = self.direction;
        let filter = filters.get(&(ifindex, direction));
        let path = pin(pins, direction, ifindex);
        match self.hook {
            Hook::Tcx => {
                let link = ours(&path, direction)?;
                self.attach_tcx(pins, &path, ifindex, link)?;
                match filter {
                    Some(filter) => clsact.remove(filter),
                    None => Ok(()),
                }
            }
            Hook::Clsact => {
                match filter {
                    Some(filter) if filter.program == self.id => {}
                    Some(filter) => clsact.replace(filter, self.fd.as_fd())?,
                    None => clsact.add(ifindex, direction, self.fd.as_fd(), self.order)?,
                }
                match ours(&path, direction)? {
                    Some(_) => detach(&path),
                    None => Ok(()),
                }
            }
        }
    }

    fn attach_tcx(
        &self,
        pins: &Pins,
        path: &Path,
        ifindex: u32,
        link: Option<(OwnedFd, LinkInfo)>,
    ) -> Result<(), Error> {
        let name = self.direction.program();
        match link {
            Some((link, info))
                if info.target == LinkTarget::Tcx(ifindex) && !self.is_misplaced(pins, &info) =>
            {
                if info.program == self.id {
                    return Ok(());
                }
                sys::link_update(link.as_fd(), self.fd.as_fd())
                    .doing(|| format!("cannot swap program {name} on {}", self::name(ifindex)))
            }
            // There is none, or somebody detached it, or its interface is gone and this is another
            // one with the same number; or it is at the wrong place.
            link => {
                if let Some((link, info)) = &link
                    && info.program == self.id
                {
                    // An interface has a program once only.
                    let _ = sys::link_detach(link.as_fd());
                }
                let attach = self.direction.tcx();
                let new = self
                    .order
                    .attach(self.fd.as_fd(), ifindex, attach)
                    .doing(|| format!("cannot attach program {name} to {}", self::name(ifindex)))?;
                pin_link(new.as_fd(), path, link.is_some())
            }
        }
    }

    /// Whether it is to be before the packet path's program, and is not, or on another side of somebody else's.
    fn is_misplaced(&self, pins: &Pins, own: &LinkInfo) -> bool {
        let LinkTarget::Tcx(ifindex) = own.target else {
            return false;
        };
        if self.direction != Direction::Capture {
            let chain = || sys::tcx_chain(ifindex, self.direction.tcx()).unwrap_or_default();
            return self.order.is_relative() && self.order.is_broken(own.program, &chain());
        }
        let other = pin(pins, Direction::Ingress, ifindex);
        let Ok(Some((_, other))) = ours(&other, Direction::Ingress) else {
            return false;
        };
        let order = sys::tcx_programs(ifindex, self.direction.tcx()).unwrap_or_default();
        let place = |program: u32| order.iter().position(|id| *id == program);
        match (place(own.program), place(other.program)) {
            (Some(own), Some(other)) => own > other,
            _ => false,
        }
    }
}

/// Our filters, by interface and program.
type Filters = BTreeMap<(u32, Direction), Filter>;

/// Whether a filter of these programs is on an interface.
fn is_used(filters: &Filters, of: &[Direction], ifindex: u32) -> bool {
    of.iter()
        .any(|direction| filters.contains_key(&(ifindex, *direction)))
}

/// Removes the packet path's programs from every interface, as [`PacketPrograms::attach`] with none.
pub fn keep_none(pins: &Pins) -> Result<Vec<String>, Error> {
    keep_none_of(pins, &Direction::ALL)
}

/// Likewise, that of mesh capture.
pub fn keep_no_capture(pins: &Pins) -> Result<Vec<String>, Error> {
    keep_none_of(pins, &Direction::CAPTURE)
}

fn keep_none_of(pins: &Pins, directions: &[Direction]) -> Result<Vec<String>, Error> {
    let mut clsact = Clsact::open(pins.root())?;
    let filters = clsact.ours()?;
    remove_elsewhere(pins, &mut clsact, &filters, directions, |_| false)
}

/// Whether a program of the packet path is on any interface.
pub fn any(pins: &Pins) -> Result<bool, Error> {
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

/// Removes some of our programs from where they are not to be.
fn remove_elsewhere(
    pins: &Pins,
    clsact: &mut Clsact,
    filters: &Filters,
    directions: &[Direction],
    kept: impl Fn(u32) -> bool,
) -> Result<Vec<String>, Error> {
    let mut failed = Vec::new();
    for (path, direction, ifindex) in links(&pins.layout()) {
        if directions.contains(&direction)
            && !kept(ifindex)
            && ours(&path, direction)?.is_some()
            && let Err(error) = detach(&path)
        {
            failed.push(error.to_string());
        }
    }
    for filter in filters.values() {
        if directions.contains(&filter.direction)
            && !kept(filter.ifindex)
            && let Err(error) = clsact.remove(filter)
        {
            failed.push(error.to_string());
        }
    }
    let others: Vec<Direction> = Direction::EVERY
        .into_iter()
        .filter(|direction| !directions.contains(direction))
        .collect();
    clsact.remove_qdiscs(|ifindex| !kept(ifindex) && !is_used(filters, &others, ifindex))?;
    Ok(failed)
}

fn pin_link(link: BorrowedFd<'_>, path: &Path, replace: bool) -> Result<(), Error> {
    if !replace {
        return sys::obj_pin(link, path).doing(|| format!("cannot pin {}", path.display()));
    }
    let mut new = path.as_os_str().to_owned();
    new.push(REPLACEMENT);
    let new = PathBuf::from(new);
    let _ = fs::remove_file(&new);
    sys::obj_pin(link, &new).doing(|| format!("cannot pin {}", new.display()))?;
    fs::rename(&new, path).doing(|| format!("cannot replace {}", path.display()))
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
    // Removing the last pin detaches it too, but some time later. One whose interface is gone
    // cannot be detached again.
    let _ = sys::link_detach(link.as_fd());
    fs::remove_file(path).doing(|| format!("cannot remove {}", path.display()))
}

/// An interface's name, for people; its number if it is gone.
pub fn name(ifindex: u32) -> String {
    known_name(ifindex).unwrap_or_else(|| format!("interface {ifindex}"))
}

/// An interface's name; none if it is gone. (nix's function answers an empty name then, and no error.)
fn known_name(ifindex: u32) -> Option<String> {
    let name = nix::net::if_::if_indextoname(ifindex).ok()?;
    let name = name.to_string_lossy().into_owned();
    (!name.is_empty()).then_some(name)
}

/// How one of our programs is on an interface, as the kernel says now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceAttachment {
    /// The interface's number.
    pub ifindex: u32,
    /// Its name.
    pub interface: String,
    /// Which of our programs.
    pub direction: Direction,
    /// How it is attached.
    pub hook: Option<Hook>,
    /// The kernel's number of the program.
    pub program_id: Option<u32>,
    /// What is wrong, if anything: it runs if this is `None`.
    pub problem: Option<String>,
}

/// Asks the kernel whether our programs run on these interfaces.
///
/// # Errors
/// If the kernel cannot be asked. What is wrong on one interface is in its
/// [`InterfaceAttachment::problem`].
pub fn attachments(pins: &Pins, wanted: &[u32]) -> Result<Vec<InterfaceAttachment>, Error> {
    let filters = Clsact::open(pins.root())?.ours()?;
    let mut all = Vec::new();
    for &ifindex in wanted {
        for direction in Direction::ALL.into_iter().rev() {
            let filter = filters.get(&(ifindex, direction));
            all.push(attachment(pins, ifindex, direction, filter));
        }
    }
    Ok(all)
}

fn attachment(
    pins: &Pins,
    ifindex: u32,
    direction: Direction,
    filter: Option<&Filter>,
) -> InterfaceAttachment {
    let mut found = InterfaceAttachment {
        ifindex,
        interface: name(ifindex),
        direction,
        hook: None,
        program_id: None,
        problem: None,
    };
    let path = pin(pins, direction, ifindex);
    match ours(&path, direction) {
        Ok(Some((_, link))) => {
            found.hook = Some(Hook::Tcx);
            found.program_id = Some(link.program);
            found.problem = if link.target == LinkTarget::Tcx(ifindex) {
                match sys::tcx_programs(ifindex, direction.tcx()) {
                    Ok(ids) if ids.contains(&link.program) => None,
                    Ok(_) => Some("the link is there, but the interface does not run it".into()),
                    Err(error) => Some(format!("cannot ask what runs there: {error}")),
                }
            } else {
                Some("its link was detached".into())
            };
        }
        Ok(None) => {}
        Err(error) => found.problem = Some(error.to_string()),
    }
    if let Some(filter) = filter
        && (found.hook.is_none() || found.problem.is_some())
    {
        found.hook = Some(Hook::Clsact);
        found.program_id = Some(filter.program);
        found.problem = None;
    }
    if found.hook.is_none() && found.problem.is_none() {
        found.problem = Some("not attached".into());
    }
    found
}

/// Removes the TCX links of one layout. With `dry_run`, says what it would remove.
pub fn remove_links(layout: &Path, dry_run: bool) -> Result<Vec<CleanupItem>, Error> {
    let mut items = Vec::new();
    for (path, direction, ifindex) in links(layout) {
        // What is not ours is named by whoever lists the other pins.
        if let Ok(Some((_, info))) = ours(&path, direction) {
            let place = match info.target {
                LinkTarget::Tcx(0) => "no interface any more".to_owned(),
                _ => name(ifindex),
            };
            let what = format!(
                "link {} of program {} on {place}",
                info.id,
                direction.program()
            );
            if !dry_run {
                detach(&path)?;
            }
            items.push(CleanupItem {
                path,
                what,
                ours: true,
            });
        }
    }
    Ok(items)
}

/// Removes our filters, and qdiscs that were made for them and have nothing else. With `dry_run`, says what it would
/// remove.
pub fn remove_filters(root: &Path, dry_run: bool) -> Result<Vec<CleanupItem>, Error> {
    let mut items = Vec::new();
    let mut clsact = Clsact::open(root)?;
    for filter in clsact.ours()?.values() {
        if !dry_run {
            clsact.remove(filter)?;
        }
        items.push(CleanupItem {
            path: format!("tc:{}", name(filter.ifindex)).into(),
            what: filter.to_string(),
            ours: true,
        });
    }
    for (ifindex, goes) in clsact.made()? {
        items.push(CleanupItem {
            path: format!("tc:{}", name(ifindex)).into(),
            what: if goes {
                "clsact qdisc"
            } else {
                "clsact qdisc, with filters of others"
            }
            .to_owned(),
            ours: goes,
        });
    }
    let notes = root.join("qdiscs");
    if notes.exists() {
        items.push(CleanupItem {
            path: notes,
            what: "directory".to_owned(),
            ours: true,
        });
    }
    if !dry_run {
        clsact.remove_qdiscs(|_| true)?;
    }
    Ok(items)
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
