//! The kernel's routing: routes, rules by marks, the checks of sources, and IPsec policies.

mod host_networks;
mod mark_rules;
mod reverse_path;
mod ways_out;
pub(crate) mod xfrm;

pub use self::{
    host_networks::host_networks,
    mark_rules::{MarkRule, mark_rules, remove_mark_rules},
    reverse_path::{reverse_path, reverse_paths, shows_reverse_paths},
    ways_out::{Way, ways_out},
    xfrm::policies as ipsec_policies,
};
