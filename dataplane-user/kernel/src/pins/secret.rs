//! The secret of the tables of flows ([`PacketConfig::secret`]): it is made with the tables, and stays as long as they do.
//!
//! [`PacketConfig::secret`]: dataplane_common::packet::PacketConfig::secret

use std::os::fd::AsFd as _;

use super::{Pins, maps::spec};
use crate::{
    error::{Doing, Error},
    map::Mapped,
    sys,
};

const NAME: &str = "FLOW_SECRET";

/// Returns a new secret: an even number, never 0.
pub fn new_secret() -> u64 {
    loop {
        let secret = rand::random::<u64>() & !1;
        if secret != 0 {
            return secret;
        }
    }
}

impl Pins {
    /// Returns the secret of the tables of flows, 0 if there are none.
    ///
    /// # Errors
    /// The pin is not ours, or may not be opened.
    pub fn flow_secret(&self) -> Result<u64, Error> {
        let Some((map, _)) = self.open_map(spec(NAME))? else {
            return Ok(0);
        };
        let map = Mapped::<u64>::map(map, 1, false).doing(|| format!("cannot map table {NAME}"))?;
        Ok(map.get(0).unwrap_or_default())
    }

    /// Makes the secret if there is none, before the tables are made.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn make_flow_secret(&self) -> Result<(), Error> {
        if self.open_map(spec(NAME))?.is_some() {
            return Ok(());
        }
        let doing = || format!("cannot make table {NAME}");
        let map = sys::map_create(NAME, &Mapped::<u64>::shape(false), 1).doing(doing)?;
        let mapped = Mapped::<u64>::map(map.try_clone().doing(doing)?, 1, true).doing(doing)?;
        mapped.set(0, new_secret());
        // The secret is in the table before the table can be found.
        sys::obj_pin(map.as_fd(), &self.map(NAME)).doing(doing)
    }
}
