//! Reads the kernel's tables independently of the agent.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use dataplane_common::{
    Addr, Port, Protocol, decide,
    tables::{Block, FrontendKey},
};
use dataplane_tests::api::Churn;
use kernel::tables::Tables;

/// Time limit for a change. A change that takes longer has failed.
const LIMIT: Duration = Duration::from_secs(30);

/// A reader of the tables.
pub struct Seen {
    bpffs: PathBuf,
    tables: Tables,
    /// The pool of each service.
    pools: BTreeMap<u32, u32>,
}

impl Seen {
    /// Opens the tables that are pinned in this directory.
    pub fn new(bpffs: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            bpffs: bpffs.to_owned(),
            tables: Tables::open(bpffs)?,
            pools: BTreeMap::new(),
        })
    }

    /// Returns the block of the endpoints of a service's port 80.
    pub fn block(&mut self, service: u32) -> anyhow::Result<Block> {
        let pool = self.pool(service)?;
        let pool = decide::Tables::pool(&self.tables, pool).context("a pool")?;
        Ok(pool.block)
    }

    /// Returns whether a pod is among a service's endpoints.
    pub fn has(&mut self, service: u32, pod: u32) -> anyhow::Result<bool> {
        // The agent may have replaced the tables by larger ones.
        self.tables = Tables::open(&self.bpffs)?;
        let block = self.block(service)?;
        let slots = block.base()..block.base() + u32::from(block.len());
        let wanted = Churn::pod(pod);
        Ok(slots
            .filter_map(|slot| decide::Tables::endpoint(&self.tables, slot))
            .any(|endpoint| endpoint.addr.ip() == wanted))
    }

    /// Waits until a service's endpoints are in another block.
    pub fn wait_for_flip(&mut self, service: u32, before: Block) -> anyhow::Result<()> {
        let start = Instant::now();
        let mut next = Duration::from_secs(1);
        while self.block(service)? == before {
            // Leave CPU time to the agent and the server.
            thread::sleep(Duration::from_micros(20));
            if start.elapsed() > next {
                // If the agent has enlarged a table, the pin leads to a new table.
                self.tables = Tables::open(&self.bpffs)?;
                next += Duration::from_secs(1);
            }
            if start.elapsed() > LIMIT {
                bail!("service {service} did not change within {LIMIT:?}");
            }
        }
        Ok(())
    }

    fn pool(&mut self, service: u32) -> anyhow::Result<u32> {
        if let Some(pool) = self.pools.get(&service) {
            return Ok(*pool);
        }
        let key = FrontendKey::new(
            Addr::from(Churn::vip(service)),
            Port::new(80),
            Protocol::TCP,
        );
        let frontend = decide::Tables::frontend(&self.tables, &key);
        if frontend.is_none() {
            bail!("service {service} is not in the tables");
        }
        self.pools.insert(service, frontend.pool());
        Ok(frontend.pool())
    }
}

/// Returns the served addresses with port and protocol, each with its endpoints as text. The result
/// does not depend on the place of the endpoints in the tables.
pub fn served(bpffs: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let tables = Tables::open(bpffs)?;
    let contents = tables.contents()?;
    let mut served = BTreeMap::new();
    for (key, frontend) in &contents.frontends {
        let pool = decide::Tables::pool(&tables, frontend.pool()).context("a pool")?;
        let block = pool.block;
        let endpoints: Vec<(IpAddr, u16)> = (block.base()..block.base() + u32::from(block.len()))
            .filter_map(|slot| decide::Tables::endpoint(&tables, slot))
            .map(|endpoint| (endpoint.addr.ip(), endpoint.port.host()))
            .collect();
        served.insert(
            format!("{key:?}"),
            format!(
                "{:?}, flags {:x}, affinity {:?}, {endpoints:?}",
                frontend.kind(),
                block.flags(),
                pool.affinity_seconds
            ),
        );
    }
    Ok(served)
}
