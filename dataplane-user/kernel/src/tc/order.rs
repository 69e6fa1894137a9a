//! Attaches our programs at their position among other programs on an interface.

use std::{io, os::fd::AsFd as _};

use aya_obj::generated::bpf_attach_type;
use model::{Anchor, Order};

use crate::sys::{self, Chain, Place};

/// Number of attempts to attach to a chain that changes meanwhile.
const ATTEMPTS: usize = 8;

/// Tells if our program is on the wrong side of the program that the order names. Always false for `First` and
/// `Last`: a program that is attached later may go before or after ours.
pub fn is_broken(order: Order, own: u32, chain: &Chain) -> bool {
    let index = |program: u32| chain.programs.iter().position(|id| *id == program);
    let anchor = order
        .anchor()
        .and_then(|anchor| position(anchor, chain, name_of));
    match (order, index(own), anchor) {
        (Order::Before(_), Some(own), Some(anchor)) => own > anchor,
        (Order::After(_), Some(own), Some(anchor)) => own < anchor,
        _ => false,
    }
}

fn place(order: Order, chain: &Chain) -> Place {
    let before = matches!(order, Order::First | Order::Before(_));
    let at = order
        .anchor()
        .and_then(|anchor| position(anchor, chain, name_of));
    let relative = at.and_then(|at| chain.programs.get(at)).copied();
    Place {
        before,
        relative,
        // At the ends of the chain the place stays right when the chain changes.
        revision: relative.map_or(0, |_| chain.revision),
    }
}

/// Attaches a program at this position. If the chain changes meanwhile, reads the chain again, because a position is
/// valid only for the revision of the chain that it was found in.
///
/// # Errors
/// If the kernel refuses.
pub fn attach(
    order: Order,
    program: std::os::fd::BorrowedFd<'_>,
    ifindex: u32,
    attach_type: bpf_attach_type,
) -> io::Result<std::os::fd::OwnedFd> {
    let mut attempts = ATTEMPTS;
    loop {
        attempts -= 1;
        let chain = sys::tcx_chain(ifindex, attach_type)?;
        match sys::link_create_tcx_at(program, ifindex, attach_type, place(order, &chain)) {
            Err(error)
                if attempts > 0
                    && matches!(error.raw_os_error(), Some(libc::ESTALE | libc::ENOENT)) => {}
            result => return result,
        }
    }
}

/// Returns the position of a program in a chain.
fn position(
    anchor: Anchor,
    chain: &Chain,
    name_of: impl Fn(u32) -> Option<String>,
) -> Option<usize> {
    match anchor {
        Anchor::Program(id) => chain.programs.iter().position(|program| *program == id),
        Anchor::Link(id) => chain.links.iter().position(|link| *link == id),
        Anchor::Name(name) => chain
            .programs
            .iter()
            .position(|program| name_of(*program).as_deref() == Some(name.text())),
    }
}

fn name_of(program: u32) -> Option<String> {
    let program = sys::prog_by_id(program).ok()?;
    Some(sys::prog_info(program.as_fd()).ok()?.name)
}

#[cfg(test)]
mod tests {
    use model::Name;

    use super::*;

    #[test]
    fn a_place_is_true_of_a_revision() {
        let chain = Chain {
            programs: vec![7, 8, 9],
            links: vec![0, 80, 90],
            revision: 5,
        };
        let at = |anchor| position(anchor, &chain, |id| Some(format!("program{id}")));
        assert_eq!(at(Anchor::Program(8)), Some(1));
        assert_eq!(at(Anchor::Link(90)), Some(2));
        assert_eq!(at(Anchor::Name(Name::new("program9").unwrap())), Some(2));
        assert_eq!(at(Anchor::Program(1)), None);
        let place = |order: Order| place(order, &chain);
        let before = place(Order::Before(Anchor::Program(8)));
        assert_eq!(
            (before.before, before.relative, before.revision),
            (true, Some(8), 5)
        );
        let after = place(Order::After(Anchor::Link(7)));
        assert_eq!(
            (after.before, after.relative, after.revision),
            (false, None, 0)
        );
        let is_broken = |order: Order, own| is_broken(order, own, &chain);
        assert!(is_broken(Order::Before(Anchor::Program(7)), 8));
        assert!(!is_broken(Order::Before(Anchor::Program(9)), 8));
        assert!(is_broken(Order::After(Anchor::Program(9)), 8));
        assert!(!is_broken(Order::After(Anchor::Program(1)), 8));
        assert!(!is_broken(Order::First, 9));
    }
}
