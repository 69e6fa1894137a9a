//! The IPsec policies of this network namespace (XFRM; `include/uapi/linux/xfrm.h`).

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use netlink_sys::protocols::NETLINK_XFRM;
use plan::ipsec::{self, Policy};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::{
    error::{Doing, Error},
    netlink::{Netlink, attributes, content},
};

const XFRM_MSG_GETPOLICY: u16 = 0x15;
const XFRM_MSG_GETSADINFO: u16 = 0x23;
const XFRM_MSG_GETDEFAULT: u16 = 0x28;

const XFRMA_SAD_CNT: u16 = 1;
const XFRMA_TMPL: u16 = 5;
const XFRMA_POLICY_TYPE: u16 = 16;
const XFRMA_MARK: u16 = 21;
const XFRMA_IF_ID: u16 = 31;

/// `XFRM_POLICY_ALLOW`, of a policy's action.
const ALLOW: u8 = 0;
/// `XFRM_USERPOLICY_BLOCK`: the default that drops packets without a policy.
const BLOCK: u8 = 1;
/// `XFRM_POLICY_IN`, `_OUT` and `_FWD`: those of sockets (3 and more) are listed, too.
const DIRECTIONS: u8 = 3;

/// `struct xfrm_selector`: addresses and ports in network order.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Selector {
    dst: [u8; 16],
    src: [u8; 16],
    ports: [u16; 4],
    family: u16,
    dst_length: u8,
    src_length: u8,
    protocol: u8,
    padding: [u8; 3],
    interface: u32,
    user: u32,
}

/// `struct xfrm_userpolicy_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Info {
    selector: Selector,
    lifetimes: [u64; 12],
    priority: u32,
    index: u32,
    direction: u8,
    action: u8,
    flags: u8,
    share: u8,
    padding: u32,
}

/// `struct xfrm_userpolicy_id`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Id {
    selector: Selector,
    index: u32,
    direction: u8,
    padding: [u8; 3],
}

const _: () = assert!(size_of::<Selector>() == 56 && size_of::<Info>() == 168);
const _: () = assert!(size_of::<Id>() == 64);

/// Returns the policies, in no particular order, with the default for packets that no policy covers.
///
/// Policies of IPsec's own interfaces (`if_id`) are left out: such an interface encrypts the packets that it gets.
///
/// # Errors
/// If the query to the kernel fails. A kernel without IPsec has no policies, which is not an error.
pub fn policies() -> Result<Vec<Policy>, Error> {
    list().doing(|| "cannot ask for the IPsec policies".to_owned())
}

