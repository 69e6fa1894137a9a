//! Headers: rare ones, contradictory ones, fragments.

use anyhow::{Result, ensure};
use dataplane_common::{Addr, Reason};
use dataplane_proof::wire::{LINK, Packet, Part, Payload, flags, protocol};

use super::{
    ALL, NEAR, Then, check, ip, packet, passed, payload, scene, sent,
    way::{PLAIN, is_passed, request},
};

scenarios! {
    Dataplane:
    headers_that_are_rare_are_passed_or_left_alone,
    headers_that_lie_are_left_alone,
    source_routes_of_pods_are_refused,
    fragments_follow_their_first,
    fragments_that_overlap_are_their_senders_own,
}

fn headers_that_are_rare_are_passed_or_left_alone() -> Result<()> {
    use protocol::{DESTINATION, HOP_BY_HOP, ROUTING};
    let extension = |number: u8, words: u8| {
        let mut body = vec![words];
        body.resize(7 + 8 * usize::from(words), 1);
        (number, body)
    };
    scene(|scene| {
        for tcp in [true, false] {
            for words in 1..=10 {
                let mut with_options = request(true, tcp);
                with_options.options = vec![1; 4 * words];
                is_passed(scene, &format!("{words} words of options"), &with_options)?;
            }
            let chains: [&[u8]; 6] = [
                &[HOP_BY_HOP],
                &[ROUTING],
                &[DESTINATION],
                &[HOP_BY_HOP, DESTINATION, ROUTING],
                &[HOP_BY_HOP, DESTINATION, ROUTING, DESTINATION, DESTINATION],
                &[DESTINATION; 6],
            ];
            for chain in chains {
                for words in [0, 3] {
                    let mut extended = request(false, tcp);
                    let all = chain.iter().map(|number| extension(*number, words));
                    extended.extensions = all.collect();
                    is_passed(scene, &format!("{chain:?}"), &extended)?;
                }
            }
            // More than anybody has use for.
            let mut many = request(false, tcp);
            many.extensions = vec![extension(DESTINATION, 0); 7];
            let frame = many.frame();
            check(scene, "seven", ("eth0", false), &frame, &Then::Alone, &[])?;
            // A fragment header of a packet that is not a fragment (RFC 6946).
            let mut atomic = request(false, tcp);
            atomic.part = Some(Part {
                from: 0,
                to: usize::MAX,
                more: false,
            });
            is_passed(scene, "an atomic fragment", &atomic)?;
        }
        for v4 in [true, false] {
            for class in [0x10, 0xb8, 0xff] {
                let classed = Packet {
                    class,
                    ..request(v4, true)
                };
                is_passed(scene, "a class", &classed)?;
            }
            let mut unsummed = request(v4, false);
            if let Payload::Udp { summed, .. } = &mut unsummed.payload {
                *summed = false;
            }
            is_passed(scene, "UDP without a checksum", &unsummed)?;
            // Data by which the checksum becomes each value near zero.
            for low in 0..=u16::MAX {
                if low % 251 != 0 && low > 2 && low < 0xfffd {
                    continue;
                }
                let mut summed = request(v4, false);
                if let Payload::Udp { data, .. } = &mut summed.payload {
                    *data = low.to_be_bytes().to_vec();
                }
                is_passed(scene, "every checksum", &summed)?;
            }
            for other in [protocol::ICMP, 132, 47, 50, 51] {
                scene.forget()?;
                let mut packet = request(v4, true);
                packet.payload = Payload::Raw(other, vec![8; 40]);
                let what = format!("protocol {other}");
                check(
                    scene,
                    &what,
                    ("eth0", false),
                    &packet.frame(),
                    &Then::Alone,
                    &[],
                )?;
            }
            // A tag within the packet: it belongs to a VLAN.
            let mut tagged = request(v4, true).frame();
            tagged.splice(12..12, [0x81, 0, 0, 42]);
            check(scene, "tagged", ("eth0", false), &tagged, &Then::Alone, &[])?;
        }
        Ok(())
    })
}

