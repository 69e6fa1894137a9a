//! How captured connections are counted.

use std::{collections::BTreeMap, fs};

use anyhow::{Context as _, Result, ensure};
use aya::{
    maps::{Array, Map, MapData},
    programs::loaded_programs,
};
use dataplane_common::{
    LAYOUT, Reason,
    capture::MeterSets,
    tables::{SOCKET_ELEMENTS, SOCKET_SETS, SOCKET_WAYS},
};
use kernel::{Attachment, Paths};
use serde_json::{Value, json};

use super::{World, pod};
use crate::{
    cluster::{ask, eventually, reaches},
    metrics::Metrics,
    outcome::http,
};

scenarios! {
    Dataplane:
    both_modes_count_the_same,
    pods_of_one_deployment_are_one_series,
    what_is_measured_leaves_nothing_and_fits_always,
    what_the_kernel_does_not_tell_is_made_up_for,
    nobody_is_told_of_connections_to_a_proxy_before_there_is_one,
}

/// The agent's metrics of captured connections: series with value.
fn series(world: &World) -> Result<BTreeMap<String, String>> {
    let (_, text) = http(world.lab.node("node1"), "http://127.0.0.1:15020/metrics")?;
    Metrics::read(&text)?;
    let lines = text.lines().filter(|line| line.starts_with("istio_tcp_"));
    lines
        .map(|line| {
            let (series, value) = line.rsplit_once(' ').context("a value")?;
            Ok((series.to_owned(), value.to_owned()))
        })
        .collect()
}

/// The same connections by the kernel alone and by the proxy: the same series have the same values,
/// bytes included.
fn both_modes_count_the_same() -> Result<()> {
    let mut world = World::new()?;
    let pods = world.state.path().join("pods.yaml");
    let named = |name: &str, addresses: [&str; 2], mode: &str| {
        let mut object = pod(mode, json!({}));
        object["metadata"]["name"] = name.into();
        object["metadata"]["labels"]["app"] = name.into();
        object["metadata"]["labels"]["version"] = "v2".into();
        object["status"]["podIPs"] = addresses
            .map(|ip| json!({ "ip": ip }))
            .into_iter()
            .collect();
        object
    };
    let items = [
        named("app", ["10.244.1.8", "fd00:10:244:1::8"], "ambient"),
        named("one", ["10.244.1.5", "fd00:10:244:1::5"], "none"),
        named("far", ["10.244.2.5", "fd00:10:244:2::5"], "none"),
    ];
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
    fs::write(&pods, list.to_string())?;
    world.app().ip("route add unreachable 192.0.2.0/24")?;
    let mut seen = Vec::new();
    for mode in ["kernel", "proxy"] {
        let config: Value = json!({ "rules": { "mode": mode } });
        world.agent_with(&config, std::slice::from_ref(&pods))?;
        let app = world.app();
        reaches(app, "10.244.1.5:7", "connect --count 5", &["one"])?;
        reaches(app, "10.244.1.5:80", "http --count 3", &["one"])?;
        reaches(app, "[fd00:10:244:1::5]:80", "http --count 2", &["one"])?;
        reaches(app, "10.96.0.10:80", "connect --count 4", &["far"])?;
        // An unknown host, a closed port, and a destination without a route.
        reaches(app, "10.244.1.6:7", "connect --count 2", &["two"])?;
        for to in ["10.244.1.5:9", "192.0.2.1:80"] {
            let report = ask(app, to, "connect")?;
            ensure!(report.answered == 0, "{to}: {report:?}");
        }
        // And inbound: from a known client, here and on another node, from an unknown one, and from itself, which is
        // neither.
        let (one, two, far) = (
            world.lab.pod("one"),
            world.lab.pod("two"),
            world.lab.pod("far"),
        );
        reaches(one, "10.244.1.8:7", "connect --count 3", &["app"])?;
        reaches(far, "[fd00:10:244:1::8]:80", "http --count 2", &["app"])?;
        reaches(two, "10.244.1.8:80", "http", &["app"])?;
        reaches(app, "10.244.1.8:7", "connect", &["app"])?;
        let mut all = BTreeMap::new();
        eventually(|| {
            all = series(&world)?;
            let sum = |family: &str| -> u32 {
                let of = all.iter().filter(|(series, _)| series.starts_with(family));
                of.filter_map(|(_, value)| value.parse::<u32>().ok()).sum()
            };
            let closed = sum("istio_tcp_connections_closed_total");
            let failed = sum("istio_tcp_connections_failed_total");
            ensure!((closed, failed) == (22, 2), "{closed}, {failed}: {all:#?}");
            Ok(())
        })?;
        seen.push(all);
    }
    ensure!(
        seen[0] == seen[1],
        "not the same:\nby the kernel {:#?}\nby the proxy {:#?}",
        seen[0],
        seen[1]
    );
    let of = |name: &str, labels: &[&str]| {
        let found = seen[0].iter().find(|(series, _)| {
            series.starts_with(name) && labels.iter().all(|label| series.contains(label))
        });
        let (_, count) = found.with_context(|| format!("no {name}{labels:?}: {:#?}", seen[0]))?;
        anyhow::Ok(count.clone())
    };
    let opened = of(
        "istio_tcp_connections_opened_total",
        &[
            "destination_service_name=\"web\"",
            "destination_workload=\"far\"",
            "destination_version=\"v2\"",
            "source_workload=\"app\"",
        ],
    )?;
    ensure!(opened == "4", "{opened} of 4");
    let arrived = of(
        "istio_tcp_connections_closed_total",
        &[
            "reporter=\"destination\"",
            "source_workload=\"one\"",
            "destination_workload=\"app\"",
        ],
    )?;
    ensure!(arrived == "3", "{arrived} of 3");
    Ok(())
}