fn list() -> io::Result<Vec<Policy>> {
    let mut netlink = match Netlink::open(NETLINK_XFRM) {
        Ok(netlink) => netlink,
        Err(error) if is_absent(&error) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    let any = Id::new_zeroed();
    netlink.dump(XFRM_MSG_GETPOLICY, any.as_bytes(), |answer| {
        found.extend(policy(answer));
    })?;
    let asked = netlink.get(XFRM_MSG_GETDEFAULT, &[0; 3], |answer| {
        // struct xfrm_userpolicy_default: in, fwd, out; in the order of the directions' numbers: in, out, fwd.
        if let [inward, onward, outward, ..] = *answer {
            let blocked = [inward, outward, onward].into_iter().zip(0..);
            let blocked = blocked.filter(|(what, _)| *what == BLOCK);
            found.extend(blocked.flat_map(|(_, direction)| ipsec::block_by_default(direction)));
        }
    });
    match asked {
        // Older than Linux 5.15: the kernel blocks no packets that lack a policy.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        asked => asked?,
    }
    Ok(found)
}

/// Returns whether this network namespace has an IPsec association, with which the kernel sends packets of its own (ESP in UDP).
///
/// Asks for their number, because a list of them has their keys.
///
/// # Errors
/// If the query to the kernel fails. `None`: the kernel has no IPsec, which is not an error.
pub fn has_associations() -> io::Result<Option<bool>> {
    let mut netlink = match Netlink::open(NETLINK_XFRM) {
        Ok(netlink) => netlink,
        Err(error) if is_absent(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut found = false;
    netlink.get(XFRM_MSG_GETSADINFO, &[0; 4], |answer| {
        // Flags, then attributes (`build_sadinfo`, net/xfrm/xfrm_user.c).
        let attributes = answer.get(4..).unwrap_or_default();
        let count = content(attributes, XFRMA_SAD_CNT);
        found |= count.is_some_and(|count| count.iter().any(|byte| *byte != 0));
    })?;
    Ok(Some(found))
}

fn is_absent(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EPROTONOSUPPORT)
}

/// Returns the policy of a message, if it is about packets that the packet path could have.
fn policy(message: &[u8]) -> Option<Policy> {
    let (info, rest) = Info::read_from_prefix(message).ok()?;
    let selector = &info.selector;
    let mut narrow = selector.protocol != 0
        || selector.ports != [0; 4]
        || selector.interface != 0
        || selector.user != 0;
    let mut protects = info.action != ALLOW;
    let mut kind = 0;
    for (attribute, content) in attributes(rest) {
        match attribute {
            XFRMA_TMPL => protects |= !content.is_empty(),
            XFRMA_POLICY_TYPE => kind = content.first().copied().unwrap_or_default(),
            XFRMA_MARK => narrow = true,
            XFRMA_IF_ID if content.iter().any(|byte| *byte != 0) => return None,
            _ => {}
        }
    }
    Some(Policy {
        kind: (info.direction, kind),
        priority: info.priority,
        src: network(selector.family, selector.src, selector.src_length)?,
        dst: network(selector.family, selector.dst, selector.dst_length)?,
        narrow,
        protects,
    })
    .filter(|policy| policy.kind.0 < DIRECTIONS)
}

fn network(family: u16, addr: [u8; 16], length: u8) -> Option<IpNet> {
    let addr = match i32::from(family) {
        libc::AF_INET => {
            let [a, b, c, d, ..] = addr;
            IpAddr::V4(Ipv4Addr::new(a, b, c, d))
        }
        libc::AF_INET6 => IpAddr::V6(Ipv6Addr::from(addr)),
        _ => return None,
    };
    Some(IpNet::new(addr, length).ok()?.trunc())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::attribute;

    fn info() -> Info {
        let mut info = Info::new_zeroed();
        info.selector.family = 2;
        info.selector.src[..4].copy_from_slice(&[10, 1, 2, 3]);
        info.selector.src_length = 16;
        info.priority = 7;
        info.direction = 2;
        info
    }

    fn read(info: &Info, attributes: &[Vec<u8>]) -> Option<Policy> {
        policy(&[info.as_bytes(), &attributes.concat()].concat())
    }

    #[test]
    fn a_policy_is_read() {
        let plain = read(&info(), &[]).unwrap();
        assert_eq!(plain.src, "10.1.0.0/16".parse().unwrap());
        assert_eq!(plain.dst, "0.0.0.0/0".parse().unwrap());
        assert_eq!((plain.kind, plain.priority), ((2, 0), 7));
        assert!(!plain.protects && !plain.narrow);
        let template = attribute(XFRMA_TMPL, &[0; 64]);
        assert!(read(&info(), &[template]).unwrap().protects);
        let mark = attribute(XFRMA_MARK, &[1; 8]);
        let sub = attribute(XFRMA_POLICY_TYPE, &[1, 0, 0, 0, 0, 0]);
        let marked = read(&info(), &[mark, sub]).unwrap();
        assert!(marked.narrow && marked.kind == (2, 1));
        let block = Info {
            action: 1,
            ..info()
        };
        assert!(read(&block, &[]).unwrap().protects);
    }

    #[test]
    fn others_are_left_out() {
        assert_eq!(
            read(&info(), &[attribute(XFRMA_IF_ID, &[5, 0, 0, 0])]),
            None
        );
        assert!(read(&info(), &[attribute(XFRMA_IF_ID, &[0; 4])]).is_some());
        let of_a_socket = Info {
            direction: 4,
            ..info()
        };
        assert_eq!(read(&of_a_socket, &[]), None);
        assert_eq!(policy(&info().as_bytes()[..160]), None);
        let mut long = info();
        long.selector.src_length = 33;
        assert_eq!(read(&long, &[]), None);
    }
}
