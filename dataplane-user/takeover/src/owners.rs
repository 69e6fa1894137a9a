//! Identifies the owner of a rule with two tables: one of owners, one of signatures. A signature is the beginning of a
//! name, so it also matches new chains of a known owner. The longest matching signature wins.

use kernel::{capture::OUR_TABLE, routing::MarkRule};

/// The action for an owner's rules when the dataplane takes over a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Plan {
    /// The dataplane does the work of these rules, so the take-over can remove them.
    TakeOver,
    /// The rules belong to the dataplane.
    Ours,
    /// The rules stay.
    Leave,
}

impl Plan {
    /// Returns the plan as words for reports.
    pub fn word(self) -> &'static str {
        match self {
            Self::TakeOver => "take over",
            Self::Ours => "ours",
            Self::Leave => "leave",
        }
    }
}

/// A program that writes rules.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner {
    /// The action for its rules.
    pub plan: Plan,
    /// Its display name.
    pub name: &'static str,
    /// A remark for operators about the function of the rules.
    pub note: &'static str,
}

/// Defines the owners. Each line has the constant, the plan, the display name and the remark for operators.
macro_rules! owners {
    ($($constant:ident: $plan:ident, $name:literal, $note:literal;)*) => {
        $(#[doc = $name] pub const $constant: &Owner = &Owner {
            plan: Plan::$plan,
            name: $name,
            note: $note,
        };)*
    };
}

owners! {
    KUBE_PROXY: TakeOver, "kube-proxy", "translates connections to services";
    ISTIO_SIDECAR: TakeOver, "Istio sidecar", "captures the pod's connections for the proxy beside the application";
    ISTIO_AMBIENT: Leave, "Istio ambient", "captures pods' connections for ztunnel, which encrypts them: do not capture such pods with mesh.rules";
    OSM: TakeOver, "Open Service Mesh", "captures the pod's connections for the proxy beside the application";
    OURS: Ours, "dataplane", "keeps NAT on for connections that kube-proxy translated (`dataplane keep-nat`), drops packets while a mesh's rules are changed, or routes a mesh's packets";
    LINKERD: Leave, "Linkerd", "captures the pod's connections for Linkerd's proxy: do not capture this pod with mesh.rules";
    KUMA: Leave, "Kuma", "captures the pod's connections for Kuma's proxy: do not capture this pod with mesh.rules";
    KUBELET: Leave, "kubelet", "drops packets from elsewhere to the node's loopback, and shows which iptables is in use";
    HOST_PORTS: Leave, "host ports", "translates pods' host ports; who made them removes them with the pod";
    CNI: Leave, "a network plug-in (CNI)", "masquerades or admits pods' packets: pods need it";
    FLANNEL: Leave, "flannel", "masquerades and admits pods' packets: pods need it";
    CALICO: Leave, "Calico", "enforces NetworkPolicy, masquerades pods' packets";
    CILIUM: Leave, "Cilium", "enforces NetworkPolicy; may translate services itself";
    KUBE_ROUTER: Leave, "kube-router", "enforces NetworkPolicy";
    NETWORK_POLICIES: Leave, "kube-network-policies", "enforces NetworkPolicy";
    AWS_VPC_CNI: Leave, "AWS VPC CNI", "masquerades pods' packets, and leads answers of node ports back: pods need it";
    IP_MASQ_AGENT: Leave, "ip-masq-agent", "masquerades pods' packets: pods need it";
    ANTREA: Leave, "Antrea", "enforces NetworkPolicy, masquerades pods' packets; may translate services itself";
    OVN_KUBERNETES: Leave, "OVN-Kubernetes", "leads services' packets to OVN, masquerades pods' packets";
    AZURE_NPM: Leave, "Azure NPM", "enforces NetworkPolicy";
    NODE_LOCAL_DNS: Leave, "NodeLocal DNSCache", "keeps queries to the node's DNS cache from conntrack";
    WEAVE: Leave, "Weave Net", "enforces NetworkPolicy, masquerades pods' packets";
    DOCKER: Leave, "Docker", "serves containers that are no pods";
    PODMAN: Leave, "Podman", "serves containers that are no pods";
    LIBVIRT: Leave, "libvirt", "serves virtual machines";
    LXC: Leave, "LXC", "serves containers that are no pods";
    LXD: Leave, "LXD", "serves containers that are no pods";
    INCUS: Leave, "Incus", "serves containers that are no pods";
    UFW: Leave, "ufw", "the node's firewall";
    FIREWALLD: Leave, "firewalld", "the node's firewall";
    OPENWRT: Leave, "OpenWrt", "the node's firewall";
    FAIL2BAN: Leave, "fail2ban", "refuses clients of the node's own services";
    TAILSCALE: Leave, "Tailscale", "admits and masquerades packets of its network";
    FOREIGN: Leave, "foreign", "nobody whom this program knows";
}

