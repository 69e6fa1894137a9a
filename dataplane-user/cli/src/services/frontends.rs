//! The kernel's tables, for a node without a running agent.

use std::{collections::BTreeMap, net::SocketAddr, process::ExitCode};

use dataplane_common::{
    Protocol,
    decide::Tables as _,
    tables::{FrontendKey, Kind},
};
use kernel::tables::Tables;
use serde::Serialize;
use terminal::output::{self, BAD, Cell, GOOD, Table};

use super::{Format, affinity};

/// An address and port in the kernel's tables.
#[derive(Debug, Serialize)]
pub struct Frontend {
    vip: String,
    #[serde(rename = "type")]
    kind: &'static str,
    pool: u32,
    pub endpoints: Vec<String>,
    affinity_seconds: Option<u32>,
    connections: u64,
}

/// Returns the addresses and ports in the tables, in their order.
pub fn frontends(tables: &Tables) -> Result<Vec<Frontend>, kernel::Error> {
    let contents = tables.contents()?;
    let sorted: BTreeMap<FrontendKey, _> = contents.frontends.into_iter().collect();
    let ports = sorted
        .into_iter()
        .filter(|(key, f)| key.protocol != Protocol::ANY && f.kind() != Kind::NODE_ADDRESS);
    Ok(ports
        .map(|(key, frontend)| {
            let pool = tables.pool(frontend.pool()).unwrap_or_default();
            let slots = (0..u32::from(pool.block.len())).map(|offset| pool.block.base() + offset);
            let endpoints = slots.filter_map(|slot| tables.endpoint(slot));
            Frontend {
                vip: plan::key_text(&key),
                kind: frontend.kind().word(),
                pool: frontend.pool(),
                endpoints: endpoints
                    .map(|e| SocketAddr::new(e.addr.ip(), e.port.host()).to_string())
                    .collect(),
                affinity_seconds: (pool.affinity_seconds > 0).then_some(pool.affinity_seconds),
                connections: tables.pool_stats(frontend.pool()).translated,
            }
        })
        .collect())
}

/// Prints a line for each address and port.
pub fn print(frontends: &[Frontend], format: Format) -> anyhow::Result<ExitCode> {
    let mut out = output::stdout();
    if format == Format::Json {
        output::json(&mut out, &frontends)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new(&["VIP", "TYPE", "ENDPOINTS", "AFFINITY", "CONNECTIONS"]);
    for f in frontends {
        let ready = f.endpoints.len();
        let endpoints = if format == Format::Wide && ready > 0 {
            f.endpoints.join(", ")
        } else {
            ready.to_string()
        };
        table.row([
            f.vip.as_str().into(),
            f.kind.into(),
            Cell::new(endpoints, if ready == 0 { BAD } else { GOOD }),
            affinity(f.affinity_seconds.map(u64::from)).into(),
            f.connections.to_string().into(),
        ]);
    }
    table.write(&mut out)?;
    Ok(ExitCode::SUCCESS)
}
