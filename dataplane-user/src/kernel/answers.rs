//! What a mesh leaves in workloads' network namespaces besides a program, and in the node's: the rules
//! and routes by which answers to a client's address come back to the proxy (`route_answers`), and
//! packets to sockets that they were given to (`route_to_sockets`).

use std::{io, os::fd::AsFd, path::PathBuf};

use dataplane_common::capture::{Enrolled, FROM_CLIENT};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAttribute, RouteMessage, RouteType},
    rule::{RuleAttribute, RuleMessage},
};

use super::{
    capture::{self, Namespace, TABLE},
    error::{Doing, Error},
    map::Hash,
    namespaces,
    pins::{CleanupItem, Pins, spec},
    rtnetlink::Netlink,
    sys,
};

/// Ours in one network namespace.
struct Left {
    path: PathBuf,
    namespace: Namespace,
    what: Vec<(AddressFamily, What)>,
}

/// What a rule asks of a packet's mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The bits that are looked at.
    pub mask: u32,
    /// What they are.
    pub value: u32,
}

impl Mark {
    /// It has all these bits, whatever others it has, which are other people's.
    pub const fn with(bits: u32) -> Self {
        Self {
            mask: bits,
            value: bits,
        }
    }
}

#[derive(Clone, Copy)]
enum What {
    /// Of packets with this mark.
    Rule(Mark),
    Route,
}

impl What {
    fn text(self, family: AddressFamily) -> String {
        let family = match family {
            AddressFamily::Inet6 => "IPv6",
            _ => "IPv4",
        };
        match self {
            Self::Rule(Mark { value, mask }) => {
                format!("{family} rule: fwmark {value:#x}/{mask:#x} lookup {TABLE}")
            }
            Self::Route => format!("{family} route: local default dev lo table {TABLE}"),
        }
    }
}

/// Removes them from the namespaces whose workloads the tables know, or that are linked with ours:
/// what else there is on this machine may be another node's, of a practice cluster. With `dry_run`,
/// says what it would remove.
pub fn remove(pins: &Pins, dry_run: bool) -> Result<Vec<CleanupItem>, Error> {
    let mut enrolled = Vec::new();
    // Of another shape, or of nobody: then links tell.
    if let Ok(Some((map, info))) = pins.open_map(spec("NAMESPACES")) {
        let map = Hash::<u64, Enrolled>::from_fd(map, info.max_entries);
        let entries = map
            .entries()
            .doing(|| "cannot read table NAMESPACES".to_owned())?;
        // The guard notes the others as well, with nothing to capture of them.
        let captured = entries
            .into_iter()
            .filter(|(_, enrolled)| enrolled.flags != 0);
        enrolled.extend(captured.map(|(cookie, _)| cookie));
    }
    let own = sys::netns_cookie()
        .doing(|| "cannot ask for this network namespace's cookie".to_owned())?;
    let visited = namespaces::visit(|path| {
        let Some(what) = list().ok().filter(|what| !what.is_empty()) else {
            return Ok(None);
        };
        Ok(Some(Left {
            path: path.into(),
            namespace: capture::this_namespace()?,
            what,
        }))
    });
    let mut items = Vec::new();
    for left in visited.found.into_iter().flatten() {
        let cookie = left.namespace.cookie;
        // Our own has them for workloads that are captured by their packets.
        let ours = cookie == own
            || enrolled.contains(&cookie)
            || capture::is_linked(&left.namespace).unwrap_or(false);
        if !ours {
            continue;
        }
        if !dry_run {
            let what = left.what.clone();
            namespaces::within(left.namespace.file.as_fd(), move || remove_here(&what)).doing(
                || {
                    let place = left.path.display();
                    format!("cannot remove our rules and routes from {place}")
                },
            )?;
        }
        items.extend(left.what.iter().map(|(family, what)| CleanupItem {
            path: format!("netns:{}", left.path.display()).into(),
            what: what.text(*family),
            ours: true,
        }));
    }
    Ok(items)
}

/// Ours in the network namespace that this thread is in.
fn list() -> io::Result<Vec<(AddressFamily, What)>> {
    let mut netlink = Netlink::open()?;
    let mut found = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let marks = rules(&mut netlink, family)?;
        found.extend(marks.into_iter().map(|mark| (family, What::Rule(mark))));
        let mut question = RouteMessage::default();
        question.header.address_family = family;
        let answers = netlink.list(&RouteNetlinkMessage::GetRoute(question))?;
        if answers.iter().any(|answer| is_our_route(answer, family)) {
            found.push((family, What::Route));
        }
    }
    Ok(found)
}

/// The marks of our rules: one that is there is not to be made again, since the kernel takes two rules
/// of which nobody said the preference for different ones.
pub fn rules(netlink: &mut Netlink, family: AddressFamily) -> io::Result<Vec<Mark>> {
    let mut question = RuleMessage::default();
    question.header.family = family;
    let answers = netlink.list(&RouteNetlinkMessage::GetRule(question))?;
    let ours = answers.into_iter().filter_map(|answer| match answer {
        RouteNetlinkMessage::NewRule(rule) if rule.header.family == family => our_mark(&rule),
        _ => None,
    });
    Ok(ours.collect())
}

/// Nobody else's rule has this table and this bit.
fn our_mark(rule: &RuleMessage) -> Option<Mark> {
    let table = RuleAttribute::Table(TABLE);
    if !rule.attributes.contains(&table) {
        return None;
    }
    let (mut value, mut mask) = (0, u32::MAX);
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::FwMark(found) => value = *found,
            RuleAttribute::FwMask(found) => mask = *found,
            _ => {}
        }
    }
    (value & FROM_CLIENT != 0).then_some(Mark { mask, value })
}

fn is_our_route(answer: &RouteNetlinkMessage, family: AddressFamily) -> bool {
    let RouteNetlinkMessage::NewRoute(route) = answer else {
        return false;
    };
    route.header.address_family == family
        && route.header.kind == RouteType::Local
        && route.attributes.contains(&RouteAttribute::Table(TABLE))
}

fn remove_here(what: &[(AddressFamily, What)]) -> io::Result<()> {
    let mut netlink = Netlink::open()?;
    for (family, what) in what {
        let request = match what {
            What::Rule(mark) => RouteNetlinkMessage::DelRule(capture::answers_rule(*family, *mark)),
            What::Route => RouteNetlinkMessage::DelRoute(capture::answers_route(*family)),
        };
        match netlink.request(request, 0) {
            Err(error) if !matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {
                return Err(error);
            }
            _ => {}
        }
    }
    Ok(())
}
