//! Processes of the node that listen at a node port or a host port that is served, and so get no new connections there.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::IpAddr,
    path::Path,
};

use dataplane_common::tables::{Frontend, FrontendKey, Kind};
use kernel::listening::Listener;

use super::Finding;

/// How many processes are named.
const NAMED: usize = 16;

/// Returns the findings, if this process is in the network namespace of the tables.
pub fn findings(tables: &kernel::tables::Tables) -> Vec<Finding> {
    let is_here =
        kernel::namespaces::netns_cookie().is_ok_and(|cookie| cookie == tables.host_netns());
    if !is_here {
        return Vec::new();
    }
    let looked = kernel::listening::listeners()
        .map_err(|error| format!("cannot find out which processes listen on this node: {error}"))
        .and_then(|listeners| {
            let contents = tables.contents().map_err(|error| error.to_string())?;
            let own = relay::local_addresses().map_err(|error| {
                format!("cannot find out which addresses this node has: {error}")
            })?;
            Ok(tell(&hidden(&listeners, &contents.frontends, &own)))
        });
    match looked {
        Ok(findings) => findings,
        Err(text) => vec![Finding::warning(text)],
    }
}

/// Returns the listeners whose port a service has at an address of the node, each with the frontend.
fn hidden<'a>(
    listeners: &'a [Listener],
    frontends: &[(FrontendKey, Frontend)],
    own: &[IpAddr],
) -> Vec<(&'a Listener, FrontendKey)> {
    let mut by_port: BTreeMap<_, Vec<&Listener>> = BTreeMap::new();
    for listener in listeners {
        let key = (listener.protocol, listener.port);
        by_port.entry(key).or_default().push(listener);
    }
    let mut hidden = Vec::new();
    for (key, frontend) in frontends {
        let of_port = by_port.get(&(key.protocol, key.port.host()));
        for listener in of_port.into_iter().flatten() {
            let at = listener.socket.addr.to_canonical();
            // At all addresses: those of its family, and for IPv6 of both, as far as this is known.
            let is_everywhere = at.is_unspecified() && (at.is_ipv6() || key.addr.is_v4());
            let is = match frontend.kind() {
                Kind::NODE_PORT => is_everywhere || at.is_ipv4() == key.addr.is_v4(),
                Kind::EXTERNAL_IP => {
                    let vip = key.addr.ip();
                    at == vip || is_everywhere && own.contains(&vip)
                }
                _ => false,
            };
            if is {
                hidden.push((*listener, *key));
            }
        }
    }
    hidden.sort_by_key(|(listener, key)| (*key, listener.socket.inode));
    hidden
}

fn tell(hidden: &[(&Listener, FrontendKey)]) -> Vec<Finding> {
    let inodes: BTreeSet<u64> = hidden.iter().map(|(l, _)| l.socket.inode).collect();
    let holders = if inodes.is_empty() {
        BTreeMap::new()
    } else {
        holders(Path::new("/proc"), &inodes)
    };
    let finding = |(listener, key): &(&Listener, FrontendKey)| {
        let who = holders.get(&listener.socket.inode).map_or_else(
            || "a process that this command does not see".to_owned(),
            Clone::clone,
        );
        let text = format!(
            "{who} listens at {}, port {}/{}, where a service or a pod's host port is served ({}): new connections go to \
             the service. If that is not wanted, change the nodePort or hostPort, or the port of the process",
            listener.socket.addr,
            listener.port,
            listener.protocol,
            plan::key_text(key),
        );
        Finding::warning(text)
    };
    let mut findings: Vec<_> = hidden.iter().take(NAMED).map(finding).collect();
    if let Some(more) = hidden.len().checked_sub(NAMED).filter(|more| *more > 0) {
        let text = format!("processes of this node listen at {more} more ports that are served");
        findings.push(Finding::warning(text));
    }
    findings
}

