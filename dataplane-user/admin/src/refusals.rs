//! The connections that the agent's proxy has refused: `GET /refusals`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A page of the connections that the agent's proxy has refused.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Refusals {
    /// The lines of the access log, as JSON objects.
    pub refusals: Vec<Value>,
    /// The number of the first connection of the next page.
    pub next: u64,
    /// How many were gone before they were read.
    pub lost: u64,
}