/// For any payload and destination; packets of hosts that are no pods pass unchanged.
fn source_routes_of_pods_are_refused() -> Result<()> {
    use protocol::{DESTINATION, HOP_BY_HOP, ROUTING};
    let near = |packet: &Packet| Packet {
        src: ip(packet.src.is_ipv4(), NEAR[0], NEAR[1]),
        ..packet.clone()
    };
    let extension = |number: u8| (number, vec![0; 7]);
    scene(|scene| {
        let routed = |what: &str, packet: &Packet| {
            let reasons = [Reason::SourceRouted];
            let frame = near(packet).frame();
            check(
                scene,
                what,
                ("veth-near", false),
                &frame,
                &Then::Dropped,
                &reasons,
            )
        };
        let other = |packet: &Packet, number: u8| Packet {
            payload: Payload::Raw(number, vec![8; 40]),
            ..packet.clone()
        };
        for tcp in [true, false] {
            let mut chains: Vec<Vec<u8>> = (0..6)
                .map(|before| [&vec![DESTINATION; before][..], &[ROUTING]].concat())
                .collect();
            chains.push(vec![HOP_BY_HOP, DESTINATION, ROUTING, DESTINATION]);
            // Behind more than is looked through, and more than that without any.
            chains.push([&[DESTINATION; 6][..], &[ROUTING]].concat());
            chains.push(vec![DESTINATION; 7]);
            for chain in chains {
                let mut extended = request(false, tcp);
                extended.extensions = chain.iter().map(|number| extension(*number)).collect();
                let what = format!("{chain:?}");
                routed(&what, &extended)?;
                routed(&what, &other(&extended, protocol::ICMP6))?;
                routed(&what, &other(&extended, 132))?;
                // To a destination without a service, and to many hosts.
                extended.dst = "fd66::6".parse()?;
                routed(&what, &extended)?;
                for from in [0, 8] {
                    extended.part = Some(Part {
                        from,
                        to: from + 8,
                        more: true,
                    });
                    if chain.contains(&ROUTING) || from == 0 {
                        routed(&format!("{what} from byte {from}"), &extended)?;
                    }
                }
            }
            // Cut off within it.
            let mut extended = request(false, tcp);
            extended.extensions = vec![extension(ROUTING)];
            let mut cut = near(&extended).frame();
            cut.truncate(LINK + 41);
            cut[LINK + 4..LINK + 6].copy_from_slice(&[0, 1]);
            let reasons = [Reason::SourceRouted];
            check(
                scene,
                "cut",
                ("veth-near", false),
                &cut,
                &Then::Dropped,
                &reasons,
            )?;

            let last = [&[1; 36][..], &[131, 3, 4, 0]].concat();
            let options: [&[u8]; 7] = [
                &[131, 7, 4, 10, 9, 0, 1, 0],
                &[1, 137, 7, 4, 10, 9, 0, 1],
                &[7, 7, 4, 0, 0, 0, 0, 131, 7, 4, 10, 9, 0, 1, 0, 0],
                &last,
                // Lengths that cannot be.
                &[7, 0, 4, 0],
                &[7, 1, 4, 0],
                &[7, 9, 4, 0, 0, 0, 0, 0],
            ];
            for options in options {
                let mut routed_v4 = request(true, tcp);
                routed_v4.options = options.to_vec();
                let what = format!("{options:?}");
                routed(&what, &routed_v4)?;
                routed(&what, &other(&routed_v4, protocol::ICMP))?;
                routed(&what, &other(&routed_v4, 132))?;
                is_passed(scene, &what, &routed_v4)?;
            }
            // Other options are no routes, and bytes after the end of options are no options.
            for options in [[7, 7, 4, 0, 0, 0, 0, 1], [0, 131, 7, 4, 0, 0, 0, 0]] {
                let mut harmless = request(true, tcp);
                harmless.options = options.to_vec();
                harmless.dst = "10.66.0.6".parse()?;
                let frame = near(&harmless).frame();
                check(
                    scene,
                    "harmless",
                    ("veth-near", false),
                    &frame,
                    &Then::Alone,
                    &[],
                )?;
            }
        }
        Ok(())
    })
}

