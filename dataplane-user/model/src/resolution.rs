//! How a workload looks up names: the fields of its pod from which the kubelet writes its `resolv.conf`.

use std::net::IpAddr;

/// `spec.dnsPolicy` and `spec.dnsConfig` of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resolution {
    /// `dnsPolicy`.
    pub policy: DnsPolicy,
    /// `dnsConfig.nameservers`.
    pub nameservers: Box<[IpAddr]>,
    /// `dnsConfig.searches`, in lower case, without dots at their ends.
    pub searches: Box<[Box<str>]>,
    /// Option `ndots` of `dnsConfig.options`.
    pub ndots: Option<u8>,
}

/// `spec.dnsPolicy`, after the pod's network was taken into account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DnsPolicy {
    /// The cluster's DNS, and the search list of the pod's namespace (`ClusterFirst` of a pod with a network of its
    /// own, and `ClusterFirstWithHostNet`).
    #[default]
    Cluster,
    /// As the node (`Default`, and `ClusterFirst` of a pod in the node's network).
    Node,
    /// `dnsConfig` only (`None`).
    Own,
}
