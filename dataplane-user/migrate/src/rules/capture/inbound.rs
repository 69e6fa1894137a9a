//! Reads the ports and interfaces at which rules capture inbound connections.

use std::collections::BTreeSet;

use super::{chains::OWN_PORTS, options::Options};

/// The capture of inbound connections by the rules of one family.
#[derive(Clone, Debug, Default)]
pub struct Inbound {
    /// Whether `PREROUTING` jumps to the mesh's chain.
    pub hooked: bool,
    /// Whether ports without a rule are captured.
    pub all: bool,
    /// The proxy's port.
    pub to: u16,
    pub included: BTreeSet<u16>,
    pub excluded: BTreeSet<u16>,
    /// Ports of the sidecar itself.
    pub own_ports: BTreeSet<u16>,
    /// Interfaces at which no inbound connection is captured.
    pub interfaces: BTreeSet<String>,
}

impl Inbound {
    /// Returns true if any inbound connection is captured.
    pub fn is_captured(&self) -> bool {
        self.hooked && (self.all || !self.included.is_empty())
    }

    /// Reads a rule of `PREROUTING` that excludes an interface.
    pub fn leave_alone(&mut self, interface: &str) -> Result<(), String> {
        if self.hooked {
            return Err("a rule before captures connections at this interface".to_owned());
        }
        if interface.is_empty() || interface.ends_with('+') {
            return Err("mesh.rules.excludeInterfaces takes whole names of interfaces".to_owned());
        }
        self.interfaces.insert(interface.to_owned());
        Ok(())
    }

    /// Reads a rule of the mesh's chain. `to`: the target that captures.
    pub fn row(&mut self, to: &str, options: &Options) -> Result<(), String> {
        if self.all {
            return Err("no packet comes to this rule".to_owned());
        }
        if options.protocol != "tcp" {
            return Err("only TCP is captured".to_owned());
        }
        match (&*options.shape, &*options.target) {
            ("p", target) if target == to => self.all = true,
            ("p port", "RETURN") => {
                for port in &options.ports {
                    if self.included.contains(port) {
                        return Err(format!("port {port} is captured by a rule before"));
                    }
                    let ports = if OWN_PORTS.contains(port) {
                        &mut self.own_ports
                    } else {
                        &mut self.excluded
                    };
                    ports.insert(*port);
                }
            }
            ("p port", target) if target == to => {
                for port in &options.ports {
                    if self.excluded.contains(port) || OWN_PORTS.contains(port) {
                        return Err(format!(
                            "port {port} is the sidecar's, or a rule before leaves it alone"
                        ));
                    }
                    self.included.insert(*port);
                }
            }
            _ => return Err("inbound connections are captured by port only".to_owned()),
        }
        Ok(())
    }
}