fn headers_that_lie_are_left_alone() -> Result<()> {
    scene(|scene| {
        let malformed = |what: &str, frame: &[u8]| {
            let then = (&Then::Alone, &[Reason::Malformed][..]);
            check(scene, what, ("eth0", false), frame, then.0, then.1)
        };
        for (v4, tcp) in ALL {
            scene.forget()?;
            let whole = request(v4, tcp).frame();
            let header = if v4 { 20 } else { 40 };
            // Cut short at every byte that a test run takes.
            for length in LINK + header..whole.len() {
                malformed(&format!("cut to {length} bytes"), &whole[..length])?;
            }
            // Cut short with matching lengths: the rest of the transport header is too short.
            let least = if tcp { 20 } else { 8 };
            let at = if v4 { 16 } else { 18 };
            for left in 0..least {
                let mut frame = whole[..LINK + header + left].to_vec();
                let length = if v4 { header + left } else { left };
                frame[at..at + 2].copy_from_slice(&u16::try_from(length)?.to_be_bytes());
                malformed(&format!("{left} bytes of transport"), &frame)?;
            }
            // Lengths of the packet and of its header that cannot be.
            let longest = whole.len() - LINK - if v4 { 0 } else { 40 };
            let lies: Vec<usize> = if v4 {
                (0..28).chain([longest + 1, 0x4000, 0xffff]).collect()
            } else {
                (0..8).chain([longest + 1, 0x4000, 0xffff]).collect()
            };
            for length in lies {
                let mut frame = whole.clone();
                frame[at..at + 2].copy_from_slice(&u16::try_from(length)?.to_be_bytes());
                malformed(&format!("a length of {length}"), &frame)?;
            }
            if v4 {
                for words in (0..5).chain([13, 14, 15]) {
                    let mut frame = whole.clone();
                    frame[LINK] = 0x40 | words;
                    malformed(&format!("a header of {words} words"), &frame)?;
                }
            } else {
                // Extension headers that end behind the packet.
                for first in [
                    protocol::HOP_BY_HOP,
                    protocol::ROUTING,
                    protocol::DESTINATION,
                ] {
                    let mut frame = whole.clone();
                    frame[LINK + 6] = first;
                    frame[LINK + 41] = 200;
                    malformed("an extension header that is too long", &frame)?;
                }
            }
            for version in [0, 5, 15] {
                let mut frame = whole.clone();
                frame[LINK] = version << 4 | frame[LINK] & 15;
                malformed("another version", &frame)?;
            }
            // Lengths that only the endpoint believes or not: passed as they are.
            let (_, _, seen, endpoint) = PLAIN.ends(v4);
            let lie = |frame: &[u8]| {
                let mut frame = frame.to_vec();
                let l4 = LINK + header;
                if tcp {
                    frame[l4 + 12] = 0xf0;
                } else {
                    frame[l4 + 4..l4 + 6].copy_from_slice(&[0xff, 0xff]);
                }
                frame
            };
            let then = PLAIN.toward_endpoint(scene, &request(v4, tcp), seen, endpoint);
            let Then::Sent(frame) = then else {
                anyhow::bail!("{then:?}");
            };
            let then = Then::Sent(lie(&frame));
            let reasons = [Reason::Masqueraded];
            check(
                scene,
                "a lie inside",
                ("eth0", false),
                &lie(&whole),
                &then,
                &reasons,
            )?;
            // Behind the packet's end may be padding.
            scene.forget()?;
            let pad = |frame: &[u8]| [frame, &[0xee; 9]].concat();
            let then = Then::Sent(pad(&frame));
            check(
                scene,
                "padding",
                ("eth0", false),
                &pad(&whole),
                &then,
                &reasons,
            )?;
        }
        Ok(())
    })
}

fn part(from: usize, to: usize, more: bool) -> Part {
    Part { from, to, more }
}

