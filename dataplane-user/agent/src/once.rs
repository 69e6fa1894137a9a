//! The snapshot of one view, for an agent that does not run.

use std::sync::Arc;

use model::{Node, Snapshot};
use source::{Feed, Health, View};

use super::input::{Input, InputError};

/// Returns the snapshot that an agent on this node would serve for this view.
///
/// # Errors
///
/// If the kernel does not report the node's name or addresses.
pub fn snapshot_of(view: View, settings: &settings::Node) -> Result<Snapshot, InputError> {
    let feed = |_: &Arc<Node>| Ok(Box::new(Once(Some(view))) as Box<dyn Feed>);
    let input = Input::with(feed, settings, None, |_| {})?;
    Ok(input.snapshot().clone())
}

/// A feed of one view.
struct Once(Option<View>);

impl Feed for Once {
    fn take(&mut self) -> Option<View> {
        self.0.take()
    }

    fn health(&self) -> Health {
        Health::default()
    }
}
