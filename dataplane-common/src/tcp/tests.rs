use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use proptest::{prelude::*, test_runner::TestCaseResult};

use super::{
    flags::{ACK, FIN, RST, SYN},
    *,
};
use crate::seen::{FIN as CLOSED, PACKET, RST as RESET};

const REQUESTS: bool = false;
const REPLIES: bool = true;

/// A flow's two words.
struct Flow([AtomicU64; 2]);

impl Flow {
    /// A flow of which nothing is known.
    fn unknown() -> Self {
        Self(Default::default())
    }

    /// A flow that a SYN made.
    fn opened(syn: u32) -> Self {
        Self(begin(&segment(SYN, syn, 0), 0).map(AtomicU64::new))
    }

    /// A flow after its handshake.
    fn established(client: u32, server: u32) -> Self {
        let flow = Self::opened(client);
        let seen = flow.see(REPLIES, SYN | ACK, server, client.wrapping_add(1));
        assert_eq!(seen, PACKET | ANEW);
        let [client, server] = [client, server].map(|number| number.wrapping_add(1));
        assert_eq!(flow.see(REQUESTS, ACK, client, server), PACKET);
        flow
    }

    /// As the programs do, except for [`GOES_ON`].
    fn see(&self, replies: bool, flags: u8, end: u32, ack: u32) -> u8 {
        self.judge(replies, flags, end, ack) & !GOES_ON
    }

    fn judge(&self, replies: bool, flags: u8, end: u32, ack: u32) -> u8 {
        let segment = segment(flags, end, ack);
        let asked = replies && Opening((&self.0).load(OPENING)).is_asked();
        if flags & (SYN | FIN | RST) == 0 && self.positions().is_near(replies, end) && !asked {
            return PACKET | GOES_ON;
        }
        judge(&self.0, replies, &segment)
    }

    fn positions(&self) -> Positions {
        Positions((&self.0).load(POSITIONS))
    }
}

fn segment(flags: u8, end: u32, ack: u32) -> Segment {
    let flags = flags.into();
    Segment { end, ack, flags }
}

#[test]
fn a_reset_counts_where_its_direction_is() {
    for client in [1000, u32::MAX - 5, 0] {
        let server = client.wrapping_mul(7).wrapping_add(0x8000_0000);
        for (replies, own, other) in [(REQUESTS, client, server), (REPLIES, server, client)] {
            for (flags, by, counts) in [
                (RST, 1, true),
                (RST | ACK, 1, true),
                (RST, 20_000, true),
                (RST, -20_000, true),
                (RST, 40_000, false),
                (RST, -40_000, false),
                (RST | ACK, i32::MIN, false),
            ] {
                let flow = Flow::established(client, server);
                let before = flow.positions();
                let ack = other.wrapping_add(9000);
                let seen = flow.see(replies, flags, own.wrapping_add_signed(by), ack);
                assert_eq!(seen, if counts { PACKET | RESET } else { 0 }, "{own} {by}");
                assert_eq!(flow.positions(), before);
            }
        }
    }
}

/// A closed port answers with sequence number 0, and acknowledges the SYN: with or without its data.
#[test]
fn a_refusal_counts_if_it_acknowledges_the_syn() {
    for (ack, counts) in [(90_001, true), (90_201, true), (91_000, false), (0, false)] {
        let flow = Flow(begin(&segment(SYN, 90_200, 0), 0).map(AtomicU64::new));
        let seen = flow.see(REPLIES, RST | ACK, 0, ack);
        assert_eq!(seen != 0, counts, "{ack}");
    }
    let flow = Flow::opened(1_000_000);
    assert_eq!(flow.see(REPLIES, RST | ACK, 0, 0), 0);
    assert_eq!(
        flow.see(REPLIES, RST, 0, 1_000_001),
        0,
        "it acknowledges nothing"
    );
    // The client's own RST, to an answer that it does not expect.
    assert_eq!(flow.see(REQUESTS, RST, 1_000_001, 0), PACKET | RESET);
}

