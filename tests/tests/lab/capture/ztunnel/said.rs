//! A connection in the access logs and metrics of the agent and of ztunnel, and in the headers between them.

use anyhow::{Context as _, Result, ensure};

use super::{
    with_log,
    world::{APP, FAR, World},
};
use crate::{
    cluster::{eventually, reaches},
    metrics::Metrics,
    outcome::http,
};

/// The message of lines of both access logs.
const MESSAGE: &str = "\taccess\tconnection complete\t";

/// The fields of a line, in their order.
#[derive(Debug)]
struct Line(Vec<(String, String)>);

impl Line {
    /// Returns the last line of a connection with this direction to this address and port, or to it in a tunnel.
    fn last(log: &str, direction: &str, to: &str) -> Result<Self> {
        let wanted = [format!("direction=\"{direction}\""), format!("addr={to} ")];
        let mut lines = log
            .lines()
            .rev()
            .filter_map(|line| line.split_once(MESSAGE));
        let line = lines.find(|(_, fields)| wanted.iter().all(|of| fields.contains(of)));
        let (_, line) = line.with_context(|| format!("no line has {wanted:?}: {log}"))?;
        let fields = line.split(' ').filter_map(|field| field.split_once('='));
        let fields = fields.map(|(name, value)| (name.to_owned(), value.to_owned()));
        Ok(Self(fields.collect()))
    }

    fn names(&self) -> Vec<&str> {
        self.0.iter().map(|(name, _)| &**name).collect()
    }

    fn value(&self, name: &str) -> Result<&str> {
        let found = self.0.iter().find(|(of, _)| of == name);
        let (_, value) = found.with_context(|| format!("no {name}: {self:?}"))?;
        Ok(value)
    }
}

/// The service that a client addressed. At a server, a ztunnel knows it only from a control plane: one with its workloads in a file
/// has no services of a destination.
const SERVICE: &str = "dst.service";

/// Wants both sides of a connection to write the same fields in the same order, and the same values. `client`, `server`: the lines
/// of both sides; `service`: the host that the client addressed; `is_known`: whether the server knows it.
fn agree(client: &Line, server: &Line, service: &str, is_known: bool) -> Result<()> {
    let lines = || format!("client {client:#?}, server {server:#?}");
    let mut of_client = client.names();
    of_client.retain(|name| is_known || *name != SERVICE);
    ensure!(of_client == server.names(), "{}", lines());
    for name in [
        "src.workload",
        "src.namespace",
        "src.identity",
        "src.cluster",
        "dst.addr",
        "dst.hbone_addr",
        SERVICE,
        "dst.workload",
        "dst.namespace",
        "dst.identity",
        "dst.cluster",
    ] {
        ensure!(
            name == SERVICE && !is_known || client.value(name)? == server.value(name)?,
            "{name}: {}",
            lines()
        );
    }
    ensure!(
        client.value(SERVICE)? == format!("{service:?}"),
        "{}",
        lines()
    );
    for (one, other) in [("bytes_sent", "bytes_recv"), ("bytes_recv", "bytes_sent")] {
        ensure!(
            client.value(one)? == server.value(other)?,
            "{one}: {}",
            lines()
        );
    }
    for line in [client, server] {
        let duration = line.value("duration")?;
        ensure!(duration.ends_with("ms\""), "{duration}");
        // Each side has a port of its own: that of the tunnel, or of the client.
        ensure!(line.value("src.addr")?.contains(':'), "{}", lines());
    }
    Ok(())
}

/// Returns the fields of a connection that is refused, of either side.
fn refused(log: &str, direction: &str, to: &str) -> Result<Line> {
    let line = Line::last(log, direction, to)?;
    ensure!(line.value("error").is_ok(), "no error: {line:?}");
    Ok(line)
}

