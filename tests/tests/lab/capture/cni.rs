//! The CNI plug-in: a pod's first connection is captured, and a pod waits for the agent.

use std::{
    fs,
    net::IpAddr,
    os::unix::fs::symlink,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Command, Host, patience};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::{World, packets, pod};
use crate::{
    cluster::{eventually, reaches},
    outcome::Outcome,
};

scenarios! {
    Dataplane:
    the_first_connection_of_a_pod_is_captured,
    a_pod_waits_until_its_packets_are_captured,
    a_pod_waits_for_the_agent_and_for_its_object,
    who_is_not_root_is_refused,
    the_agent_keeps_the_plugin_in_the_network_configuration,
}

const UID: &str = "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60";

/// A call of the plug-in for a pod of the lab.
struct Call<'a> {
    command: &'a str,
    container: &'a str,
    namespace: &'a str,
    pod: &'a Host,
    wait_seconds: u64,
}

impl<'a> Call<'a> {
    fn new(command: &'a str, container: &'a str, pod: &'a Host) -> Self {
        Self {
            command,
            container,
            namespace: "default",
            pod,
            wait_seconds: 60,
        }
    }

    /// The result of the plug-ins before ours.
    fn result(&self) -> Value {
        let sandbox = format!("/run/netns/{}", self.pod.netns());
        let ips = self.pod.addresses().map(|addr| {
            let length = if addr.is_ipv4() { 24 } else { 64 };
            json!({ "address": format!("{addr}/{length}"), "interface": 1 })
        });
        json!({
            "cniVersion": "1.1.0",
            "interfaces": [{ "name": "veth1" }, { "name": "eth0", "sandbox": sandbox }],
            "ips": ips,
            "routes": [{ "dst": "0.0.0.0/0" }],
        })
    }

    /// As a container runtime calls it: by its name, without arguments.
    fn command(&self, world: &World, more: &Value) -> Result<Command> {
        let mut input = json!({
            "cniVersion": "1.1.0",
            "name": "net",
            "type": "dataplane-cni",
            "socket": world.agent()?.socket(),
            "excludeNamespaces": ["kube-system"],
            "waitSeconds": self.wait_seconds,
            "prevResult": self.result(),
        });
        for (key, value) in more.as_object().into_iter().flatten() {
            input[key] = value.clone();
        }
        let file = format!("{}-{}.json", self.command, self.container);
        let file = world.state.path().join(file);
        fs::write(&file, input.to_string())?;
        let plugin = world.state.path().join("dataplane-cni");
        if !plugin.exists() {
            symlink(world.lab.programs().dataplane()?, &plugin)?;
        }
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_UID={UID}",
            self.namespace,
            self.pod.name()
        );
        let node = world.agent()?.node();
        let command = node.command("sh").args(["-c", "exec \"$0\" < \"$1\""]);
        Ok(command
            .arg(plugin)
            .arg(file)
            .env("CNI_COMMAND", self.command)
            .env("CNI_CONTAINERID", self.container)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_NETNS", format!("/run/netns/{}", self.pod.netns()))
            .env("CNI_ARGS", args))
    }

    fn run(&self, world: &World) -> Result<Outcome> {
        Outcome::of(&self.command(world, &json!({}))?.output()?)
    }
}

/// A pod that its source knows and whose address it does not know yet.
fn without_address(name: &str) -> Value {
    let mut pod = pod("ambient", json!({}));
    pod["metadata"]["name"] = name.into();
    pod["metadata"]["uid"] = UID.into();
    pod["status"] = json!({ "phase": "Pending" });
    pod
}

fn write(world: &World, pods: &[&str]) -> Result<PathBuf> {
    let file = world.state.path().join("pods.yaml");
    let pods: Vec<Value> = pods.iter().map(|name| without_address(name)).collect();
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": pods });
    // In one step: the agent may read it at any time.
    let new = file.with_extension("new");
    fs::write(&new, list.to_string())?;
    fs::rename(new, &file)?;
    Ok(file)
}

/// The sandboxes that the agent keeps for the next agent.
fn kept(world: &World) -> Result<Vec<String>> {
    let file = world.agent()?.socket().with_file_name("pods.json");
    let pods: Value = serde_json::from_slice(&fs::read(file)?)?;
    let pods = pods.as_array().context("a list")?.iter();
    let containers = pods.filter_map(|pod| pod["key"]["container"].as_str());
    Ok(containers.map(str::to_owned).collect())
}

fn captured(world: &World, from: &Host, reason: Reason, wanted: u64) -> Result<()> {
    let (_, counted) = world.counted(reason, || {
        reaches(from, "10.244.2.5:7", "connect", &["far"])
    })?;
    ensure!(
        counted == wanted,
        "{}: {counted} of {wanted}\n{}",
        reason.word(),
        world.agent()?.log()
    );
    Ok(())
}