/// An endpoint that still has an earlier connection from the same port answers a SYN with an ACK (RFC 5961, section
/// 4.2).
#[test]
fn a_challenge_answers_nothing() {
    let flow = Flow::opened(100);
    assert_eq!(flow.see(REPLIES, ACK, 7, 9), 0);
    assert_eq!(flow.see(REPLIES, SYN | ACK, 40, 101), PACKET | ANEW);
    // Nothing is known of a flow that was taken over.
    assert_eq!(Flow::unknown().see(REPLIES, ACK, 7, 9), PACKET);
}

/// A flow that was taken over from an older agent has no positions yet: the first segment of each direction counts with
/// any number.
#[test]
fn what_is_not_known_is_learnt() {
    assert_eq!(Flow::unknown().see(REPLIES, RST, 77, 0), PACKET | RESET);
    let flow = Flow::unknown();
    assert_eq!(flow.see(REPLIES, ACK, 5_000_000, 900), PACKET);
    assert_eq!(flow.see(REQUESTS, ACK, 1000, 5_000_000), PACKET);
    assert_eq!(flow.see(REPLIES, RST, 77, 0), 0);
    assert_eq!(flow.see(REQUESTS, RST, 770_000, 0), 0);
    let fin = flow.see(REQUESTS, ACK | FIN, 1000, 5_000_000);
    assert_eq!(fin, PACKET | CLOSED);
}

#[test]
fn a_fin_counts_if_both_numbers_are_plausible() {
    let (client, server) = (50, 3_000_000_000);
    for (end, ack, counts) in [
        (51, 3_000_000_001, true),
        (1_000_000, 3_000_000_001, true),
        (1_000_000_000, 3_000_000_001, false),
        (51, 1_000_000_000, false),
        // A window that Linux opens by default is on its way.
        (51, 3_000_000_001 - 30 * (1 << 20), true),
        (51, 3_000_000_001 - 40 * (1 << 20), false),
        // No endpoint acknowledges bytes that were not sent.
        (51, 3_000_000_001 + 60_000, true),
        (51, 3_000_000_001 + 4 * (1 << 20), false),
    ] {
        let flow = Flow::established(client, server);
        let seen = flow.see(REQUESTS, ACK | FIN, end, ack);
        let wanted = if counts { PACKET | CLOSED } else { PACKET };
        assert_eq!(seen, wanted, "{end} {ack}");
    }
    let flow = Flow::established(client, server);
    assert_eq!(
        flow.see(REQUESTS, FIN, 51, 0),
        PACKET,
        "no endpoint takes it without an ACK"
    );
    let flow = Flow::opened(client);
    assert_eq!(flow.see(REQUESTS, ACK | FIN, 51, 3_000_000_001), PACKET);
    flow.see(REPLIES, SYN | ACK, server, 51);
    let seen = flow.see(REQUESTS, ACK | FIN, 51, 3_000_000_001);
    assert_eq!(seen, PACKET | CLOSED);
}

/// A sender that does not know the numbers cannot move a position to a number that it knows, and cannot begin the flow
/// anew.
#[test]
fn strangers_move_no_position() {
    let (client, server) = (0x1000_0000, 0x9000_0000);
    let flow = Flow::established(client, server);
    let before = flow.positions();
    for step in 0..1000_u32 {
        let number = step.wrapping_mul(0x0041_5926).wrapping_add(0x5000_0000);
        if is_within(number, client, NEAR, FAR) {
            continue;
        }
        for (flags, counted) in [(ACK, PACKET), (ACK | FIN, PACKET), (SYN, PACKET), (RST, 0)] {
            assert_eq!(flow.see(REQUESTS, flags, number, 0x1234_5678), counted);
            assert_eq!(flow.positions(), before);
        }
    }
}

