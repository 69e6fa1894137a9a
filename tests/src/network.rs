//! Namespaces, links, addresses and routes, made by few runs of `ip -batch`.

use std::{
    fmt::Write as _,
    fs::{self, File},
    path::Path,
};

use nix::sched::{CloneFlags, setns};

use crate::{
    error::{Doing, Result},
    lab::{Host, Role},
    netns::{NETNS_DIR, ip_batch, lines},
};

/// Creates named namespaces.
pub(crate) fn create_namespaces(names: &[&str]) -> Result<()> {
    ip_batch(None, &lines("netns add", names))
}

/// The settings of a host's namespace that differ from the kernel's defaults.
fn sysctls(role: Role) -> Vec<(&'static str, &'static str)> {
    // Duplicate address detection keeps a fresh v6 address unusable for a second or two.
    let mut settings = vec![
        ("ipv6/conf/all/accept_dad", "0"),
        ("ipv6/conf/default/accept_dad", "0"),
        ("ipv6/conf/default/accept_ra", "0"),
        ("ipv6/conf/default/router_solicitations", "0"),
        // Inherited from the machine otherwise.
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/default/rp_filter", "0"),
        // Scenarios refuse a client more often than the kernel's limits allow.
        ("ipv4/icmp_ratelimit", "0"),
        ("ipv6/icmp/ratelimit", "0"),
    ];
    match role {
        Role::Node => {
            settings.extend([("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")]);
        }
        // The fabric is a switch: it has no addresses.
        Role::Fabric => settings.extend([("ipv6/conf/default/disable_ipv6", "1")]),
        Role::Pod | Role::External => {}
    }
    settings
}

/// Writes the hosts' settings. A thread of its own, since it walks from namespace to namespace and
/// `/proc/sys/net` shows the namespace of the thread that opens it.
fn configure(hosts: &[(String, Role)]) -> Result<()> {
    let hosts = hosts.to_vec();
    std::thread::spawn(move || -> Result<()> {
        for (netns, role) in hosts {
            let path = Path::new(NETNS_DIR).join(&netns);
            let file = File::open(&path).doing(|| format!("open {}", path.display()))?;
            setns(file, CloneFlags::CLONE_NEWNET).doing(|| format!("enter {netns}"))?;
            for (key, value) in sysctls(role) {
                let file = Path::new("/proc/sys/net").join(key);
                // A kernel without IPv6 has none of its settings; adding the links will fail then.
                if file.exists() {
                    fs::write(&file, value)
                        .doing(|| format!("write {value} to {} in {netns}", file.display()))?;
                }
            }
        }
        Ok(())
    })
    .join()
    .expect("the thread that writes settings does not panic")
}

/// Makes the network of a lab whose namespaces exist: a switch that connects the nodes and outside clients, a link from
/// each pod to its node, and routes between them and nowhere else.
pub(crate) fn connect(fabric: &str, hosts: &[Host]) -> Result<()> {
    let mut roles: Vec<_> = hosts
        .iter()
        .map(|h| (h.netns().to_owned(), h.role()))
        .collect();
    roles.push((fabric.to_owned(), Role::Fabric));
    configure(&roles)?;

    ip_batch(Some(fabric), &switch(hosts))?;
    // Nodes first: they make the links into their pods.
    for role in [Role::Node, Role::Pod, Role::External] {
        for host in hosts.iter().filter(|host| host.role() == role) {
            let script = match role {
                Role::Node => node(host, hosts),
                Role::Pod => pod(host),
                Role::External | Role::Fabric => external(host),
            };
            ip_batch(Some(host.netns()), &script)?;
        }
    }
    Ok(())
}

/// The switch: no address, no spanning tree, no multicast snooping (it would delay neighbour
/// discovery).
fn switch(hosts: &[Host]) -> String {
    let mut script =
        String::from("link add name br0 up type bridge stp_state 0 mcast_snooping 0\n");
    for (port, host) in hosts
        .iter()
        .filter(|host| host.role() != Role::Pod)
        .enumerate()
    {
        let _ = write!(
            script,
            "link add name port{port} type veth peer name eth0 netns {}\n\
             link set port{port} master br0 up\n",
            host.netns()
        );
    }
    script
}

/// A node: its address on the switch, a link to each of its pods, a route to each other node's.
fn node(node: &Host, hosts: &[Host]) -> String {
    let mut script = uplink(node);
    for pod in hosts.iter().filter(|host| host.node() == Some(node.name())) {
        // The gateway's address is on every pod's link, because neighbour discovery answers only for the addresses of
        // the link on which it is asked.
        let _ = write!(
            script,
            "link add name veth-{name} type veth peer name eth0 netns {netns}\n\
             addr add {gateway4}/32 dev veth-{name}\n\
             addr add {gateway6}/128 dev veth-{name} nodad\n\
             link set veth-{name} up\n\
             route add {ipv4}/32 dev veth-{name} src {gateway4}\n\
             route add {ipv6}/128 dev veth-{name} src {gateway6}\n",
            name = pod.name(),
            netns = pod.netns(),
            gateway4 = pod.gateway4(),
            gateway6 = pod.gateway6(),
            ipv4 = pod.ipv4(),
            ipv6 = pod.ipv6(),
        );
    }
    for other in hosts
        .iter()
        .filter(|h| h.role() == Role::Node && h.name() != node.name())
    {
        let _ = write!(
            script,
            "route add {} via {}\nroute add {} via {}\n",
            other.pod_network4(),
            other.ipv4(),
            other.pod_network6(),
            other.ipv6(),
        );
    }
    script
}

fn pod(pod: &Host) -> String {
    format!(
        "link set lo up\n\
         addr add {ipv4}/32 dev eth0\n\
         addr add {ipv6}/128 dev eth0 nodad\n\
         link set eth0 up\n\
         route add {gateway4} dev eth0\n\
         route add default via {gateway4} src {ipv4}\n\
         route add {gateway6} dev eth0\n\
         route add default via {gateway6} src {ipv6}\n",
        ipv4 = pod.ipv4(),
        ipv6 = pod.ipv6(),
        gateway4 = pod.gateway4(),
        gateway6 = pod.gateway6(),
    )
}

/// An outside client knows its own network, and the routes that a scenario adds.
fn external(host: &Host) -> String {
    uplink(host)
}

fn uplink(host: &Host) -> String {
    format!(
        "link set lo up\n\
         addr add {}/24 dev eth0\n\
         addr add {}/64 dev eth0 nodad\n\
         link set eth0 up\n",
        host.ipv4(),
        host.ipv6(),
    )
}
