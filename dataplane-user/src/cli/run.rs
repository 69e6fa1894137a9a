//! `dataplane run`.

use std::{
    env,
    io::{self, IsTerminal},
    process::ExitCode,
};

use clap::{Args, ValueEnum};
use dataplane_common::Protocol;
use ipnet::IpNet;

use super::{Command, Listen, PathArgs, Refusal, SocketArgs, exit, range, source::SourceArgs};
use crate::{
    admin,
    agent::{
        self, InputError, NodeSettings, OnExit, Settings,
        interfaces::{Detector, PacketSettings, Pattern, Patterns},
    },
    config::Mesh,
    kernel::{self, AttachOptions, Hook, Order, conntrack::room, probe},
    settings::NfConntrack,
    source::kubernetes::Scope,
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

    /// Take the place of the agent that runs on this node, if one does
    ///
    /// It gives its place away when this one has read its source, and ends when this one serves; what its
    /// proxy has it relays for at most 30 s more. The proxy's listening sockets are handed over, with the
    /// connections that wait in them: none is refused. If this one ends before it serves, the other takes
    /// its place back. Without this, a second agent ends and says who runs.
    #[arg(long, env = "DATAPLANE_REPLACE", hide_env_values = true)]
    replace: bool,

    /// Stay, idle, when another agent has taken this one's place, and take it back when that one is gone
    ///
    /// For those who start again whatever ends, as Kubernetes does: it would take the place back from the
    /// other. The configuration and the source are read anew then.
    #[arg(long, env = "DATAPLANE_STAY", hide_env_values = true)]
    stay: bool,

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
    packet: PacketArgs,

    /// Whose TCP connections go to a proxy: what a configuration file has below `mesh:`, in YAML
    /// [default: nobody's]
    #[arg(
        long,
        value_name = "YAML",
        env = "DATAPLANE_MESH",
        hide_env_values = true,
        help_heading = "Mesh"
    )]
    mesh: Option<Mesh>,

    #[command(flatten)]
    nf_conntrack: NfConntrack,

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
        value_parser = range,
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

/// Packets that no socket of ours decided on.
#[derive(Clone, Debug, Args)]
#[command(
    next_help_heading = "Packet path (clients outside of the cluster, and pods that are VMs)"
)]
struct PacketArgs {
    /// Whether packets are translated too, by programs on the node's interfaces; off: only what the
    /// sockets of this node's processes do
    #[arg(
        long,
        value_enum,
        value_name = "ON|OFF",
        env = "DATAPLANE_PACKET_PATH",
        hide_env_values = true,
        default_value_t
    )]
    packet_path: Switch,

    /// The interfaces by which the rest of the world is reached: names or patterns, `!` excludes
    /// [default: those with a default route or an address, without pods' sides, bridges and
    /// dummies]
    #[arg(
        long,
        value_name = "PATTERN",
        num_args = 1..,
        value_delimiter = ',',
        env = "DATAPLANE_UPLINK",
        hide_env_values = true
    )]
    uplink: Vec<Pattern>,

    /// The node's ends of the pairs whose other ends are in pods: names or patterns, `!` excludes
    /// [default: every veth and netkit with its other end in another network namespace, and with no
    /// default route and no network of its own]
    #[arg(
        long,
        value_name = "PATTERN",
        num_args = 1..,
        value_delimiter = ',',
        env = "DATAPLANE_POD_INTERFACE",
        hide_env_values = true
    )]
    pod_interface: Vec<Pattern>,

    /// Whoever has an address in these networks is a pod; others are masqueraded on the way to a
    /// cluster IP (kube-proxy's detectLocalMode ClusterCIDR and NodeCIDR) [default: nobody is]
    #[arg(
        long,
        value_name = "CIDR",
        num_args = 1..,
        value_delimiter = ',',
        env = "DATAPLANE_POD_CIDR",
        hide_env_values = true,
        value_parser = range,
        conflicts_with = "pods_by_interface"
    )]
    pod_cidr: Vec<IpNet>,

    /// Whoever sends from a pod's interface is a pod; others are masqueraded on the way to a cluster
    /// IP (kube-proxy's detectLocalMode BridgeInterface and InterfaceNamePrefix)
    #[arg(long, env = "DATAPLANE_PODS_BY_INTERFACE", hide_env_values = true)]
    pods_by_interface: bool,

    /// Masquerade whatever goes to a cluster IP
    #[arg(long, env = "DATAPLANE_MASQUERADE_ALL", hide_env_values = true)]
    masquerade_all: bool,

    /// Where our programs go among other people's on an interface
    ///
    /// First: a program that ends the chain, as most do for packets they let pass, hides no service.
    /// Last: others see, and may drop, what clients send to a service before it is translated.
    /// Whoever comes later may still go before ours. `before:NAME`, `after:NAME`: next to the program with that name, also
    /// if it comes later (TCX only). `program:ID` or `link:ID` in place of the name: by the kernel's number.
    #[arg(
        long,
        value_name = "first|last|before:NAME|after:NAME",
        env = "DATAPLANE_TC_ORDER",
        hide_env_values = true,
        default_value_t
    )]
    tc_order: Order,

    /// How our programs are put on interfaces
    #[arg(
        long,
        value_enum,
        value_name = "HOOK",
        env = "DATAPLANE_TC_HOOK",
        hide_env_values = true,
        default_value_t
    )]
    tc_hook: TcHook,

    /// How many flows conntrack has room for, rounded up to a power of two: 176 bytes of kernel memory each. Taken
    /// when the tables are made; those of an earlier agent keep their size until `dataplane cleanup`, or until an
    /// agent runs with --packet-path off [default: 32 768 for each of the node's cores, at least 131 072 (22 MiB),
    /// but at most what takes a 64th of the node's memory]
    #[arg(
        long,
        value_name = "N",
        env = "DATAPLANE_CONNTRACK_FLOWS",
        hide_env_values = true,
        value_parser = clap::value_parser!(u32).range(1024..=8_388_608)
    )]
    conntrack_flows: Option<u32>,
}

