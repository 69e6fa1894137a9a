//! `dataplane run`.

use std::{
    env,
    io::{self, IsTerminal},
    process::ExitCode,
};

use clap::{Args, ValueEnum};
use dataplane_common::Protocol;
use ipnet::IpNet;
use tracing_subscriber::EnvFilter;

use super::{Listen, PathArgs, SocketArgs, exit, source::SourceArgs};
use crate::{
    admin,
    agent::{self, NodeSettings, OnExit, Settings},
    kernel::{self, probe},
};

/// Run the agent on this node.
///
/// Reads Kubernetes Services and EndpointSlices, from files or from the API server, keeps the kernel's tables in line with them, and
/// attaches the programs that serve them. Runs in the foreground; SIGTERM or Ctrl-C ends it, and
/// SIGHUP has it read manifests again (it also notices by itself). Killed or restarted, it
/// leaves services up, and finds the tables again when it starts.
#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// What becomes of the programs when the agent ends
    #[arg(
        long,
        value_enum,
        env = "DATAPLANE_ON_EXIT",
        hide_env_values = true,
        default_value_t
    )]
    on_exit: OnExit,

    /// Destroy sockets that are connected through a service to an endpoint that is gone, so that
    /// their processes connect anew at once
    ///
    /// As kube-proxy has it, a service's last endpoint does not count as gone before there is
    /// another one. TCP connections otherwise stay until one side ends them. Takes the host's PID
    /// namespace, to see the pods' network namespaces.
    #[arg(
        long,
        value_enum,
        num_args = 1..,
        value_delimiter = ',',
        value_name = "PROTOCOL",
        env = "DATAPLANE_DESTROY_STALE",
        hide_env_values = true,
        default_value = "udp"
    )]
    destroy_stale: Vec<Stale>,

    /// Say more in the log; twice: still more. RUST_LOG is finer
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,

    /// How to write the log, on standard error
    #[arg(
        long,
        value_enum,
        env = "DATAPLANE_LOG_FORMAT",
        hide_env_values = true,
        default_value_t
    )]
    log_format: LogFormat,

    #[command(flatten)]
    node: NodeArgs,

    #[command(flatten)]
    paths: PathArgs,

    #[command(flatten)]
    socket: SocketArgs,

    #[command(flatten)]
    listen: ListenArgs,

    #[command(flatten)]
    limits: LimitArgs,
}

/// What to take this node for.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "This node")]
pub(super) struct NodeArgs {
    /// Its name, as in the endpoints' `nodeName` [default: NODE_NAME, or its host name]
    #[arg(
        long,
        value_name = "NAME",
        env = "DATAPLANE_NODE_NAME",
        hide_env_values = true
    )]
    node_name: Option<String>,

    /// Answer node ports on the addresses in these ranges [default: the node's primary addresses,
    /// those of the interface with the default route]
    ///
    /// Loopback is always answered, for the node's own processes.
    #[arg(
        long,
        value_name = "CIDR",
        num_args = 1..,
        value_delimiter = ',',
        env = "DATAPLANE_NODEPORT_ADDRESSES", hide_env_values = true
    )]
    nodeport_addresses: Vec<IpNet>,

    /// Its zone, for endpoints that are hinted to zones [default: the label
    /// topology.kubernetes.io/zone of its Node object]
    #[arg(
        long,
        value_name = "ZONE",
        env = "DATAPLANE_ZONE",
        hide_env_values = true
    )]
    zone: Option<String>,
}

impl NodeArgs {
    pub(super) fn settings(&self) -> NodeSettings {
        NodeSettings {
            // As DaemonSets call it that tell it by the downward API.
            name: self
                .node_name
                .clone()
                .or_else(|| env::var("NODE_NAME").ok())
                .unwrap_or_default(),
            nodeport_addresses: self.nodeport_addresses.clone(),
            zone: self.zone.clone().unwrap_or_default(),
        }
    }
}

/// Where else the agent listens.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Endpoints (ADDRESS:PORT, or `off`)")]
struct ListenArgs {
    /// Prometheus metrics, at /metrics
    #[arg(
        long = "metrics-addr",
        value_name = "ADDR",
        env = "DATAPLANE_METRICS_ADDR",
        hide_env_values = true,
        default_value = "0.0.0.0:15020"
    )]
    metrics: Listen,

    /// Readiness, at /healthz/ready, and liveness, at /healthz/live
    #[arg(
        long = "health-addr",
        value_name = "ADDR",
        env = "DATAPLANE_HEALTH_ADDR",
        hide_env_values = true,
        default_value = "0.0.0.0:15021"
    )]
    health: Listen,

    /// For load balancers and probes, as kube-proxy answers them: /healthz and /livez
    ///
    /// While another process (kube-proxy) has the port, that is a problem in `dataplane status` and
    /// tried again. A service's `healthCheckNodePort` is answered on the addresses for node ports.
    #[arg(
        long = "healthz-addr",
        value_name = "ADDR",
        env = "DATAPLANE_HEALTHZ_ADDR",
        hide_env_values = true,
        default_value = "0.0.0.0:10256"
    )]
    healthz: Listen,

    /// What the Unix socket shows, over TCP: /status, /services, /pools
    #[arg(
        long = "admin-addr",
        value_name = "ADDR",
        env = "DATAPLANE_ADMIN_ADDR",
        hide_env_values = true,
        default_value = "127.0.0.1:15000"
    )]
    admin: Listen,
}

