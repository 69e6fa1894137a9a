//! Reads the rules of Istio's ambient mode in a pod. ztunnel has sockets in the pod; their mark distinguishes them from
//! the pod's own sockets.

use super::{
    Row,
    family::{Family, Wrong, is_loopback},
    options::{Options, options},
};

/// The owner's name in reports.
pub const OWNER: &str = "Istio's ambient mode";
/// A chain that occurs only in the rules of ambient mode.
const PREROUTING: &str = "ISTIO_PRERT";
const OUTPUT: &str = "ISTIO_OUTPUT";
/// The mark of ztunnel's sockets, with its mask. `OF_ZTUNNEL` is the mark of their connections.
const ZTUNNEL: (u32, u32) = (0x539, 0xfff);
const OF_ZTUNNEL: (u32, u32) = (0x111, 0xfff);

/// Returns true if a table has rules of ambient mode.
pub fn is_ambient(rows: &[Row<'_>]) -> bool {
    rows.iter().any(|row| {
        row.chain == PREROUTING || matches!(&row.parts[..], [part] if part.value == PREROUTING)
    })
}

/// Checks table `mangle`, whose rules may only set marks.
pub fn mangle(rows: &[Row<'_>]) -> Result<(), Wrong> {
    each(rows, |chain, options| {
        let (shape, target) = (&*options.shape, &*options.target);
        match (chain, shape, target) {
            ("PREROUTING", "", PREROUTING) | ("OUTPUT", "", OUTPUT) => Ok(()),
            (PREROUTING, "mark", "CONNMARK") | (OUTPUT, "connmark", "CONNMARK") => {
                has_mark(options)
            }
            _ => Err("this rule of table mangle is not understood".to_owned()),
        }
    })
}

/// Reads table `nat` of one family.
pub fn nat(rows: &[Row<'_>]) -> Result<Family, Wrong> {
    let mut found = Family::default();
    found.capture.owner = OWNER;
    let mut hooked = false;
    // Reads the rules of PREROUTING first: they name the sources of the kubelet's probes, which rules of OUTPUT refer
    // to.
    let mut sorted: Vec<&Row<'_>> = rows.iter().collect();
    sorted.sort_by_key(|row| row.chain != PREROUTING);
    each(sorted, |chain, options| {
        row(&mut found, &mut hooked, chain, options)
    })?;
    let last = rows.last().map_or(1, |row| row.line);
    let wrong = |what: &str| Err((last, what.to_owned(), String::new()));
    if !hooked || !found.outbound.all {
        return wrong("no outbound connection is captured");
    }
    let virtuals_to = found.outbound.virtuals_to;
    if virtuals_to.is_some_and(|to| to != found.capture.outbound) {
        return wrong("connections that come in by an interface are redirected to another port");
    }
    if virtuals_to.is_some() && !found.inbound.hooked {
        return wrong("PREROUTING does not lead to chain ISTIO_PRERT");
    }
    if found.inbound.all && !found.inbound.hooked {
        return wrong("PREROUTING does not lead to chain ISTIO_PRERT");
    }
    Ok(found)
}

fn each<'r>(
    rows: impl IntoIterator<Item = &'r Row<'r>>,
    mut read: impl FnMut(&str, &Options) -> Result<(), String>,
) -> Result<(), Wrong> {
    for row in rows {
        if matches!(&*row.chain, "PREROUTING" | "OUTPUT") || row.chain.starts_with("ISTIO_") {
            let read = options(row).and_then(|options| read(&row.chain, &options));
            read.map_err(|what| row.wrong(&what))?;
        }
    }
    Ok(())
}

fn row(
    found: &mut Family,
    hooked: &mut bool,
    chain: &str,
    options: &Options,
) -> Result<(), String> {
    let (shape, target) = (&*options.shape, &*options.target);
    let (tcp, lo) = (options.protocol == "tcp", options.interface == "lo");
    if found.outbound.all && chain == OUTPUT || found.inbound.all && chain == PREROUTING {
        return Err("a rule before captures all connections".to_owned());
    }
    has_mark(options)?;
    let mut loopback = || {
        let net = options.destination.filter(|net| is_loopback(*net));
        let net = net.ok_or("the rule is for a destination of its own")?;
        let v4 = net.addr().is_ipv4();
        let known = *found.v4.get_or_insert(v4);
        (known == v4)
            .then_some(())
            .ok_or_else(|| "the rule is of another family".to_owned())
    };
    match (chain, shape, target) {
        ("PREROUTING", "", PREROUTING) => found.inbound.hooked = true,
        ("OUTPUT", "", OUTPUT) => *hooked = true,
        (PREROUTING, "i p", "REDIRECT") if tcp => {
            let to = options.to_port.ok_or("the rule names no port")?;
            if *found.outbound.virtuals_to.get_or_insert(to) != to {
                return Err("interfaces lead to several ports".to_owned());
            }
            found.virtual_interface(options)?;
        }
        (PREROUTING, "i p", "RETURN") if tcp => found.inbound.leave_alone(&options.interface)?,
        // The node gives the kubelet's probes this source address.
        (PREROUTING, "p s", "ACCEPT") if tcp => {
            found
                .capture
                .probes
                .extend(options.source.map(|net| net.addr()));
        }
        (OUTPUT, "d p", "ACCEPT") if tcp => {
            let addr = options.destination.map(|net| net.addr());
            let probes = &found.capture.probes;
            if !probes.is_empty() && !addr.is_some_and(|addr| probes.contains(&addr)) {
                return Err("the rule is for a destination of its own".to_owned());
            }
        }
        (PREROUTING, "!d !mark !port p", "REDIRECT") if tcp => {
            loopback()?;
            found.inbound.own_ports.extend(&options.ports);
            found.inbound.all = true;
            found.inbound.to = options.to_port.ok_or("the rule names no port")?;
        }
        (OUTPUT, "!mark !o p port", "REDIRECT")
            if lo && options.protocol == "udp" && options.ports == [53] =>
        {
            let to = options.to_port.ok_or("the rule names no port")?;
            found.dns.push(("udp".to_owned(), true, to));
        }
        (OUTPUT, "!d !mark p port", "REDIRECT") if tcp && options.ports == [53] => {
            loopback()?;
            let to = options.to_port.ok_or("the rule names no port")?;
            found.dns.push(("tcp".to_owned(), true, to));
        }
        (OUTPUT, "mark p", "ACCEPT") if tcp => {}
        (OUTPUT, "!d o", "ACCEPT") if lo => loopback()?,
        (OUTPUT, "!d !mark p", "REDIRECT") if tcp => {
            loopback()?;
            found.outbound.all = true;
            found.capture.outbound = options.to_port.ok_or("the rule names no port")?;
        }
        _ => return Err("this rule has no counterpart in mesh.rules".to_owned()),
    }
    Ok(())
}

/// Checks that a mark is one of ztunnel's.
fn has_mark(options: &Options) -> Result<(), String> {
    let known = match options.mark {
        None => true,
        Some(mark) if options.shape.contains("connmark") => mark == OF_ZTUNNEL,
        Some(mark) => mark == ZTUNNEL || mark == OF_ZTUNNEL && options.target == "ACCEPT",
    };
    known
        .then_some(())
        .ok_or_else(|| "the mark is not ztunnel's".to_owned())
}
