//! Describes a plan for people: keys whose answers change, instead of words that are written.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::SocketAddr,
};

use dataplane_common::tables::{Block, Endpoint, Frontend, Kind, Pool};
use serde::Serialize;

use super::{Contents, Planner, PoolOwner, wanted::key_text};

/// A key whose answer a plan changes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// The key as text ([`key_text`]).
    pub key: String,
    /// The service that owns the key after the plan. `None` if the plan removes the key, or if the key is the node's.
    pub service: Option<String>,
    /// The route that splits the service's port after the plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    /// The answer before the plan. `None` if the key is new.
    pub before: Option<Answer>,
    /// The answer after the plan. `None` if the plan removes the key.
    pub after: Option<Answer>,
    /// Whether the key moves to another pool, for example because its owner changes.
    pub moved: bool,
}

/// The answer of a key.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    /// Its kind ([`Kind::word`]).
    pub kind: &'static str,
    /// The endpoints that share the connections, sorted.
    pub endpoints: Vec<SocketAddr>,
    /// The part of each endpoint, from 0 to 1, if the parts differ. Connections of the remaining part are refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parts: Option<Vec<f64>>,
    /// The reason if there is no endpoint.
    pub refuses: Option<Empty>,
    /// Timeout of the session affinity in seconds.
    pub affinity_seconds: Option<u32>,
}

/// The reason why a key has no endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Empty {
    /// The service has no ready endpoint.
    NoEndpoints,
    /// The service has no endpoint on this node, and its traffic policy is Local.
    NoLocalEndpoint,
    /// The service does not have the port.
    PortNotServed,
}

/// Returns the keys whose answers differ between `before` and the tables of `after`, in the order of the keys. The cost
/// grows with the tables, not with the change: for commands, not for the sync.
///
/// Both must be consistent: [`Planner::adopt`] has accepted `before`.
pub fn changes(before: &Contents, after: &Planner) -> Vec<Change> {
    let old = before.frontends.iter().copied().collect::<BTreeMap<_, _>>();
    let new = after.frontends().into_iter().collect::<BTreeMap<_, _>>();
    let keys = old.keys().chain(new.keys()).collect::<BTreeSet<_>>();
    keys.into_iter()
        .filter_map(|key| {
            let (old, new) = (old.get(key), new.get(key));
            let owner = new.and_then(|frontend| after.pool_owner(frontend.pool()));
            let change = Change {
                key: key_text(key),
                service: owner.map(|owner| owner.service.to_string()),
                route: owner.and_then(|owner| route(after, owner)),
                before: old.map(|frontend| {
                    let pool = before
                        .pools
                        .get(frontend.pool() as usize)
                        .copied()
                        .unwrap_or_default();
                    let from = pool.block.base() as usize;
                    let to = from + usize::from(pool.block.len());
                    let endpoints = before.endpoints.get(from..to).unwrap_or_default();
                    Answer::new(*frontend, pool, endpoints)
                }),
                after: new.map(|frontend| {
                    let (pool, endpoints) = after.pool(frontend.pool()).unwrap_or_default();
                    Answer::new(*frontend, pool, endpoints)
                }),
                moved: old
                    .zip(new)
                    .is_some_and(|(old, new)| old.pool() != new.pool()),
            };
            // A move to an equal pool changes nothing for clients.
            (change.before != change.after).then_some(change)
        })
        .collect()
}

/// Returns the route that splits the port of a pool's owner.
fn route(after: &Planner, owner: &PoolOwner) -> Option<String> {
    let service = after.snapshot().services.get(&owner.service)?;
    let mut ports = service.ports.iter();
    let port = ports.find(|port| Some((port.port, port.protocol)) == owner.port)?;
    Some(port.split.as_ref()?.by.to_string())
}

