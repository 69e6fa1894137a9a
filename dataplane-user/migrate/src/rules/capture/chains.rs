//! The chains of the supported meshes, and the ports of their sidecars.

use super::Row;
use crate::text::tree::Key;

/// The chains of a mesh in table `nat`.
#[derive(Debug)]
pub struct Chains {
    pub owner: &'static str,
    pub prefix: &'static str,
    pub inbound: &'static str,
    pub to_inbound: &'static str,
    pub output: &'static str,
    pub to_outbound: &'static str,
    pub dns: &'static str,
}

pub const MESHES: [Chains; 2] = [
    Chains {
        owner: "Istio",
        prefix: "ISTIO_",
        inbound: "ISTIO_INBOUND",
        to_inbound: "ISTIO_IN_REDIRECT",
        output: "ISTIO_OUTPUT",
        to_outbound: "ISTIO_REDIRECT",
        dns: "ISTIO_OUTPUT_DNS",
    },
    Chains {
        owner: "Open Service Mesh",
        prefix: "PROXY_",
        inbound: "PROXY_INBOUND",
        to_inbound: "PROXY_IN_REDIRECT",
        output: "PROXY_OUTPUT",
        to_outbound: "PROXY_REDIRECT",
        dns: "",
    },
];

/// The ports that the sidecars themselves use. A configuration cannot name most of them.
pub const OWN_PORTS: &[u16] = &[
    15000, 15001, 15003, 15006, 15008, 15010, 15020, 15021, 15053, 15090, 15901, 15902, 15903,
];

impl Chains {
    /// Returns true if a rule is in a chain of the mesh, or jumps to one.
    pub fn has(&self, row: &Row<'_>) -> bool {
        let is = |name: &str| name.starts_with(self.prefix) && !name.starts_with("PROXY_INIT_");
        let mut parts = row.parts.iter();
        is(&row.chain)
            || parts.any(|part| {
                part.key != Key::Comment && (is(&part.value) || part.more.is_some_and(is))
            })
    }
}
