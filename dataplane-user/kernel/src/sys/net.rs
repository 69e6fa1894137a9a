//! Network namespaces.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd},
};

use socket2::{Domain, Type};

use crate::opener;

/// The error of a system call that answers a negative number.
pub(super) fn checked(result: libc::c_int) -> io::Result<()> {
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
    checked(result)?;
    Ok(cookie)
}
