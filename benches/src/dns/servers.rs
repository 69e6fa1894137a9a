//! DNS servers that know the same names, each on one CPU. The client runs on another CPU.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use dataplane_tests::{Command, Host, Lab, Process};

use crate::{fleet::Fleet, manifests, say};

/// The pod in which all servers run.
const POD: (&str, &str) = ("servers", "10.244.1.10");
/// The port of the resolver that all servers ask for other names.
const UPSTREAM: u16 = 5300;
/// Number of names that only this resolver knows.
pub const OUTSIDE: u32 = 20_000;
/// How long a server may take to start.
const PATIENCE: Duration = Duration::from_mins(1);
/// Maximum number of the client's queries that wait for an answer.
const OUTSTANDING: &str = "100";

/// A DNS server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// `dataplane dns serve`, with one thread.
    Dataplane,
    /// unbound, with the names as local data.
    Unbound,
    /// dnsmasq, with the names as hosts.
    Dnsmasq,
    /// BIND, with the names as a zone.
    Bind,
}

impl Server {
    /// All servers, in the order of their declaration.
    pub const ALL: [Self; 4] = [Self::Dataplane, Self::Unbound, Self::Dnsmasq, Self::Bind];

    /// Returns the server's `path` in the rows.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Dataplane => "dataplane",
            Self::Unbound => "unbound",
            Self::Dnsmasq => "dnsmasq",
            Self::Bind => "bind",
        }
    }

    /// Returns the server's program and the package that contains it. `None` if this project builds
    /// the program, or if the benchmark needs it in any case.
    const fn program(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Dataplane | Self::Unbound => None,
            Self::Dnsmasq => Some(("dnsmasq", "dnsmasq-base")),
            Self::Bind => Some(("named", "bind9")),
        }
    }

    const fn port(self) -> u16 {
        UPSTREAM + 1 + self as u16
    }
}

/// A set of names to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// Names of services.
    Local,
    /// Names that only the resolver knows, answered from the cache.
    Cached,
}

impl Names {
    /// All sets of names.
    pub const ALL: [Self; 2] = [Self::Local, Self::Cached];

    /// Returns the `case` of the rows.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Cached => "cached",
        }
    }
}

/// The running servers.
pub struct Servers {
    lab: Lab,
    running: Vec<(Server, Process)>,
    _upstream: Process,
    directory: tempfile::TempDir,
}

impl Servers {
    /// Starts all servers that are installed, with the names of this many services.
    ///
    /// # Errors
    /// Fails if dnsperf or unbound is missing, or if a server does not answer.
    pub fn start(services: u32) -> anyhow::Result<Self> {
        ensure!(
            is_there("dnsperf"),
            "dnsperf is not there, which asks the servers; install the package dnsperf"
        );
        let (name, address) = POD;
        let lab = Lab::builder()
            .node("node1")
            .pod("node1", name, address)
            .build()?;
        let directory = tempfile::tempdir()?;
        let fleet = Fleet {
            services,
            target: vec![std::net::Ipv4Addr::new(10, 244, 9, 9).into()],
            remote: vec![],
            node: vec![],
        };
        let snapshot = fleet.snapshot();
        let of_services = directory.path().join("services");
        fs::create_dir(&of_services)?;
        manifests::write(&snapshot, "node1", &of_services)?;
        let local: Vec<(String, String)> = snapshot
            .services
            .values()
            .filter_map(|service| {
                let name = format!(
                    "{}.{}.svc.cluster.local",
                    service.name.name(),
                    service.name.namespace()
                );
                Some((name, service.cluster_ips.first()?.to_string()))
            })
            .collect();
        let queries = |names: &mut dyn Iterator<Item = String>| -> String {
            let lines: Vec<String> = names.map(|name| format!("{name} A\n")).collect();
            lines.concat()
        };
        let mut names = local.iter().map(|(name, _)| name.clone());
        fs::write(directory.path().join("local"), queries(&mut names))?;
        let mut names = (0..OUTSIDE).map(|number| format!("n{number}.example.com"));
        fs::write(directory.path().join("cached"), queries(&mut names))?;
        let conf = unbound(
            UPSTREAM,
            " local-zone: \"example.com.\" redirect\n local-data: \"example.com. 86400 IN A 192.0.2.1\"\n",
        );
        let conf = write(directory.path(), "upstream.conf", &conf)?;
        let upstream = lab
            .pod(POD.0)
            .command("unbound")
            .args(["-d", "-c"])
            .arg(conf)
            .spawn()?;
        let mut servers = Self {
            lab,
            running: vec![],
            _upstream: upstream,
            directory,
        };
        servers.wait_for(UPSTREAM, "n1.example.com")?;
        for server in Server::ALL {
            if let Some((program, package)) =
                server.program().filter(|(program, _)| !is_there(program))
            {
                say!(
                    "without {}: {program} is not there; install the package {package}",
                    server.word()
                );
                continue;
            }
            let process = servers.command(server, &local)?.spawn()?;
            servers.running.push((server, process));
            servers.wait_for(server.port(), &local[0].0)?;
        }
        Ok(servers)
    }

