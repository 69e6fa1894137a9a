//! `dataplane proxy`.

mod serve;
mod sockets;

use std::{env, net::SocketAddr, path::PathBuf, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use clap::{ArgMatches, Args};
use jiff::SignedDuration;
use model::{Egress, Place, Workload, WorkloadName};
use proxy::Settings;
use relay::AccessLog;
use settings::{Listen, LogFormat, LogLevel, Node};

use super::{log, settled, source::SourceArgs};

/// Run the L4 proxy alone, in this network namespace.
///
/// Accepts TCP connections and relays them. The proxy reads a connection's original destination
/// from SO_ORIGINAL_DST (capture, or iptables' REDIRECT) or from the socket's own address (TPROXY,
/// sk_lookup, or VIPs that are routed to this machine).
///
/// If the destination is a service's VIP and port, the proxy connects to one of the service's
/// endpoints: at random, preferred endpoints first, another endpoint if the first cannot be
/// reached. If the destination is another known address, the proxy connects directly; with --egress
/// allow also to unknown addresses. The proxy resets refused connections.
///
/// Runs in the foreground. SIGTERM and Ctrl-C drain the proxy. SIGHUP makes it read the manifests
/// again; it also notices changes by itself. The access log goes to standard output, the log to
/// standard error.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
    # In a pod, whose connections iptables or a capture redirects to port 15001:
    dataplane proxy --manifests services/ --mark 1337
    # Refuse destinations that are neither services nor endpoints; log as JSON:
    dataplane proxy --kubernetes --egress deny --access-log json
    # Take over from a running proxy, without refusing a connection:
    dataplane proxy --manifests services/ --handover /run/dataplane/proxy.sock

Response flags in the access log: - done, UH no endpoint, NR no such port, DENY refused by policy,
LOOP the proxy itself, UF no endpoint reached, DC the client reset it, UC the endpoint reset it, SI idle,
DRAIN cut.")]
pub struct ProxyArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// Listen here for connections from the workload [default: 127.0.0.1:15001 and [::1]:15001]
    #[arg(long, value_name = "ADDR", num_args = 1.., value_delimiter = ',')]
    outbound: Vec<SocketAddr>,

    /// Listen here for connections to the workload, which go directly to their original destination
    /// [default: no listener]
    #[arg(long, value_name = "ADDR", num_args = 1.., value_delimiter = ',')]
    inbound: Vec<SocketAddr>,

    /// Policy for connections from the workload to addresses that do not belong to a service, an
    /// endpoint or a workload
    #[arg(long, value_enum, default_value_t)]
    egress: Egress,

    /// Number of relaying threads [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    workers: Option<u16>,

    /// Mark of the proxy's own connections (SO_MARK), so that capture leaves them alone; for
    /// example 0x539 or 1337
    #[arg(long, value_name = "MARK", value_parser = mark)]
    mark: Option<u32>,

    /// Connect to the workload from the client's address, and accept connections from TPROXY
    /// (IP_TRANSPARENT; needs CAP_NET_ADMIN, and routes that lead the answers back)
    #[arg(long)]
    transparent: bool,

    /// Take over from the proxy at this Unix socket, if there is one: its listening sockets with
    /// their backlog. Then wait there for the next proxy
    #[arg(long, value_name = "PATH")]
    handover: Option<PathBuf>,

    /// Format of the access log, which has a line for each connection, at its end
    #[arg(long, value_enum, default_value_t)]
    access_log: AccessLog,

    #[command(flatten)]
    limits: LimitArgs,

    #[command(flatten)]
    who: WhoArgs,

    #[command(flatten)]
    node: Node,

    #[command(flatten)]
    listen: ListenArgs,

    /// Log more (-v: debug, -vv: trace). RUST_LOG sets levels by module; POST /logging at the admin
    /// socket changes them
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,

    /// Format of the log on standard error [default: text]
    #[arg(long, value_enum)]
    log_format: Option<LogFormat>,

    #[arg(skip)]
    log_level: LogLevel,
}

/// How long, and how many.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Limits (durations as 500ms, 5s, 2m)")]
struct LimitArgs {
    /// Time that an endpoint has to accept a connection; after that the proxy tries another
    /// endpoint
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    connect_timeout: Duration,

    /// Number of endpoints that the proxy tries
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..))]
    attempts: u8,

    /// Reset connections that are idle for this time [default: never]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    idle_timeout: Option<Duration>,

    /// Probe the peers of connections that are idle for this time (TCP keepalive); `0s`: never
    #[arg(long, value_name = "TIME", default_value = "3m", value_parser = duration)]
    keepalive: Duration,

    /// Time that connections have to end when the proxy ends; then the proxy resets them
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = duration)]
    drain_time: Duration,

    /// Maximum number of connections at the same time; further connections wait in the backlog
    /// [default: as many as the hard limit of open files allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: Option<u32>,
}