fn the_first_connection_of_a_pod_is_captured() -> Result<()> {
    for (mode, reason) in [("kernel", Reason::Direct), ("proxy", Reason::Captured)] {
        let mut world = World::new()?;
        let pods = write(&world, &["app"])?;
        world.agent_with(&json!({ "rules": { "mode": mode } }), &[pods])?;
        let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
        // The agent knows no address by which it could find the pod.
        captured(&world, &app, reason, 0)?;
        let add = Call::new("ADD", "c1", &app);
        let said = add.run(&world)?.exits(0)?.json()?;
        ensure!(
            said == add.result(),
            "not the result that came in: {said:#}"
        );
        if mode == "kernel" {
            // The agent cannot help any more.
            let agent = Pid::from_raw(world.agent()?.id().cast_signed());
            kill(agent, Signal::SIGSTOP)?;
            let first = captured(&world, &app, reason, 1);
            kill(agent, Signal::SIGCONT)?;
            first?;
        } else {
            captured(&world, &app, reason, 1)?;
            let (_, counted) = world.counted(Reason::CapturedInbound, || {
                reaches(&one, "10.244.1.8:7", "connect", &["app"])
            })?;
            ensure!(counted == 1, "{counted} inbound connections were captured");
        }
        Call::new("CHECK", "c1", &app).run(&world)?.exits(0)?;
        // The next agent does not know an address either.
        let agent = world.agent.as_mut().context("an agent")?;
        agent.kill();
        agent.start()?;
        captured(&world, &app, reason, 1)?;
        Call::new("CHECK", "c1", &app).run(&world)?.exits(0)?;
        ensure!(kept(&world)? == ["c1"], "{:?}", kept(&world)?);
        Call::new("DEL", "c1", &app).run(&world)?.exits(0)?;
        Call::new("DEL", "c1", &app).run(&world)?.exits(0)?;
        ensure!(kept(&world)?.is_empty(), "{:?}", kept(&world)?);
        // The pod is still there, and its object, too.
        captured(&world, &app, reason, 1)?;
        for command in ["STATUS", "VERSION"] {
            Call::new(command, "", &app).run(&world)?.exits(0)?;
        }
    }
    Ok(())
}

/// A pod that is captured by its packets, to which no interface of the node leads yet.
fn a_pod_waits_until_its_packets_are_captured() -> Result<()> {
    for (mode, reason) in [("kernel", Reason::Direct), ("proxy", Reason::Captured)] {
        let mut world = packets::world()?;
        let pods = write(&world, &["app"])?;
        let (app, node) = (world.app().clone(), world.lab.node("node1").clone());
        let routes = |command: &str| -> Result<()> {
            let gateways = [IpAddr::from(app.gateway4()), app.gateway6().into()];
            for (addr, gateway) in app.addresses().into_iter().zip(gateways) {
                node.ip(&format!(
                    "route {command} {addr} dev veth-app src {gateway}"
                ))?;
            }
            Ok(())
        };
        routes("del")?;
        let rules = json!({ "mode": mode, "capturedBy": "packets" });
        world.agent_with(&json!({ "rules": rules }), &[pods])?;
        let short = Call {
            wait_seconds: 1,
            ..Call::new("ADD", "c1", &app)
        };
        let said = short.run(&world)?.exits(1)?;
        said.says(&["no interface of the node leads only to the pod's addresses"])?;
        Call::new("CHECK", "c1", &app).run(&world)?.exits(1)?;
        routes("add")?;
        Call::new("ADD", "c1", &app).run(&world)?.exits(0)?;
        captured(&world, &app, reason, 1)?;
        Call::new("CHECK", "c1", &app).run(&world)?.exits(0)?;
    }
    Ok(())
}

