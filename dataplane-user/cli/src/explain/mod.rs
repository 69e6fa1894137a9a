//! `dataplane explain`.

mod capture;
mod decision;
mod explanation;
mod live;
mod packet;
mod room;
mod target;
mod ways;

use std::{
    fmt,
    io::Write,
    net::{IpAddr, SocketAddr},
    process::ExitCode,
    str::FromStr,
};

use admin::report::Report;
use agent::addresses;
use anyhow::Context as _;
use capture::{Client, Mesh, Place};
use clap::Args;
use decision::decide;
use explanation::Explanation;
use kernel::{conntrack::Conntrack, packet::PacketTables, tables::Tables};
use target::Target;
use terminal::{
    PathArgs, SocketArgs,
    netns::{self, Namespace},
    output::{self, BOLD, Cell, DIM, Format, GOOD, Table, WARN},
};

use super::{Destination, names::Names};

/// Explain what happens to a connection, and why.
///
/// Reads the kernel's tables and takes the same steps as the kernel programs, with the same code.
/// Sends no packet.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane explain 10.244.2.8 10.96.130.105:8000
  dataplane explain node 10.96.0.10:53/udp
  dataplane explain netns:blue 127.0.0.1:30080
  dataplane explain shop/web-7c9f 192.0.2.80:443    a captured workload, by its name
  dataplane explain shop/web-7c9f httpbin.default:8000   by the name that it looks up first
  dataplane explain pid:4711 192.0.2.80:443         with the process's user and cgroup
  dataplane explain 192.0.2.7 10.244.2.8:8080       inbound, if 10.244.2.8 is captured
  dataplane explain --iface eth0 192.0.2.7:40112 198.51.100.2:30080/tcp")]
pub struct ExplainArgs {
    /// The client: an address of a pod or of this node, `node`, `netns:NAME`, `netns:/PATH`,
    /// `pid:NUMBER`, or a captured workload as `NAMESPACE/NAME`. With --iface: ADDRESS:PORT
    ///
    /// The client makes a difference in three cases: its connections are captured; the destination
    /// is a loopback address (the node's loopback answers node ports, a pod's does not); the
    /// service has session affinity, which is by network namespace.
    #[arg(value_name = "SRC")]
    source: Source,

    /// The destination: ADDRESS:PORT, with `/udp` for UDP; IPv6 as [ADDRESS]:PORT. A DNS name in
    /// place of the address, if the agent answers the client's DNS queries
    #[arg(value_name = "DST:PORT[/udp]")]
    destination: Target,

    /// Explain a packet that arrives at this interface, not a connection of a socket on this node
    #[arg(long, value_name = "NAME")]
    iface: Option<String>,

    /// With --iface: length of the packet in bytes, from the IP header on, at most 3000. An IPv4
    /// packet has "don't fragment" set [default: the headers' length]
    #[arg(
        long,
        value_name = "BYTES",
        requires = "iface",
        default_value_t = 0,
        hide_default_value = true
    )]
    length: usize,

    /// User of the client's process, for rules that exclude users from capture [default: with
    /// `pid:` the process's user; otherwise a user without a rule]
    #[arg(long, value_name = "UID")]
    user: Option<u32>,

    /// Group of the client's process, for rules that exclude groups [default: as for --user]
    #[arg(long, value_name = "GID")]
    group: Option<u32>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,

    #[command(flatten)]
    pub(super) paths: PathArgs,

    #[command(flatten)]
    pub(super) socket: SocketArgs,
}

/// The client of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Source {
    Node,
    Address(IpAddr),
    Socket(SocketAddr),
    Namespace(String),
    Process(u32),
    /// `NAMESPACE/NAME`.
    Workload(String),
}

impl Source {
    /// Returns the client's network namespace. `None` if no namespace here has the address.
    fn namespace(&self, host_netns: u64, mesh: Option<&Mesh>) -> anyhow::Result<Option<Namespace>> {
        match self {
            Self::Node => Ok(Some(Namespace {
                cookie: host_netns,
                place: "the agent's".to_owned(),
                path: None,
            })),
            Self::Namespace(name) => netns::named(name).map(Some),
            Self::Process(pid) => netns::of_process(*pid).map(Some),
            Self::Address(addr) => with_address(*addr, mesh),
            Self::Socket(socket) => with_address(socket.ip(), mesh),
            Self::Workload(name) => match mesh {
                Some(mesh) => match mesh.find(name)? {
                    Place::Namespace(namespace) => Ok(Some(namespace)),
                    Place::Cgroup(_) => Self::Node.namespace(host_netns, None),
                    Place::Packets(addr) => by_routes(addr),
                },
                None => anyhow::bail!("cannot find the workload {name}: this node has no mesh"),
            },
        }
    }
}

