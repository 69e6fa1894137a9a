//! Puts loaded programs on interfaces: swaps earlier ones in place, restores removed ones.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use model::{Anchor, Order};
use tracing::warn;

use super::{
    Direction, Filters, Hook, clsact::Clsact, detach, is_used, known_name, name, order, ours, pin,
    removal,
};
use crate::{
    error::{Doing, Error},
    pins::Pins,
    programs::REPLACEMENT,
    sys::{self, LinkInfo, LinkTarget},
};

/// The packet path's loaded programs, to be put on interfaces.
#[derive(Debug)]
pub struct PacketPrograms {
    ingress: Program,
    egress: Program,
    /// Interfaces that came later than the first, and whose programs are filters for now although there is TCX.
    ///
    /// To attach to TCX takes the kernel a grace period of RCU, 16 ms, under a lock that all interfaces share
    /// (`tcx_entry_sync` in `include/net/tcx.h`). A filter takes it some ten microseconds. So forty pods that begin together
    /// are served at once, and have links a second later.
    provisional: BTreeSet<u32>,
    /// Whether programs were attached at all.
    has_begun: bool,
}

impl PacketPrograms {
    /// Takes loaded programs. `hook`: the kind of attachment; `None`: the best that this kernel has.
    pub(crate) fn new(
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
                     filters; use packets.order: first or last"
                )
            });
        }
        Ok(Self {
            ingress: Program::new(ingress, Direction::Ingress, hook, order)?,
            egress: Program::new(egress, Direction::Egress, hook, order)?,
            provisional: BTreeSet::new(),
            has_begun: false,
        })
    }

    /// Returns the kind of attachment.
    pub fn hook(&self) -> Hook {
        self.ingress.hook
    }

    /// Attaches the programs to exactly these interfaces. Replaces our older programs in place, and restores programs
    /// of ours that another process removed. Returns the failures, which do not stop the rest of the work. `done` is
    /// called for each interface as soon as its work is finished.
    pub(crate) fn attach(
        &mut self,
        pins: &Pins,
        wanted: &BTreeSet<u32>,
        done: impl Fn(u32) -> Result<(), Error>,
    ) -> Result<Vec<String>, Error> {
        let mut clsact = Clsact::open(pins.root())?;
        let mut filters = clsact.ours()?;
        let mut failed = Vec::new();
        self.provisional.retain(|ifindex| wanted.contains(ifindex));
        let has_begun = std::mem::replace(&mut self.has_begun, true);
        if self.hook() == Hook::Tcx && has_begun {
            let before = self.provisional.len();
            for &ifindex in wanted {
                if is_new(pins, &filters, ifindex) && self.add_filters(&mut clsact, ifindex) {
                    self.provisional.insert(ifindex);
                    if let Err(error) = done(ifindex) {
                        failed.push(error.to_string());
                    }
                }
            }
            if self.provisional.len() != before {
                filters = clsact.ours()?;
            }
        }
        for &ifindex in wanted.difference(&self.provisional) {
            for direction in Direction::ALL {
                let program = self.of(direction);
                if let Err(error) = program.attach(pins, &mut clsact, ifindex, &filters) {
                    // Pods go while we are at it, and their interfaces with them.
                    if known_name(ifindex).is_some() {
                        failed.push(error.to_string());
                    }
                    break;
                }
            }
            if let Err(error) = done(ifindex) {
                failed.push(error.to_string());
            }
        }
        // On the wanted interfaces, `attach` has already removed our attachments of the other kind.
        let kept = |ifindex: u32| wanted.contains(&ifindex);
        failed.extend(removal::elsewhere(
            pins,
            &mut clsact,
            &filters,
            &Direction::ALL,
            kept,
        )?);
        if self.hook() == Hook::Tcx {
            let provisional = &self.provisional;
            clsact.remove_qdiscs(|ifindex| {
                !provisional.contains(&ifindex) && !is_used(&filters, &Direction::CAPTURE, ifindex)
            })?;
        }
        Ok(failed)
    }

    /// Whether `attach` was called before. If not, interfaces may have programs of an earlier agent.
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Whether there are interfaces whose programs are filters for now.
    pub fn has_provisional(&self) -> bool {
        !self.provisional.is_empty()
    }

    /// Replaces the filters of one such interface by links. For a moment both are attached: the second program leaves
    /// packets alone that the first program has decided about.
    pub(crate) fn replace_one_provisional(&mut self, pins: &Pins) -> Result<(), Error> {
        let Some(ifindex) = self.provisional.pop_first() else {
            return Ok(());
        };
        let mut clsact = Clsact::open(pins.root())?;
        let filters = clsact.ours()?;
        for direction in Direction::ALL {
            let program = self.of(direction);
            if let Err(error) = program.attach(pins, &mut clsact, ifindex, &filters) {
                // The pod may be gone.
                return known_name(ifindex).map_or(Ok(()), |_| Err(error));
            }
        }
        clsact.remove_qdiscs(|other| {
            other == ifindex && !is_used(&filters, &Direction::CAPTURE, ifindex)
        })
    }

    fn of(&self, direction: Direction) -> &Program {
        match direction {
            Direction::Egress => &self.egress,
            _ => &self.ingress,
        }
    }

    /// Adds both filters. Returns `false` if an error occurs.
    fn add_filters(&self, clsact: &mut Clsact, ifindex: u32) -> bool {
        Direction::ALL.into_iter().all(|direction| {
            let program = self.of(direction);
            let added = clsact.add(ifindex, direction, program.fd.as_fd(), Order::First);
            added.is_ok()
        })
    }
}

