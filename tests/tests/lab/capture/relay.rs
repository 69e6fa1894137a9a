//! Proxies that are not the agent's, in the pod of `app` or on its node, as Open Service Mesh's user.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt as _, chown},
    path::{Path, PathBuf},
};

use anyhow::{Result, ensure};
use dataplane_tests::{Command, Host, Process};
use serde_json::Value;

use super::{UID, World};
use crate::cluster::eventually;

/// A transparent relay: it passes connections on to their original destination, and logs it.
pub struct Relay {
    log: PathBuf,
    _process: Process,
}

impl Relay {
    /// An unmodified HAProxy.
    pub fn haproxy(world: &World) -> Result<Self> {
        Self::haproxy_on(world, world.app())
    }

    /// As [`Relay::haproxy`], at every address of the pod, because rules lead connections of an interface to it.
    pub fn haproxy_everywhere(world: &World) -> Result<Self> {
        let config = HAPROXY.replace("bind 127.0.0.1:15001", "bind 0.0.0.0:15001");
        let config = config.replace("bind ::1:15001", "bind :::15001 v6only");
        Self::haproxy_with(world, world.app(), &config)
    }

    /// As [`Relay::haproxy`], on another host.
    pub fn haproxy_on(world: &World, host: &Host) -> Result<Self> {
        Self::haproxy_with(world, host, HAPROXY)
    }

    fn haproxy_with(world: &World, host: &Host, text: &str) -> Result<Self> {
        let config = world.state.path().join("haproxy.cfg");
        fs::write(&config, text)?;
        let command = host.command("haproxy").args(["-db", "-f"]);
        Self::start(world, host, "haproxy.log", command.arg(&config))
    }

    /// An unmodified nginx.
    pub fn nginx(world: &World) -> Result<Self> {
        Self::nginx_on(world, world.app())
    }

    /// As [`Relay::nginx`], on another host.
    pub fn nginx_on(world: &World, host: &Host) -> Result<Self> {
        let directory = world.state.path().join("nginx");
        let config = directory.join("nginx.conf");
        if !directory.exists() {
            fs::create_dir(&directory)?;
        }
        // The proxy is not root.
        fs::set_permissions(world.state.path(), Permissions::from_mode(0o711))?;
        chown(&directory, Some(UID), Some(UID))?;
        let module = "/usr/lib/nginx/modules/ngx_stream_module.so";
        let load = if Path::new(module).exists() {
            format!("load_module {module};\n")
        } else {
            // It is built in, or nginx reports an error.
            String::new()
        };
        let log = directory.join("access.log");
        let text = NGINX
            .replace("DIRECTORY", &directory.display().to_string())
            .replace("LOG", &log.display().to_string());
        fs::write(&config, load + &text)?;
        let command = host.command("nginx").user(UID);
        let command = command.args(["-e", "stderr", "-c"]).arg(&config);
        // One process: with a master, workers would outlive it when it is killed.
        Self::start(world, host, "nginx/access.log", command)
    }

    /// The dataplane's own proxy, alone, as a proxy that is not the agent's.
    pub fn ours(world: &World) -> Result<Self> {
        fs::set_permissions(world.manifests.path(), Permissions::from_mode(0o755))?;
        let command = world.app().command(world.lab.programs().dataplane()?);
        let command = command
            .user(UID)
            .env("RUST_LOG", "warn")
            .args(["proxy", "--workload", "default/app", "--access-log", "json"])
            .args(["--outbound", "127.0.0.1:15001", "--outbound", "[::1]:15001"])
            .args(["--inbound", "0.0.0.0:15003", "--inbound", "[::]:15003"])
            .args(["--metrics-addr", "off", "--admin-addr", "off"])
            .args(["--node-name", "node1", "--manifests"])
            .arg(world.manifests.path());
        Self::start(world, world.app(), "proxy.log", command)
    }