fn a_pod_waits_for_the_agent_and_for_its_object() -> Result<()> {
    let mut world = World::new()?;
    let pods = write(&world, &["app"])?;
    world.agent_with(&json!({ "rules": { "mode": "kernel" } }), &[pods])?;
    let (app, two) = (world.app().clone(), world.lab.pod("two").clone());
    let agent = |world: &mut World| world.agent.take().context("an agent");
    let mut away = agent(&mut world)?;
    away.kill();
    world.agent = Some(away);
    let start = Instant::now();
    let short = Call {
        wait_seconds: 1,
        ..Call::new("ADD", "c1", &app)
    };
    let said = short.run(&world)?.exits(1)?;
    let said = said.says(&["no agent listens"])?.json()?;
    ensure!(
        said["code"] == 11 && said["cniVersion"] == "1.1.0",
        "{said:#}"
    );
    let took = start.elapsed();
    let bound = Duration::from_secs(1)..patience(Duration::from_secs(10));
    ensure!(bound.contains(&took), "it took {took:?}");
    captured(&world, &app, Reason::Direct, 0)?;
    // Never captured, so it waits for nobody.
    let excluded = Call {
        namespace: "kube-system",
        ..Call::new("ADD", "c0", &app)
    };
    excluded.run(&world)?.exits(0)?;
    Call::new("DEL", "c0", &app).run(&world)?.exits(0)?;
    Call::new("STATUS", "", &app).run(&world)?.exits(0)?;
    // Both wait for the agent; then one waits for its object, while another agent takes over.
    let wait = |call: Call<'_>| -> Result<_> {
        let command = call.command(&world, &json!({}))?;
        Ok(command.stdout_piped().spawn()?)
    };
    let first = wait(Call::new("ADD", "c1", &app))?;
    let mut second = wait(Call::new("ADD", "c2", &two))?;
    thread::sleep(Duration::from_millis(300));
    let mut back = agent(&mut world)?;
    back.start()?;
    world.agent = Some(back);
    first.wait().context("the pod that waited for the agent")?;
    captured(&world, &app, Reason::Direct, 1)?;
    let mut agent = agent(&mut world)?;
    agent.kill();
    agent.start()?;
    world.agent = Some(agent);
    ensure!(second.try_wait()?.is_none(), "the source has no such Pod");
    captured(&world, &two, Reason::Direct, 0)?;
    write(&world, &["app", "two"])?;
    second
        .wait()
        .context("the pod that waited for its object")?;
    captured(&world, &two, Reason::Direct, 1)?;
    let mut both = kept(&world)?;
    both.sort_unstable();
    ensure!(both == ["c1", "c2"], "{both:?}");
    let valid = json!({ "cni.dev/valid-attachments": [{ "containerID": "c2", "ifname": "eth0" }] });
    let gc = Call::new("GC", "", &app).command(&world, &valid)?;
    Outcome::of(&gc.output()?)?.exits(0)?;
    ensure!(kept(&world)? == ["c2"], "{:?}", kept(&world)?);
    Ok(())
}

fn who_is_not_root_is_refused() -> Result<()> {
    let mut world = World::new()?;
    let pods = write(&world, &["app"])?;
    world.agent_with(&json!({ "rules": { "mode": "kernel" } }), &[pods])?;
    let app = world.app().clone();
    for command in ["ADD", "DEL"] {
        let call = Call::new(command, "c1", &app).command(&world, &json!({}))?;
        let readable = "chmod -R a+rX \"$0\"";
        let node = world.agent()?.node();
        node.command("sh")
            .args(["-c", readable])
            .arg(world.state.path())
            .run()?;
        let said = Outcome::of(&call.user(65534).output()?)?.exits(1)?;
        let said = said.json()?;
        ensure!(said["code"] == 5 || said["code"] == 100, "{said:#}");
    }
    let file = world.agent()?.socket().with_file_name("pods.json");
    ensure!(!file.exists(), "a pod was announced");
    captured(&world, &app, Reason::Direct, 0)
}

fn the_agent_keeps_the_plugin_in_the_network_configuration() -> Result<()> {
    let mut world = World::new()?;
    let pods = write(&world, &["app"])?;
    // The plug-in's directory is the one from which the calls here take it.
    let (conf, bin) = (tempfile::tempdir()?, world.state.path().to_owned());
    let net = conf.path().join("10-net.conflist");
    let original = json!({
        "cniVersion": "1.0.0",
        "name": "net",
        "plugins": [{ "type": "ptp", "mtu": 1500 }, { "type": "portmap" }],
    });
    fs::write(&net, original.to_string())?;
    let file = conf.path().join("agent.yaml");
    let cni = json!({ "confDir": conf.path(), "binDir": bin });
    fs::write(&file, json!({ "onExit": "detach", "cni": cni }).to_string())?;
    let mesh = json!({ "rules": { "mode": "kernel" } });
    let file = file.to_string_lossy();
    world.agent_with_args(&mesh, &[pods], &["--config", &file])?;
    let read = || -> Result<Value> { Ok(serde_json::from_slice(&fs::read(&net)?)?) };
    let joined = |world: &World| {
        eventually(|| {
            let list = read()?;
            let ours = &list["plugins"][2];
            ensure!(ours["type"] == "dataplane-cni", "{list:#}");
            ensure!(ours["socket"] == json!(world.agent()?.socket()), "{list:#}");
            Ok(())
        })
    };
    joined(&world)?;
    // The CNI's installer starts again.
    fs::write(&net, original.to_string())?;
    joined(&world)?;
    let app = world.app().clone();
    Call::new("ADD", "c1", &app).run(&world)?.exits(0)?;
    captured(&world, &app, Reason::Direct, 1)?;
    // While no agent runs, pods wait.
    let agent = world.agent.as_mut().context("an agent")?;
    agent.kill();
    ensure!(read()?["plugins"][2]["type"] == "dataplane-cni");
    agent.start()?;
    agent.stop()?;
    ensure!(read()? == original, "{:#}", read()?);
    // A runtime may end pods with the configuration with which they began.
    ensure!(bin.join("dataplane-cni").exists(), "the program is gone");
    Ok(())
}
