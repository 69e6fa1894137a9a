//! Removes the startup taint from this node's Node object.

use std::{fmt, time::Duration};

use http::{Request, header};
use serde_json::{Value, json};
use tokio::runtime::Builder;

use super::{Failure, Target, call::Caller};

/// Time limit for each answer of the API server.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum length of a Node object, in bytes. Nodes name their images.
const NODE_MAX: usize = 4 << 20;

/// A taint that keeps Pods from a node until its agent has taken over.
pub struct StartupTaint {
    caller: Caller,
    node: String,
    key: String,
}

impl fmt::Debug for StartupTaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StartupTaint({} of {})", self.key, self.node)
    }
}

impl StartupTaint {
    /// Names the taint of a node. Sends no request.
    pub fn new(target: Target, node: String, key: String) -> Self {
        Self {
            caller: Caller::new(target, PATIENCE, NODE_MAX),
            node,
            key,
        }
    }

    /// Removes the taint, whatever its value and effect. Returns whether the node had it. Blocks the thread.
    ///
    /// # Errors
    /// If the API server does not answer or refuses; or if the node's taints have changed meanwhile.
    pub fn remove(&self) -> Result<bool, Failure> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Failure::Unreachable(error.to_string()))?;
        let removed = runtime.block_on(self.remove_now());
        runtime.shutdown_background();
        removed
    }

    async fn remove_now(&self) -> Result<bool, Failure> {
        let uri = format!("/api/v1/nodes/{}", self.node);
        let ask = Request::get(&uri).body(Vec::new());
        let node: Value = serde_json::from_slice(&self.caller.call(ask).await?)?;
        let Some(without) = patch(&node, &self.key) else {
            return Ok(false);
        };
        let change = Request::patch(&uri)
            .header(header::CONTENT_TYPE, "application/json-patch+json")
            .body(without.to_string().into_bytes());
        self.caller.call(change).await?;
        Ok(true)
    }
}

/// Returns the change that removes the taints with this key from a Node object, and fails if its taints have changed;
/// `None` if the node has none.
fn patch(node: &Value, key: &str) -> Option<Value> {
    let taints = node["spec"]["taints"].as_array()?;
    let others = taints.iter().filter(|taint| taint["key"] != key);
    let others: Vec<&Value> = others.collect();
    (others.len() < taints.len()).then(|| {
        json!([
            { "op": "test", "path": "/spec/taints", "value": taints },
            { "op": "replace", "path": "/spec/taints", "value": others },
        ])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_taints_with_the_key_are_removed() {
        const KEY: &str = "dataplane.io/not-ready";
        let node = |taints: &Value| json!({ "spec": { "taints": taints } });
        let own = |effect| json!({ "key": KEY, "effect": effect });
        let other =
            json!({ "key": "other", "value": "v", "effect": "NoExecute", "timeAdded": "t" });
        let all = json!([own("NoSchedule"), other, own("NoExecute")]);
        let wanted = json!([
            { "op": "test", "path": "/spec/taints", "value": all },
            { "op": "replace", "path": "/spec/taints", "value": [other] },
        ]);
        assert_eq!(patch(&node(&all), KEY), Some(wanted));
        for without in [json!({}), node(&json!([])), node(&json!([other]))] {
            assert_eq!(patch(&without, KEY), None, "{without}");
        }
    }
}