/// How far the tables may grow.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Limits (tables start small and grow while they serve)")]
struct LimitArgs {
    /// At most so many VIP ports, cluster addresses and node ports together
    #[arg(
        long,
        value_name = "N",
        env = "DATAPLANE_MAX_FRONTENDS", hide_env_values = true,
        default_value_t = kernel::Limits::default().frontends
    )]
    max_frontends: u32,

    /// At most so many endpoint slots
    #[arg(
        long,
        value_name = "N",
        env = "DATAPLANE_MAX_ENDPOINTS", hide_env_values = true,
        default_value_t = kernel::Limits::default().endpoints
    )]
    max_endpoints: u32,
}

impl LimitArgs {
    fn limits(&self) -> kernel::Limits {
        kernel::Limits {
            frontends: self.max_frontends,
            endpoints: self.max_endpoints,
        }
    }
}

/// Of which protocol to destroy stale sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Stale {
    /// UDP: a client that sends to an address that nobody has would wait for its own timeouts
    Udp,
    /// TCP: an endpoint that is not ready may still answer the connections that it has
    Tcp,
    /// None of them
    None,
}

/// How to write the log.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum LogFormat {
    /// For people
    #[default]
    Text,
    /// One JSON object a line
    Json,
}

impl RunArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        self.start_log();
        let settings = match self.paths.resolve() {
            Ok(paths) => self.settings(paths),
            Err(error) => return Ok(self.cannot_run(&error)),
        };
        match agent::run(settings) {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(error) if error.is_busy() => {
                eprintln!("dataplane: {error}");
                eprintln!("One agent per node: end that one first, or leave it to its work.");
                Ok(ExitCode::from(exit::BUSY))
            }
            // What is wrong with the source has nothing to do with the machine.
            Err(error @ (agent::Error::Manifests(_) | agent::Error::Connect(_))) => {
                Err(error.into())
            }
            Err(error) => Ok(self.cannot_run(&error)),
        }
    }

    /// One message that says what to do: what this machine lacks, if it lacks something, and else
    /// what went wrong.
    fn cannot_run(&self, error: &dyn std::error::Error) -> ExitCode {
        let features = probe::features(&self.paths.or_guess());
        let mut missing = features.iter().filter(|f| f.required && !f.present);
        // The most basic come first, and what else is missing may be so for want of it.
        let Some(first) = missing.next() else {
            eprintln!("dataplane: {error}");
            return ExitCode::FAILURE;
        };
        eprintln!(
            "dataplane: cannot run here for want of {} (needed for: {}): {}",
            first.name, first.needed_for, first.detail
        );
        eprintln!("What to do: {}", first.remedy);
        eprintln!("`dataplane doctor` shows everything that it takes.");
        ExitCode::FAILURE
    }

    fn settings(&self, paths: kernel::Paths) -> Settings {
        Settings {
            paths,
            limits: self.limits.limits(),
            source: self.source.source(),
            node: self.node.settings(),
            listen: admin::Settings {
                socket: self.socket.socket.clone(),
                metrics: self.listen.metrics.0,
                health: self.listen.health.0,
                healthz: self.listen.healthz.0,
                admin: self.listen.admin.0,
            },
            destroy_stale: self
                .destroy_stale
                .iter()
                .filter_map(|stale| match stale {
                    Stale::Udp => Some(Protocol::UDP),
                    Stale::Tcp => Some(Protocol::TCP),
                    Stale::None => None,
                })
                .collect(),
            on_exit: self.on_exit,
        }
    }

    fn start_log(&self) {
        let level = match self.verbose {
            0 => "info",
            // What libraries have to say is of use to few.
            1 => "info,dataplane=debug",
            _ => "debug,dataplane=trace",
        };
        let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
        let log = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(io::stderr);
        match self.log_format {
            LogFormat::Json => log.json().init(),
            LogFormat::Text => {
                let colour = io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none();
                log.with_ansi(colour).with_target(false).init();
            }
        }
    }
}