fn fragments_follow_their_first() -> Result<()> {
    scene(|scene| {
        for (v4, tcp) in ALL {
            scene.forget()?;
            let mut whole = request(v4, tcp);
            whole.identification = 0x7777;
            match &mut whole.payload {
                Payload::Tcp { data, .. } | Payload::Udp { data, .. } => *data = vec![9; 3000],
                _ => {}
            }
            let (client, vip, seen, endpoint) = PLAIN.ends(v4);
            let parts = [
                part(0, 1200, true),
                part(1200, 2400, true),
                part(2400, 9999, false),
            ];
            for (at, part) in parts.into_iter().enumerate() {
                whole.part = Some(part);
                let then = PLAIN.toward_endpoint(scene, &whole, seen, endpoint);
                let reasons: &[Reason] = if at == 0 { &[Reason::Masqueraded] } else { &[] };
                let what = format!("fragment {at}");
                check(
                    scene,
                    &what,
                    ("eth0", false),
                    &whole.frame(),
                    &then,
                    reasons,
                )?;
            }
            // The fragments of the reply: the first arrives first, the others in any order.
            let mut back = packet(tcp, endpoint, seen, flags::ACK);
            back.payload = payload(tcp, [endpoint.1, seen.1], flags::ACK, &[3; 3000]);
            for at in [0, 2, 1] {
                back.part = Some(parts[at]);
                let then = sent(scene, PLAIN.out, PLAIN.at, &passed(&back, vip, client));
                check(scene, "back", (PLAIN.out, false), &back.frame(), &then, &[])?;
            }
            // Of another datagram, whose first fragment was not seen: at an address that has other uses the fragment
            // may belong to them; a cluster IP has no other use.
            whole.identification = 0x7778;
            whole.part = Some(parts[1]);
            check(
                scene,
                "unknown",
                ("eth0", false),
                &whole.frame(),
                &Then::Alone,
                &[],
            )?;
            (whole.dst, _) = super::vip(v4, "cluster", 13);
            let frame = whole.frame();
            let (then, reasons): (_, &[Reason]) = if tcp {
                // Of no connection that is known: the stack's, as whole packets of none are.
                (Then::Alone, &[])
            } else {
                (Then::Dropped, &[Reason::UnknownFragment])
            };
            check(
                scene,
                "of a cluster IP",
                ("eth0", false),
                &frame,
                &then,
                reasons,
            )?;
        }
        Ok(())
    })
}

/// A later fragment that overlaps others, also the first one's header, goes where the first fragment of its sender went. First
/// fragments that contradict each other change the ports of this sender's datagram only.
fn fragments_that_overlap_are_their_senders_own() -> Result<()> {
    scene(|scene| {
        for (v4, tcp) in ALL {
            scene.forget()?;
            let (client, vip, seen, endpoint) = PLAIN.ends(v4);
            let fragment = |port: u16, part| {
                let mut fragment = packet(tcp, (client.0, port), vip, flags::SYN);
                fragment.identification = 0x7777;
                fragment.payload = payload(tcp, [port, vip.1], flags::SYN, &[9; 3000]);
                fragment.part = Some(part);
                fragment
            };
            let passes = |what: &str, port: u16, part, reasons: &[Reason]| {
                let whole = fragment(port, part);
                let then = PLAIN.toward_endpoint(scene, &whole, (seen.0, port), endpoint);
                let at = (PLAIN.at, false);
                check(scene, what, at, &whole.frame(), &then, reasons)
            };
            let known = || -> Result<Vec<(Addr, u16)>> {
                let entries = scene.rig.fragments.entries()?.into_iter();
                let mut known: Vec<_> = entries
                    .map(|(key, first)| (key.src, first.src_port.host()))
                    .collect();
                known.sort_unstable();
                Ok(known)
            };
            let first = part(0, 1200, true);
            passes("the first", client.1, first, &[Reason::Masqueraded])?;
            // Behind the header, whose checksum would have to change: the programs know that only of first fragments.
            for (from, to, more) in [(24, 1200, true), (600, 1800, true), (24, 1200, false)] {
                passes("overlapping", client.1, part(from, to, more), &[])?;
            }
            // Another first fragment of the same number, of another flow of the client.
            let other = client.1 + 1;
            scene.throw(PLAIN.at, false, &fragment(other, first).frame())?;
            let client = Addr::from(client.0);
            ensure!(known()? == [(client, other)], "{:?}", known()?);
            // The same number from another host.
            let mut strange = fragment(30_000, first);
            strange.src = ip(v4, "198.51.100.99", "2001:db8:99::99");
            scene.throw(PLAIN.at, false, &strange.frame())?;
            let known = known()?;
            ensure!(
                known.len() == 2 && known.contains(&(client, other)),
                "{known:?}"
            );
        }
        Ok(())
    })
}
