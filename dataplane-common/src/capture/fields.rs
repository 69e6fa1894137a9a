//! Fields of the kernel's own structures.

/// Fields of the kernel's own structures that the programs read. Their offsets differ from kernel to kernel. The agent
/// finds the offsets, in bytes from the start of a socket, in the kernel's BTF, and writes them to the programs'
/// constant `FIELDS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Field {
    /// Of `struct sock`: its cookie, 0 until a program or process asks for it.
    Cookie,
    /// `AF_INET` or `AF_INET6`, two bytes.
    Family,
    /// Its local port, two bytes in host order.
    Port,
    /// The port of the other side, two bytes in network order.
    RemotePort,
    /// Its own IPv4 address, in network order.
    V4,
    /// The IPv4 address of the other side.
    RemoteV4,
    /// Its own IPv6 address.
    V6,
    /// The IPv6 address of the other side.
    RemoteV6,
    /// `SO_MARK`.
    Mark,
    /// A pointer to its network namespace.
    Net,
    /// Of `struct net`, from its start: its cookie.
    NetCookie,
    /// Of `struct tcp_sock`: the bytes that the other side has acknowledged.
    Acked,
    /// The bytes that were received.
    Received,
}

impl Field {
    /// All of them, in the order of the constant.
    pub const ALL: [Self; 13] = [
        Self::Cookie,
        Self::Family,
        Self::Port,
        Self::RemotePort,
        Self::V4,
        Self::RemoteV4,
        Self::V6,
        Self::RemoteV6,
        Self::Mark,
        Self::Net,
        Self::NetCookie,
        Self::Acked,
        Self::Received,
    ];
}

const _: () = {
    let mut number = 0;
    while number < Field::ALL.len() {
        assert!(Field::ALL[number] as usize == number);
        number += 1;
    }
};