/// The loaded program for workloads that are captured by their packets, to be put on their
/// interfaces.
#[derive(Debug)]
pub struct CaptureProgram(Program);

impl CaptureProgram {
    /// Takes a loaded program. `hook`: the kind of attachment; `None`: the best that this kernel has.
    pub(crate) fn new(program: OwnedFd, hook: Option<Hook>) -> Result<Self, Error> {
        let hook = hook.unwrap_or_else(Hook::of_kernel);
        // With any order of the packet path, it has to be before the packet path's program.
        let program = Program::new(program, Direction::Capture, hook, Order::First)?;
        Ok(Self(program))
    }

    /// Attaches the program to exactly these interfaces, before the packet path's programs. Returns the failures on
    /// interfaces, with the reasons.
    pub(crate) fn attach(
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
        for text in removal::elsewhere(pins, &mut clsact, &filters, of, kept)? {
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
        let program = self.direction.program();
        match link {
            Some((link, info))
                if info.target == LinkTarget::Tcx(ifindex) && !self.is_misplaced(pins, &info) =>
            {
                if info.program == self.id {
                    return Ok(());
                }
                sys::link_update(link.as_fd(), self.fd.as_fd())
                    .doing(|| format!("cannot swap program {program} on {}", name(ifindex)))
            }
            // There is no link; or another process detached it; or its interface is gone, and a new interface has the
            // same index; or it is at the wrong place in the chain.
            link => {
                if let Some((link, info)) = &link
                    && info.program == self.id
                {
                    // An interface has a program once only.
                    let _ = sys::link_detach(link.as_fd());
                }
                let attach = self.direction.tcx();
                let order = self.order_on(pins, ifindex);
                let new = order::attach(order, self.fd.as_fd(), ifindex, attach)
                    .doing(|| format!("cannot attach program {program} to {}", name(ifindex)))?;
                pin_link(new.as_fd(), path, link.is_some())
            }
        }
    }

    /// Returns the program's place: behind capture's program, if that is attached.
    fn order_on(&self, pins: &Pins, ifindex: u32) -> Order {
        let capture = pin(pins, Direction::Capture, ifindex);
        match (self.direction, self.order) {
            (Direction::Ingress, Order::First) => match ours(&capture, Direction::Capture) {
                Ok(Some((_, link))) if link.target == LinkTarget::Tcx(ifindex) => {
                    Order::After(Anchor::Link(link.id))
                }
                _ => self.order,
            },
            _ => self.order,
        }
    }

    /// Whether it has to be before the packet path's program, and is not, or is on the wrong side of another owner's
    /// program.
    fn is_misplaced(&self, pins: &Pins, own: &LinkInfo) -> bool {
        let LinkTarget::Tcx(ifindex) = own.target else {
            return false;
        };
        if self.direction != Direction::Capture {
            let chain = || sys::tcx_chain(ifindex, self.direction.tcx()).unwrap_or_default();
            return self.order.is_relative() && order::is_broken(self.order, own.program, &chain());
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

/// Whether none of the programs is on an interface.
fn is_new(pins: &Pins, filters: &Filters, ifindex: u32) -> bool {
    let has_link = |direction| {
        let link = ours(&pin(pins, direction, ifindex), direction);
        !matches!(link, Ok(None))
    };
    !is_used(filters, &Direction::ALL, ifindex) && !Direction::ALL.into_iter().any(has_link)
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
