//! The pods whose mesh rules a take-over removed: they depend on the dataplane.

use std::path::{Path, PathBuf};

use clap::Args;
use takeover::journal::{DIRECTORY, Journal};

use super::netns;

/// How the rules of a mesh come back.
pub const GIVE_BACK: &str = "`dataplane-migrate takeover --revert --owner istio|osm --netns …`";

/// Where a take-over keeps files.
#[derive(Debug, Args)]
pub struct KeptArgs {
    /// Directory for the files with saved rules, and for the journals of take-overs
    #[arg(
        long,
        value_name = "DIR",
        default_value = DIRECTORY,
        env = "DATAPLANE_TAKEOVER_DIR",
    )]
    pub takeover_dir: PathBuf,
}

/// The network namespaces here whose rules of a mesh were taken over: without the dataplane, nothing captures their connections.
///
/// # Errors
/// A journal cannot be read, or the network namespaces cannot be listed.
pub fn pods_that_need_it(directory: &Path) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for cookie in Journal::of_namespaces(directory)? {
        found.extend(netns::with_cookie(cookie)?.map(|namespace| namespace.place));
    }
    Ok(found)
}