/// Two replicas that connect to each other and to a third pod, whose labels are those of unknown peers.
fn pods_of_one_deployment_are_one_series() -> Result<()> {
    for mode in ["kernel", "proxy"] {
        let mut world = World::new()?;
        let pods = world.state.path().join("pods.yaml");
        let replica = |name: &str, address: &str| {
            let mut object = pod("ambient", json!({}));
            object["metadata"]["name"] = format!("web-7d9f-{name}").into();
            object["metadata"]["labels"] = json!({
                "app": "web",
                "pod-template-hash": "7d9f",
                "istio.io/dataplane-mode": "ambient",
            });
            object["metadata"]["ownerReferences"] = json!([{
                "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-7d9f",
                "uid": "1", "controller": true,
            }]);
            object["status"]["podIPs"] = json!([{ "ip": address }]);
            object
        };
        let mut unknown = pod("none", json!({}));
        unknown["metadata"]["name"] = "unknown".into();
        unknown["metadata"]["namespace"] = "unknown".into();
        unknown["metadata"]["labels"] = json!({
            "app": "unknown",
            "version": "unknown",
            "service.istio.io/canonical-revision": "unknown",
        });
        unknown["status"]["podIPs"] = json!([{ "ip": "10.244.1.6" }]);
        let items = [
            replica("app", "10.244.1.8"),
            replica("one", "10.244.1.5"),
            unknown,
        ];
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
        fs::write(&pods, list.to_string())?;
        let config = json!({ "rules": { "mode": mode } });
        world.agent_with(&config, std::slice::from_ref(&pods))?;
        for (from, to, name) in [
            ("app", "10.244.1.5:7", "one"),
            ("one", "10.244.1.8:7", "app"),
            ("app", "10.244.1.6:7", "two"),
            // One with an unknown peer.
            ("one", "10.244.2.5:7", "far"),
            ("one", "10.244.1.6:7", "two"),
        ] {
            let how = "connect --count 2";
            reaches(world.lab.pod(from), to, how, &[name])?;
        }
        eventually(|| {
            let metrics = Metrics::scrape(world.lab.node("node1"))?;
            let closed = |reporter, peer| {
                let labels = [("reporter", reporter), ("destination_workload", peer)];
                metrics.sum("istio_tcp_connections_closed_total", &labels)
            };
            let seen = [
                closed("source", "web"),
                closed("destination", "web"),
                closed("source", "unknown"),
            ];
            let wanted = [4.0, 4.0, 6.0];
            let is_right = seen.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 0.5);
            ensure!(is_right, "{mode}: {seen:?}, not {wanted:?}");
            let of_web = metrics.samples().iter().filter(|sample| {
                sample.name == "istio_tcp_connections_closed_total"
                    && sample.labels["reporter"] == "source"
            });
            // The Pod that is called unknown is in the cluster, and the unknown peer may not be.
            ensure!(of_web.count() == 3, "{mode}: {metrics:?}");
            Ok(())
        })?;
    }
    Ok(())
}