/// The endpoint has lost the connection, and accepts a new connection from the same port.
#[test]
fn a_connection_begins_anew() {
    let flow = Flow::established(1000, 2_000_000_000);
    assert_eq!(flow.see(REQUESTS, SYN, 4_000_000_000, 0), PACKET);
    assert_eq!(
        flow.see(REQUESTS, RST, 4_000_000_000, 0),
        0,
        "nobody has answered yet"
    );
    assert_eq!(flow.see(REPLIES, SYN | ACK, 77, 1001), PACKET);
    assert_eq!(flow.see(REPLIES, RST, 77, 0), 0, "it answered another SYN");
    assert_eq!(
        flow.see(REPLIES, SYN | ACK, 77, 4_000_000_001),
        PACKET | ANEW
    );
    assert_eq!(
        flow.see(REPLIES, SYN | ACK, 77, 4_000_000_001),
        PACKET,
        "the same again begins nothing"
    );
    assert_eq!(flow.see(REQUESTS, ACK, 4_000_000_001, 78), PACKET);
    assert_eq!(flow.see(REQUESTS, RST, 1001, 0), 0);
    assert_eq!(flow.see(REPLIES, RST, 2_000_000_001, 0), 0);
    assert_eq!(flow.see(REPLIES, RST, 78, 0), PACKET | RESET);
    assert_eq!(flow.see(REQUESTS, RST, 4_000_000_001, 0), PACKET | RESET);
}

/// Segments that show that a connection goes on after a RST.
#[test]
fn a_connection_goes_on_by_its_own_segments() {
    let (client, server) = (1000, 2_000_000_000);
    let flow = Flow::established(client, server);
    for (flags, end, ack, goes_on) in [
        (ACK, client + 1, server + 1, true),
        (ACK, client + 500_000, server + 1, true),
        (ACK | FIN, client + 500_000, server + 1, true),
        (ACK, client + 1_000_000_000, server + 1, false),
        (SYN, client + 1, 0, false),
        (RST, client + 500_000, 0, false),
    ] {
        let seen = flow.judge(REQUESTS, flags, end, ack);
        assert_eq!(seen & GOES_ON != 0, goes_on, "{flags} {end}");
    }
}

/// Only an acknowledgement near the endpoint's position proves that the client has seen the endpoint's answer.
#[test]
fn a_client_acknowledges_what_it_has_seen() {
    let (client, server) = (1000, 2_000_000_000);
    let known = Flow::established(client, server).positions();
    for (positions, flags, ack, acknowledges) in [
        (known, ACK, server + 1, true),
        (known, ACK | FIN, server + NEAR, true),
        (known, ACK, server - NEAR, true),
        (known, ACK, server + 1 + NEAR, false),
        (known, ACK, server - 1 - NEAR, false),
        (known, 0, server + 1, false),
        (known, FIN, server + 1, false),
        (known, ACK | RST, server + 1, false),
        (known, ACK | SYN, server + 1, false),
        // The client's own position.
        (known, ACK, client + 1, false),
        (Flow::opened(client).positions(), ACK, 0, false),
    ] {
        let segment = segment(flags, client + 1, ack);
        let found = positions.are_acknowledged_by(&segment);
        assert_eq!(found, acknowledges, "{flags:#b} {ack}");
    }
}

/// A quoted packet proves nothing about its flow, and no packet on the wire looks like one.
#[test]
fn a_quoted_packet_is_no_segment() {
    assert!(Segment::QUOTED.is_quoted());
    // Bits that packets add to a flow lie elsewhere.
    assert_eq!((GOES_ON, ANEW), (64, 128));
    for flags in 0..=u8::MAX {
        assert!(!segment(flags, 1, 2).is_quoted() && !Segment::QUOTED.has(flags));
    }
}

/// The words of a new flow: the time of a datagram, or the number of a SYN.
#[test]
fn a_flow_begins() {
    for (first, words) in [
        (segment(0, 0, 0), [77, 0]),
        (Segment::QUOTED, [77, 0]),
        (segment(ACK, 5, 6), [0, 0]),
        (segment(SYN, 5, 6), [5, 5]),
        // 0 stands for unknown.
        (segment(SYN, 0, 6), [1, 1]),
    ] {
        assert_eq!(begin(&first, 77), words, "{first:?}");
    }
}

