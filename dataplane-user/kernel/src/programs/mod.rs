//! Our programs, and how they are attached: one pinned cgroup link each, whose program is swapped
//! in place.

mod load;
mod specs;

use std::{
    fs::{self, File},
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

use aya::Ebpf;
use aya_obj::generated::bpf_attach_type::{
    self, BPF_CGROUP_INET4_CONNECT, BPF_CGROUP_INET6_CONNECT,
};
use dataplane_common::capture::MeterSets;
use load::descriptor;
#[cfg(feature = "testing")]
pub(super) use load::has_mptcp;
pub use load::{kept_program, load, load_error, packet_program, patiently};
use specs::wanted;
pub use specs::{
    CAPTURE_PROGRAMS, INBOUND, PROBE_EVENTS, PROGRAMS, REPLACEMENT, Spec, TCP_EVENTS, tracepoint,
};
use zerocopy::FromZeros as _;

use super::{
    cgroup::cgroup_id,
    error::{Doing, Error},
    map::Mapped,
    pins::{self, Pins, spec},
    sys::{self, LinkTarget},
    tc::Direction,
};

/// The hooks of `connect()`.
const CONNECT: [bpf_attach_type; 2] = [BPF_CGROUP_INET4_CONNECT, BPF_CGROUP_INET6_CONNECT];

/// Attaches every program to a cgroup or its tracepoint. If a program's link already exists, replaces the program in
/// place, so that one is attached at every moment. The program that follows connections to a proxy is only replaced.
///
/// The kernel runs programs of a cgroup in the order in which they were attached. So if capture's program at a hook is new, or
/// another owner's program runs [between](is_parted) it and the program for services, both are attached again, and only then
/// lose their previous link: for a moment the program for services runs twice, and the second run finds nothing to translate.
///
/// Returns whether the programs were attached to another cgroup before.
pub fn attach(ebpf: &Ebpf, pins: &Pins, cgroup: &Path, capture: bool) -> Result<bool, Error> {
    let directory =
        File::open(cgroup).doing(|| format!("cannot open the cgroup {}", cgroup.display()))?;
    let id = cgroup_id(&directory, cgroup)?;
    if !capture {
        detach_capture(pins)?;
    }
    let mut parted = Vec::new();
    for hook in CONNECT {
        if capture && is_parted(pins, &directory, hook)? {
            parted.push(hook);
        }
    }
    let mut moved = false;
    for spec in wanted(capture) {
        let fd = descriptor(ebpf, spec)?;
        let again = parted.contains(&spec.hook);
        match pins.open_link(spec)? {
            None if spec.name == TCP_EVENTS.name => {}
            Some((link, info)) if info.target == LinkTarget::Cgroup(id) && !again => {
                sys::link_update(link.as_fd(), fd)
                    .doing(|| format!("cannot swap program {}", spec.name))?;
            }
            // The link belongs to another cgroup, to a removed cgroup, or to a tracepoint, whose links accept no other
            // program. The program is attached again, and then the pin is replaced. For a moment both programs run.
            Some((_, info)) => {
                moved |= !spec.is_traced() && info.target != LinkTarget::Cgroup(id);
                create(spec, fd, &directory, &pins.link(spec.name), true)?;
            }
            None => {
                if spec.is_traced() {
                    forget_meters(pins)?;
                }
                create(spec, fd, &directory, &pins.link(spec.name), false)?;
            }
        }
    }
    Ok(moved)
}

/// Attaches the program that follows connections to a proxy; does nothing if it is attached already.
pub fn attach_events(program: BorrowedFd<'_>, pins: &Pins, cgroup: &Path) -> Result<(), Error> {
    if pins.open_link(&TCP_EVENTS)?.is_some() {
        return Ok(());
    }
    let directory =
        File::open(cgroup).doing(|| format!("cannot open the cgroup {}", cgroup.display()))?;
    let path = pins.link(TCP_EVENTS.name);
    create(&TCP_EVENTS, program, &directory, &path, false)
}

/// Whether a link's pin has the name of one that an agent looks after, with capture or without.
pub fn is_link(name: &str, capture: bool) -> bool {
    let is_of_several = |program: &str| {
        let number = name.strip_prefix(program);
        number.is_some_and(|number| number.starts_with('-') && !number.ends_with(REPLACEMENT))
    };
    wanted(capture).any(|spec| spec.name == name)
        || (capture && [INBOUND, PROBE_EVENTS.name].into_iter().any(is_of_several))
        || Direction::of_pin(name)
            .is_some_and(|(direction, _)| capture || Direction::ALL.contains(&direction))
}

/// Frees the places of connections that were closed while no attached program noticed it.
fn forget_meters(pins: &Pins) -> Result<(), Error> {
    let what = || "cannot clear table METERS".to_owned();
    let Some((table, info)) = pins.open_map(spec("METERS"))? else {
        return Ok(());
    };
    let meters = Mapped::<MeterSets>::map(table, info.max_entries, true).doing(what)?;
    for element in 0..meters.capacity() {
        meters.set(element, MeterSets::new_zeroed());
    }
    Ok(())
}

/// Whether capture's program and the program for services do not run one directly after the other at a hook. Capture's program
/// leaves an error, which the program for services removes. If a program between them refuses the call, the kernel keeps the
/// error that is there (`bpf_prog_run_array_cg`), so the program for services would remove the refusal.
fn is_parted(pins: &Pins, cgroup: &File, hook: bpf_attach_type) -> Result<bool, Error> {
    let mut ours = Vec::new();
    for spec in wanted(true).filter(|spec| spec.hook == hook) {
        ours.extend(pins.open_link(spec)?.map(|(_, info)| info.program));
    }
    let running = sys::cgroup_programs(cgroup.as_fd(), hook)
        .doing(|| "cannot ask what the cgroup runs at connect()".to_owned())?;
    Ok(ours.len() != 2 || !running.windows(2).any(|pair| pair == ours))
}

/// Detaches the programs that an earlier agent attached for a mesh.
fn detach_capture(pins: &Pins) -> Result<(), Error> {
    for spec in CAPTURE_PROGRAMS.iter().rev() {
        if let Some((link, _)) = pins.open_link(spec)? {
            pins::remove_link(&link, &pins.link(spec.name))?;
        }
    }
    Ok(())
}

/// Attaches a program, and pins its link. `replace`: whether there may be such a pin, which is replaced.
pub fn create(
    spec: &Spec,
    program: BorrowedFd<'_>,
    cgroup: &File,
    path: &Path,
    replace: bool,
) -> Result<(), Error> {
    let link = if spec.is_traced() {
        sys::link_create_traced(program)
            .doing(|| format!("cannot attach program {} to its tracepoint", spec.name))?
    } else {
        sys::link_create_cgroup(program, cgroup.as_fd(), spec.hook)
            .doing(|| format!("cannot attach program {} to the cgroup", spec.name))?
    };
    if !replace {
        return sys::obj_pin(link.as_fd(), path).doing(|| format!("cannot pin {}", path.display()));
    }
    // No dots: a bpffs reserves them (`bpf_lookup` in kernel/bpf/inode.c).
    let mut new = path.as_os_str().to_owned();
    new.push(REPLACEMENT);
    let new = PathBuf::from(new);
    let _ = fs::remove_file(&new);
    sys::obj_pin(link.as_fd(), &new).doing(|| format!("cannot pin {}", new.display()))?;
    fs::rename(&new, path).doing(|| format!("cannot replace {}", path.display()))
}

/// A program's attachment, as the kernel reports it now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// The program's name, which is its hook's.
    pub program: &'static str,
    /// Its link, if there is one.
    pub link_id: Option<u32>,
    /// The program that the link holds.
    pub program_id: Option<u32>,
    /// A hash of the program's instructions.
    pub tag: Option<u64>,
    /// The fault, if there is one: with `None` the program is attached, and runs for the cgroup.
    pub problem: Option<String>,
}