/// What metrics and logs call the workload.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Names in metrics and logs")]
struct WhoArgs {
    /// Name of the workload [default: POD_NAMESPACE and POD_NAME, or default and the host name]
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = workload_name)]
    workload: Option<WorkloadName>,
}

/// Where the proxy answers questions.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Endpoints (ADDRESS:PORT, or `off`)")]
struct ListenArgs {
    /// Serve Prometheus metrics, at /metrics [default: 127.0.0.1:15020]
    #[arg(long = "metrics-addr", value_name = "ADDR")]
    metrics: Option<Listen>,

    /// Serve /config_dump, /logging, /healthz/ready and /metrics by TCP, for reading only [default: off]
    #[arg(long = "admin-addr", value_name = "ADDR")]
    admin: Option<Listen>,

    /// Serve the same pages at this Unix socket (mode 0600), which also takes POST /logging [default:
    /// no socket]
    #[arg(long, value_name = "PATH")]
    admin_socket: Option<PathBuf>,
}

/// Parses a duration with its unit.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let parsed: SignedDuration = text.parse().map_err(|_| {
        "not a duration; expected a number with its unit: 500ms, 5s, 2m, 1h".to_owned()
    })?;
    Duration::try_from(parsed)
        .map_err(|_| "a duration cannot be negative; expected one like 500ms, 5s or 2m".to_owned())
}

fn mark(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    };
    match parsed {
        Ok(0) => Err(
            "0 is not a mark, because unmarked packets have it; expected another number".to_owned(),
        ),
        Ok(mark) => Ok(mark),
        Err(_) => Err(
            "not a mark; expected a number up to 4294967295, or 0x with hexadecimal digits"
                .to_owned(),
        ),
    }
}

fn workload_name(text: &str) -> Result<WorkloadName, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => {
            Ok(WorkloadName::new(namespace, name))
        }
        _ => Err("NAMESPACE/NAME is wanted".to_owned()),
    }
}

impl ProxyArgs {
    /// Completes the options from the configuration file.
    pub(super) fn fill_from(
        &mut self,
        file: &settings::Settings,
        given: &ArgMatches,
    ) -> Result<(), clap::Error> {
        self.source.fill_from(file);
        settled::node(&mut self.node, file, given)?;
        terminal::fill(&mut self.listen.metrics, file.listen.metrics.as_ref());
        terminal::fill(&mut self.listen.admin, file.listen.admin.as_ref());
        terminal::fill(&mut self.log_format, file.log.format.as_ref());
        let level = log::level(self.verbose).or(file.log.level);
        self.log_level = level.unwrap_or_default();
        Ok(())
    }

    /// Returns the addresses at which the proxy answers commands and scrapes.
    fn listeners(&self) -> settings::Listeners {
        settings::Listeners {
            metrics: self.listen.metrics,
            admin: self.listen.admin,
            ..settings::Listeners::default()
        }
    }

    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let logging = log::start(self.log_level, self.log_format.unwrap_or_default());
        serve::run(&self, logging)
    }

    fn settings(&self) -> Settings {
        let limits = &self.limits;
        Settings {
            workers: self.workers.map_or(0, Into::into),
            mark: self.mark,
            transparent: self.transparent,
            attempts: limits.attempts.into(),
            connect_timeout: limits.connect_timeout,
            idle_timeout: limits.idle_timeout.filter(|time| !time.is_zero()),
            patience: relay::socket::Patience {
                keepalive: Some(limits.keepalive).filter(|time| !time.is_zero()),
                user_timeout: None,
            },
            max_connections: limits.max_connections.map(|max| max as usize),
            access_log: self.access_log,
            ..Settings::default()
        }
    }

    fn workload(&self) -> anyhow::Result<Arc<Workload>> {
        let own_name = || -> anyhow::Result<WorkloadName> {
            let namespace = env::var("POD_NAMESPACE").unwrap_or_else(|_| "default".to_owned());
            let name = env::var("POD_NAME").or_else(|_| {
                let name = nix::unistd::gethostname().context("cannot find out the host name")?;
                anyhow::Ok(name.to_string_lossy().into_owned())
            })?;
            Ok(WorkloadName::new(&namespace, &name))
        };
        let name = self.who.workload.clone().map_or_else(own_name, Ok)?;
        Ok(Arc::new(Workload::new(name, Place::Elsewhere)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_marks() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2m"), Ok(Duration::from_mins(2)));
        assert_eq!(duration("0s"), Ok(Duration::ZERO));
        assert!(duration("5").is_err() && duration("-5s").is_err() && duration("x").is_err());
        assert_eq!((mark("0x539"), mark("1337")), (Ok(1337), Ok(1337)));
        assert!(mark("0").is_err() && mark("0xg").is_err());
        assert!(workload_name("a").is_err() && workload_name("a/b").is_ok());
    }
}