    /// Returns the servers that run.
    pub fn running(&self) -> Vec<Server> {
        self.running.iter().map(|(server, _)| *server).collect()
    }

    fn pod(&self) -> &Host {
        self.lab.pod(POD.0)
    }

    fn command(&self, server: Server, local: &[(String, String)]) -> anyhow::Result<Command> {
        let directory = self.directory.path();
        let port = server.port();
        // The last CPU, because devices tend to interrupt the first.
        let cpu = (thread::available_parallelism()?.get() - 1).to_string();
        let pinned = self.pod().command("taskset").args(["-c", &cpu]);
        Ok(match server {
            Server::Dataplane => {
                let resolv = write(directory, "resolv.conf", "nameserver 192.0.2.53\n")?;
                pinned
                    .arg(self.lab.programs().dataplane()?)
                    .args(["dns", "serve", "--workers", "1", "--node-name", "node1"])
                    .args(["--listen", &format!("127.0.0.1:{port}")])
                    .args(["--resolver", &format!("127.0.0.1:{UPSTREAM}")])
                    .arg("--resolv-conf")
                    .arg(resolv)
                    .arg("--manifests")
                    .arg(directory.join("services"))
                    .env("RUST_LOG", "warn")
            }
            Server::Unbound => {
                let mut more = " local-zone: \"cluster.local.\" static\n".to_owned();
                for (name, address) in local {
                    writeln!(more, " local-data: \"{name}. 5 IN A {address}\"")?;
                }
                more.push_str(" msg-cache-size: 64m\n rrset-cache-size: 128m\n");
                more.push_str(" do-not-query-localhost: no\n");
                more.push_str("forward-zone:\n name: \".\"\n");
                writeln!(more, " forward-addr: 127.0.0.1@{UPSTREAM}")?;
                let conf = write(directory, "unbound.conf", &unbound(port, &more))?;
                pinned.arg("unbound").args(["-d", "-c"]).arg(conf)
            }
            Server::Dnsmasq => {
                let hosts: Vec<String> = local
                    .iter()
                    .map(|(name, address)| format!("{address} {name}\n"))
                    .collect();
                let hosts = write(directory, "hosts", &hosts.concat())?;
                pinned
                    .args([
                        "dnsmasq",
                        "--no-daemon",
                        "--no-resolv",
                        "--no-hosts",
                        "--user=root",
                    ])
                    .args(["--conf-file=/dev/null", "--pid-file=", "--bind-interfaces"])
                    .args([
                        "--cache-size=100000",
                        "--dns-forward-max=1000",
                        "--local-ttl=5",
                    ])
                    .arg("--listen-address=127.0.0.1")
                    .arg(format!("--port={port}"))
                    .arg(format!("--server=127.0.0.1#{UPSTREAM}"))
                    .arg(format!("--addn-hosts={}", hosts.display()))
            }
            Server::Bind => {
                let mut zone = "$TTL 5\n@ IN SOA ns.dns hostmaster 1 7200 1800 86400 5\n@ IN NS ns.dns\nns.dns IN A 127.0.0.1\n".to_owned();
                for (name, address) in local {
                    writeln!(zone, "{name}. IN A {address}")?;
                }
                let zone = write(directory, "zone", &zone)?;
                let conf = format!(
                    "options {{ directory \"{0}\"; pid-file none; session-keyfile \"{0}/session.key\"; listen-on port {port} \
                     {{ 127.0.0.1; }}; listen-on-v6 {{ none; }}; recursion yes; dnssec-validation no; minimal-responses yes; \
                     forward only; forwarders {{ 127.0.0.1 port {UPSTREAM}; }}; }};\ncontrols {{ }};\n\
                     zone \"cluster.local\" {{ type primary; file \"{1}\"; }};\n",
                    directory.display(),
                    zone.display()
                );
                let conf = write(directory, "named.conf", &conf)?;
                pinned.arg("named").args(["-f", "-n", "1", "-c"]).arg(conf)
            }
        })
    }