/// Asks the kernel how our programs are attached: the pins, the links in them, and whether the
/// cgroup really runs them.
///
/// # Errors
/// If the cgroup cannot be opened. A single program's fault is in its [`Attachment::problem`].
pub fn attachments(pins: &Pins, cgroup: &Path) -> Result<Vec<Attachment>, Error> {
    let directory =
        File::open(cgroup).doing(|| format!("cannot open the cgroup {}", cgroup.display()))?;
    let id = cgroup_id(&directory, cgroup)?;
    // A mesh is not everywhere: without its first pin, there is none. In a mesh without a proxy, the program that
    // follows connections to a proxy need not be attached.
    let capture = pins.link(CAPTURE_PROGRAMS[0].name).exists();
    Ok(wanted(capture)
        .filter(|spec| spec.name != TCP_EVENTS.name || pins.link(spec.name).exists())
        .map(|spec| attachment(pins, spec, &directory, id))
        .collect())
}

fn attachment(pins: &Pins, spec: &Spec, cgroup: &File, cgroup_id: u64) -> Attachment {
    let mut found = Attachment {
        program: spec.name,
        link_id: None,
        program_id: None,
        tag: None,
        problem: None,
    };
    let link = match pins.open_link(spec) {
        Ok(Some((_, link))) => link,
        Ok(None) => {
            found.problem = Some(format!(
                "not attached: {} is not there",
                pins.link(spec.name).display()
            ));
            return found;
        }
        Err(error) => {
            found.problem = Some(error.to_string());
            return found;
        }
    };
    found.link_id = Some(link.id);
    found.program_id = Some(link.program);
    found.tag = sys::prog_by_id(link.program)
        .and_then(|fd| sys::prog_info(fd.as_fd()))
        .map(|info| info.tag)
        .ok();
    found.problem = if !link.is_attached() {
        Some("its cgroup was removed; restart the agent to attach anew".into())
    } else if let LinkTarget::Cgroup(other) = link.target
        && other != cgroup_id
    {
        Some(format!(
            "attached to another cgroup (id {other}, not {cgroup_id})"
        ))
    } else if spec.is_traced() {
        // A tracepoint runs every program that has a link.
        None
    } else {
        match sys::cgroup_programs(cgroup.as_fd(), spec.hook) {
            Ok(ids) if ids.contains(&link.program) => {
                let captures = CAPTURE_PROGRAMS.iter().any(|of| of.name == spec.name);
                if captures && CONNECT.contains(&spec.hook) {
                    parted(pins, cgroup, spec)
                } else {
                    None
                }
            }
            Ok(_) => Some("the link is there, but the cgroup does not run the program".into()),
            Err(error) => Some(format!("cannot ask what the cgroup runs: {error}")),
        }
    };
    found
}

/// The fault if another program runs between capture's program and the program for services.
fn parted(pins: &Pins, cgroup: &File, capture: &Spec) -> Option<String> {
    match is_parted(pins, cgroup, capture.hook) {
        Ok(false) => None,
        Ok(true) => Some(
            "the program for services does not run directly after it; restart the agent to attach both again"
                .into(),
        ),
        Err(error) => Some(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_tell_which_links_an_agent_looks_after() {
        for name in ["connect4", "sock_release", "packet_egress-3"] {
            assert!(is_link(name, false) && is_link(name, true), "{name}");
        }
        for name in [
            "capture6",
            "tcp_events",
            "tcp_gone",
            "packet_capture-3",
            "inbound_lookup-7",
            "probe_events-7",
        ] {
            assert!(!is_link(name, false) && is_link(name, true), "{name}");
        }
        for name in [
            "connect4-new",
            "packet_egress-3-new",
            "inbound_lookup-7-new",
            "probe_events",
            "connect5",
        ] {
            assert!(!is_link(name, true), "{name}");
        }
    }
}
