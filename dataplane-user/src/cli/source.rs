//! Where the services come from.

use std::{
    env,
    path::PathBuf,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use clap::Args;

use crate::{
    admin,
    agent::{NodeSettings, Source},
    model::Snapshot,
    source::{kubernetes, manifests},
};

/// What the API server has not told by then, a command does not wait for.
const LIMIT: Duration = Duration::from_mins(1);
/// Nor for a server that cannot be read for so long.
const AWAY: Duration = Duration::from_secs(10);

/// Where the services come from.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = true)]
pub(super) struct SourceArgs {
    /// Files or directories with Services and EndpointSlices, as `kubectl get
    /// services,endpointslices -A -o yaml` prints them
    #[arg(
        short = 'f',
        long,
        num_args = 1..,
        value_delimiter = ',',
        value_name = "PATH",
        env = "DATAPLANE_MANIFESTS", hide_env_values = true,
        conflicts_with_all = ["kubernetes", "kubeconfig", "api_server"]
    )]
    manifests: Vec<PathBuf>,

    /// The Kubernetes API, as the pod's service account or with the kubeconfig that KUBECONFIG
    /// names
    #[arg(long, env = "DATAPLANE_KUBERNETES", hide_env_values = true)]
    kubernetes: bool,

    /// The Kubernetes API, with this kubeconfig (its current context)
    #[arg(
        long,
        value_name = "FILE",
        env = "DATAPLANE_KUBECONFIG",
        hide_env_values = true
    )]
    kubeconfig: Option<PathBuf>,

    /// The Kubernetes API at this URL, rather than the one in the kubeconfig or, in a pod, in
    /// KUBERNETES_SERVICE_HOST
    ///
    /// The latter is an address that a service proxy has to serve. On a node whose only service
    /// proxy is this one, give the server's own address or that of a load balancer before it.
    #[arg(
        long,
        value_name = "URL",
        env = "DATAPLANE_API_SERVER",
        hide_env_values = true
    )]
    api_server: Option<String>,
}

impl SourceArgs {
    /// As it is given; of the API, no more is read than `scope`.
    pub(super) fn source(&self, scope: kubernetes::Scope) -> Source {
        if !self.manifests.is_empty() {
            return Source::Manifests(self.manifests.clone());
        }
        let in_environment = || env::var_os("KUBECONFIG").filter(|path| !path.is_empty());
        Source::Kubernetes(kubernetes::Settings {
            target: kubernetes::Target {
                kubeconfig: self
                    .kubeconfig
                    .clone()
                    .or_else(|| in_environment().map(PathBuf::from)),
                server: self.api_server.clone(),
                ..kubernetes::Target::default()
            },
            scope,
            patience: kubernetes::Patience::default(),
        })
    }
}

impl SourceArgs {
    /// What there is to serve now.
    pub(super) fn snapshot(&self, settings: &NodeSettings) -> anyhow::Result<Snapshot> {
        let asking = "cannot find out this node's name and addresses";
        let node = settings.node().context(asking)?;
        let kubernetes = match self.source(kubernetes::Scope::HostPorts) {
            Source::Manifests(paths) => {
                let mut loaded = manifests::load(&paths, &node)?;
                settings.tell(&mut loaded).context(asking)?;
                return Ok(loaded.snapshot);
            }
            Source::Kubernetes(kubernetes) => kubernetes,
        };
        kubernetes.target.check()?;
        let view = view(kubernetes, Arc::new(node))?;
        Ok(Snapshot {
            node: Arc::new(settings.node_with(&view.node).context(asking)?),
            services: view.services,
            problems: view.problems,
            ..Snapshot::default()
        })
    }
}

/// Reads the API once.
fn view(
    settings: kubernetes::Settings,
    node: Arc<crate::model::Node>,
) -> anyhow::Result<kubernetes::View> {
    let server = settings.target.server_text();
    let (health, latest) = (Arc::default(), Arc::<kubernetes::Latest>::default());
    let (sender, changed) = mpsc::channel();
    // Fails only when nobody waits any more.
    let tell = move || sender.send(()).unwrap_or_default();
    let reading = Arc::clone(&health);
    let ended = |why| eprintln!("error: the API is read no more: {why}");
    let taken = Arc::clone(&latest);
    let _reader = kubernetes::Reader::start(settings, node, reading, taken, tell, ended)?;
    let start = Instant::now();
    let mut said = false;
    loop {
        let _ = changed.recv_timeout(Duration::from_millis(200));
        if let Some(view) = latest.take() {
            return Ok(view);
        }
        if start.elapsed() > Duration::from_secs(1) && !said {
            eprintln!("note: reading {server}");
            said = true;
        }
        if let Some((since, text)) = kubernetes::Health::failure(&health)
            && admin::now().saturating_sub(since) >= AWAY.as_secs()
        {
            bail!("{text}");
        }
        if start.elapsed() > LIMIT {
            bail!("{server} did not tell everything within {LIMIT:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        source: SourceArgs,
    }

    fn parse(arguments: &[&str]) -> Result<Source, String> {
        let arguments = [&["dataplane"], arguments].concat();
        let command = Command::try_parse_from(arguments).map_err(|e| e.to_string())?;
        Ok(command.source.source(kubernetes::Scope::Services))
    }

    #[test]
    fn one_source_and_no_more() {
        assert!(matches!(parse(&["-f", "a"]), Ok(Source::Manifests(_))));
        for arguments in [
            &["--kubernetes"][..],
            &["--kubeconfig", "a"],
            &["--api-server", "https://192.0.2.1:6443", "--kubernetes"],
        ] {
            assert!(matches!(parse(arguments), Ok(Source::Kubernetes(_))));
        }
        let none = parse(&[]).unwrap_err();
        assert!(
            none.contains("--manifests") && none.contains("--kubernetes"),
            "{none}"
        );
        let both = parse(&["-f", "a", "--kubernetes"]).unwrap_err();
        assert!(both.contains("cannot be used with"), "{both}");
    }
}
