//! Questions to the kernel's routing room (`rtnetlink(7)`), one after the other, each answered
//! before the next.

use std::{io, ops::RangeInclusive};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader,
    NetlinkMessage, NetlinkPayload, Parseable as _,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// How often a list that changed while it was read is read again.
const ATTEMPTS: RangeInclusive<u32> = 1..=8;

/// A socket to the kernel, in the network namespace of the thread that opened it.
pub struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    /// Opens it.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // Errors come with a sentence then; kernels that cannot do so say less.
        let _ = socket.set_ext_ack(true);
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// Has the kernel answer [`Netlink::list`] with what matches all of a question (`NETLINK_GET_STRICT_CHK`), and not
    /// with everything of its kind.
    pub fn filter(&self) -> io::Result<()> {
        self.socket.set_netlink_get_strict_chk(true)
    }

    /// Everything of the kind that `question` asks for.
    pub fn list(&mut self, question: &RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        for _ in ATTEMPTS {
            let mut answers = Vec::new();
            let whole = self.exchange(question.clone(), NLM_F_DUMP, |m| answers.push(m))?;
            if whole {
                return Ok(answers);
            }
        }
        Err(io::Error::other(
            "the list changes faster than it can be read",
        ))
    }

    /// What is answered to a question that is no list.
    pub fn ask(&mut self, question: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        let mut answers = Vec::new();
        self.exchange(question, NLM_F_ACK, |m| answers.push(m))?;
        Ok(answers)
    }

    /// Has something done; `flags` besides that it is a request with an answer.
    pub fn request(&mut self, what: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.exchange(what, NLM_F_ACK | flags, |_| {}).map(|_| ())
    }

    /// Whether the answer is consistent.
    fn exchange(
        &mut self,
        message: RouteNetlinkMessage,
        flags: u16,
        mut each: impl FnMut(RouteNetlinkMessage),
    ) -> io::Result<bool> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;

        let mut whole = true;
        loop {
            let (datagram, _) = self.socket.recv_from_full()?;
            let mut rest = &datagram[..];
            while let Some((header, body)) = split(rest) {
                rest = body.rest;
                if header.sequence_number != self.sequence {
                    continue; // the tail of an answer that was given up
                }
                whole &= header.flags & NLM_F_DUMP_INTR == 0;
                let Ok(answer) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(body.message)
                else {
                    // A thing that a newer kernel has and we do not know is not one of ours.
                    continue;
                };
                match answer.payload {
                    NetlinkPayload::Done(done) if done.code < 0 => {
                        return Err(io::Error::from_raw_os_error(-done.code));
                    }
                    NetlinkPayload::Done(_) => return Ok(whole),
                    NetlinkPayload::Error(error) if error.code.is_none() => return Ok(whole),
                    NetlinkPayload::Error(error) => return Err(error.to_io()),
                    NetlinkPayload::InnerMessage(inner) => each(inner),
                    _ => {}
                }
            }
        }
    }
}

struct Body<'a> {
    message: &'a [u8],
    rest: &'a [u8],
}

/// The first message of a datagram, and what follows it.
fn split(bytes: &[u8]) -> Option<(NetlinkHeader, Body<'_>)> {
    let header = NetlinkHeader::parse(&NetlinkBuffer::new_checked(bytes).ok()?).ok()?;
    let length = header.length as usize;
    let message = bytes.get(..length).filter(|m| m.len() >= 16)?;
    let rest = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((header, Body { message, rest }))
}
