//! Asks the kernel how our programs are on interfaces now.

use super::{
    Direction, Hook,
    clsact::{Clsact, Filter},
    name, ours, pin,
};
use crate::{
    error::Error,
    pins::Pins,
    sys::{self, LinkTarget},
};

/// The attachment of one of our programs to an interface, as the kernel reports it now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceAttachment {
    /// The interface's number.
    pub ifindex: u32,
    /// Its name.
    pub interface: String,
    /// The direction, and so the program.
    pub direction: Direction,
    /// The kind of attachment.
    pub hook: Option<Hook>,
    /// The kernel's number of the program.
    pub program_id: Option<u32>,
    /// The fault, if there is one: with `None` the program runs.
    pub problem: Option<String>,
}

/// Asks the kernel whether our programs run on these interfaces.
///
/// # Errors
/// If the kernel cannot be asked. The fault on one interface is in its [`InterfaceAttachment::problem`].
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
