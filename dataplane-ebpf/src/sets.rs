//! Tables of sets of sockets, by socket cookie: a socket has a few places in each, and is found without a
//! hash, a lock or an allocation.
//!
//! A caller that looks for a place or frees it has the socket's lock, or is the last owner of the socket. So only
//! taking a free place is a race, with other sockets.

use core::ptr::{null_mut, read_volatile, write_volatile};

use dataplane_common::{
    capture::{Meter, MeterSets},
    tables::{Owners, Peer, PeerSets, SOCKET_SETS, SOCKET_WAYS, SocketSet},
};

use crate::{
    atomic,
    tables::{METERS, PEERS},
};

/// An element of one of the tables.
pub trait Sets: Sized {
    /// The record of a socket.
    type Record;
    /// The element, or null.
    fn element(index: u32) -> *mut Self;
    /// The owners of the places.
    fn owners(element: *mut Self) -> *mut Owners;
    /// The record in the first place of the first set.
    fn places(element: *mut Self) -> *mut Self::Record;
}

impl Sets for PeerSets {
    type Record = Peer;

    #[inline(always)]
    fn element(index: u32) -> *mut Self {
        PEERS.get_ptr_mut(index).unwrap_or(null_mut())
    }

    #[inline(always)]
    fn owners(element: *mut Self) -> *mut Owners {
        // SAFETY: only an address is computed.
        unsafe { &raw mut (*element).owners }
    }

    #[inline(always)]
    fn places(element: *mut Self) -> *mut Peer {
        // SAFETY: only an address is computed.
        unsafe { (&raw mut (*element).peers).cast() }
    }
}

impl Sets for MeterSets {
    type Record = Meter;

    #[inline(always)]
    fn element(index: u32) -> *mut Self {
        METERS.get_ptr_mut(index).unwrap_or(null_mut())
    }

    #[inline(always)]
    fn owners(element: *mut Self) -> *mut Owners {
        // SAFETY: only an address is computed.
        unsafe { &raw mut (*element).owners }
    }

    #[inline(always)]
    fn places(element: *mut Self) -> *mut Meter {
        // SAFETY: only an address is computed.
        unsafe { (&raw mut (*element).meters).cast() }
    }
}

/// The places that a socket may have: of each way, the owner and the record. `None` if there is no such element.
#[inline(always)]
fn ways<S: Sets>(cookie: u64) -> Option<[(*mut u64, *mut S::Record); SOCKET_WAYS]> {
    let at = SocketSet::of(cookie);
    let element = S::element(at.element);
    if element.is_null() {
        return None;
    }
    // SAFETY: within the element, since `SocketSet` says which set.
    let (owners, places) = unsafe {
        (
            S::owners(element).cast::<u64>().add(at.set),
            S::places(element).add(at.set),
        )
    };
    // SAFETY: as above.
    Some(
        [0, 1, 2, 3]
            .map(|way| unsafe { (owners.add(way * SOCKET_SETS), places.add(way * SOCKET_SETS)) }),
    )
}

const _: () = assert!(SOCKET_WAYS == 4);

/// The place of a socket, or null.
#[inline(always)]
pub fn place_of<S: Sets>(cookie: u64) -> *mut S::Record {
    let Some(ways) = ways::<S>(cookie) else {
        return null_mut();
    };
    for (owner, place) in ways {
        // SAFETY: within the set.
        if unsafe { read_volatile(owner) } == cookie {
            return place;
        }
    }
    null_mut()
}

/// A free place for a socket that has none, or null.
#[inline(always)]
pub fn take_place<S: Sets>(cookie: u64) -> *mut S::Record {
    let Some(ways) = ways::<S>(cookie) else {
        return null_mut();
    };
    for (owner, place) in ways {
        // SAFETY: within the set, aligned to eight bytes.
        unsafe {
            if read_volatile(owner) == 0 && atomic::compare_exchange(owner, 0, cookie) == 0 {
                return place;
            }
        }
    }
    null_mut()
}

/// Frees the socket's place, if it has one. Returns whether it had.
#[inline(always)]
pub fn free_place<S: Sets>(cookie: u64) -> bool {
    let Some(ways) = ways::<S>(cookie) else {
        return false;
    };
    for (owner, _) in ways {
        // SAFETY: within the set.
        unsafe {
            if read_volatile(owner) == cookie {
                write_volatile(owner, 0);
                return true;
            }
        }
    }
    false
}
