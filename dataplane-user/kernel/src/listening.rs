//! The sockets that listen in a network namespace.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use dataplane_common::Protocol;

use super::{
    opener::{self, Table},
    sockets,
};

/// `TCP_LISTEN` in `/proc/net/tcp`.
const LISTEN: &str = "0A";
/// `TCP_CLOSE`, in `/proc/net/udp`: a socket that is not connected.
const UNCONNECTED: &str = "07";

/// A socket that takes unsolicited traffic: a TCP socket that listens, or a UDP socket that is not connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// At which port.
    pub port: u16,
    /// The socket and its address.
    pub socket: Listening,
}

/// Returns all listeners in the network namespace that this thread is in.
///
/// # Errors
/// If the query to the kernel fails.
pub fn listeners() -> io::Result<Vec<Listener>> {
    let tcp = tcp(0)?.into_iter().map(|(port, socket)| Listener {
        protocol: Protocol::TCP,
        port,
        socket,
    });
    let mut found: Vec<Listener> = tcp.collect();
    for family in ["", "6"] {
        let table = match fs::read_to_string(format!("/proc/thread-self/net/udp{family}")) {
            Ok(table) => table,
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let all = table.lines().skip(1);
        let all = all.filter_map(|line| entry(line, UNCONNECTED));
        found.extend(all.map(|(port, socket)| Listener {
            protocol: Protocol::UDP,
            port,
            socket,
        }));
    }
    Ok(found)
}

/// A TCP socket that listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listening {
    /// Where; unspecified: at all addresses. An IPv6 socket may take IPv4 too: the kernel does not
    /// say here.
    pub addr: IpAddr,
    /// The socket's inode, by which processes' descriptors name it.
    pub inode: u64,
}

impl Listening {
    /// Whether it takes connections to loopback in a family, as far as the kernel shows it.
    pub fn takes_loopback(&self, v4: bool) -> bool {
        match self.addr {
            IpAddr::V4(addr) => v4 && (addr == Ipv4Addr::LOCALHOST || addr.is_unspecified()),
            IpAddr::V6(addr) => {
                addr.is_unspecified()
                    || !v4 && addr == Ipv6Addr::LOCALHOST
                    || v4 && addr == Ipv4Addr::LOCALHOST.to_ipv6_mapped()
            }
        }
    }
}

/// The sockets that listen at a port in the network namespace that this thread is in.
///
/// # Errors
/// If the query to the kernel fails.
pub fn listening(port: u16) -> io::Result<Vec<Listening>> {
    Ok(tcp(port)?.into_iter().map(|(_, socket)| socket).collect())
}

/// TCP sockets that listen at a port, or at any if it is 0, each with its port.
///
/// `sock_diag(7)` walks the sockets that listen. `/proc/net/tcp` walks the machine's whole table of connections, whose
/// size goes with the memory (262 144 buckets at 24 GiB), for each network namespace: 7 ms instead of 20 us. So it is
/// read only where the kernel has no such list (no module `tcp_diag`).
fn tcp(port: u16) -> io::Result<Vec<(u16, Listening)>> {
    match sockets::listening(port) {
        Ok(listed) => Ok(listed
            .into_iter()
            .map(|socket| {
                let (addr, inode) = (socket.addr, socket.inode);
                (socket.port, Listening { addr, inode })
            })
            .collect()),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => by_tables(port),
        Err(error) => Err(error),
    }
}

/// Lists the TCP listeners from the tables in `/proc/net`.
fn by_tables(port: u16) -> io::Result<Vec<(u16, Listening)>> {
    let read = |table| io::read_to_string(opener::table(table)?);
    let mut found = of_port(&read(Table::Tcp)?, port);
    match read(Table::Tcp6) {
        Ok(v6) => found.extend(of_port(&v6, port)),
        // A kernel without IPv6.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    Ok(found)
}

/// Returns the listeners in a table, in the format of `/proc/net/tcp` and `tcp6`.
fn of_port(table: &str, port: u16) -> Vec<(u16, Listening)> {
    let all = table.lines().skip(1);
    let all = all.filter_map(|line| entry(line, LISTEN));
    all.filter(|(of, _)| port == 0 || *of == port).collect()
}

/// A line of a table, if the socket is in this state: its port and the socket.
fn entry(line: &str, wanted: &str) -> Option<(u16, Listening)> {
    let mut fields = line.split_whitespace();
    let (addr, port) = fields.nth(1)?.split_once(':')?;
    let state = fields.nth(1)?;
    let inode = fields.nth(5)?.parse().ok()?;
    let socket = Listening {
        addr: address(addr)?,
        inode,
    };
    let port = u16::from_str_radix(port, 16).ok()?;
    (state == wanted).then_some((port, socket))
}

/// An address as there: words of four bytes, each as the machine's own number.
fn address(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| {
        let digits = hex.get(at * 8..at * 8 + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    match hex.len() {
        8 => Some(IpAddr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (at, four) in bytes.chunks_exact_mut(4).enumerate() {
                four.copy_from_slice(&word(at)?);
            }
            Some(IpAddr::from(bytes))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn finds_listening_sockets_by_their_port() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   \
                     uid  timeout inode\n   0: 0100007F:3A9E 00000000:0000 0A 00000000:00000000 \
                     00:00000000 00000000     0        0 4711 1 0000000000000000 100 0 0 10 0\n   \
                     1: 0100007F:3A9E 0100007F:D431 01 00000000:00000000 00:00000000 00000000     \
                     0        0 4712 1 0000000000000000 20 4 30 10 -1\n";
        let found = of_port(table, 15006);
        let listens = Listening {
            addr: Ipv4Addr::LOCALHOST.into(),
            inode: 4711,
        };
        assert_eq!(found, [(15006, listens)]);
        assert!(listens.takes_loopback(true) && !listens.takes_loopback(false));
        assert!(of_port(table, 15001).is_empty());
        assert_eq!(of_port(table, 0), found);
    }

    #[test]
    fn both_ways_of_asking_find_the_same() {
        let sockets = ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0", "[::]:0"].map(TcpListener::bind);
        for socket in sockets.into_iter().flatten() {
            let own = socket.local_addr().unwrap();
            // Connected to it: at the same port, and not listening.
            let _held = TcpStream::connect(own).unwrap();
            let listed = tcp(own.port()).unwrap();
            assert_eq!(listed, by_tables(own.port()).unwrap());
            let [(port, found)] = listed[..] else {
                panic!("{listed:?}");
            };
            assert_eq!((port, found.addr), (own.port(), own.ip()));
            assert!(tcp(0).unwrap().contains(&(port, found)));
        }
    }

    #[test]
    fn reads_addresses_of_both_families() {
        let v6 = "00000000000000000000000001000000";
        assert_eq!(address(v6), Some(Ipv6Addr::LOCALHOST.into()));
        let mapped = "0000000000000000FFFF00000100007F";
        let mapped = address(mapped).unwrap();
        assert_eq!(mapped, Ipv4Addr::LOCALHOST.to_ipv6_mapped());
        assert_eq!(address("0100"), None);
        let takes = |addr, v4| Listening { addr, inode: 1 }.takes_loopback(v4);
        assert!(takes(mapped, true) && !takes(mapped, false));
        let any = Ipv6Addr::UNSPECIFIED.into();
        assert!(takes(any, true) && takes(any, false));
    }
}
