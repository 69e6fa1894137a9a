//! `dataplane monitor`.

mod pages;
mod queries;
mod refusals;

use std::{
    io::{self, BufWriter, Write},
    net::SocketAddr,
    process::ExitCode,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use clap::Args;
use dataplane_common::{Addr, Event, Hook, Port, Reason};
use kernel::{Monitor, tc::name as interface_name};
use serde::Serialize;
use terminal::{
    PathArgs, SocketArgs,
    output::{self, BAD, DIM, Format, GOOD},
};

use super::names::Names;

/// Show the programs' decisions as they are made.
///
/// One line for each connection to a service, and for each datagram of an unconnected socket: time,
/// client, address, endpoint and reason. Of packets, the first packet of each flow, and each
/// refused packet. At `lookup`, each connection that Istio's policies or `mesh.unsupported: deny` refuse
/// when it arrives at a captured workload. With `--hook dns`, the DNS queries that the agent answers; with
/// `--hook proxy`, the connections that the agent's proxy refuses.
/// Costs nothing while `monitor` does not run. Ctrl-C ends it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane monitor --service default/httpbin
  dataplane monitor --reason no-endpoints --reason no-local-endpoint
  dataplane monitor --hook packet --iface eth0
  dataplane monitor --hook dns                    the DNS queries that the agent answers
  dataplane monitor --hook proxy                  the connections that the agent's proxy refuses")]
pub struct MonitorArgs {
    /// Only decisions about this service (needs a running agent, which knows the names)
    #[arg(long, value_name = "NAMESPACE/NAME")]
    service: Option<String>,

    /// Only decisions with this reason; can be given several times
    #[arg(long, value_name = "WORD", value_parser = reason)]
    reason: Vec<Reason>,

    /// Only decisions at this hook, or DNS queries (`dns`), or connections that the proxy refuses
    /// (`proxy`); can be given several times [default: all hooks except dns and proxy]
    #[arg(long, value_name = "HOOK", value_parser = hook)]
    hook: Vec<Shown>,

    /// Only packets at this interface
    #[arg(long, value_name = "NAME")]
    iface: Option<String>,

    /// End after N lines
    #[arg(long, value_name = "N")]
    count: Option<u64>,

    /// Output format; json prints one object for each line
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,

    #[command(flatten)]
    pub(super) paths: PathArgs,

    #[command(flatten)]
    pub(super) socket: SocketArgs,
}

fn reason(word: &str) -> Result<Reason, String> {
    Reason::from_word(word).ok_or_else(|| {
        let words: Vec<&str> = Reason::ALL.iter().map(|reason| reason.word()).collect();
        format!(
            "there is no reason `{word}`; there are: {}",
            words.join(", ")
        )
    })
}

/// A kind of lines: decisions at a hook, DNS queries, or connections that the proxy refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    At(Hook),
    Queries,
    Refusals,
}

impl Shown {
    const ALL: [Self; 7] = [
        Self::At(Hook::Connect),
        Self::At(Hook::Sendmsg),
        Self::At(Hook::Recvmsg),
        Self::At(Hook::Packet),
        Self::At(Hook::Lookup),
        Self::Queries,
        Self::Refusals,
    ];

    const fn word(self) -> &'static str {
        match self {
            Self::At(hook) => hook.word(),
            Self::Queries => "dns",
            Self::Refusals => "proxy",
        }
    }
}

fn hook(word: &str) -> Result<Shown, String> {
    Shown::ALL
        .into_iter()
        .find(|shown| shown.word() == word)
        .ok_or_else(|| {
            let words = Shown::ALL.map(Shown::word).join(", ");
            format!("there is no hook `{word}`; there are: {words}")
        })
}

/// A decision as JSON.
#[derive(Debug, Serialize)]
struct Line {
    /// Seconds since the epoch.
    time: f64,
    hook: &'static str,
    protocol: String,
    /// The packet's source. `None` at the socket, which may not have an address yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<String>,
    /// The packet's interface.
    #[serde(skip_serializing_if = "Option::is_none")]
    interface: Option<String>,
    destination: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    endpoint: Option<String>,
    reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    service: Option<String>,
    pool: u32,
    /// The client's process, at the socket.
    #[serde(flatten)]
    process: Option<Process>,
}

/// A process that uses a socket.
#[derive(Debug, Serialize)]
struct Process {
    pid: u32,
    command: String,
    netns_cookie: u64,
    socket_cookie: u64,
}

