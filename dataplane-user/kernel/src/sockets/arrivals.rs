//! Connections that arrived at workloads directly, and not by their proxies: found by their meters, and destroyed.

use std::{
    collections::HashSet,
    io,
    net::SocketAddr,
    os::fd::{AsFd as _, BorrowedFd},
};

use dataplane_common::{
    Protocol,
    capture::{Meter, MeterSets, TrafficKey},
};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use zerocopy::FromBytes as _;

use super::{CONNECTED, FAMILIES, Listed, SOCK_DIAG_BY_FAMILY, destroy, list, listening, noted};
use crate::{
    error::{Doing as _, Error},
    map::Mapped,
    namespaces,
    netlink::Netlink,
    pins::{Pins, spec},
};

/// Destroys the TCP connections in a workload's network namespace that arrived at the workload directly, if `is_forbidden` says so of
/// the client and of the workload's own address and port. `workload`: its number in the tables. Connections without a meter stay: those
/// of the proxy, probes, the workload's own, and those from before the programs. Returns how many connections it destroyed.
pub(crate) fn destroy_arrived(
    pins: &Pins,
    namespace: BorrowedFd<'_>,
    workload: u32,
    is_forbidden: impl Fn(SocketAddr, SocketAddr) -> bool + Send,
) -> Result<usize, Error> {
    let open = |name| pins.open_map(spec(name));
    let (Some((sets, info)), Some((stored, _))) = (open("METERS")?, open("MORE_METERS")?) else {
        return Ok(0);
    };
    let sets = Mapped::<MeterSets>::map(sets, info.max_entries, false)
        .doing(|| "cannot map table METERS".to_owned())?;
    let is_of =
        |meter: &Meter| (meter.key.workload, meter.key.pool) == (workload, TrafficKey::INBOUND);
    let elements = (0..sets.capacity()).filter_map(|index| sets.get(index));
    let measured = elements
        .flat_map(|sets| sets.owners.into_iter().zip(sets.meters))
        .flat_map(|(owners, meters)| owners.into_iter().zip(meters))
        .filter(|(cookie, meter)| *cookie != 0 && is_of(meter));
    let measured: HashSet<u64> = measured.map(|(cookie, _)| cookie).collect();
    let stored = &stored;
    let work = move || -> io::Result<usize> {
        // A place in a set that is taken just now may be read half and half: a connection that the workload opens has another port.
        let ports: HashSet<u16> = listening(0)?.iter().map(|socket| socket.port).collect();
        let mut netlink = Netlink::open(NETLINK_SOCK_DIAG)?;
        let mut destroyed = 0;
        for family in FAMILIES {
            let mut found = Vec::new();
            let request = list(Protocol::TCP, family, CONNECTED, Some(stored));
            netlink.dump(SOCK_DIAG_BY_FAMILY, &request, |answer| {
                let Ok((socket, rest)) = Listed::read_from_prefix(answer) else {
                    return;
                };
                let [own, client] = socket.ends();
                let arrived = noted::<Meter>(rest).is_some_and(|meter| is_of(&meter))
                    || measured.contains(&socket.id.cookie()) && ports.contains(&own.port());
                if arrived && is_forbidden(client, own) {
                    found.push(socket);
                }
            })?;
            for socket in found {
                destroyed += usize::from(destroy(&mut netlink, Protocol::TCP, &socket)?);
            }
        }
        Ok(destroyed)
    };
    namespaces::within(namespace.as_fd(), work)
        .doing(|| "cannot end the connections of a network namespace".to_owned())
}
