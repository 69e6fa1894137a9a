//! IPv4's options: finds source routes.

use aya_ebpf::bindings::__sk_buff;

use super::skb::Skb;

/// IPv4's options (RFC 791 section 3.1): the end of options, no operation (one byte), and the two source routes.
const END: u8 = 0;
const NOTHING: u8 = 1;
const LOOSE: u8 = 131;
const STRICT: u8 = 137;
/// The most bytes that options can have.
const MOST: u32 = 40;

/// Whether the options of an IPv4 header, from one offset to another, have a source route: 1 or 0. Also 1 if they are
/// contradictory. With external linkage, as in `table.rs`: the verifier looks at it once.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn packet_source_route(skb: *mut __sk_buff, from: u32, to: u32) -> u32 {
    let skb = Skb(skb);
    let mut at = from;
    for _ in 0..=MOST {
        if at >= to {
            return u32::from(at > to);
        }
        let mut kind = END;
        if !skb.load(at, &mut kind) || kind == LOOSE || kind == STRICT {
            return 1;
        }
        if kind == END {
            return 0;
        }
        let mut length = 1_u8;
        if kind != NOTHING && (!skb.load(at + 1, &mut length) || length < 2) {
            return 1;
        }
        at += u32::from(length);
    }
    1
}