/// Returns the network namespace of an address: by the tables, else by the node's routes and interfaces.
fn with_address(addr: IpAddr, mesh: Option<&Mesh>) -> anyhow::Result<Option<Namespace>> {
    let captured = mesh.and_then(|mesh| mesh.namespace_with(addr));
    match captured.map(netns::with_cookie).transpose()? {
        Some(Some(namespace)) => Ok(Some(namespace)),
        _ => by_routes(addr),
    }
}

/// Returns the namespace that has this address, by the node's routes and interfaces, because a pod controls the
/// addresses in its own namespace. Returns this process's own namespace if one of its interfaces has the address.
fn by_routes(addr: IpAddr) -> anyhow::Result<Option<Namespace>> {
    if addr.is_loopback() || addresses::of_interfaces()?.iter().any(|i| i.addr == addr) {
        return netns::own().map(Some);
    }
    let found = agent::namespace_with(addr).map_err(anyhow::Error::msg)?;
    found.map(|path| netns::at(&path)).transpose()
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node => f.write_str("node"),
            Self::Address(addr) => addr.fmt(f),
            Self::Socket(socket) => socket.fmt(f),
            Self::Namespace(name) => write!(f, "netns:{name}"),
            Self::Process(pid) => write!(f, "pid:{pid}"),
            Self::Workload(name) => f.write_str(name),
        }
    }
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "node" {
            return Ok(Self::Node);
        }
        if let Some(name) = text.strip_prefix("netns:") {
            return Ok(Self::Namespace(name.to_owned()));
        }
        if let Some(pid) = text.strip_prefix("pid:") {
            return pid
                .parse()
                .map(Self::Process)
                .map_err(|_| format!("`{pid}` is not a process id; expected a number"));
        }
        if let Ok(socket) = text.parse() {
            return Ok(Self::Socket(socket));
        }
        if let Ok(address) = text.parse() {
            return Ok(Self::Address(address));
        }
        match text.split('/').collect::<Vec<_>>()[..] {
            [namespace, name] if !namespace.is_empty() && !name.is_empty() => {
                Ok(Self::Workload(text.to_owned()))
            }
            _ => Err(format!(
                "`{text}` is not a client; expected an address, `node`, `netns:NAME`, `netns:/PATH`, `pid:NUMBER` or \
                 `NAMESPACE/NAME`"
            )),
        }
    }
}

impl ExplainArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let tables = Tables::open(&self.paths.bpffs())?;
        let names = Names::new(self.socket.client());
        let owner = |pool| names.of_pool(pool);
        let mut told = if let Some(iface) = &self.iface {
            self.packet(&tables, iface, owner)?
        } else {
            self.connection(&tables, owner)?
        };
        told.route = told.pool.and_then(|pool| names.route_of_pool(pool));
        if told.pool.is_none() {
            told.steps.extend(names.left_out(&told.destination));
        }
        let route = told.route.as_ref();
        told.steps.extend(route.map(|route| {
            format!("{route} splits the connections to this port among its backends")
        }));
        self.output.print(&told, text)?;
        Ok(ExitCode::SUCCESS)
    }
}

impl ExplainArgs {
    fn connection(
        &self,
        tables: &Tables,
        owner: impl Fn(u32) -> Option<String>,
    ) -> anyhow::Result<Explanation> {
        let host_netns = tables.host_netns();
        let mesh = Mesh::open(tables, &self.paths.bpffs(), &self.socket.client())?;
        let namespace = self.source.namespace(host_netns, mesh.as_ref())?;
        let namespace = namespace.as_ref();
        let (to, found) = match &self.destination {
            Target::Address(to) => (*to, None),
            Target::Name {
                name,
                port,
                protocol,
            } => {
                let client = self.socket.client();
                let found = target::find(&client, &self.source, namespace, name)?;
                let Some(addr) = found.address else {
                    let (from, to) = (self.source.to_string(), self.destination.to_string());
                    return Ok(found.without_address(from, to));
                };
                let to = Destination {
                    addr,
                    port: *port,
                    protocol: *protocol,
                };
                (to, Some(found))
            }
        };
        let mut told = decide(tables, owner, namespace, host_netns, to);
        told.source = self.source.to_string();
        if let Some(mesh) = &mesh {
            let mut client = Client {
                namespace,
                own: namespace.is_some_and(|namespace| namespace.cookie == host_netns),
                user: self.user,
                group: self.group,
                address: None,
                cgroups: Vec::new(),
            };
            match &self.source {
                Source::Process(pid) => {
                    let (user, group) = capture::ids_of(*pid)?;
                    client.user.get_or_insert(user);
                    client.group.get_or_insert(group);
                    client.cgroups = capture::cgroups_of(*pid)?;
                }
                Source::Workload(name) => match mesh.find(name)? {
                    Place::Cgroup(id) => {
                        client.cgroups = vec![(id, format!("with id {id}").into())];
                    }
                    Place::Packets(addr) => client.address = Some(addr),
                    Place::Namespace(_) => {}
                },
                Source::Address(addr) => client.address = Some(*addr),
                Source::Socket(socket) => client.address = Some(socket.ip()),
                _ => {}
            }
            if let Some(namespace) = namespace.filter(|_| client.address.is_none()) {
                client.address = mesh.address_in(namespace.cookie, to.addr.is_ipv4());
            }
            let mut inbound = mesh.inbound(&client, to);
            if let Some(told) = &mut inbound {
                told.judge(&self.socket.client(), client.address, to);
            }
            let mut outbound = mesh.outbound(tables, &client, to);
            if let Some(told) = &mut outbound {
                told.lead(&self.socket.client(), to);
            }
            told.capture(outbound, inbound);
        }
        if let Some(found) = found {
            told.destination = format!("{} ({})", self.destination, told.destination);
            told.steps.splice(1..1, found.steps);
            told.lookup = Some(found.lookup);
        }
        Ok(told)
    }