    /// Starts it, with its standard output in a file, and waits until it listens.
    fn start(world: &World, host: &Host, log: &str, command: Command) -> Result<Self> {
        let log = world.state.path().join(log);
        let process = if log.starts_with(world.state.path().join("nginx")) {
            // It writes its log itself.
            command.spawn()?
        } else {
            command.stdout(fs::File::create(&log)?).spawn()?
        };
        let relay = Self {
            log,
            _process: process,
        };
        eventually(|| {
            let listening = host.command("ss").args(["-Hltn"]).run()?;
            let at = |host: &str| listening.contains(&format!("{host}:15001"));
            let v4 = at("127.0.0.1") || at("0.0.0.0") || at("*");
            let v6 = at("[::1]") || at("[::]");
            ensure!(
                v4 && v6 && listening.contains(":15003"),
                "it does not listen: {listening}"
            );
            Ok(())
        })?;
        Ok(relay)
    }

    /// Returns its log: direction, original destination, client.
    fn lines(&self) -> Result<Vec<[String; 3]>> {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let mut lines = Vec::new();
        for line in text.lines() {
            // If the file was emptied, zeros take the place of its earlier contents.
            let line = line.trim_start_matches('\0');
            if line.starts_with('{') {
                let line: Value = serde_json::from_str(line)?;
                let field = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
                // Without brackets around IPv6 addresses, as the others have it.
                let destination = field("dst").replace(['[', ']'], "");
                lines.push([field("direction"), destination, field("src")]);
            } else if let ["seen", direction, destination, client] =
                line.split(' ').collect::<Vec<_>>()[..]
            {
                lines.push([direction, destination, client].map(str::to_owned));
            }
        }
        Ok(lines)
    }

    /// The original destinations of so many connections in a direction, once they are over.
    pub fn saw(&self, direction: &str, count: usize) -> Result<Vec<String>> {
        let mut seen = Vec::new();
        eventually(|| {
            seen = self.lines()?;
            seen.retain(|[name, ..]| name == direction);
            ensure!(seen.len() >= count, "the proxy has logged {seen:?} so far");
            Ok(())
        })?;
        ensure!(
            seen.len() == count,
            "the proxy saw {count} and more: {seen:?}"
        );
        Ok(seen
            .into_iter()
            .map(|[_, destination, _]| destination)
            .collect())
    }

    /// Empties the log.
    pub fn forget(&self) -> Result<()> {
        match fs::File::options().write(true).open(&self.log) {
            Ok(file) => Ok(file.set_len(0)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

const HAPROXY: &str = "\
global
    uid 1500
    gid 1500
    noreuseport
    log stdout format raw daemon
defaults
    mode tcp
    log global
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    log-format \"seen %f %[dst]:%[dst_port] %ci\"
frontend outbound
    bind 127.0.0.1:15001
    bind ::1:15001
    default_backend on
frontend inbound
    bind 0.0.0.0:15003
    bind :::15003 v6only
    default_backend on
backend on
    server destination 0.0.0.0
";

/// At wildcard addresses: it asks for a connection's own address (`getsockname`) only if it does not
/// know it from its listening socket.
const NGINX: &str = "\
daemon off;
master_process off;
pid DIRECTORY/nginx.pid;
events {}
stream {
    log_format outbound 'seen outbound $server_addr:$server_port $remote_addr';
    log_format inbound 'seen inbound $server_addr:$server_port $remote_addr';
    server {
        listen 0.0.0.0:15001;
        access_log LOG outbound;
        proxy_pass $server_addr:$server_port;
    }
    server {
        listen [::]:15001 ipv6only=on;
        access_log LOG outbound;
        proxy_pass [$server_addr]:$server_port;
    }
    server {
        listen 0.0.0.0:15003;
        access_log LOG inbound;
        proxy_pass $server_addr:$server_port;
    }
    server {
        listen [::]:15003 ipv6only=on;
        access_log LOG inbound;
        proxy_pass [$server_addr]:$server_port;
    }
}
";