#[test]
fn a_udp_flow_is_a_stream_after_two_seconds() {
    let begun = Flow(begin(&segment(0, 0, 0), 1000).map(AtomicU64::new));
    assert!(!is_stream(&begun.0, 1000) && !is_stream(&begun.0, 1000 + STREAM_AFTER));
    assert!(is_stream(&begun.0, 1001 + STREAM_AFTER));
    assert_eq!(STREAM_AFTER, 2_000_000_000);
}

/// A client's SYNs ask an endpoint that takes no new connections, and give it up only if it has been silent twice.
#[test]
fn an_endpoint_is_given_up_once_it_is_silent() {
    let at = Tick::from_number;
    let (client, server) = (1000, 2_000_000_000);
    // Returns the tick at which the SYNs give up the endpoint, if it answers with these acknowledgements.
    let silent = |answers: &dyn Fn(u16) -> Option<u32>| {
        let flow = Flow::established(client, server);
        (0..200).find(|tick| {
            let _ = flow.see(REQUESTS, SYN, 5_000_000 + u32::from(*tick), 0);
            let gone = ask(&flow.0, at(u16::MAX.wrapping_add(*tick)));
            if let Some(ack) = answers(*tick) {
                let _ = flow.see(REPLIES, ACK, server + 1, ack);
            }
            gone
        })
    };
    let own = client + 1;
    assert_eq!(silent(&|_| None), Some(4));
    // Challenges: only to the first SYN, to one of the next, now and then.
    assert_eq!(silent(&|tick| (tick == 0).then_some(own)), Some(5));
    assert_eq!(silent(&|tick| (tick == 3).then_some(own)), Some(8));
    assert_eq!(silent(&|tick| tick.is_multiple_of(3).then_some(own)), None);
    // The sender of a forged answer does not know the client's sequence numbers.
    assert_eq!(silent(&|_| Some(own + 1_000_000_000)), Some(4));
}

/// A client's SYN gives up an endpoint at once if the service no longer lists this endpoint, even if it answers.
#[test]
fn an_endpoint_that_has_departed_is_given_up() {
    let (client, server) = (1000, 2_000_000_000);
    let flow = Flow::established(client, server);
    assert!(!ask(&flow.0, Tick::from_number(7)));
    depart(&flow.0);
    depart(&flow.0);
    assert!(ask(&flow.0, Tick::from_number(7)), "for good");
    assert!(Opening((&flow.0).load(OPENING)).is_asked(), "still");
    let _ = flow.see(REPLIES, ACK, server + 1, client + 1);
    assert!(!Opening((&flow.0).load(OPENING)).is_asked(), "it answers");
    let _ = flow.see(REQUESTS, SYN, 5_000_000, 0);
    assert!(ask(&flow.0, Tick::from_number(8)));
}

/// Only the client's SYN is the one to answer, and only the endpoint's segments answer.
#[test]
fn each_side_speaks_for_itself() {
    let (client, server) = (1000, 2_000_000_000);
    let flow = Flow::established(client, server);
    let opening = || (&flow.0).load(OPENING);
    let before = opening();
    assert_eq!(flow.see(REPLIES, SYN, 77, 0), PACKET);
    assert_eq!(opening(), before);
    assert!(!ask(&flow.0, Tick::from_number(7)));
    let asked = opening();
    assert_eq!(
        flow.see(REQUESTS, ACK, client + 500_000, server + 1),
        PACKET
    );
    assert_eq!(opening(), asked);
}

/// A flow's words that another CPU changes before each exchange.
#[derive(Clone, Copy)]
struct Contended<'a>(&'a Flow, &'a AtomicU64);

