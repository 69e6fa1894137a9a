//! The packets that a flow has had, as bits of `seen`. [`PACKET`] and [`FIN`] stand for requests. Replies have
//! these two bits four places higher ([`in_replies`]). The other bits belong to both directions.

/// A packet at all.
pub const PACKET: u8 = 1;
/// TCP: a FIN.
pub const FIN: u8 = 2;
/// TCP: a RST, in either direction.
pub const RST: u8 = 4;
/// The flow belongs to the kernel's own conntrack, which translates it: packets are left alone.
///
/// If the flow is masqueraded, its entry reserves a port: the key has the addresses and ports that the endpoint sees,
/// with the node's address and port, so that no other flow to the endpoint gets this port. The index of the node's
/// address can have any value except 0.
pub const FOREIGN: u8 = 8;
/// TCP: another segment of the connection has followed the last FIN.
pub const FOLLOWED: u8 = 1 << 6;
/// Both ends have confirmed the flow, so it is evicted later than other flows and has a longer timeout. TCP: the client
/// has acknowledged the endpoint's answer. UDP: the flow was answered and is in use two seconds after it began. A
/// client with a spoofed address can only guess the number to acknowledge.
pub const ASSURED: u8 = 1 << 7;
/// The bits that no longer count once a flow begins anew: all except that there was a request.
pub const EARLIER: u8 = !PACKET;

/// The bits of requests.
#[inline(always)]
pub const fn of_requests(seen: u8) -> u8 {
    seen & (PACKET | FIN)
}

/// The bits of replies, moved to the places of requests' bits.
#[inline(always)]
pub const fn of_replies(seen: u8) -> u8 {
    seen >> 4 & (PACKET | FIN)
}

/// The inverse of [`of_replies`].
#[inline(always)]
pub const fn in_replies(seen: u8) -> u8 {
    seen << 4
}

/// The bits that a packet adds to a flow. `bits`: those of the packet, as if it were a request.
#[inline(always)]
pub const fn of_packet(bits: u8, replies: bool) -> u8 {
    if replies {
        in_replies(bits & (PACKET | FIN)) | bits & RST
    } else {
        bits
    }
}

/// Whether a FIN was seen, in either direction.
#[inline(always)]
pub const fn is_closing(seen: u8) -> bool {
    seen & (FIN | in_replies(FIN)) != 0
}

/// Whether neither side sends anything new: one has reset the connection, or both have closed it.
#[inline(always)]
pub const fn is_ended(seen: u8) -> bool {
    seen & RST != 0 || of_requests(seen) & of_replies(seen) & FIN != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bits are in pinned tables: each has one meaning for good.
    #[test]
    fn bits_have_fixed_places() {
        assert_eq!([PACKET, FIN, RST, FOREIGN], [1, 2, 4, 8]);
        assert_eq!([in_replies(PACKET), in_replies(FIN)], [16, 32]);
        assert_eq!([FOLLOWED, ASSURED, EARLIER], [64, 128, 254]);
    }

    #[test]
    fn a_packet_adds_its_bits_in_its_direction() {
        for bits in 0..8 {
            assert_eq!(of_packet(bits, false), bits);
            let (moved, reset) = (bits & 3, bits & RST);
            assert_eq!(of_packet(bits, true), moved * 16 + reset, "{bits:#b}");
        }
        for seen in 0..=u8::MAX {
            assert_eq!(of_requests(seen), seen & 3);
            assert_eq!(of_replies(seen), (seen / 16) & 3);
            let (requests, replies) = (seen & FIN != 0, seen & 32 != 0);
            assert_eq!(is_closing(seen), requests || replies, "{seen:#b}");
            let is_ended = requests && replies || seen & RST != 0;
            assert_eq!(super::is_ended(seen), is_ended, "{seen:#b}");
        }
    }
}
