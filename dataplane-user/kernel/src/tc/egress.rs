//! Other owners' programs, filters and queueing disciplines on the ways out of interfaces and in.
//!
//! `bpf_redirect_peer` hands a packet to the other end of a pair and passes by all of these. So the packet path sends
//! packets by the ordinary way where there is something: a policy that drops packets, or a limit of the rate.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::{Direction, clsact::Clsact, name, ours, pin};
use crate::{error::Error, pins::Pins, sys};

/// The queueing discipline of an interface that has no queue, as pairs have by default.
const NO_QUEUE: &str = "noqueue";

/// Returns the name of an interface at which filters of others come after our program on the way in, such as those of the CNI
/// plug-in `bandwidth`, which lead packets to an IFB: they see no packet that our program sends on.
///
/// # Errors
/// If the query to the kernel fails.
pub fn ingress_of_others(bpffs: &Path) -> Result<Option<String>, Error> {
    let pins = Pins::new(bpffs);
    let interfaces = Clsact::open(pins.root())?.with_others_after_ours()?;
    Ok(interfaces.into_iter().map(name).min())
}

/// Whether programs of others come after ours at TCX on the way in of these interfaces: they see no packet that our program sends
/// on.
pub fn has_programs_after_ours(bpffs: &Path, interfaces: impl IntoIterator<Item = u32>) -> bool {
    let pins = Pins::new(bpffs);
    interfaces.into_iter().any(|ifindex| {
        // The interface is gone, or the kernel has no TCX.
        let programs = sys::tcx_programs(ifindex, Direction::Ingress.tcx()).unwrap_or_default();
        if programs.len() < 2 {
            return false;
        }
        let own = ours(&pin(&pins, Direction::Ingress, ifindex), Direction::Ingress);
        let own = own.ok().flatten().map(|(_, link)| link.program);
        programs.last().copied() != own
    })
}

/// Returns other owners' objects on the way out of these interfaces, in words, by interface. An interface without any
/// is left out.
///
/// # Errors
/// If the query to the kernel fails.
pub fn egress_of_others(
    bpffs: &Path,
    interfaces: &BTreeSet<u32>,
) -> Result<BTreeMap<u32, Vec<String>>, Error> {
    let mut found: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    if interfaces.is_empty() {
        return Ok(found);
    }
    let pins = Pins::new(bpffs);
    let mut clsact = Clsact::open(pins.root())?;
    for (ifindex, kind) in clsact.roots()? {
        if interfaces.contains(&ifindex) && kind != NO_QUEUE {
            let what = format!("queueing discipline {kind}");
            found.entry(ifindex).or_default().push(what);
        }
    }
    for ifindex in clsact.with_clsact()? {
        if interfaces.contains(&ifindex) && clsact.has_others(ifindex, Direction::Egress)? {
            let what = "filters of clsact".to_owned();
            found.entry(ifindex).or_default().push(what);
        }
    }
    for &ifindex in interfaces {
        // The interface is gone, or the kernel has no TCX.
        let programs = sys::tcx_programs(ifindex, Direction::Egress.tcx());
        let programs = programs.unwrap_or_default();
        if programs.is_empty() {
            continue;
        }
        let own = ours(&pin(&pins, Direction::Egress, ifindex), Direction::Egress);
        let own = own.ok().flatten().map(|(_, link)| link.program);
        let others = programs.iter().filter(|id| Some(**id) != own);
        let others = others.map(|id| format!("program {id} at TCX"));
        found.entry(ifindex).or_default().extend(others);
    }
    found.retain(|_, others| !others.is_empty());
    Ok(found)
}
