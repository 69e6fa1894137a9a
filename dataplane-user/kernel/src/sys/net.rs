//! Network devices and namespaces.

use std::{
    io,
    mem::zeroed,
    net::{Ipv4Addr, UdpSocket},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd},
};

use socket2::{Domain, Type};

use crate::opener;

/// Sets one of a network device's values (`struct ethtool_value` in `include/uapi/linux/ethtool.h`).
pub fn ethtool_set(interface: &str, command: u32, value: u32) -> io::Result<()> {
    let mut request = [command, value];
    let mut ifreq = ifreq(interface);
    ifreq.ifr_ifru.ifru_data = request.as_mut_ptr().cast();
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: the request lives until the call is over, and has the two words that such a command
    // reads.
    let result = unsafe {
        libc::ioctl(
            socket.as_fd().as_raw_fd(),
            libc::SIOCETHTOOL as _,
            &raw mut ifreq,
        )
    };
    checked(result)
}

/// Makes a network device whose packets, bare of any link-layer header, are read from and written to
/// `tun`, an open `/dev/net/tun`. It lives as long as that is open.
pub fn tun_make(tun: BorrowedFd<'_>, interface: &str) -> io::Result<()> {
    let mut ifreq = ifreq(interface);
    let flags = i16::try_from(libc::IFF_TUN | libc::IFF_NO_PI);
    ifreq.ifr_ifru.ifru_flags = flags.map_err(io::Error::other)?;
    // SAFETY: the structure lives until the call is over.
    checked(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF as _, &raw mut ifreq) })
}

/// A request about a network device.
fn ifreq(interface: &str) -> libc::ifreq {
    // SAFETY: plain data, for which zero is a value.
    let mut ifreq: libc::ifreq = unsafe { zeroed() };
    for (to, from) in ifreq.ifr_name.iter_mut().zip(interface.bytes().take(15)) {
        *to = from.cast_signed();
    }
    ifreq
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// The user namespace that owns a namespace (`NS_GET_USERNS`, `ioctl_ns(2)`).
pub fn owner_of_namespace(namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: this request has no argument, and answers a descriptor that is ours.
    unsafe {
        let owner = libc::ioctl(namespace.as_raw_fd(), libc::NS_GET_USERNS);
        checked(owner)?;
        Ok(OwnedFd::from_raw_fd(owner))
    }
}

/// The cookie of the network namespace that this thread is in (`SO_NETNS_COOKIE`, Linux 5.14).
pub fn netns_cookie() -> io::Result<u64> {
    let socket = opener::socket(Domain::IPV4, Type::DGRAM, None)?;
    let mut cookie = 0u64;
    let mut len: libc::socklen_t = 8;
    // SAFETY: eight bytes of room, as `len` says.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            std::ptr::from_mut(&mut cookie).cast(),
            &raw mut len,
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(cookie)
    }
}
