//! Builds packets with new ends. The checksums are computed anew over all bytes, not corrected incrementally.

use dataplane_common::{Addr, Port};

use super::read::{Fragment, Headers};
use crate::wire::{self, LINK, fold, protocol, pseudo, sum};

/// New source and destination of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    pub src: Addr,
    pub dst: Addr,
    pub src_port: Port,
    pub dst_port: Port,
}

impl Ends {
    fn back(self) -> Self {
        Self {
            src: self.dst,
            dst: self.src,
            src_port: self.dst_port,
            dst_port: self.src_port,
        }
    }
}

/// The bytes of an address in a packet of its family.
fn octets(addr: Addr, v4: bool) -> Vec<u8> {
    let all = addr.octets();
    if v4 { all[12..].to_vec() } else { all.to_vec() }
}

fn set(frame: &mut [u8], at: usize, bytes: &[u8]) {
    frame[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Returns the error of a checksummed range, as a number modulo 0xffff; 0 if the checksum is correct. `extra`: the sum
/// of the pseudo header.
fn fault(bytes: &[u8], extra: u32) -> u32 {
    u32::from(fold(sum(bytes) + extra)) % 0xffff
}

/// Sets the checksum at `at` (an offset in the range) so that the range has the error `wrong` (see [`fault`]). A router
/// must not repair a checksum that arrived wrong, and must not break a correct one.
fn set_checksum(bytes: &mut [u8], at: usize, extra: u32, wrong: u32) {
    set(bytes, at, &[0, 0]);
    let now = u32::from(fold(sum(bytes) + extra));
    // now + checksum = wrong (modulo 0xffff)
    let checksum = (wrong + 2 * 0xffff - now) % 0xffff;
    let checksum = u16::try_from(checksum).unwrap_or_default();
    set(bytes, at, &checksum.to_be_bytes());
}

fn set_addresses(frame: &mut [u8], headers: &Headers, ends: &Ends) {
    let (at, size) = if headers.v4 { (12, 4) } else { (8, 16) };
    set(frame, headers.l3 + at, &octets(ends.src, headers.v4));
    set(frame, headers.l3 + at + size, &octets(ends.dst, headers.v4));
}

/// Writes the IP header: addresses, hop count and, for IPv4, the checksum over the header with its options.
fn set_header(frame: &mut [u8], headers: &Headers, ends: &Ends, hops: u8) {
    let end = headers.l4.min(frame.len());
    let wrong = if headers.v4 {
        fault(&frame[headers.l3..end], 0)
    } else {
        0
    };
    set_addresses(frame, headers, ends);
    if headers.v4 {
        frame[headers.l3 + 8] = hops;
        set_checksum(&mut frame[headers.l3..end], 10, 0, wrong);
    } else {
        frame[headers.l3 + 7] = hops;
    }
}

fn pseudo_of(frame: &[u8], headers: &Headers, length: usize) -> u32 {
    let (at, size) = if headers.v4 { (12, 4) } else { (8, 16) };
    let src = headers.l3 + at;
    let dst = src + size;
    let addresses = (&frame[src..dst], &frame[dst..dst + size]);
    pseudo(addresses.0, addresses.1, headers.protocol, length)
}

/// Returns the packet with new ends.
pub fn translated(frame: &[u8], headers: &Headers, ends: &Ends, hops: u8) -> Vec<u8> {
    let mut out = frame.to_vec();
    let range = headers.l4..headers.end;
    let before = pseudo_of(frame, headers, range.len());
    set_header(&mut out, headers, ends, hops);
    if headers.fragment == Fragment::Later {
        return out;
    }
    let wrong = fault(&frame[range.clone()], before);
    let after = pseudo_of(&out, headers, range.len());
    set(&mut out, headers.l4, &ends.src_port.host().to_be_bytes());
    set(
        &mut out,
        headers.l4 + 2,
        &ends.dst_port.host().to_be_bytes(),
    );
    let udp = headers.protocol == protocol::UDP;
    let at = if udp { 6 } else { 16 };
    // A first fragment may end before its checksum field.
    if range.len() < at + 2 {
        return out;
    }
    if udp && out[headers.l4 + 6..headers.l4 + 8] == [0, 0] {
        return out;
    }
    set_checksum(&mut out[range], at, after, wrong);
    if udp && out[headers.l4 + 6..headers.l4 + 8] == [0, 0] {
        set(&mut out, headers.l4 + 6, &[0xff, 0xff]);
    }
    out
}

/// Returns an ICMP error with new ends. The quoted packet gets the same ends, in the opposite direction.
pub fn error_translated(
    frame: &[u8],
    outer: &Headers,
    quoted: &Headers,
    ends: &Ends,
    hops: u8,
) -> Vec<u8> {
    let mut out = frame.to_vec();
    let range = outer.l4..outer.end;
    let extra = |frame: &[u8]| {
        if outer.v4 {
            0
        } else {
            pseudo_of(frame, outer, range.len())
        }
    };
    let wrong = fault(&frame[range.clone()], extra(frame));
    let inside = ends.back();
    set_header(&mut out, quoted, &inside, quoted.hops);
    set(&mut out, quoted.l4, &inside.src_port.host().to_be_bytes());
    set(
        &mut out,
        quoted.l4 + 2,
        &inside.dst_port.host().to_be_bytes(),
    );
    set_header(&mut out, outer, ends, hops);
    let after = extra(&out);
    set_checksum(&mut out[range], 2, after, wrong);
    out
}

/// The problem that an ICMP error reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Complaint {
    PortUnreachable,
    TimeExceeded,
    TooBig(u16),
}

/// Builds the ICMP error that answers a packet, from the packet's destination to its source.
pub fn complaint(frame: &[u8], headers: &Headers, complaint: Complaint) -> Vec<u8> {
    let mtu = match complaint {
        Complaint::TooBig(mtu) => u32::from(mtu),
        _ => 0,
    };
    let kind = match (complaint, headers.v4) {
        (Complaint::PortUnreachable, true) => [3, 3],
        (Complaint::PortUnreachable, false) => [1, 4],
        (Complaint::TimeExceeded, true) => [11, 0],
        (Complaint::TimeExceeded, false) => [3, 0],
        (Complaint::TooBig(_), true) => [3, 4],
        (Complaint::TooBig(_), false) => [2, 0],
    };
    let quoted = headers.l4 - headers.l3 + if headers.is_tcp() { 20 } else { 8 };
    let packet = wire::Packet {
        link: [
            frame[6..12].try_into().unwrap_or_default(),
            frame[..6].try_into().unwrap_or_default(),
        ],
        whole: true,
        identification: 0,
        ..wire::Packet::new(
            headers.dst.ip(),
            headers.src.ip(),
            wire::Payload::Icmp {
                kind,
                rest: mtu.to_be_bytes(),
                data: frame[headers.l3..headers.l3 + quoted].to_vec(),
            },
        )
    };
    packet.frame()
}

/// Sets the link-layer addresses of a frame, destination first.
pub fn link(frame: &mut [u8], to: [u8; 6], from: [u8; 6]) {
    debug_assert!(frame.len() >= LINK, "a frame that was read has its header");
    set(frame, 0, &to);
    set(frame, 6, &from);
}

/// Whether a packet's checksums are correct: of the IPv4 header, and of its payload. The payload of a fragment, and UDP
/// without a checksum, cannot be checked and count as correct.
pub fn is_right(frame: &[u8], headers: &Headers) -> bool {
    let header = !headers.v4 || fault(&frame[headers.l3..headers.l4], 0) == 0;
    let range = headers.l4..headers.end;
    if headers.fragment != Fragment::Whole {
        return header;
    }
    let none = headers.protocol == protocol::UDP && frame[headers.l4 + 6..headers.l4 + 8] == [0, 0];
    let extra = if headers.protocol == protocol::ICMP {
        0
    } else {
        pseudo_of(frame, headers, range.len())
    };
    header && (none || fault(&frame[range], extra) == 0)
}