/// A measured connection has a place in a table until it is closed, also one that failed, or never left; and it is
/// measured even if there is no place.
fn what_is_measured_leaves_nothing_and_fits_always() -> Result<()> {
    const OWNERS: usize = SOCKET_SETS * SOCKET_WAYS;
    let mut world = World::new()?;
    world.capture(json!({}), json!({ "mode": "kernel" }))?;
    let app = world.app().clone();
    app.ip("route add unreachable 192.0.2.0/24")?;
    let agent = world.agent.as_ref().context("an agent")?;
    let pin = agent.bpffs().join(format!("v{LAYOUT}/maps/METERS"));
    let meters = Map::Array(MapData::from_pin(pin)?);
    // As words: first the owners of the places, then their contents.
    let mut meters = Array::<MapData, [u64; size_of::<MeterSets>() / 8]>::try_from(meters)?;
    let count = |family: &str| -> Result<u32> {
        let all = series(&world)?;
        let of = all.iter().filter(|(series, _)| series.starts_with(family));
        Ok(of.filter_map(|(_, value)| value.parse::<u32>().ok()).sum())
    };
    let connect = || -> Result<()> {
        reaches(&app, "10.96.0.10:80", "connect --count 20", &["far"])?;
        reaches(&app, "10.244.1.5:7", "connect --count 20", &["one"])?;
        for to in ["10.244.1.5:9", "192.0.2.1:80"] {
            let report = ask(&app, to, "connect")?;
            ensure!(report.answered == 0, "{to}: {report:?}");
        }
        // One socket that fails, and then succeeds.
        reaches(
            &app,
            "10.244.1.5:7",
            "connect --first 10.244.1.5:9",
            &["one"],
        )?;
        Ok(())
    };
    let all = |closed: u32, failed: u32| {
        eventually(|| {
            let now = (
                count("istio_tcp_connections_closed_total")?,
                count("istio_tcp_connections_failed_total")?,
            );
            ensure!(now == (closed, failed), "{now:?}");
            Ok(())
        })
    };
    connect()?;
    all(41, 3)?;
    let mut left = Vec::new();
    for element in meters.iter() {
        left.extend(
            element?[..OWNERS]
                .iter()
                .copied()
                .filter(|owner| *owner != 0),
        );
    }
    ensure!(
        left.is_empty(),
        "connections {left:?} are closed and still there"
    );

    // Cookies count up from 1: these are no socket's.
    let mut full = [0; size_of::<MeterSets>() / 8];
    full[..OWNERS].fill(u64::MAX);
    for element in 0..SOCKET_ELEMENTS {
        meters.set(element, full, 0)?;
    }
    connect()?;
    all(82, 6)
}

/// The programs of an agent, as the kernel has them.
fn attachments(world: &World) -> Result<Vec<Attachment>> {
    Ok(kernel::attachments(&Paths {
        bpffs: world.agent()?.bpffs().into(),
        cgroup: world.lab.node_cgroup("node1"),
    })?)
}

