//! The network namespaces of pods, and which of them the packet path serves.

mod by_packets;
mod namespaces;

pub use self::{
    by_packets::ByPackets,
    namespaces::{KnownPods, Own, PodNamespace, pod_namespaces},
};
