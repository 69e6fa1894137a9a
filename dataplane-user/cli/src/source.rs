//! Where the services come from.

use std::{
    env,
    path::PathBuf,
    sync::mpsc,
    time::{Duration, Instant},
};

use agent::Input;
use anyhow::bail;
use clap::{Args, builder::TypedValueParser as _};
use model::Snapshot;
use settings::{Iptables, Kubernetes, Node, Settings};
use source::{Notice, Source, kubernetes};

/// What the API server has not told by then, a command does not wait for.
const LIMIT: Duration = Duration::from_mins(1);
/// Nor for a server that cannot be read for so long.
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
        env = "DATAPLANE_MANIFESTS", hide_env_values = true,
        conflicts_with_all = ["kubernetes", "kubeconfig", "api_server", "from_iptables"]
    )]
    manifests: Vec<PathBuf>,

    /// Read the Kubernetes API, as the pod's service account or with the kubeconfig that KUBECONFIG
    /// names
    #[arg(long, env = "DATAPLANE_KUBERNETES", hide_env_values = true)]
    kubernetes: bool,

    /// Read the Kubernetes API, with this kubeconfig (its current context)
    #[arg(
        long,
        value_name = "FILE",
        env = "DATAPLANE_KUBECONFIG",
        hide_env_values = true
    )]
    kubeconfig: Option<PathBuf>,

    /// Read the Kubernetes API at this URL, not at the URL in the kubeconfig or in the pod's
    /// KUBERNETES_SERVICE_HOST
    ///
    /// KUBERNETES_SERVICE_HOST is a cluster IP, which needs a service proxy. If the dataplane is
    /// the node's only service proxy, give the API server's own address or the address of its load
    /// balancer.
    #[arg(
        long,
        value_name = "URL",
        env = "DATAPLANE_API_SERVER",
        hide_env_values = true
    )]
    api_server: Option<String>,

    /// Read the services out of kube-proxy's rules: in FILE, which `iptables-save` and `ip6tables-save`, or `nft list
    /// ruleset`, wrote; without FILE those in the kernel
    ///
    /// The rules also say which clients are masqueraded and which addresses answer node ports, if no option says it.
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        default_missing_value = "",
        value_parser = clap::builder::StringValueParser::new().map(PathBuf::from),
        env = "DATAPLANE_FROM_IPTABLES",
        hide_env_values = true,
        conflicts_with_all = ["kubernetes", "kubeconfig", "api_server"]
    )]
    from_iptables: Option<PathBuf>,

    /// Refuse kube-proxy's rules that have a line that is not understood. Without this option, such lines are named and
    /// the services that they concern are left out
    #[arg(
        long,
        requires = "from_iptables",
        env = "DATAPLANE_STRICT",
        hide_env_values = true
    )]
    strict: bool,

    /// Directory in which `dataplane takeover` saves rules: once it has removed those in the kernel, --from-iptables reads the
    /// saved ones [default: /var/lib/dataplane/takeover]
    #[arg(
        long,
        value_name = "DIR",
        env = "DATAPLANE_TAKEOVER_DIR",
        hide_env_values = true
    )]
    takeover_dir: Option<PathBuf>,

    #[arg(skip)]
    settled: settings::Source,
}

impl SourceArgs {
    /// The group of these options.
    pub(super) const GROUP: &str = "SourceArgs";

    /// Takes the file's source if none of these options was given.
    pub(super) fn settle(&mut self, file: &Settings) {
        let api = self.kubernetes || self.kubeconfig.is_some() || self.api_server.is_some();
        let of_file = file.source.kubernetes.as_ref();
        let of_rules = file.source.iptables.as_ref();
        let from_iptables = self.from_iptables.is_some();
        self.settled = if api || from_iptables || !self.manifests.is_empty() {
            settings::Source {
                manifests: self.manifests.clone(),
                iptables: self.from_iptables.as_ref().map(|file| Iptables {
                    file: Some(file.clone()).filter(|file| !file.as_os_str().is_empty()),
                    strict: self.strict || of_rules.is_some_and(|of| of.strict),
                    takeover_dir: (self.takeover_dir.clone())
                        .or_else(|| of_rules.and_then(|of| of.takeover_dir.clone())),
                    kernel_only: false,
                }),
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
        if let Some(kubernetes) = &mut self.settled.kubernetes
            && kubernetes.kubeconfig.is_none()
        {
            let in_environment = env::var_os("KUBECONFIG").filter(|path| !path.is_empty());
            kubernetes.kubeconfig = in_environment.map(PathBuf::from);
        }
    }

    /// What was said, by whichever means.
    pub(super) fn settled(&self) -> &settings::Source {
        &self.settled
    }

    /// The same, as a source; of the API, no more is read than `scope`.
    pub(super) fn source(&self, scope: kubernetes::Scope) -> Source {
        agent::source(&self.settled, scope, false)
    }

    /// Returns the source for commands that answer the names of services.
    pub(super) fn source_of_names(&self) -> Source {
        agent::source(&self.settled, kubernetes::Scope::Mesh, true)
    }
}

/// Reads what kube-proxy's rules serve. The rules are in a file, or in the kernel.
pub(super) fn of_rules(file: Option<PathBuf>) -> anyhow::Result<Snapshot> {
    let iptables = Some(Iptables {
        file,
        kernel_only: true,
        ..Iptables::default()
    });
    let settled = settings::Source {
        iptables,
        ..settings::Source::default()
    };
    let source = SourceArgs {
        manifests: Vec::new(),
        kubernetes: false,
        kubeconfig: None,
        api_server: None,
        from_iptables: None,
        strict: false,
        takeover_dir: None,
        settled,
    };
    source.snapshot(&Node::default())
}

impl SourceArgs {
    /// Reads what the source has to serve now.
    pub(super) fn snapshot(&self, node: &Node) -> anyhow::Result<Snapshot> {
        self.read(self.source(kubernetes::Scope::HostPorts), node)
    }

    /// Reads what the source has to answer now.
    pub(super) fn names(&self, node: &Node) -> anyhow::Result<Snapshot> {
        self.read(self.source_of_names(), node)
    }

    fn read(&self, source: Source, node: &Node) -> anyhow::Result<Snapshot> {
        let (node, rules) = agent::node_of_rules(&self.settled, node)?;
        let source = source.having_read(rules);
        let (sender, notices) = mpsc::channel();
        let notify = move |notice| {
            // Fails only when nobody waits any more.
            sender.send(notice).unwrap_or_default();
        };
        let mut input = Input::open(&source, &node, None, notify)?;
        let place = input.health().places().join(", ");
        let start = Instant::now();
        let mut said = false;
        while !input.is_known() {
            let notice = notices.recv_timeout(Duration::from_millis(200));
            if let Ok(Notice::Died { thread, why }) = notice {
                bail!(
                    "the thread that reads {place} has died ({thread}: {why}). Please report this"
                );
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
        command.source.settle(&Settings::default());
        Ok(command.source.source(kubernetes::Scope::Services))
    }

    /// The file says strict, and the command line names the rules.
    #[test]
    fn strict_in_the_file_stays() {
        let mut file = Settings::default();
        file.source.iptables = Some(Iptables {
            file: None,
            strict: true,
            ..Iptables::default()
        });
        let mut command =
            Command::try_parse_from(["dataplane", "--from-iptables", "rules"]).unwrap();
        command.source.settle(&file);
        let settled = command.source.settled().iptables.as_ref().unwrap();
        assert!(settled.strict);
        assert_eq!(settled.file.as_deref(), Some("rules".as_ref()));
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
