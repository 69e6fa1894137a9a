//! The filter in front of the tables, `VIPS`: in line with the frontends, and with the addresses of flows.

use std::{collections::HashSet, time::Instant};

use dataplane_common::{
    Addr, decide,
    tables::{Frontend, FrontendKey, Kind},
};

use super::Tables;
use crate::error::{Doing, Error};

impl Tables {
    /// Returns frontends that the filter in front of them (`VIPS`) does not let through: none, as long as only the
    /// agent writes to our tables. The programs leave connections to them alone.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn filtered_out(&self) -> Result<Vec<FrontendKey>, Error> {
        let frontends = self
            .frontends
            .entries()
            .doing(|| "cannot read table FRONTENDS".to_owned())?;
        let mut missed = Vec::new();
        for (key, _) in frontends {
            // One that has just been removed is not missed.
            let there = || decide::Tables::frontend(self, &key) != Frontend::NONE;
            if !self.vips.passes(&key) && there() && !self.vips.passes(&key) {
                missed.push(key);
            }
        }
        missed.sort_unstable();
        Ok(missed)
    }

    /// Returns services' addresses of flows that the filter does not let through: none, as long as only the agent
    /// writes to our tables. The programs leave requests of these flows alone.
    pub fn filtered_flows(&self, vips: &HashSet<Addr>) -> Vec<Addr> {
        let mut missed: Vec<Addr> = vips
            .iter()
            .filter(|vip| !decide::may_be_vip(self, **vip))
            .copied()
            .collect();
        missed.sort_unstable();
        missed
    }

    /// Makes the filter consistent with `FRONTENDS`, and lets other addresses through as well: the masquerade
    /// addresses, because replies come to them, and the addresses of flows. Without a packet path `flows` is `None`.
    /// Returns the number of words that were wrong.
    pub(crate) fn rebuild_filter(
        &mut self,
        masquerade: &[Addr],
        flows: Option<&HashSet<Addr>>,
    ) -> Result<usize, Error> {
        let frontends = self.all_let_through(masquerade)?;
        Ok(self.vips.rebuild(&frontends, flows))
    }

    /// Puts the filter in line with `FRONTENDS` and the addresses that flows are masqueraded to, after the number of
    /// them behind each bit was lost. The filter lets the addresses that flows go to through until a walk has found
    /// them.
    pub(crate) fn recount_filter(&mut self, masquerade: &[Addr]) -> Result<(), Error> {
        let frontends = self.all_let_through(masquerade)?;
        self.vips.recount(&frontends);
        Ok(())
    }

    fn all_let_through(&self, masquerade: &[Addr]) -> Result<Vec<(FrontendKey, Frontend)>, Error> {
        let mut frontends = self
            .frontends
            .entries()
            .doing(|| "cannot read table FRONTENDS".to_owned())?;
        frontends.extend(masquerade.iter().map(|addr| node_address(*addr)));
        Ok(frontends)
    }

    /// Takes the result of a walk that began at `since`: lets the addresses of flows through, and no longer the
    /// addresses that only earlier flows used.
    pub(crate) fn keep_flows(&mut self, vips: &HashSet<Addr>, since: Instant) {
        self.vips.keep_flows(vips, since);
    }

    /// Before an address is masqueraded to: lets it through the filter.
    pub(crate) fn let_through(&mut self, addr: Addr) {
        let (key, frontend) = node_address(addr);
        self.vips.add(&key, frontend);
    }

    /// After an address was masqueraded to for the last time.
    pub(crate) fn let_through_no_more(&mut self, addr: Addr) {
        let (key, frontend) = node_address(addr);
        self.vips.remove(&key, frontend);
    }
}

fn node_address(addr: Addr) -> (FrontendKey, Frontend) {
    (
        FrontendKey::address(addr),
        Frontend::new(0, Kind::NODE_ADDRESS),
    )
}