impl Line for Contended<'_> {
    fn load(self, word: usize) -> u64 {
        (&self.0.0).load(word)
    }

    fn load_after(self, word: usize, _: u64) -> u64 {
        self.load(word)
    }

    fn both(one: u64, other: u64) -> u64 {
        one | other
    }

    fn store(self, word: usize, value: u64) {
        (&self.0.0).store(word, value);
    }

    fn exchange(self, _: usize, _: u64, _: u64) -> bool {
        self.1.fetch_add(1, Relaxed);
        false
    }

    fn add(self, word: usize, amount: u64) -> u64 {
        (&self.0.0).add(word, amount)
    }
}

/// The verifier needs a bound, and a packet waits for nobody.
#[test]
fn an_exchange_is_tried_three_times() {
    let flow = Flow::established(1000, 2_000_000_000);
    let tries = AtomicU64::new(0);
    depart(Contended(&flow, &tries));
    assert_eq!(tries.swap(0, Relaxed), 3);
    let far = segment(ACK | FIN, 500_000, 2_000_000_001);
    let counts = judge(Contended(&flow, &tries), REQUESTS, &far);
    assert_eq!(
        (counts, tries.load(Relaxed)),
        (PACKET | CLOSED | GOES_ON, 3)
    );
}

/// The next step of a sender.
#[derive(Clone, Debug)]
enum Step {
    /// So many bytes in one segment (those of GSO and BIG TCP are large), acknowledging all but so many; earlier
    /// segments may be lost.
    Send {
        replies: bool,
        bytes: u32,
        unacknowledged: u32,
    },
    /// A segment that was sent before, so far back.
    Again { replies: bool, back: u32 },
}

fn step() -> impl Strategy<Value = Step> {
    let send = (
        any::<bool>(),
        0_u32..8_000_000,
        0_u32..UNACKNOWLEDGED - NEAR,
    );
    let again = (any::<bool>(), 0_u32..10_000_000);
    prop_oneof![
        4 => send.prop_map(|(replies, bytes, unacknowledged)| Step::Send {
            replies,
            bytes,
            unacknowledged,
        }),
        1 => again.prop_map(|(replies, back)| Step::Again { replies, back }),
    ]
}

fn follows(start: [u32; 2], steps: &[Step]) -> TestCaseResult {
    let flow = Flow::established(start[0], start[1]);
    let mut sent = start.map(|number| number.wrapping_add(1));
    for step in steps {
        match *step {
            Step::Send {
                replies,
                bytes,
                unacknowledged,
            } => {
                let own = usize::from(replies);
                sent[own] = sent[own].wrapping_add(bytes);
                let ack = sent[1 - own].wrapping_sub(unacknowledged);
                prop_assert_eq!(flow.see(replies, ACK, sent[own], ack), PACKET);
            }
            Step::Again { replies, back } => {
                let own = usize::from(replies);
                let end = sent[own].wrapping_sub(back);
                prop_assert_eq!(flow.see(replies, ACK, end, sent[1 - own]), PACKET);
            }
        }
        for (own, replies) in [REQUESTS, REPLIES].into_iter().enumerate() {
            let position = flow.positions().of(replies);
            prop_assert!(
                is_within(sent[own], position, NEAR, NEAR),
                "{sent:?} {position}"
            );
        }
    }
    // Either side can end it at any time, in any way.
    for (own, replies) in [REQUESTS, REPLIES].into_iter().enumerate() {
        prop_assert_eq!(flow.see(replies, RST, sent[own], 0), PACKET | RESET);
        let fin = flow.see(replies, FIN | ACK, sent[own], sent[1 - own]);
        prop_assert_eq!(fin, PACKET | CLOSED);
    }
    Ok(())
}

proptest! {
    /// The positions follow every connection, wherever its numbers begin, and its end counts.
    #[test]
    fn positions_follow(start: [u32; 2], steps in prop::collection::vec(step(), 0..60)) {
        follows(start, &steps)?;
    }
}