impl MonitorArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        if let Some(service) = &self.service {
            anyhow::ensure!(
                service.split('/').filter(|part| !part.is_empty()).count() == 2,
                "`{service}` is not a service's name; expected NAMESPACE/NAME"
            );
            // The agent knows the names of services. Without an agent no event would match, and the output
            // would not say why.
            self.socket.client().get_text("/version")?;
        }
        match self.hook[..] {
            [Shown::Queries] => return pages::show(&self, &queries::KIND),
            [Shown::Refusals] => return pages::show(&self, &refusals::KIND),
            _ => {}
        }
        anyhow::ensure!(
            self.hook.iter().all(|shown| matches!(shown, Shown::At(_))),
            "--hook dns and --hook proxy cannot be given with other hooks; run a second `dataplane monitor`"
        );
        let names = Names::new(self.socket.client());
        let mut monitor = Monitor::open(&self.paths.bpffs())?;
        let boot = boot_time();
        // Written after all present events have been formatted, and not line by line.
        let mut out = BufWriter::new(output::stdout());
        let mut left = self.count.unwrap_or(u64::MAX);
        while left > 0 {
            for event in monitor.wait() {
                let Some(line) = self.line(&names, &event, boot) else {
                    continue;
                };
                match self.output {
                    Format::Text => text(&mut out, &line)?,
                    Format::Json => {
                        serde_json::to_writer(&mut out, &line)?;
                        writeln!(out)?;
                    }
                }
                left -= 1;
                if left == 0 {
                    break;
                }
            }
            out.flush()?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Returns the line of an event that passes the filters.
    fn line(&self, names: &Names, event: &Event, boot: Duration) -> Option<Line> {
        let reason = Reason::from_number(event.reason);
        if !self.reason.is_empty() && !reason.is_some_and(|r| self.reason.contains(&r)) {
            return None;
        }
        let hook = Hook::from_number(event.hook);
        if !self.hook.is_empty() && !hook.is_some_and(|h| self.hook.contains(&Shown::At(h))) {
            return None;
        }
        let interface = (event.ifindex != 0).then(|| interface_name(event.ifindex));
        if self.iface.is_some() && self.iface != interface {
            return None;
        }
        let service = names.of_pool(event.pool);
        if self.service.is_some() && self.service != service {
            return None;
        }
        let socket = |addr: Addr, port: Port| SocketAddr::new(addr.ip(), port.host()).to_string();
        let end = event
            .comm
            .iter()
            .position(|&b| b == 0)
            .unwrap_or(event.comm.len());
        Some(Line {
            time: (boot + Duration::from_nanos(event.at)).as_secs_f64(),
            hook: hook.map_or("unknown", Hook::word),
            protocol: event.protocol.to_string(),
            source: (event.source != Addr::UNSPECIFIED)
                .then(|| socket(event.source, event.source_port)),
            interface,
            destination: socket(event.destination, event.destination_port),
            endpoint: (event.endpoint != Addr::UNSPECIFIED)
                .then(|| socket(event.endpoint, event.endpoint_port)),
            reason: reason.map_or("unknown", Reason::word),
            service,
            pool: event.pool,
            process: (!matches!(hook, Some(Hook::Packet | Hook::Lookup))).then(|| Process {
                pid: event.pid,
                // A process may have any name.
                command: String::from_utf8_lossy(&event.comm[..end])
                    .chars()
                    .map(|c| if c.is_control() { '?' } else { c })
                    .collect(),
                netns_cookie: event.netns,
                socket_cookie: event.socket,
            }),
        })
    }
}

/// Returns the time at which the clock of the events was 0.
fn boot_time() -> Duration {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    now.saturating_sub(Duration::from_nanos(super::monotonic_ns()))
}

/// Writes the time of day, and a word.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the time of day, which is positive and small"
)]
fn begin(out: &mut dyn Write, time: f64, word: &str) -> io::Result<()> {
    let millis = (time * 1000.0) as u64;
    let second = millis / 1000 % 86_400;
    write!(
        out,
        "{DIM}{:02}:{:02}:{:02}.{:03}{DIM:#} {word:<7} ",
        second / 3600,
        second / 60 % 60,
        second % 60,
        millis % 1000,
    )
}

