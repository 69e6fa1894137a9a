//! Reads the rules of Istio's sidecar in table `mangle`. They capture inbound connections by TPROXY and drop packets
//! that conntrack calls invalid. Only TPROXY needs their marks.

use super::{
    Row,
    chains::Chains,
    family::{Wrong, is_loopback},
    inbound::Inbound,
    options::options,
};

/// The rules of one family.
#[derive(Debug, Default)]
pub struct Mangle {
    pub v4: Option<bool>,
    pub inbound: Inbound,
    pub drops_invalid: bool,
}

/// Reads table `mangle` of one family.
pub fn mangle(mesh: &Chains, rows: &[Row<'_>]) -> Result<Mangle, Wrong> {
    let mut found = Mangle::default();
    for row in rows {
        if matches!(&*row.chain, "PREROUTING" | "OUTPUT") || mesh.has(row) {
            let wrong = |what: String| row.wrong(&what);
            found.row(mesh, row).map_err(wrong)?;
        }
    }
    let inbound = &found.inbound;
    if inbound.is_captured() && (inbound.to == 0 || found.v4.is_none()) {
        let line = rows.first().map_or(1, |row| row.line);
        let what = "chain ISTIO_TPROXY does not hand over connections";
        return Err((line, what.to_owned(), String::new()));
    }
    Ok(found)
}

impl Mangle {
    fn row(&mut self, mesh: &Chains, row: &Row<'_>) -> Result<(), String> {
        let options = options(row)?;
        let (shape, target) = (&*options.shape, &*options.target);
        let (tcp, lo) = (options.protocol == "tcp", options.interface == "lo");
        match (&*row.chain, shape, target) {
            ("PREROUTING", "p", to) if tcp && to == mesh.inbound => self.inbound.hooked = true,
            ("PREROUTING", "i", "RETURN") => self.inbound.leave_alone(&options.interface)?,
            ("PREROUTING", "state" | "p state", "ISTIO_DROP") if options.state == "INVALID" => {
                self.drops_invalid = true;
            }
            // The rules of `OUTPUT` after this one only set marks.
            ("ISTIO_DROP", "", "DROP")
            | ("ISTIO_DIVERT", "", "MARK" | "ACCEPT")
            | ("OUTPUT", "o", "RETURN") => {}
            ("PREROUTING", "mark p", "CONNMARK") | ("OUTPUT", "connmark p", "CONNMARK") if tcp => {}
            ("OUTPUT", "mark o p", "RETURN") | ("OUTPUT", "!d o p uid" | "!d gid o p", "MARK")
                if tcp && lo => {}
            ("ISTIO_TPROXY", "!d p", "TPROXY") if tcp && self.inbound.to == 0 => {
                let net = options.destination.filter(|net| is_loopback(*net));
                let net = net.ok_or("the rule is for a destination of its own")?;
                self.v4 = Some(net.addr().is_ipv4());
                self.inbound.to = options.to_port.ok_or("the rule names no port")?;
            }
            // The proxy's connections to the application, and the pod's connections to itself.
            (chain, "mark p", "RETURN") if tcp && chain == mesh.inbound => {}
            (chain, "i p s" | "!mark i p", "RETURN") if tcp && lo && chain == mesh.inbound => {}
            // Connections that are already captured.
            (chain, "p state" | "p port state", "ISTIO_DIVERT")
                if tcp && chain == mesh.inbound && options.state == "RELATED,ESTABLISHED" => {}
            (chain, ..) if chain == mesh.inbound => self.inbound.row("ISTIO_TPROXY", &options)?,
            _ => {
                return Err("this rule of table mangle has no counterpart in mesh.rules".to_owned());
            }
        }
        Ok(())
    }
}