impl Answer {
    fn new(frontend: Frontend, pool: Pool, endpoints: &[Endpoint]) -> Self {
        let refuses = (frontend.kind() != Kind::NODE_ADDRESS && endpoints.is_empty()).then(|| {
            if pool.block.flags() & Block::NO_SUCH_PORT != 0 {
                Empty::PortNotServed
            } else if pool.block.flags() & Block::NO_LOCAL != 0 {
                Empty::NoLocalEndpoint
            } else {
                Empty::NoEndpoints
            }
        });
        let same = endpoints.chunk_by(|a, b| a == b);
        let same = same.filter(|same| !same[0].is_none());
        let parts: Vec<f64> = same
            .clone()
            .map(|same| part(same.len(), endpoints.len()))
            .collect();
        let lens: BTreeSet<usize> = same.clone().map(<[_]>::len).collect();
        let slots: usize = same.clone().map(<[_]>::len).sum();
        let differ = lens.len() > 1 || slots < endpoints.len();
        Self {
            kind: frontend.kind().word(),
            endpoints: same
                .map(|same| SocketAddr::new(same[0].addr.ip(), same[0].port.host()))
                .collect(),
            parts: differ.then_some(parts),
            refuses,
            affinity_seconds: (pool.affinity_seconds != 0).then_some(pool.affinity_seconds),
        }
    }
}

/// Returns the part of a block that `slots` slots are.
fn part(slots: usize, of: usize) -> f64 {
    let [slots, of] = [slots, of].map(|count| f64::from(u32::try_from(count).unwrap_or(u32::MAX)));
    slots / of
}

impl fmt::Display for Empty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoEndpoints => "refuses: no endpoints",
            Self::NoLocalEndpoint => "refuses: no endpoint on this node",
            Self::PortNotServed => "refuses ports that the service does not have",
        })
    }
}

/// Prints one line per key: `+` added, `-` removed, `~` changed, with the added (`+`) and removed (`-`) endpoints.
impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = match (&self.before, &self.after) {
            (None, _) => '+',
            (_, None) => '-',
            _ => '~',
        };
        write!(f, "{sign} {}", self.key)?;
        if let Some(answer) = self.after.as_ref().or(self.before.as_ref()) {
            write!(f, " {}", answer.kind)?;
        }
        if let Some(service) = &self.service {
            write!(f, " of {service}")?;
        }
        if let Some(route) = &self.route {
            write!(f, ", split by {route}")?;
        }
        let none = Vec::new();
        let before = self
            .before
            .as_ref()
            .map_or(&none, |answer| &answer.endpoints);
        let after = self
            .after
            .as_ref()
            .map_or(&none, |answer| &answer.endpoints);
        let mut between = ": ";
        let mut item = |f: &mut fmt::Formatter<'_>, args: fmt::Arguments<'_>| {
            write!(f, "{}{args}", std::mem::replace(&mut between, ", "))
        };
        if self.moved {
            item(f, format_args!("changes hands"))?;
        }
        for endpoint in before.iter().filter(|e| after.binary_search(e).is_err()) {
            item(f, format_args!("-{endpoint}"))?;
        }
        for endpoint in after.iter().filter(|e| before.binary_search(e).is_err()) {
            item(f, format_args!("+{endpoint}"))?;
        }
        let Some(answer) = &self.after else {
            return Ok(());
        };
        if let Some(parts) = &answer.parts
            && self.before.as_ref().and_then(|old| old.parts.as_ref()) != Some(parts)
        {
            for (endpoint, part) in answer.endpoints.iter().zip(parts) {
                item(f, format_args!("{endpoint} gets {:.1} %", part * 100.0))?;
            }
            let refused = 100.0 - parts.iter().sum::<f64>() * 100.0;
            if refused > 0.001 {
                item(f, format_args!("{refused:.1} % are refused"))?;
            }
        } else if answer.parts.is_none()
            && self.before.as_ref().is_some_and(|old| old.parts.is_some())
        {
            item(f, format_args!("equal parts"))?;
        }
        let old = self.before.as_ref();
        if let Some(before) = old.filter(|before| before.kind != answer.kind) {
            item(f, format_args!("was {}", before.kind))?;
        }
        if let Some(empty) = answer
            .refuses
            .filter(|e| old.is_none_or(|o| o.refuses != Some(*e)))
        {
            item(f, format_args!("{empty}"))?;
        }
        match (
            old.and_then(|before| before.affinity_seconds),
            answer.affinity_seconds,
        ) {
            (before, Some(seconds)) if before != Some(seconds) => {
                item(f, format_args!("affinity {seconds} s"))
            }
            (Some(_), None) => item(f, format_args!("no affinity")),
            _ => Ok(()),
        }
    }
}
