//! Sockets in workloads' network namespaces.

use std::{fs::File, io, os::fd::AsFd};

use nix::sched::{CloneFlags, setns};

use super::attachment::Attached;

/// In which network namespace a worker's thread is. A socket belongs to the namespace in which it
/// was made, whatever its thread does afterwards.
#[derive(Debug, Default)]
pub struct Namespaces {
    /// The one in which it was started; known once it has left it.
    home: Option<File>,
    /// The attachment whose namespace it is in; `None`: home.
    current: Option<u64>,
}

impl Namespaces {
    /// Enters the namespace from which an attachment's connections are made.
    ///
    /// # Errors
    /// If the process may not (`CAP_SYS_ADMIN`).
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

    /// Goes home if it is in the namespace of this attachment: a thread keeps the namespace alive that it
    /// is in, and with it the interfaces of a pod that has gone.
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
