//! The rules and routes that a mesh leaves in workloads' network namespaces besides a program, and in the node's
//! (`capture/routing.rs`).

use std::{io, os::fd::AsFd, path::PathBuf};

use dataplane_common::capture::Enrolled;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::item::CleanupItem;
use crate::{
    capture::{
        Namespace,
        interface_rules::{self, InterfaceRule},
        is_linked, machine_marks,
        routing::{self, Mark, TABLE},
        this_namespace,
    },
    error::{Doing, Error},
    map::Hash,
    namespaces,
    pins::{Pins, spec},
    rtnetlink::Netlink,
    sys,
};

/// Ours in one network namespace.
struct Leftovers {
    path: PathBuf,
    namespace: Namespace,
    what: Vec<(AddressFamily, What)>,
}

#[derive(Clone)]
enum What {
    /// A routing rule for packets with this mark.
    Rule(Mark),
    /// A routing rule, of this priority, for packets that arrive on an interface.
    Interface(InterfaceRule, u32),
    /// The table of nf_tables that marks these, of both families.
    Marks,
    Route,
}

impl What {
    fn text(&self, family: AddressFamily) -> String {
        let family = match family {
            AddressFamily::Inet6 => "IPv6",
            _ => "IPv4",
        };
        match self {
            Self::Rule(Mark { value, mask }) => {
                format!("{family} rule: fwmark {value:#x}/{mask:#x} lookup {TABLE}")
            }
            Self::Interface(InterfaceRule { interface, to, .. }, _) => {
                format!("{family} rule: to {to} iif {interface} lookup {TABLE}")
            }
            Self::Marks => format!("nf_tables: table inet {}", machine_marks::TABLE),
            Self::Route => format!("{family} route: local default dev lo table {TABLE}"),
        }
    }
}

/// Removes the routes and rules from the namespaces whose workloads are in the tables, and from namespaces with one of
/// our links. Other namespaces on this machine may belong to another node, as in a practice cluster. With `dry_run`,
/// only lists them.
pub fn remove(pins: &Pins, dry_run: bool) -> Result<Vec<CleanupItem>, Error> {
    let mut enrolled = Vec::new();
    // If the table has another shape or is missing, only the links show the namespaces.
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
        Ok(Some(Leftovers {
            path: path.into(),
            namespace: this_namespace()?,
            what,
        }))
    });
    let mut items = Vec::new();
    for left in visited.found.into_iter().flatten() {
        let cookie = left.namespace.cookie;
        // Our own has them for workloads that are captured by their packets.
        let ours = cookie == own
            || enrolled.contains(&cookie)
            || is_linked(&left.namespace).unwrap_or(false);
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
        let marks = routing::rules(&mut netlink, family)?;
        found.extend(marks.into_iter().map(|mark| (family, What::Rule(mark))));
        let interfaces = interface_rules::interface_rules(&mut netlink, family)?;
        let interfaces = interfaces.into_iter();
        found.extend(interfaces.map(|(rule, place)| (family, What::Interface(rule, place))));
        if routing::has_our_route(&mut netlink, family)? {
            found.push((family, What::Route));
        }
    }
    if machine_marks::is_there()? {
        found.push((AddressFamily::Unspec, What::Marks));
    }
    Ok(found)
}

fn remove_here(what: &[(AddressFamily, What)]) -> io::Result<()> {
    let mut netlink = Netlink::open()?;
    for (family, what) in what {
        let request = match what {
            What::Rule(mark) => RouteNetlinkMessage::DelRule(routing::answers_rule(*family, *mark)),
            What::Interface(rule, place) => {
                let rule = interface_rules::message(*family, rule, Some(*place));
                RouteNetlinkMessage::DelRule(rule)
            }
            What::Marks => {
                machine_marks::remove()?;
                continue;
            }
            What::Route => RouteNetlinkMessage::DelRoute(routing::answers_route(*family)),
        };
        netlink.remove_if_there(&request)?;
    }
    Ok(())
}