/// The kernel runs no program of a tracepoint inside of itself, and does not run it later. Without the program for
/// established and closed connections, the program for destroyed sockets counts their end.
fn what_the_kernel_does_not_tell_is_made_up_for() -> Result<()> {
    const FAMILIES: [&str; 5] = [
        "connections_opened",
        "connections_closed",
        "connections_failed",
        "sent_bytes",
        "received_bytes",
    ];
    let mut world = World::new()?;
    world.capture(json!({}), json!({ "mode": "kernel" }))?;
    let counted = || -> Result<[u64; FAMILIES.len()]> {
        let all = series(&world)?;
        Ok(FAMILIES.map(|family| {
            let of = all
                .iter()
                .filter(|(series, _)| series.starts_with(&format!("istio_tcp_{family}_total")));
            of.filter_map(|(_, value)| value.parse::<u64>().ok()).sum()
        }))
    };
    // A connection that is reset leaves no counts in a socket that is gone.
    let connect = || -> Result<()> {
        reaches(world.app(), "10.244.1.5:80", "http --count 20", &["one"])?;
        let report = ask(world.app(), "10.244.1.5:9", "connect")?;
        ensure!(report.answered == 0, "{report:?}");
        Ok(())
    };
    let mut told = [0; FAMILIES.len()];
    connect()?;
    eventually(|| {
        told = counted()?;
        ensure!(told[..3] == [20, 20, 1], "{told:?}");
        Ok(())
    })?;
    let attached = attachments(&world)?;
    let states = attached.iter().find(|one| one.program == "tcp_states");
    let program = states
        .and_then(|one| one.program_id)
        .context("tcp_states")?;
    let pin = format!("v{LAYOUT}/links/tcp_states");
    fs::remove_file(world.agent()?.bpffs().join(pin))?;
    eventually(|| {
        let mut loaded = loaded_programs().flatten();
        ensure!(!loaded.any(|one| one.id() == program), "still there");
        Ok(())
    })?;
    connect()?;
    eventually(|| {
        let all = counted()?;
        ensure!(all == told.map(|of| of * 2), "{all:?}, and {told:?} before");
        Ok(())
    })
}

/// The kernel asks the program for connections to a proxy ten times for every connection.
fn nobody_is_told_of_connections_to_a_proxy_before_there_is_one() -> Result<()> {
    let mut world = World::new()?;
    let pods = world.state.path().join("pods.yaml");
    let write = |mode: &str| -> Result<()> {
        let new = pods.with_extension("new");
        fs::write(
            &new,
            pod("ambient", json!({ "dataplane.io/mode": mode })).to_string(),
        )?;
        Ok(fs::rename(new, &pods)?)
    };
    write("kernel")?;
    world.agent_with(&json!({}), std::slice::from_ref(&pods))?;
    let app = world.app().clone();
    let attached = |world: &World| -> Result<bool> {
        let attached = attachments(world)?;
        for one in &attached {
            ensure!(one.problem.is_none(), "{one:?}");
        }
        Ok(attached.iter().any(|one| one.program == "tcp_events"))
    };
    let captured = |world: &World, wanted: Reason| {
        eventually(|| {
            let (_, counted) = world.counted(wanted, || {
                reaches(&app, "10.244.1.5:7", "connect", &["one"])
            })?;
            ensure!(counted == 1, "not {wanted:?}");
            Ok(())
        })
    };
    captured(&world, Reason::Direct)?;
    ensure!(!attached(&world)?, "attached without a proxy");
    write("proxy")?;
    captured(&world, Reason::Captured)?;
    ensure!(attached(&world)?, "not attached with a proxy");
    // The connections to the earlier proxy are no longer known.
    write("kernel")?;
    captured(&world, Reason::Direct)?;
    world.agent.as_mut().context("an agent")?.kill();
    world.agent.as_mut().context("an agent")?.start()?;
    captured(&world, Reason::Direct)?;
    ensure!(attached(&world)?, "not attached any more");
    Ok(())
}
