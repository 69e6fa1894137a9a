//! News of IPsec policies and of rules of nf_tables. The kernel sends each change to the members of a multicast group.

use std::io;

use netlink_sys::{
    AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket,
    protocols::{NETLINK_NETFILTER, NETLINK_XFRM},
};

use super::error::{Doing, Error};

/// `include/uapi/linux/xfrm.h`.
const XFRMNLGRP_POLICY: u32 = 4;
/// `include/uapi/linux/netfilter/nfnetlink.h`.
const NFNLGRP_NFTABLES: u32 = 7;

/// Tells when objects of one kind come, change or go.
#[derive(Default)]
pub struct ChangeNews {
    /// `None`: nothing can change, or the caller does not want to know.
    socket: Option<TokioSocket>,
}

impl ChangeNews {
    /// Starts to receive the changes of IPsec policies in this thread's network namespace. Must be called within a
    /// runtime.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn of_policies() -> Result<Self, Error> {
        Self::of(NETLINK_XFRM, XFRMNLGRP_POLICY)
            .doing(|| "cannot listen for changes of IPsec policies".to_owned())
    }

    /// Starts to receive the changes of tables, chains, rules and sets of nf_tables in this thread's network namespace.
    /// Must be called within a runtime.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn of_rules() -> Result<Self, Error> {
        Self::of(NETLINK_NETFILTER, NFNLGRP_NFTABLES)
            .doing(|| "cannot listen for changes of nf_tables' rules".to_owned())
    }

    fn of(protocol: isize, group: u32) -> io::Result<Self> {
        let mut socket = match TokioSocket::new(protocol) {
            Ok(socket) => socket,
            // A kernel without the subsystem.
            Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => {
                return Ok(Self::default());
            }
            Err(error) => return Err(error),
        };
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        socket.socket_mut().add_membership(group)?;
        Ok(Self {
            socket: Some(socket),
        })
    }

    /// Waits until something has changed; forever if nothing can change. The caller then reads the new state.
    ///
    /// # Errors
    /// If the kernel reports no more changes.
    pub async fn changed(&mut self) -> io::Result<()> {
        let Some(socket) = &mut self.socket else {
            return std::future::pending().await;
        };
        let mut buffer = Vec::with_capacity(64 * 1024);
        match socket.recv(&mut buffer).await {
            Ok(()) => Ok(()),
            // More than it keeps: something has certainly changed.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
