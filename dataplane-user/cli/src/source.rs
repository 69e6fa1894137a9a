//! The source of the services.

use std::{
    env,
    path::PathBuf,
    sync::mpsc,
    time::{Duration, Instant},
};

use agent::Input;
use anyhow::bail;
use clap::Args;
use model::Snapshot;
use settings::{Kubernetes, Node, Settings};
use source::{
    Notice, Source,
    kubernetes::{self, WantedPolicies},
};

/// Maximum time that a command waits for the API server.
const LIMIT: Duration = Duration::from_mins(1);
/// Maximum time that a command waits for a server that cannot be read.
const AWAY: Duration = Duration::from_secs(10);

/// Where the services come from.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = true)]
pub(super) struct SourceArgs {
    /// Read these files and directories with Services and EndpointSlices, as `kubectl get
    /// services,endpointslices -A -o yaml` prints them
    #[arg(
        short = 'f',
        long,
        num_args = 1..,
        value_delimiter = ',',
        value_name = "PATH",
        env = "DATAPLANE_MANIFESTS",
        conflicts_with_all = ["kubernetes", "kubeconfig", "api_server"]
    )]
    manifests: Vec<PathBuf>,

    /// Read the Kubernetes API, as the pod's service account or with the kubeconfig that KUBECONFIG
    /// names
    #[arg(long, env = "DATAPLANE_KUBERNETES")]
    kubernetes: bool,

    /// Read the Kubernetes API, with this kubeconfig (its current context)
    #[arg(long, value_name = "FILE", env = "DATAPLANE_KUBECONFIG")]
    kubeconfig: Option<PathBuf>,

    /// Read the Kubernetes API at this URL, not at the URL in the kubeconfig or in the pod's
    /// KUBERNETES_SERVICE_HOST
    ///
    /// KUBERNETES_SERVICE_HOST is a cluster IP, which needs a service proxy. If the dataplane is
    /// the node's only service proxy, give the API server's own address or the address of its load
    /// balancer.
    #[arg(long, value_name = "URL", env = "DATAPLANE_API_SERVER")]
    api_server: Option<String>,

    #[arg(skip)]
    settings: settings::Source,
}

impl SourceArgs {
    /// The group of these options.
    pub(super) const GROUP: &str = "SourceArgs";

    /// Uses the file's source if none of these options is set.
    pub(super) fn fill_from(&mut self, file: &Settings) {
        let api = self.kubernetes || self.kubeconfig.is_some() || self.api_server.is_some();
        let of_file = file.source.kubernetes.as_ref();
        self.settings = if api || !self.manifests.is_empty() {
            settings::Source {
                manifests: self.manifests.clone(),
                kubernetes: api.then(|| Kubernetes {
                    kubeconfig: self.kubeconfig.clone(),
                    api_server: self.api_server.clone(),
                    service_entries: of_file.is_some_and(|of| of.service_entries),
                    routes: of_file.is_some_and(|of| of.routes),
                }),
            }
        } else {
            file.source.clone()
        };
        if let Some(kubernetes) = &mut self.settings.kubernetes
            && kubernetes.kubeconfig.is_none()
        {
            let in_environment = env::var_os("KUBECONFIG").filter(|path| !path.is_empty());
            kubernetes.kubeconfig = in_environment.map(PathBuf::from);
        }
    }

    /// Returns the source settings of the command line or the file.
    pub(super) fn settings(&self) -> &settings::Source {
        &self.settings
    }

    /// Returns the source for these settings. Of the API, it reads at most `scope`.
    pub(super) fn source(&self, scope: kubernetes::Scope) -> Source {
        agent::source(&self.settings, scope, WantedPolicies::None, false, false)
    }

    /// Returns the source for commands that answer the names of services.
    pub(super) fn source_of_names(&self) -> Source {
        let scope = kubernetes::Scope::Mesh;
        agent::source(&self.settings, scope, WantedPolicies::None, false, true)
    }
}

impl SourceArgs {
    /// Reads the objects that the source serves now.
    pub(super) fn snapshot(&self, node: &Node) -> anyhow::Result<Snapshot> {
        read(&self.source(kubernetes::Scope::HostPorts), node)
    }

    /// Reads the objects whose names the source answers now.
    pub(super) fn names(&self, node: &Node) -> anyhow::Result<Snapshot> {
        read(&self.source_of_names(), node)
    }
}

fn read(source: &Source, node: &Node) -> anyhow::Result<Snapshot> {
    let (sender, notices) = mpsc::channel();
    let notify = move |notice| {
        // Fails only when the receiver is gone.
        sender.send(notice).unwrap_or_default();
    };
    let mut input = Input::open(source, node, None, notify)?;
    let place = input.health().places().join(", ");
    let start = Instant::now();
    let mut said = false;
    while !input.is_known() {
        let notice = notices.recv_timeout(Duration::from_millis(200));
        if let Ok(Notice::Died { thread, why }) = notice {
            bail!("the thread that reads {place} has died ({thread}: {why}). Please report this");
        }
        input.take();
        if start.elapsed() > Duration::from_secs(1) && !said {
            eprintln!("note: reading {place}");
            said = true;
        }
        if let Some((since, text)) = input.health().failure()
            && admin::now().saturating_sub(since) >= AWAY.as_secs()
        {
            bail!("{text}");
        }
        if start.elapsed() > LIMIT {
            bail!("{place} did not tell everything within {LIMIT:?}");
        }
    }
    Ok(input.snapshot().clone())
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
        let mut command = Command::try_parse_from(arguments).map_err(|e| e.to_string())?;
        command.source.fill_from(&Settings::default());
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