fn labels_of_ours(world: &World) -> Result<()> {
    let metrics = Metrics::scrape(world.lab.node("node1"))?;
    let (web, back) = (
        "web.default.svc.cluster.local",
        "back.default.svc.cluster.local",
    );
    for (reporter, source, destination, service) in [
        ("source", "east", "west", web),
        ("destination", "west", "east", back),
    ] {
        let zones = [source, destination].map(|region| format!("{region}-1"));
        let labels = [
            ("reporter", reporter),
            ("connection_security_policy", "mutual_tls"),
            ("source_cluster", "Kubernetes"),
            ("destination_cluster", "Kubernetes"),
            ("source_region", source),
            ("source_zone", &*zones[0]),
            ("destination_region", destination),
            ("destination_zone", &*zones[1]),
            ("destination_service", service),
        ];
        let opened = metrics.sum("istio_tcp_connections_opened_total", &labels);
        ensure!(opened > 0.5, "{reporter}: {opened}: {metrics:?}");
    }
    Ok(())
}

pub fn both_say_the_same_of_a_connection() -> Result<()> {
    with_log("both_say_the_same_of_a_connection", "istio", |mut world| {
        let (web, back) = (
            "web.default.svc.cluster.local",
            "back.default.svc.cluster.local",
        );
        reaches(world.app(), "10.96.0.10:80", "http", &["far"])?;
        reaches(world.far(), "10.96.0.11:80", "http", &["app"])?;
        eventually(|| {
            let (ours, theirs) = (world.agent.log(), world.log_text());
            let to_far = "10.244.2.5:80";
            let client = Line::last(&ours, "outbound", to_far)?;
            agree(
                &client,
                &Line::last(&theirs, "inbound", to_far)?,
                web,
                false,
            )?;
            ensure!(
                client.value("src.identity")? == format!("{APP:?}"),
                "{client:?}"
            );
            let to_app = "10.244.1.8:80";
            let client = Line::last(&theirs, "outbound", to_app)?;
            agree(&client, &Line::last(&ours, "inbound", to_app)?, back, true)?;
            ensure!(
                client.value("src.identity")? == format!("{FAR:?}"),
                "{client:?}"
            );
            labels_of_ours(&world)
        })?;

        // A closed port: both sides have an error.
        for from in [world.app(), world.far()] {
            let to = if from.name() == "app" {
                "10.244.2.5:9"
            } else {
                "10.244.1.8:9"
            };
            let report = crate::cluster::ask(from, to, "connect")?;
            println!("{} to {to}: {report:?}", from.name());
        }
        eventually(|| {
            let (ours, theirs) = (world.agent.log(), world.log_text());
            for to in ["10.244.2.5:9", "10.244.1.8:9"] {
                let (client, server) = if to.starts_with("10.244.2") {
                    (&ours, &theirs)
                } else {
                    (&theirs, &ours)
                };
                let lines = [
                    refused(client, "outbound", to)?,
                    refused(server, "inbound", to)?,
                ];
                println!("{lines:#?}");
            }
            Ok(())
        })?;

        // The agent's baggage has the names that ztunnel does not know.
        world.knows_app = false;
        world.restart(&[])?;
        reaches(world.app(), "10.96.0.10:80", "http", &["far"])?;
        eventually(|| {
            let line = Line::last(&world.log_text(), "inbound", "10.244.2.5:80")?;
            for (name, wanted) in [
                ("src.workload", "app"),
                ("src.namespace", "default"),
                ("src.cluster", "Kubernetes"),
            ] {
                ensure!(
                    line.value(name)? == format!("{wanted:?}"),
                    "{name}: {line:?}"
                );
            }
            let (_, metrics) = http(world.far(), "http://127.0.0.1:15020/metrics")?;
            for label in [
                "source_workload=\"app\"",
                "source_zone=\"east-1\"",
                "source_region=\"east\"",
            ] {
                ensure!(metrics.contains(label), "{label}: {metrics}");
            }
            Ok(())
        })
    })
}
