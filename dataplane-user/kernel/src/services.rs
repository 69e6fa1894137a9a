//! The tables of services and their one writer. Changes to interfaces and network namespaces take tens of milliseconds
//! each, so another thread can write these tables meanwhile.

use std::{
    collections::{BTreeSet, HashSet},
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use dataplane_common::Addr;
use plan::{Contents, Demand, Write};

use crate::{
    error::Error,
    packet::Filter,
    tables::{Growth, Limits, Tables},
};

/// The tables of services. Clones are the same tables; each step of one waits for those of the others.
#[derive(Clone, Debug)]
pub struct ServiceTables(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    tables: Tables,
    limits: Limits,
    /// A hash element was freed, and may be reused by the next that is added: not before a grace
    /// period has passed.
    freed: bool,
    /// Addresses that flows are masqueraded to, which the filter lets through.
    masquerade: BTreeSet<Addr>,
}

impl ServiceTables {
    pub(crate) fn new(tables: Tables, limits: Limits, masquerade: Vec<Addr>) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            tables,
            limits,
            freed: false,
            masquerade: masquerade.into_iter().collect(),
        })))
    }

    /// A thread that panicked during a write leaves the tables as a killed agent would leave them: with whole services.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the tables, for reading. Writers wait meanwhile.
    pub(crate) fn read(&self) -> impl Deref<Target = Tables> {
        Reading(self.lock())
    }

    /// Returns the tables' contents.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn contents(&self) -> Result<Contents, Error> {
        self.lock().tables.contents()
    }

    /// Makes the tables large enough for a plan, while the programs run.
    ///
    /// # Errors
    /// [`Error::TableFull`] or [`Error::Grow`]; nothing that is served has changed.
    pub fn reserve(&self, demand: &Demand) -> Result<Vec<Growth>, Error> {
        let inner = &mut *self.lock();
        inner.tables.reserve(demand, inner.limits)
    }

    /// Carries out a plan's writes, in their order, after [`ServiceTables::reserve`].
    ///
    /// # Errors
    /// The kernel's refusal of a write; those before it are done, and the planner must be made
    /// anew from [`ServiceTables::contents`].
    pub fn apply(&self, writes: &[Write]) -> Result<(), Error> {
        let inner = &mut *self.lock();
        let result = write(&mut inner.tables, &mut inner.freed, writes);
        if result.is_err() {
            // Only the kernel knows which keys were added before the error. If the keys cannot be read, the filter lets
            // more packets through than necessary, but never fewer.
            let masquerade: Vec<Addr> = inner.masquerade.iter().copied().collect();
            let _ = inner.tables.recount_filter(&masquerade);
        }
        result
    }

    /// Keeps the filter `VIPS` in line with the flows: `vips` are the addresses that a walk found, which began at
    /// `since`. Flows to an address that no service has any longer go on until they end.
    pub fn keep_flows(&self, vips: &HashSet<Addr>, since: Instant) {
        self.lock().tables.keep_flows(vips, since);
    }

    /// Waits until no program that runs now can still see removed entries.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn grace(&self) -> Result<(), Error> {
        let inner = &mut *self.lock();
        inner.tables.grace()?;
        inner.freed = false;
        Ok(())
    }
}

impl Filter for ServiceTables {
    fn let_through(&mut self, addr: Addr) {
        let inner = &mut *self.lock();
        inner.masquerade.insert(addr);
        inner.tables.let_through(addr);
    }

    fn let_through_no_more(&mut self, addr: Addr) {
        let inner = &mut *self.lock();
        inner.masquerade.remove(&addr);
        inner.tables.let_through_no_more(addr);
    }

    fn wait_for_programs(&mut self) -> Result<(), Error> {
        self.grace()
    }
}

/// The tables, while no other thread has them.
struct Reading<'a>(MutexGuard<'a, Inner>);

impl Deref for Reading<'_> {
    type Target = Tables;

    fn deref(&self) -> &Tables {
        &self.0.tables
    }
}

/// Carries out writes, in their order. `freed`: whether a hash element was freed since the last
/// grace period.
pub(crate) fn write(tables: &mut Tables, freed: &mut bool, writes: &[Write]) -> Result<(), Error> {
    let mut keys = Vec::new();
    let mut values = Vec::new();
    let mut replaced = Vec::new();
    let mut writes = writes.iter().peekable();
    while let Some(write) = writes.next() {
        if *freed && matches!(write, Write::Insert { .. }) {
            tables.grace()?;
            *freed = false;
        }
        match write {
            Write::Endpoints { base, endpoints } => tables.set_endpoints(*base, endpoints),
            Write::AddSource { key } => tables.sources().add(key)?,
            Write::RemoveSource { key } => tables.sources().remove(key)?,
            Write::Pool { index, pool, fresh } => tables.set_pool(*index, pool, *fresh)?,
            Write::Insert { key, frontend } => {
                keys.push(*key);
                values.push(*frontend);
                if !matches!(writes.peek(), Some(Write::Insert { .. })) {
                    tables.insert_frontends(&keys, &values)?;
                    keys.clear();
                    values.clear();
                }
            }
            Write::Replace { key, frontend } => {
                replaced.push((*key, *frontend));
                if !matches!(writes.peek(), Some(Write::Replace { .. })) {
                    tables.replace_frontends(&replaced, freed)?;
                    replaced.clear();
                }
            }
            Write::Remove { key, frontend } => {
                *freed = true;
                keys.push(*key);
                values.push(*frontend);
                if !matches!(writes.peek(), Some(Write::Remove { .. })) {
                    tables.remove_frontends(&keys, &values)?;
                    keys.clear();
                    values.clear();
                }
            }
        }
    }
    Ok(())
}
