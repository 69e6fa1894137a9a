//! The command line: one file per subcommand.

#![forbid(unsafe_code)]

mod ca;
mod certs;
mod cleanup;
mod cni;
mod completions;
mod config;
mod conntrack;
mod dns;
mod doctor;
mod explain;
mod guard;
mod keep_nat;
mod live;
mod log;
mod monitor;
mod names;
mod opener;
mod plan;
mod policies;
mod proxy;
mod run;
mod services;
mod settled;
mod source;
mod status;

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
    str::FromStr,
};

use clap::{Parser, Subcommand};
use dataplane_common::Protocol;
use nix::time::{ClockId, clock_gettime};
pub use settled::parse;

/// Kubernetes services without iptables: translated at the socket, by eBPF programs.
///
/// The agent (`dataplane run`) reads which services to serve and keeps tables in the kernel up to
/// date. Kernel programs read the tables and decide about connections; they go on serving without
/// the agent. The commands status, services, explain, monitor and plan read the tables themselves.
/// They ask a running agent only for data that the tables do not have, such as names.
#[derive(Debug, Parser)]
#[command(name = "dataplane", version, after_help = EXIT_CODES)]
pub struct Cli {
    /// Configuration file (YAML). Flags and environment variables override its values. See
    /// docs/configuration.md and `dataplane config`
    #[arg(long, value_name = "FILE", env = "DATAPLANE_CONFIG", global = true)]
    config: Option<PathBuf>,

    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "\
Exit codes: 0 success; 1 error, or not healthy; 2 `plan`: something would change; 3 another agent runs; 64 wrong command line.

Start with `dataplane doctor`, which tests if this machine can run the dataplane.";

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<run::RunArgs>),
    Plan(plan::PlanArgs),
    Status(status::StatusArgs),
    Proxy(Box<proxy::ProxyArgs>),
    Services(services::ServicesArgs),
    Explain(explain::ExplainArgs),
    Policies(policies::PoliciesArgs),
    Monitor(monitor::MonitorArgs),
    Conntrack(conntrack::ConntrackArgs),
    Dns(Box<dns::DnsArgs>),
    Doctor(doctor::DoctorArgs),
    Config(config::ConfigArgs),
    Guard(guard::GuardArgs),
    KeepNat(keep_nat::KeepNatArgs),
    Cleanup(cleanup::CleanupArgs),
    Cni(cni::CniArgs),
    Ca(ca::CaArgs),
    Certs(certs::CertsArgs),
    Completions(completions::CompletionsArgs),
    #[command(hide = true)]
    Opener(opener::OpenerArgs),
}

impl Cli {
    /// Executes the command.
    ///
    /// # Errors
    ///
    /// If it fails. The message is for the operator.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Run(args) => args.run(),
            Command::Plan(args) => args.run(),
            Command::Status(args) => args.run(),
            Command::Proxy(args) => args.run(),
            Command::Services(args) => args.run(),
            Command::Explain(args) => args.run(),
            Command::Policies(args) => args.run(),
            Command::Monitor(args) => args.run(),
            Command::Conntrack(args) => args.run(),
            Command::Dns(args) => args.run(),
            Command::Doctor(args) => args.run(),
            Command::Config(args) => args.run(),
            Command::Guard(args) => args.run(),
            Command::KeepNat(args) => args.run(),
            Command::Cleanup(args) => args.run(),
            Command::Cni(args) => args.run(),
            Command::Ca(args) => args.run(),
            Command::Certs(args) => args.run(),
            Command::Completions(args) => args.run(),
            Command::Opener(args) => args.run(),
        }
    }
}

/// Parses destinations: `10.96.0.1:443`, `10.96.0.10:53/udp`, `[fd00::1]:80`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Destination {
    addr: IpAddr,
    port: u16,
    protocol: Protocol,
}

impl FromStr for Destination {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (socket, protocol) = with_protocol(text)?;
        let addr: SocketAddr = socket.parse().map_err(|_| {
            format!(
                "`{socket}` is not an address and port; expected ADDRESS:PORT such as 10.96.0.1:443, 10.96.0.10:53/udp or \
                     [fd00::1]:80, or NAME:PORT such as httpbin.default:8000"
            )
        })?;
        if addr.port() == 0 {
            return Err(
                "port 0 cannot be connected to; expected a port from 1 to 65535".to_owned(),
            );
        }
        Ok(Self {
            addr: addr.ip(),
            port: addr.port(),
            protocol,
        })
    }
}

/// Splits the protocol from the end of a destination.
fn with_protocol(text: &str) -> Result<(&str, Protocol), String> {
    match text.rsplit_once('/') {
        None => Ok((text, Protocol::TCP)),
        Some((rest, "tcp")) => Ok((rest, Protocol::TCP)),
        Some((rest, "udp")) => Ok((rest, Protocol::UDP)),
        Some((_, other)) => Err(format!(
            "`{other}` is not a protocol that the dataplane serves; expected tcp (the default) or udp"
        )),
    }
}

impl std::fmt::Display for Destination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}/{}",
            SocketAddr::new(self.addr, self.port),
            self.protocol
        )
    }
}

/// Returns the nanoseconds since boot, on the clock of the programs.
fn monotonic_ns() -> u64 {
    // The kernel always has this clock.
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map(|now| u64::try_from(std::time::Duration::from(now).as_nanos()).unwrap_or(u64::MAX))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn destinations() {
        let parse = |text: &str| text.parse::<Destination>();
        let tcp = parse("10.96.0.1:443").unwrap();
        assert_eq!(tcp.to_string(), "10.96.0.1:443/tcp");
        assert_eq!(parse("10.96.0.10:53/udp").unwrap().protocol, Protocol::UDP);
        assert_eq!(
            parse("[fd00::1]:80").unwrap().to_string(),
            "[fd00::1]:80/tcp"
        );
        for wrong in [
            "10.96.0.1",
            "10.96.0.1:0",
            "10.96.0.1:80/sctp",
            "web:80",
            "fd00::1:80x",
            "",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    /// The kernel crate has the defaults, and the comments repeat them.
    #[test]
    fn the_schema_says_the_defaults_of_limits() {
        let schema = settings::config::schema();
        let limits = &schema["properties"]["limits"]["properties"];
        let default = kernel::tables::Limits::default();
        for (key, default) in [
            ("frontends", default.frontends),
            ("endpoints", default.endpoints),
            ("affinityClients", default.affinity),
        ] {
            let text = limits[key]["description"].as_str().unwrap();
            assert!(text.contains(&format!("Default: {default}.")), "{text}");
        }
    }

    /// Flags are for the settings that one types by hand. All other settings are keys of the configuration file only.
    #[test]
    fn the_agent_has_few_flags() {
        let command = Cli::command();
        let run = command.find_subcommand("run").unwrap();
        let common = command.get_arguments().filter(|a| a.is_global_set());
        let flags = run.get_arguments().chain(common);
        let mut flags: Vec<_> = flags.filter_map(clap::Arg::get_long).collect();
        flags.sort_unstable();
        flags.dedup();
        flags.retain(|flag| !["help", "version"].contains(flag));
        assert!(flags.len() <= 25, "{} flags: {flags:?}", flags.len());
    }
}
