//! Tables of sets of sockets, by socket cookie: a socket has a few places in each, and is found without a
//! hash, a lock or an allocation.
//!
//! A caller that looks for a place or frees it has the socket's lock, or is the last owner of the socket. So only
//! taking a free place is a race, with other sockets. Places of a [`flow_owner`] need no lock: [`put`] writes the record
//! before it names the owner, and [`free_all`] frees them when the socket has no other user.

use core::ptr::{null_mut, read_volatile, write_volatile};

use dataplane_common::{
    capture::{Meter, MeterSets},
    tables::{
        BEING_WRITTEN, Owners, Peer, PeerSets, SOCKET_SETS, SOCKET_WAYS, SocketSet, flow_owner,
    },
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
/// (Computed one after the other: the stack has no room for all of them.)
#[inline(always)]
fn ways<S: Sets>(cookie: u64) -> Option<impl Iterator<Item = (*mut u64, *mut S::Record)>> {
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
        (0..SOCKET_WAYS).map(move |way| unsafe {
            (owners.add(way * SOCKET_SETS), places.add(way * SOCKET_SETS))
        }),
    )
}

/// The place of a socket, or null.
#[inline(always)]
pub fn place_of<S: Sets>(cookie: u64) -> *mut S::Record {
    find::<S>(cookie, |_| true)
}

/// The first of the owner's places whose record fits, or null.
#[inline(always)]
pub fn find<S: Sets>(owner: u64, mut fits: impl FnMut(*mut S::Record) -> bool) -> *mut S::Record {
    let Some(ways) = ways::<S>(owner) else {
        return null_mut();
    };
    for (word, place) in ways {
        // SAFETY: within the set.
        let found = unsafe { read_volatile(word) };
        // Every processor reads the owner before the record. (Compared with it, so that the compiler does not compute it
        // from `owner` after the comparison.)
        let nothing = atomic::nothing_of(found);
        if found | nothing as u64 != owner {
            continue;
        }
        let place = place.wrapping_byte_add(nothing);
        if fits(place) {
            return place;
        }
    }
    null_mut()
}

/// Puts a record into a free place. Returns whether there was one. The record is there before the owner is, and the
/// owner before anything that this program does next.
#[inline(always)]
pub fn put<S: Sets<Record: Copy>>(owner: u64, record: &S::Record) -> bool {
    let Some(ways) = ways::<S>(owner) else {
        return false;
    };
    for (word, place) in ways {
        // SAFETY: within the set, aligned to eight bytes; only the program that has exchanged the word writes the record.
        unsafe {
            if read_volatile(word) == 0 && atomic::compare_exchange(word, 0, BEING_WRITTEN) == 0 {
                *place = *record;
                atomic::compare_exchange(word, BEING_WRITTEN, owner);
                return true;
            }
        }
    }
    false
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

/// Frees all places of a socket that has no other user, under both its owners.
#[inline(always)]
pub fn free_all<S: Sets>(cookie: u64) {
    let Some(ways) = ways::<S>(cookie) else {
        return;
    };
    for (word, _) in ways {
        // SAFETY: within the set.
        unsafe {
            let owner = read_volatile(word);
            if owner == cookie || owner == flow_owner(cookie) {
                write_volatile(word, 0);
            }
        }
    }
}
