//! Data that the kernel programs and user space share: addresses, table keys and values, verdicts, limits.
//!
//! Everything here is plain data with one layout on both sides: `#[repr(C)]`, no implicit padding,
//! no `bool`, `enum` or `Option` in a table's value. Sizes are asserted at compile time, because
//! the tables outlive the agent that wrote them: see [`LAYOUT`].
//!
//! The decisions are here, too: [`decide`] about a destination, [`first`] about a packet, [`capture`] about a workload's
//! connection. They are generic over the source of the tables, so that the kernel programs, `dataplane explain` and the
//! property tests run the same code.
#![no_std]

/// Data in a table: user space reads and writes its bytes.
macro_rules! layout {
    ($($item:item)*) => {$(
        #[cfg_attr(
            feature = "user",
            derive(
                zerocopy::FromBytes,
                zerocopy::IntoBytes,
                zerocopy::Immutable,
                zerocopy::KnownLayout
            )
        )]
        $item
    )*};
}

mod addr;
pub mod capture;
pub mod cells;
pub mod decide;
mod event;
pub mod first;
pub mod origins;
pub mod packet;
mod reason;
pub mod reread;
pub mod seen;
pub mod states;
pub mod tables;
pub mod tcp;
mod vips;

pub use addr::{Addr, Port, Protocol};
pub use event::{Event, Hook};
pub use reason::Reason;
pub use vips::{ClaimedPort, VIP_ELEMENTS, VipElement, VipPlace, VipWords};

/// The priority (`SO_PRIORITY`) of the agent's sockets to the API server and to resolvers: of all services, only cluster IPs
/// are translated for them, and only in the node's own network namespace. Else an object with the server's address as its
/// external IP would take the agent's connections and queries. It takes CAP_NET_ADMIN to set. Queueing disciplines see network
/// control (`TC_PRIO_CONTROL`, the lowest four bits).
pub const OF_AGENT: u32 = 0xdada_0007;

/// Version of everything that is pinned: table layouts, their names and the meaning of flags.
///
/// It is part of the pin directory's name. Raise it with any change to [`tables`], [`packet`], [`tcp`], [`Event`] or
/// the numbers of [`Reason`]; the agent then builds a new directory beside the old one and swaps once. The tables that
/// it takes along are in `CONNECTIONS` of the agent's `kernel/layouts.rs`: check there whether one of these tables has
/// changed. A new bit of flags, a new value or a new [`Reason`] needs no new layout if older programs ignore it and an
/// older agent writes the entry anew.
///
/// No version had layout 12: it is the layout from which connections are taken over. The tests use it as the previous
/// layout.
pub const LAYOUT: u32 = 14;