/// The processes that have sockets open, by the sockets' inodes: `nginx (pid 4711)`. Of several processes, the first.
fn holders(proc: &Path, inodes: &BTreeSet<u64>) -> BTreeMap<u64, String> {
    let mut found = BTreeMap::new();
    let processes = fs::read_dir(proc).into_iter().flatten().flatten();
    let mut pids: Vec<u32> = processes
        .filter_map(|process| process.file_name().to_str()?.parse().ok())
        .collect();
    pids.sort_unstable();
    for pid in pids {
        let process = proc.join(pid.to_string());
        let open = fs::read_dir(process.join("fd")).into_iter().flatten();
        for descriptor in open.flatten() {
            let inode = fs::read_link(descriptor.path()).ok().and_then(|target| {
                let text = target.to_str()?;
                let number = text.strip_prefix("socket:[")?.strip_suffix(']')?;
                number.parse().ok()
            });
            if let Some(inode) = inode.filter(|inode| inodes.contains(inode)) {
                found.entry(inode).or_insert_with(|| {
                    let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
                    format!("{} (pid {pid})", name.trim())
                });
            }
        }
        if found.len() == inodes.len() {
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, os::fd::AsRawFd};

    use dataplane_common::{Addr, Port, Protocol};
    use kernel::listening::Listening;

    use super::*;

    fn listener(addr: &str, port: u16, protocol: Protocol) -> Listener {
        Listener {
            protocol,
            port,
            socket: Listening {
                addr: addr.parse().unwrap(),
                inode: 1,
            },
        }
    }

    #[test]
    fn who_listens_where_a_service_is_served_is_found() {
        let (tcp, udp) = (Protocol::TCP, Protocol::UDP);
        let node_port = |v4, port| {
            let key = FrontendKey::node_port(v4, Port::new(port), tcp);
            (key, Frontend::new(1, Kind::NODE_PORT))
        };
        let at = |ip: &str, port, kind| {
            let addr = Addr::from(ip.parse::<IpAddr>().unwrap());
            let key = FrontendKey::new(addr, Port::new(port), tcp);
            (key, Frontend::new(1, kind))
        };
        let served = [
            node_port(true, 8080),
            node_port(false, 8081),
            at("192.0.2.1", 443, Kind::EXTERNAL_IP),
            at("198.51.100.1", 444, Kind::EXTERNAL_IP),
            at("10.96.0.1", 53, Kind::CLUSTER_IP),
        ];
        let own: [IpAddr; 1] = ["192.0.2.1".parse().unwrap()];
        for (addr, port, protocol, count) in [
            ("0.0.0.0", 8080, tcp, 1),
            ("127.0.0.1", 8080, tcp, 1),
            ("::", 8080, tcp, 1),
            ("fd00::1", 8080, tcp, 0),
            ("0.0.0.0", 8080, udp, 0),
            ("::", 8081, tcp, 1),
            ("0.0.0.0", 8081, tcp, 0),
            ("192.0.2.1", 443, tcp, 1),
            ("::ffff:192.0.2.1", 443, tcp, 1),
            ("192.0.2.2", 443, tcp, 0),
            ("0.0.0.0", 443, tcp, 1),
            ("::", 443, tcp, 1),
            ("0.0.0.0", 444, tcp, 0),
            ("0.0.0.0", 53, tcp, 0),
        ] {
            let listeners = [listener(addr, port, protocol)];
            let found = hidden(&listeners, &served, &own);
            assert_eq!(found.len(), count, "{addr} {port} {protocol}");
        }
    }

    #[test]
    fn the_process_is_named() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let all = kernel::listening::listeners().unwrap();
        let found = all.iter().find(|l| l.port == port).expect("it listens");
        assert_eq!(found.protocol, Protocol::TCP);
        let link = fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap();
        let inode = found.socket.inode;
        assert_eq!(link.to_str(), Some(&*format!("socket:[{inode}]")));
        let key = FrontendKey::node_port(true, Port::new(port), Protocol::TCP);
        let told = tell(&[(found, key)]);
        let pid = format!("(pid {})", std::process::id());
        let says = |word: &str| told[0].text.contains(word);
        assert!(
            says(&pid) && says(&format!("*:{port}/tcp")),
            "{}",
            told[0].text
        );
    }
}
