//! Questions to the kernel's routing room (`rtnetlink(7)`), one after the other, in the types of `netlink-packet-route`.

use std::{io, ops::RangeInclusive};

use netlink_packet_core::{NetlinkDeserializable as _, NetlinkHeader, NetlinkSerializable as _};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage, route::RouteMessage, rule::RuleMessage,
};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::netlink;

/// How often a list that changed while it was read is read again.
const ATTEMPTS: RangeInclusive<u32> = 1..=8;

/// A socket to the kernel, in the network namespace of the thread that opened it.
pub struct Netlink(netlink::Netlink);

impl Netlink {
    /// Opens it.
    pub fn open() -> io::Result<Self> {
        netlink::Netlink::open(NETLINK_ROUTE).map(Self)
    }

    /// Makes the kernel filter the answer to [`Netlink::list`] by all fields of the question, and not return all
    /// objects of the kind.
    pub fn filter(&self) -> io::Result<()> {
        self.0.filter()
    }

    /// Everything of the kind that `question` asks for.
    pub fn list(&mut self, question: &RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        let request = content(question);
        for _ in ATTEMPTS {
            let mut answers = Vec::new();
            let listed = self
                .0
                .dump_kinds(question.message_type(), &request, |kind, item| {
                    answers.extend(message(kind, item));
                });
            match listed {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                listed => return listed.map(|()| answers),
            }
        }
        Err(io::Error::other(
            "the list changes faster than it can be read",
        ))
    }

    /// Returns the routing rules of a family. A kernel without the family has none.
    pub fn rules(&mut self, family: AddressFamily) -> io::Result<Vec<RuleMessage>> {
        let mut question = RuleMessage::default();
        question.header.family = family;
        let answers = self.list_of_family(&RouteNetlinkMessage::GetRule(question))?;
        let rules = answers.into_iter().filter_map(|answer| match answer {
            RouteNetlinkMessage::NewRule(rule) if rule.header.family == family => Some(rule),
            _ => None,
        });
        Ok(rules.collect())
    }

    /// Returns the routes of a family, in all tables. A kernel without the family has none.
    pub fn routes(&mut self, family: AddressFamily) -> io::Result<Vec<RouteMessage>> {
        let mut question = RouteMessage::default();
        question.header.address_family = family;
        let answers = self.list_of_family(&RouteNetlinkMessage::GetRoute(question))?;
        let is_its = |route: &RouteMessage| route.header.address_family == family;
        let routes = answers.into_iter().filter_map(|answer| match answer {
            RouteNetlinkMessage::NewRoute(route) if is_its(&route) => Some(route),
            _ => None,
        });
        Ok(routes.collect())
    }

    /// Like [`Netlink::list`], for one address family. Returns nothing if the kernel does not have the family.
    pub fn list_of_family(
        &mut self,
        question: &RouteNetlinkMessage,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        match self.list(question) {
            Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => Ok(Vec::new()),
            answers => answers,
        }
    }

    /// Removes a rule or route, which may be gone meanwhile.
    pub fn remove_if_there(&mut self, what: &RouteNetlinkMessage) -> io::Result<()> {
        match self.request(what, 0) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {
                Ok(())
            }
            done => done,
        }
    }

    /// Returns the answers to a question that is no list.
    pub fn ask(&mut self, question: &RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        let mut answers = Vec::new();
        let kind = question.message_type();
        self.0.request(kind, 0, &content(question), |kind, item| {
            answers.extend(message(kind, item));
        })?;
        Ok(answers)
    }

    /// Sends a request that the kernel acknowledges. `flags` are added to the flags of a request.
    pub fn request(&mut self, what: &RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.0
            .request(what.message_type(), flags, &content(what), |_, _| {})
    }
}

/// A message without its header, as bytes.
fn content(message: &RouteNetlinkMessage) -> Vec<u8> {
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// Parses an answer. Returns `None` for an object of a newer kernel that this agent does not know, because it is not
/// one of ours.
fn message(kind: u16, content: &[u8]) -> Option<RouteNetlinkMessage> {
    let mut header = NetlinkHeader::default();
    header.message_type = kind;
    RouteNetlinkMessage::deserialize(&header, content).ok()
}
