//! Workloads' network namespaces.

use std::{fs::File, io, net::IpAddr, os::fd::AsFd};

use nix::sched::{CloneFlags, setns};

use super::attachment::Attached;

/// The network namespace that a thread is in. A socket belongs to the namespace in which it was made,
/// whatever the thread does afterwards.
#[derive(Debug, Default)]
pub struct Namespaces {
    /// The namespace in which the thread was started; known once the thread has left it.
    home: Option<File>,
    /// The attachment whose namespace the thread is in; `None`: home.
    current: Option<u64>,
}

impl Namespaces {
    /// Enters the namespace from which an attachment's connections are made.
    ///
    /// # Errors
    /// If the process lacks `CAP_SYS_ADMIN`.
    pub fn enter(&mut self, attached: &Attached) -> io::Result<()> {
        let wanted = attached.namespace.as_ref().map(|_| attached.id);
        if wanted == self.current {
            return Ok(());
        }
        if self.home.is_none() {
            self.home = Some(File::open("/proc/thread-self/ns/net")?);
        }
        let namespace = attached.namespace.as_ref().map(AsFd::as_fd);
        if let Some(namespace) = namespace.or(self.home.as_ref().map(AsFd::as_fd)) {
            setns(namespace, CloneFlags::CLONE_NEWNET)?;
            self.current = wanted;
        }
        Ok(())
    }

    /// Goes home if the thread is in the namespace of this attachment. A thread keeps its namespace
    /// alive, and with it the interfaces of a pod that has gone.
    pub fn leave(&mut self, attachment: u64) {
        if self.current != Some(attachment) {
            return;
        }
        let Some(home) = &self.home else {
            return;
        };
        match setns(home, CloneFlags::CLONE_NEWNET) {
            Ok(()) => self.current = None,
            Err(error) => tracing::warn!("cannot leave a workload's network namespace: {error}"),
        }
    }
}

/// The addresses of this network namespace's interfaces.
pub fn local_addresses() -> Box<[IpAddr]> {
    let interfaces = nix::ifaddrs::getifaddrs().into_iter().flatten();
    let addresses = interfaces.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    });
    addresses.collect()
}