/// A signature by which an owner is recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// A chain whose name starts with this text.
    Chain(&'static str),
    /// A table of nf_tables whose name starts with this text.
    Table(&'static str),
    /// A rule whose comment starts with this text.
    Comment(&'static str),
    /// A rule that matches a set whose name starts with this text.
    Set(&'static str),
    /// A rule that matches or sets this mark.
    Mark(u32),
    /// A rule that matches an interface whose name starts with this text.
    Interface(&'static str),
}

use Sign::{Chain, Comment, Interface, Mark, Set, Table};

/// The signatures and their owners.
const SIGNS: &[(Sign, &Owner)] = &[
    (Chain("KUBE-"), KUBE_PROXY),
    // The sets of kube-proxy in IPVS mode: KUBE-CLUSTER-IP, KUBE-6-LOOP-BACK.
    (Set("KUBE-"), KUBE_PROXY),
    (Table("kube-proxy"), KUBE_PROXY),
    (Chain("KUBE-FIREWALL"), KUBELET),
    (Chain("KUBE-KUBELET-CANARY"), KUBELET),
    (Chain("KUBE-IPTABLES-HINT"), KUBELET),
    (Chain("KUBE-HOSTPORT"), HOST_PORTS),
    (Chain("KUBE-HP-"), HOST_PORTS),
    (Chain("CRIO-"), HOST_PORTS),
    (Chain("CNI-HOSTPORT-"), HOST_PORTS),
    (Chain("CNI-DN-"), HOST_PORTS),
    (Table("cni_hostport"), HOST_PORTS),
    (Chain("CNI-"), CNI),
    (Table("cni_plugins_"), CNI),
    (Chain("ISTIO_"), ISTIO_SIDECAR),
    (Table("istio-proxy-"), ISTIO_SIDECAR),
    // Marks of the sidecar's connections in TPROXY mode. The marks of ambient mode have the mask 0xfff.
    (Mark(1337), ISTIO_SIDECAR),
    (Mark(1338), ISTIO_SIDECAR),
    (Chain("ISTIO_PRERT"), ISTIO_AMBIENT),
    (Chain("ISTIO_POSTRT"), ISTIO_AMBIENT),
    (Table("istio-ambient-"), ISTIO_AMBIENT),
    (Set("istio-inpod-probes-"), ISTIO_AMBIENT),
    (Mark(0x111), ISTIO_AMBIENT),
    (Chain("ztunnel-"), ISTIO_AMBIENT),
    (Set("ztunnel-pods-ips"), ISTIO_AMBIENT),
    (Chain("PROXY_"), OSM),
    (Chain("OSM_PROXY_"), OSM),
    (Chain("PROXY_INIT_"), LINKERD),
    (Comment("proxy-init/"), LINKERD),
    (Chain("MESH_"), KUMA),
    (Chain("KUMA_"), KUMA),
    (Comment("kuma/"), KUMA),
    (Chain("FLANNEL"), FLANNEL),
    (Comment("flanneld "), FLANNEL),
    (Table("flannel-"), FLANNEL),
    (Chain("cali-"), CALICO),
    (Comment("cali:"), CALICO),
    (Set("cali"), CALICO),
    (Table("calico"), CALICO),
    (Chain("CILIUM_"), CILIUM),
    (Chain("OLD_CILIUM_"), CILIUM),
    (Comment("cilium"), CILIUM),
    (Set("cilium_"), CILIUM),
    (Chain("KUBE-ROUTER"), KUBE_ROUTER),
    (Chain("KUBE-NWPLCY"), KUBE_ROUTER),
    (Chain("KUBE-POD-FW"), KUBE_ROUTER),
    (Set("kube-router-"), KUBE_ROUTER),
    (Chain("KUBE-NETWORK-POLICIES"), NETWORK_POLICIES),
    (Table("kube-network-policies"), NETWORK_POLICIES),
    (Chain("AWS-"), AWS_VPC_CNI),
    (Comment("AWS"), AWS_VPC_CNI),
    (Table("aws-cni"), AWS_VPC_CNI),
    (Chain("IP-MASQ"), IP_MASQ_AGENT),
    (Comment("ip-masq"), IP_MASQ_AGENT),
    (Chain("ANTREA-"), ANTREA),
    (Comment("Antrea: "), ANTREA),
    (Set("ANTREA-"), ANTREA),
    (Table("antrea"), ANTREA),
    (Chain("OVN-KUBE-"), OVN_KUBERNETES),
    (Table("ovn-kubernetes"), OVN_KUBERNETES),
    (Chain("AZURE-NPM"), AZURE_NPM),
    (Set("azure-npm-"), AZURE_NPM),
    (Comment("NodeLocal DNS Cache"), NODE_LOCAL_DNS),
    (Chain("WEAVE"), WEAVE),
    (Chain("DOCKER"), DOCKER),
    (Interface("docker"), DOCKER),
    (Table("docker-"), DOCKER),
    (Chain("NETAVARK"), PODMAN),
    (Table("netavark"), PODMAN),
    (Chain("LIBVIRT_"), LIBVIRT),
    (Interface("virbr"), LIBVIRT),
    (Table("libvirt_network"), LIBVIRT),
    (Chain("LXC"), LXC),
    (Table("lxd"), LXD),
    (Table("incus"), INCUS),
    (Chain("ufw"), UFW),
    (Chain("FWD"), FIREWALLD),
    (Chain("FORWARD_"), FIREWALLD),
    (Table("firewalld"), FIREWALLD),
    (Table("fw4"), OPENWRT),
    (Chain("f2b-"), FAIL2BAN),
    (Table("f2b-"), FAIL2BAN),
    (Chain("ts-"), TAILSCALE),
    (Table("dataplane-keep-nat"), OURS),
    (Table("dataplane-guard"), OURS),
    (Table("dataplane-machines"), OURS),
];

/// Returns the owner of a chain, by the chain's name.
pub fn of_chain(name: &str) -> Option<&'static Owner> {
    longest(|sign| match sign {
        Chain(beginning) => begins(beginning, name),
        _ => None,
    })
}

/// Returns the owner of a table of nf_tables, by the table's name.
pub fn of_table(name: &str) -> Option<&'static Owner> {
    longest(|sign| match sign {
        Table(beginning) => begins(beginning, name),
        _ => None,
    })
}

/// Returns the owner of a rule, by the rule's comment.
pub fn of_comment(comment: &str) -> Option<&'static Owner> {
    longest(|sign| match sign {
        Comment(beginning) => begins(beginning, comment),
        _ => None,
    })
}

/// Returns the owner of a set, by the set's name.
pub fn of_set(name: &str) -> Option<&'static Owner> {
    longest(|sign| match sign {
        Set(beginning) => begins(beginning, name),
        _ => None,
    })
}

