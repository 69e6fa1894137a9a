//! The commands that show, convert and change rules, one file each.

pub mod apply;
pub mod cleanup;
pub mod compare;
pub mod detect;
pub mod import;
pub mod import_mesh;
pub mod report;
pub mod rules;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use takeover::owners::{ISTIO_AMBIENT, ISTIO_SIDECAR, KUBE_PROXY, OSM, Owner};
use terminal::netns::{self, Namespace};

/// An owner whose rules can be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OwnerWord {
    /// kube-proxy's rules on a node
    KubeProxy,
    /// Istio's rules in a pod: sidecar and ambient
    Istio,
    /// Open Service Mesh's rules in a pod
    Osm,
}

impl OwnerWord {
    pub fn owners(self) -> &'static [&'static Owner] {
        match self {
            Self::KubeProxy => &[KUBE_PROXY],
            Self::Istio => &[ISTIO_SIDECAR, ISTIO_AMBIENT],
            Self::Osm => &[OSM],
        }
    }
}

/// The network namespace with the rules, and the programs of iptables and nft.
#[derive(Debug, Args)]
struct WhereArgs {
    /// Network namespace that has the rules: a NAME of `ip netns`, a /PATH such as
    /// /proc/4711/ns/net, or pid:NUMBER [default: this command's own]
    #[arg(long, value_name = "N")]
    netns: Option<String>,

    /// Root directory that has the programs to run, such as /host or /proc/4711/root. The programs run there
    /// by chroot, in the network namespace of --netns [default: the programs on PATH]
    ///
    /// The programs run as this user with CAP_NET_ADMIN and CAP_NET_RAW only. A process that can write to the directory
    /// can replace the programs: name only directories that you trust.
    #[arg(long, value_name = "DIR")]
    host_root: Option<PathBuf>,
}

impl WhereArgs {
    fn namespace(&self) -> anyhow::Result<Namespace> {
        netns::of_option(self.netns.as_deref())
    }

    /// Describes the origin of the programs, for messages.
    fn programs(&self) -> String {
        match &self.host_root {
            None => "on PATH".to_owned(),
            Some(root) => format!("below {}", root.display()),
        }
    }
}