/// Whether something is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Switch {
    #[default]
    On,
    Off,
}

/// How programs are put on interfaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum TcHook {
    /// TCX if the kernel has it (Linux 6.6), otherwise clsact
    #[default]
    Auto,
    /// Links, which run before all filters of clsact qdiscs
    Tcx,
    /// Filters of a clsact qdisc
    Clsact,
}

impl PacketArgs {
    fn settings(&self) -> PacketSettings {
        let attach = AttachOptions {
            hook: match self.tc_hook {
                TcHook::Auto => None,
                TcHook::Tcx => Some(Hook::Tcx),
                TcHook::Clsact => Some(Hook::Clsact),
            },
            order: self.tc_order,
        };
        PacketSettings {
            attach: (self.packet_path == Switch::On).then_some(attach),
            flows: self.conntrack_flows.unwrap_or_else(room::of_this_machine),
            uplinks: Patterns::new(self.uplink.clone()),
            pods: Patterns::new(self.pod_interface.clone()),
            detector: Detector {
                networks: self.pod_cidr.clone(),
                interface: self.pods_by_interface,
            },
            masquerade_all: self.masquerade_all,
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

    /// The mode of kube-proxy that services are served like, for tools that ask it: /proxyMode
    ///
    /// While another process (kube-proxy) has the port, that is a warning in `dataplane status` and tried
    /// again.
    #[arg(
        long = "proxy-mode-addr",
        value_name = "ADDR",
        env = "DATAPLANE_PROXY_MODE_ADDR",
        hide_env_values = true,
        default_value = "127.0.0.1:10249"
    )]
    proxy_mode: Listen,

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
#[expect(clippy::struct_field_names, reason = "they are the options' names")]
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

    /// Remember the endpoints of at most so many clients of services with session affinity: 16 bytes of kernel
    /// memory for each once a service has affinity, and 128 more for each that is there
    #[arg(
        long,
        value_name = "N",
        env = "DATAPLANE_MAX_AFFINITY_CLIENTS", hide_env_values = true,
        default_value_t = kernel::Limits::default().affinity,
        value_parser = clap::value_parser!(u32).range(1024..=16_777_216)
    )]
    max_affinity_clients: u32,
}

impl LimitArgs {
    fn limits(&self) -> kernel::Limits {
        kernel::Limits {
            frontends: self.max_frontends,
            endpoints: self.max_endpoints,
            affinity: self.max_affinity_clients,
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
pub(super) enum LogFormat {
    /// For people
    #[default]
    Text,
    /// One JSON object a line
    Json,
}

/// The settings by the configuration as it is now.
fn read_again() -> Result<Settings, String> {
    let cli = super::parse(env::args_os()).map_err(|refusal| match refusal {
        Refusal::Usage(error) => error.to_string(),
        Refusal::Config(errors) => errors.to_string(),
    })?;
    let Command::Run(args) = cli.command else {
        // As it was when this process started.
        return Err("the command line is not `run`".to_owned());
    };
    let paths = args.paths.resolve().map_err(|error| error.to_string())?;
    Ok(args.settings(paths))
}

impl RunArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        self.start_log();
        let settings = match self.paths.resolve() {
            Ok(paths) => self.settings(paths),
            Err(error) => return Ok(self.cannot_run(&error)),
        };
        match agent::run(settings, read_again) {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(error) if error.is_busy() => {
                eprintln!("dataplane: {error}");
                eprintln!("One agent per node: end that one first, or leave it to its work.");
                Ok(ExitCode::from(exit::BUSY))
            }
            // What is wrong with the source has nothing to do with the machine.
            Err(
                error @ (agent::Error::Manifests(_) | agent::Error::Input(InputError::Open(_))),
            ) => Err(error.into()),
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
            source: self.source.source(match &self.mesh {
                Some(mesh) if mesh.denies() => Scope::Registry,
                Some(_) => Scope::Mesh,
                None => Scope::HostPorts,
            }),
            node: self.node.settings(),
            packet: self.packet.settings(),
            nf_conntrack: self.nf_conntrack.clone(),
            cgroup_given: self.paths.cgroup.is_some(),
            mesh: self.mesh.clone(),
            listen: admin::Settings {
                socket: self.socket.socket.clone(),
                metrics: self.listen.metrics.0,
                health: self.listen.health.0,
                healthz: self.listen.healthz.0,
                proxy_mode: self.listen.proxy_mode.0,
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
            replace: self.replace,
            stay: self.stay,
        }
    }

    fn start_log(&self) {
        let filter = super::log_filter(self.verbose);
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