/// Returns the owner that uses a mark.
pub fn of_mark(mark: u32) -> Option<&'static Owner> {
    longest(|sign| (*sign == Mark(mark)).then_some(0))
}

/// Returns the owner of a routing rule, by its mark and its table.
pub fn of_routing_rule(rule: &MarkRule) -> &'static Owner {
    /// The mask of the marks that Istio's CNI agent uses, and its routing tables.
    const AMBIENT: (u32, std::ops::RangeInclusive<u32>) = (0xfff, 100..=102);
    if rule.table == OUR_TABLE {
        OURS
    } else if rule.bits == AMBIENT.0 && AMBIENT.1.contains(&rule.table) {
        ISTIO_AMBIENT
    } else {
        of_mark(rule.mark).unwrap_or(FOREIGN)
    }
}

/// Returns the owner of an interface, by the interface's name.
pub fn of_interface(name: &str) -> Option<&'static Owner> {
    longest(|sign| match sign {
        Interface(beginning) => begins(beginning, name),
        _ => None,
    })
}

/// Returns the length of the signature if the name starts with it.
fn begins(beginning: &str, name: &str) -> Option<usize> {
    name.starts_with(beginning).then_some(beginning.len())
}

/// Returns the owner with the longest matching signature.
fn longest(fits: impl Fn(&Sign) -> Option<usize>) -> Option<&'static Owner> {
    let all = SIGNS
        .iter()
        .filter_map(|(sign, owner)| Some((fits(sign)?, *owner)));
    all.max_by_key(|(length, _)| *length)
        .map(|(_, owner)| owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_beginning_counts() {
        for (name, owner) in [
            ("KUBE-POD-FW-X7", KUBE_ROUTER),
            ("KUBE-EXTERNAL-SERVICES", KUBE_PROXY),
            ("KUBE-FIREWALL", KUBELET),
            ("PROXY_INBOUND", OSM),
            ("OSM_PROXY_OUT_REDIRECT", OSM),
            ("PROXY_INIT_REDIRECT", LINKERD),
            ("CNI-HOSTPORT-DNAT", HOST_PORTS),
            ("CNI-0123abcd", CNI),
            ("AWS-SNAT-CHAIN-0", AWS_VPC_CNI),
            ("IP-MASQ-AGENT", IP_MASQ_AGENT),
            ("ANTREA-FORWARD", ANTREA),
            ("OVN-KUBE-NODEPORT", OVN_KUBERNETES),
            ("AZURE-NPM-INGRESS", AZURE_NPM),
        ] {
            assert_eq!(of_chain(name), Some(owner), "{name}");
        }
        assert_eq!(of_chain("FORWARD"), None);
        assert_eq!(of_table("istio-proxy-nat"), Some(ISTIO_SIDECAR));
        assert_eq!(of_comment("cali:_-9"), Some(CALICO));
        assert_eq!(of_comment("AWS, primary ENI"), Some(AWS_VPC_CNI));
        assert_eq!(
            of_comment("NodeLocal DNS Cache: skip conntrack"),
            Some(NODE_LOCAL_DNS)
        );
        assert_eq!(of_set("cali40s:x"), Some(CALICO));
        assert_eq!(of_mark(0x111), Some(ISTIO_AMBIENT));
        assert_eq!(of_mark(0x110), None);
        assert_eq!(of_interface("docker0"), Some(DOCKER));
    }

    #[test]
    fn routing_rules_have_owners() {
        for (mark, bits, table, owner) in [
            (0x111, 0xfff, 100, ISTIO_AMBIENT),
            (0x100, 0xfff, 101, ISTIO_AMBIENT),
            (0x539, u32::MAX, 133, ISTIO_SIDECAR),
            (15006, 15006, 15006, OURS),
            (0x100, 0x100, 100, FOREIGN),
        ] {
            let rule = MarkRule {
                v4: true,
                priority: 1,
                mark,
                bits,
                table,
            };
            assert_eq!(of_routing_rule(&rule), owner, "{rule:?}");
        }
    }

    #[test]
    fn no_sign_is_there_twice() {
        for (place, (sign, _)) in SIGNS.iter().enumerate() {
            assert!(
                SIGNS[..place].iter().all(|(other, _)| other != sign),
                "{sign:?}"
            );
        }
    }

    #[test]
    fn the_own_tables_are_known() {
        for table in [
            kernel::netfilter::keep_nat::TABLE,
            kernel::netfilter::guard::TABLE,
        ] {
            assert_eq!(of_table(table), Some(OURS), "{table}");
        }
    }
}