    fn wait_for(&mut self, port: u16, name: &str) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            let dig = self
                .pod()
                .command("dig")
                .args(["@127.0.0.1", "-p", &port.to_string()]);
            let dig = dig.args(["+tries=1", "+time=1", "+short", name]).run();
            match dig {
                Ok(text) if text.contains('.') => return Ok(()),
                _ if start.elapsed() < PATIENCE => thread::sleep(Duration::from_millis(50)),
                Ok(text) => bail!("the server at port {port} does not know {name}: {text}"),
                Err(error) => return Err(error).context(format!("the server at port {port}")),
            }
        }
    }

    /// Returns the number of queries per second that a server answers, and the CPU time of a query
    /// in µs.
    ///
    /// # Errors
    /// Fails if a query gets no answer.
    pub fn measure(&self, server: Server, names: Names, seconds: u32) -> anyhow::Result<[f64; 2]> {
        let before = self.cpu(server)?;
        let dnsperf = self.pod().command("taskset").args(["-c", "0", "dnsperf"]);
        let dnsperf = dnsperf.args(["-s", "127.0.0.1", "-p", &server.port().to_string()]);
        let dnsperf = dnsperf.args(["-c", "8", "-T", "1", "-q", OUTSTANDING]);
        let dnsperf = dnsperf.args(["-l", &seconds.to_string(), "-d"]);
        let text = dnsperf
            .arg(self.directory.path().join(names.word()))
            .run()?;
        let figure = |title: &str| -> anyhow::Result<f64> {
            let line = text
                .lines()
                .find_map(|line| line.trim().strip_prefix(title));
            let word = line.and_then(|line| line.split_whitespace().next());
            let figure = word.and_then(|word| word.parse().ok());
            figure.with_context(|| format!("dnsperf does not say {title:?}:\n{text}"))
        };
        let (sent, answered) = (figure("Queries sent:")?, figure("Queries completed:")?);
        if answered < sent || !text.contains("NOERROR") || text.contains("NXDOMAIN") {
            bail!("{}: not all were answered:\n{text}", server.word());
        }
        let cpu = (self.cpu(server)? - before) / answered * 1e6;
        Ok([figure("Queries per second:")?, cpu])
    }

    /// Returns the CPU time that a server has used so far, in seconds.
    fn cpu(&self, server: Server) -> anyhow::Result<f64> {
        let found = self.running.iter().find(|(other, _)| *other == server);
        let id = found.context("it does not run")?.1.id();
        let mut sum = 0.0;
        for thread in fs::read_dir(format!("/proc/{id}/task"))? {
            let text = fs::read_to_string(thread?.path().join("schedstat"))?;
            let used = text.split_whitespace().next();
            sum += used
                .and_then(|used| used.parse::<f64>().ok())
                .unwrap_or_default();
        }
        Ok(sum / 1e9)
    }
}

/// Returns whether a program is in one of the usual directories.
fn is_there(program: &str) -> bool {
    let directories = ["/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin"];
    directories
        .iter()
        .any(|directory| Path::new(directory).join(program).exists())
}

fn write(directory: &Path, name: &str, text: &str) -> anyhow::Result<PathBuf> {
    let path = directory.join(name);
    fs::write(&path, text).with_context(|| path.display().to_string())?;
    Ok(path)
}

/// Returns the configuration of an unbound with one thread that listens on a port of loopback.
fn unbound(port: u16, more: &str) -> String {
    format!(
        "server:\n directory: \"/\"\n chroot: \"\"\n username: \"\"\n pidfile: \"\"\n use-syslog: no\n logfile: \"\"\n \
         do-daemonize: no\n verbosity: 0\n num-threads: 1\n interface: 127.0.0.1@{port}\n \
         access-control: 0.0.0.0/0 allow\n module-config: \"iterator\"\n so-reuseport: no\n{more}"
    )
}