fn text(out: &mut dyn Write, line: &Line) -> io::Result<()> {
    let refused = Reason::from_word(line.reason).is_some_and(Reason::is_refusal);
    let style = if refused { BAD } else { GOOD };
    begin(out, line.time, line.hook)?;
    if let Some(source) = &line.source {
        write!(out, "{source} -> ")?;
    }
    write!(out, "{}/{}", line.destination, line.protocol)?;
    if let Some(endpoint) = &line.endpoint {
        write!(out, " -> {endpoint}")?;
    }
    write!(out, " {}", output::styled(style, line.reason))?;
    if let Some(service) = &line.service {
        write!(out, " {service}")?;
    }
    if let Some(interface) = &line.interface {
        write!(out, " {DIM}on {interface}{DIM:#}")?;
    }
    if let Some(Process { command, pid, .. }) = &line.process {
        write!(out, " {DIM}{command}[{pid}]{DIM:#}")?;
    }
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use admin::client::Client;
    use dataplane_common::Protocol;

    use super::*;

    fn event(reason: Reason) -> Event {
        let mut comm = [0; 16];
        comm[..6].copy_from_slice(b"cu\x1bl\0x");
        Event {
            at: 1_500_000_000,
            netns: 1,
            socket: 2,
            source: Addr::UNSPECIFIED,
            destination: Addr::from_v4([10, 96, 0, 1]),
            endpoint: Addr::from_v4([10, 244, 1, 5]),
            destination_port: Port::new(80),
            endpoint_port: Port::new(8080),
            pool: 3,
            pid: 42,
            ifindex: 0,
            source_port: Port::ANY,
            reserved: 0,
            reason: reason as u8,
            hook: Hook::Connect as u8,
            protocol: Protocol::TCP,
            padding: 0,
            comm,
        }
    }

    fn args(reason: &[Reason]) -> MonitorArgs {
        MonitorArgs {
            service: None,
            reason: reason.to_vec(),
            hook: Vec::new(),
            iface: None,
            count: None,
            output: Format::Text,
            paths: PathArgs {
                bpffs: None,
                cgroup: None,
            },
            socket: SocketArgs {
                socket: Some("/nowhere".into()),
            },
        }
    }

    fn nobody() -> Names {
        Names::new(Client::new(Path::new("/nowhere")))
    }

    #[test]
    fn a_line_for_people() {
        let line = args(&[])
            .line(
                &nobody(),
                &event(Reason::Translated),
                Duration::from_secs(86_400 + 3661),
            )
            .unwrap();
        let mut out = anstream::StripStream::new(Vec::new());
        text(&mut out, &line).unwrap();
        assert_eq!(
            String::from_utf8(out.into_inner()).unwrap(),
            "01:01:02.500 connect 10.96.0.1:80/tcp -> 10.244.1.5:8080 translated cu?l[42]\n"
        );
    }

    #[test]
    fn a_packets_line() {
        let packet = Event {
            source: Addr::from_v4([192, 0, 2, 7]),
            source_port: Port::new(40112),
            hook: Hook::Packet as u8,
            // Loopback is interface 1 of every network namespace.
            ifindex: 1,
            comm: [0; 16],
            ..event(Reason::Masqueraded)
        };
        let line = |args: &MonitorArgs| args.line(&nobody(), &packet, Duration::ZERO);
        let mut some = args(&[]);
        let mut out = anstream::StripStream::new(Vec::new());
        text(&mut out, &line(&some).unwrap()).unwrap();
        assert_eq!(
            String::from_utf8(out.into_inner()).unwrap(),
            "00:00:01.500 packet  192.0.2.7:40112 -> 10.96.0.1:80/tcp -> 10.244.1.5:8080 \
             masqueraded on lo\n"
        );
        some.iface = Some("lo".to_owned());
        some.hook = vec![Shown::At(Hook::Packet)];
        assert!(line(&some).is_some());
        some.iface = Some("eth0".to_owned());
        assert!(line(&some).is_none());
        some.iface = None;
        some.hook = vec![Shown::At(Hook::Connect)];
        assert!(line(&some).is_none());
        assert!(hook("packets").unwrap_err().contains("packet"));
    }

    #[test]
    fn an_interface_that_is_gone_is_shown_by_its_number() {
        let gone = Event {
            ifindex: u32::MAX,
            ..event(Reason::Masqueraded)
        };
        let line = args(&[]).line(&nobody(), &gone, Duration::ZERO).unwrap();
        assert_eq!(line.interface.as_deref(), Some("interface 4294967295"));
    }

    #[test]
    fn filters() {
        let some = args(&[Reason::NoEndpoints]);
        let line = |reason| some.line(&nobody(), &event(reason), Duration::ZERO);
        assert!(line(Reason::Translated).is_none());
        assert_eq!(line(Reason::NoEndpoints).unwrap().reason, "no-endpoints");
        assert!(reason("no-endpoint").unwrap_err().contains("no-endpoints"));
    }
}
