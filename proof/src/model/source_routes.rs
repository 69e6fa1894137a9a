//! Recognizes packets that carry a source route.

use dataplane_common::Addr;

use super::read::Limit;
use crate::wire::{LINK, protocol};

/// Whether a frame has a source route, or more extension headers than any legitimate packet needs. `segmented`: see
/// [`frame`](super::read::frame).
pub fn is_routed(frame: &[u8], segmented: bool) -> bool {
    let limit = Limit::Frame {
        end: frame.len(),
        segmented,
    };
    match frame.get(12..14) {
        Some([0x08, 0x00]) => v4(frame, limit),
        Some([0x86, 0xdd]) => v6(frame, limit),
        _ => None,
    }
    .unwrap_or(false)
}

fn v4(frame: &[u8], limit: Limit) -> Option<bool> {
    let header = frame.get(LINK..LINK + 20)?;
    let length = usize::from(header[0] & 15) * 4;
    let said = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let end = match limit.end_of_big() {
        Some(end) if said == 0 => end,
        _ => LINK + said,
    };
    if header[0] >> 4 != 4 || length < 20 || end < LINK + length || !limit.allows(end) {
        return None;
    }
    let mut options = frame.get(LINK + 20..LINK + length)?;
    while let [kind, rest @ ..] = options {
        options = match kind {
            0 => return Some(false),
            1 => rest,
            131 | 137 => return Some(true),
            // An invalid length hides the options behind it. (The length byte may lie behind the end of the options.)
            _ => {
                let at = LINK + length - rest.len();
                let told = usize::from(*frame.get(at).unwrap_or(&0));
                match options.get(told..) {
                    Some(rest) if told >= 2 => rest,
                    _ => return Some(true),
                }
            }
        };
    }
    Some(false)
}

fn v6(frame: &[u8], limit: Limit) -> Option<bool> {
    let header = frame.get(LINK..LINK + 40)?;
    let payload = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let big = limit.end_of_big().is_some();
    if header[0] >> 4 != 6 || (payload == 0 && !big) || !limit.allows(LINK + 40 + payload) {
        return None;
    }
    let is_v4 = |at: usize| Some(Addr::from_v6(header[at..at + 16].try_into().ok()?).is_v4());
    if is_v4(8)? || is_v4(24)? {
        return None;
    }
    let (mut next, mut at) = (header[6], LINK + 40);
    for _ in 0..6 {
        match next {
            protocol::ROUTING => return Some(true),
            protocol::FRAGMENT => {
                let extension = frame.get(at..at + 8)?;
                if extension[2] != 0 || extension[3] & 0xf8 != 0 {
                    return Some(false);
                }
                (next, at) = (extension[0], at + 8);
            }
            protocol::HOP_BY_HOP | protocol::DESTINATION => {
                let extension = frame.get(at..at + 2)?;
                (next, at) = (extension[0], at + (usize::from(extension[1]) + 1) * 8);
            }
            _ => return Some(false),
        }
    }
    let all = [
        protocol::ROUTING,
        protocol::FRAGMENT,
        protocol::HOP_BY_HOP,
        protocol::DESTINATION,
    ];
    Some(all.contains(&next))
}