    fn packet(
        &self,
        tables: &Tables,
        iface: &str,
        owner: impl Fn(u32) -> Option<String>,
    ) -> anyhow::Result<Explanation> {
        let Source::Socket(source) = self.source else {
            anyhow::bail!(
                "`{}` is not the source of a packet; expected ADDRESS:PORT",
                self.source
            );
        };
        let bpffs = self.paths.bpffs();
        let conntrack = Conntrack::open(&bpffs)?.with_context(|| {
            format!(
                "{} has no tables for flows, because no agent with a packet path has run with this directory",
                bpffs.display()
            )
        })?;
        let mesh = Mesh::open(tables, &bpffs, &self.socket.client())?;
        let open = PacketTables::open(&bpffs)?;
        let report = open
            .is_through_stack()
            .then(|| self.socket.client().get::<Report>("/status").ok());
        let agent = report.flatten().and_then(|report| report.agent);
        let live = live::Live {
            tables,
            packet: &open,
            conntrack: &conntrack,
            stack_because: agent.and_then(|agent| agent.stack_because),
            mesh: mesh.as_ref(),
            bpffs: &bpffs,
        };
        let Target::Address(to) = self.destination else {
            anyhow::bail!(
                "a packet goes to an address; expected ADDRESS:PORT, not {}",
                self.destination
            );
        };
        let packet = ways::Packet {
            iface,
            source,
            to,
            length: self.length,
        };
        packet::explain(&live, owner, &packet)
    }
}

fn text(out: &mut dyn Write, told: &Explanation) -> std::io::Result<()> {
    writeln!(out, "{BOLD}{} -> {}{BOLD:#}", told.source, told.destination)?;
    for (n, step) in told.steps.iter().enumerate() {
        writeln!(out, "{DIM}{:>3}.{DIM:#} {step}", n + 1)?;
    }
    let style = if matches!(told.verdict, "refused" | "no-address") {
        WARN
    } else {
        GOOD
    };
    writeln!(
        out,
        "{} ({})",
        output::styled(style, told.verdict),
        told.reason
    )?;
    if told.endpoints.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    let mut table = Table::new(&["ENDPOINT", "PROBABILITY"]);
    for choice in &told.endpoints {
        table.row([
            Cell::from(choice.endpoint.as_str()),
            format!("{:.2}%", choice.probability * 100.0).into(),
        ]);
    }
    table.write(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources() {
        assert_eq!("node".parse(), Ok(Source::Node));
        assert_eq!(
            "10.244.2.8".parse(),
            Ok(Source::Address("10.244.2.8".parse().unwrap()))
        );
        assert_eq!(
            "netns:blue".parse(),
            Ok(Source::Namespace("blue".to_owned()))
        );
        assert_eq!(
            "10.244.2.8:4000".parse(),
            Ok(Source::Socket("10.244.2.8:4000".parse().unwrap()))
        );
        assert_eq!("pid:42".parse(), Ok(Source::Process(42)));
        assert_eq!(
            "shop/web-7c9f".parse(),
            Ok(Source::Workload("shop/web-7c9f".to_owned()))
        );
        assert!("10.0.0.0/".parse::<Source>().is_err());
        assert!("pid:x".parse::<Source>().is_err());
        assert!(
            "sleep"
                .parse::<Source>()
                .unwrap_err()
                .contains("netns:NAME")
        );
    }
}
