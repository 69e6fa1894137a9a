//! Names of what the kernel's tables know by number: a running agent knows them.

use std::{
    cell::RefCell,
    collections::HashMap,
    fmt,
    time::{Duration, Instant},
};

use crate::admin::{
    api::{Page, Pool},
    client::Client,
};

/// A pool can be given to another service: a name is asked for again after this time.
const FRESH: Duration = Duration::from_secs(5);

/// Looks up names, and remembers them for a short while.
#[derive(Debug)]
pub struct Names {
    client: Option<Client>,
    known: RefCell<HashMap<u32, (Instant, Option<Owner>)>>,
}

/// Whose a pool is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The service's namespace.
    pub namespace: String,
    /// The service's name.
    pub name: String,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl Names {
    /// Asks this agent.
    pub fn new(client: Client) -> Self {
        Self {
            client: Some(client),
            known: RefCell::default(),
        }
    }

    /// Knows nobody.
    #[cfg(test)]
    pub fn none() -> Self {
        Self {
            client: None,
            known: RefCell::default(),
        }
    }

    /// Whose a pool is; none if nobody's, or if no agent answers.
    pub fn of_pool(&self, pool: u32) -> Option<Owner> {
        let client = self.client.as_ref()?;
        // Pool 0 is never used.
        if pool == 0 {
            return None;
        }
        let mut known = self.known.borrow_mut();
        if let Some((asked, owner)) = known.get(&pool)
            && asked.elapsed() < FRESH
        {
            return owner.clone();
        }
        let owner = client
            .get::<Page<Pool>>(&format!("/pools?pool={pool}"))
            .ok()
            .and_then(|page| page.items.into_iter().next())
            .map(|p| Owner {
                namespace: p.namespace,
                name: p.name,
            });
        known.insert(pool, (Instant::now(), owner.clone()));
        owner
    }
}
