//! Table `SOURCES`: networks of load balancers' source ranges, of pods, of the node and of policies.

use std::{
    collections::BTreeSet,
    os::fd::{AsFd, OwnedFd},
};

use dataplane_common::{Addr, packet::SourceKey};
use zerocopy::{FromBytes, IntoBytes};

use super::{
    error::{Doing, Error},
    sys,
};

/// The networks that `SOURCES` has, by set.
#[derive(Debug)]
pub struct Sources {
    fd: OwnedFd,
}

/// The table's value for each network of pools and pods, which means that the network is present.
const PRESENT: u32 = 1;

impl Sources {
    /// Whether a set contains an address.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn contains(&self, set: u32, addr: Addr) -> Result<bool, Error> {
        self.said(set, addr).map(|said| said.is_some())
    }

    /// Returns the value of the longest network of a set that an address is in.
    pub(super) fn said(&self, set: u32, addr: Addr) -> Result<Option<u32>, Error> {
        let mut value = [0; 4];
        let found = sys::map_lookup(
            self.fd.as_fd(),
            SourceKey::host(set, addr).as_bytes(),
            &mut value,
        )
        .doing(|| "cannot read table SOURCES".to_owned())?;
        Ok(found.then(|| u32::from_ne_bytes(value)))
    }

    /// Every network, in no order.
    ///
    /// # Errors
    /// If the kernel does not let them be read.
    pub fn all(&self) -> Result<Vec<SourceKey>, Error> {
        let mut all = Vec::new();
        let mut bytes = [0; size_of::<SourceKey>()];
        let mut before: Option<SourceKey> = None;
        loop {
            let from = before.as_ref().map(IntoBytes::as_bytes);
            let more = sys::map_next_key(self.fd.as_fd(), from, &mut bytes)
                .doing(|| "cannot read table SOURCES".to_owned())?;
            let Some(key) = more
                .then(|| SourceKey::read_from_bytes(&bytes).ok())
                .flatten()
            else {
                return Ok(all);
            };
            all.push(key);
            before = Some(key);
        }
    }

    pub(super) fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// The source ranges of load balancers.
    pub(super) fn of_pools(&self) -> Result<Vec<SourceKey>, Error> {
        let mut all = self.all()?;
        all.retain(|key| !key.is_of_node() && !key.is_of_policy());
        Ok(all)
    }

    /// The networks of pods and of the node itself.
    pub(super) fn of_node(&self) -> Result<BTreeSet<SourceKey>, Error> {
        let all = self.all()?.into_iter();
        Ok(all.filter(SourceKey::is_of_node).collect())
    }

    pub(super) fn add(&self, key: &SourceKey) -> Result<(), Error> {
        self.put(key, PRESENT)
    }

    pub(super) fn put(&self, key: &SourceKey, value: u32) -> Result<(), Error> {
        sys::map_update(self.fd.as_fd(), key.as_bytes(), value.as_bytes(), 0)
            .doing(|| format!("cannot add {key:?} to SOURCES"))
    }

    pub(super) fn remove(&self, key: &SourceKey) -> Result<(), Error> {
        sys::map_delete(self.fd.as_fd(), key.as_bytes())
            .doing(|| format!("cannot remove {key:?} from SOURCES"))
            .map(|_| ())
    }
}
