//! Other people's programs on the interfaces that ours are on: a CNI's, a monitor's. They are attached before or after
//! ours, and neither side takes packets from the other, by TCX (Linux 6.6) as by clsact.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Agent, Host, Lab};
use kernel::{
    tc::Hook,
    trial::{self, Bystander},
};

use crate::{
    cluster::{TCP, eventually, reaches, serve},
    features::on,
    manifest::{Config, Manifests, Service},
    outcome::run,
};

scenarios! {
    Dataplane:
    others_filters_and_ours_share_clsact,
    others_links_and_ours_share_tcx,
    ours_stay_beside_an_others,
}

/// The node's interface that faces the others.
const UPLINK: &str = "eth0";

/// A node with an agent whose programs are on its uplink, and a client outside that talks to the
/// node itself: packets that ours leave alone.
struct Scene {
    lab: Lab,
    manifests: Manifests,
}

impl Scene {
    fn new() -> Result<Self> {
        let lab = Lab::builder()
            .node("node1")
            .pod("node1", "near", "10.244.1.5")
            .external("ext")
            .build()?;
        let service = Service::new("web", &["10.96.0.10"])
            .port("tcp", 80, TCP)
            .endpoints(&[lab.pod("near")]);
        let manifests = Manifests::new(&[service])?;
        Ok(Self { lab, manifests })
    }

    fn node(&self) -> &Host {
        self.lab.node("node1")
    }

    fn agent(&self, arguments: &[&str]) -> Result<Agent> {
        let agent = self.lab.agent("node1").manifests(self.manifests.path());
        Ok(agent.args(arguments).start()?)
    }

    /// Has the client outside talk to the node, and checks that each of these programs sees the packets.
    fn all_see(&self, bystanders: &[(&str, &Bystander)]) -> Result<()> {
        let before: Vec<u64> = bystanders
            .iter()
            .map(|(_, bystander)| bystander.seen())
            .collect::<Result<_, _>>()?;
        let _server = serve(self.node())?;
        let to = format!("{}:{TCP}", self.node().ipv4());
        reaches(
            self.lab.external("ext"),
            &to,
            "connect --count 5",
            &["node1"],
        )?;
        for ((who, bystander), before) in bystanders.iter().zip(before) {
            let packets = bystander.seen()? - before;
            // SYN, ACK, FIN of each, at least.
            ensure!(packets >= 15, "{who} saw {packets} packets");
        }
        Ok(())
    }

    /// Another program's filter on the uplink, and its name.
    fn filter(&self, name: &str, preference: u32) -> Result<Bystander> {
        let bystander = Bystander::load().context("load")?;
        let pin: PathBuf = self.lab.bpffs()?.join(name);
        bystander.pin(&pin).context("pin")?;
        let preference = preference.to_string();
        self.node()
            .command("tc")
            .args([
                "filter",
                "add",
                "dev",
                UPLINK,
                "ingress",
                "pref",
                &preference,
            ])
            .args(["bpf", "direct-action", "object-pinned"])
            .arg(&pin)
            .run()?;
        fs::remove_file(&pin)?;
        Ok(bystander)
    }

    fn filters(&self) -> Result<String> {
        let show = ["filter", "show", "dev", UPLINK, "ingress"];
        Ok(self.node().command("tc").args(show).run()?)
    }
}

/// The program that runs on the uplink for us.
fn attached(agent: &Agent, hook: &str) -> Result<()> {
    let status = run(agent, "status")?.exits(0)?;
    status.says(&[UPLINK, hook]).map(drop)
}

/// A qdisc that another program made, with a filter before ours and one after, and one that comes when ours is there.
/// Ours goes, theirs stay.
fn others_filters_and_ours_share_clsact() -> Result<()> {
    let scene = Scene::new()?;
    let qdisc = ["qdisc", "add", "dev", UPLINK, "clsact"];
    scene.node().command("tc").args(qdisc).run()?;
    let before = scene.filter("before", 1)?;
    let after = scene.filter("after", 1000)?;
    let agent = scene.agent(&["--tc-hook", "clsact"])?;
    attached(&agent, "clsact")?;
    ensure!(
        scene.filters()?.contains("packet_ingress"),
        "{}",
        scene.filters()?
    );
    let late = scene.filter("late", 500)?;
    let all = [("before", &before), ("after", &after), ("late", &late)];
    scene.all_see(&all)?;

    drop(agent);
    let left = scene.filters()?;
    ensure!(
        !left.contains("packet_ingress") && left.matches("direct-action").count() == 3,
        "not theirs alone: {left}"
    );
    scene.all_see(&all)
}

/// Likewise with links, where the kernel has them.
fn others_links_and_ours_share_tcx() -> Result<()> {
    if Hook::of_kernel() != Hook::Tcx {
        println!(
            "skipped neighbours::others_links_and_ours_share_tcx: this kernel has no TCX (Linux 6.6)"
        );
        return Ok(());
    }
    let scene = Scene::new()?;
    let link = |first| -> Result<_> {
        let bystander = Bystander::load().context("load")?;
        let link = on(scene.node(), |_| {
            let index = nix::net::if_::if_nametoindex(UPLINK)?;
            Ok(bystander.attach_tcx(index, first)?)
        })?;
        Ok((bystander, link))
    };
    let (before, _link) = link(true)?;
    let (after, _link2) = link(false)?;
    let agent = scene.agent(&[])?;
    attached(&agent, "tcx")?;
    let (late_before, _link3) = link(true)?;
    let (late_after, _link4) = link(false)?;
    let all = [
        ("before", &before),
        ("after", &after),
        ("late, before", &late_before),
        ("late, after", &late_after),
    ];
    scene.all_see(&all)?;
    // A filter runs after all links.
    let qdisc = ["qdisc", "add", "dev", UPLINK, "clsact"];
    scene.node().command("tc").args(qdisc).run()?;
    let filter = scene.filter("filter", 1)?;
    scene.all_see(&[("filter", &filter)])?;

    drop(agent);
    scene.all_see(&all)?;
    scene.all_see(&[("filter", &filter)])
}

/// Where our program is among those that TCX runs on the uplink.
fn places(scene: &Scene, others: &[&Bystander]) -> Result<(usize, Vec<usize>)> {
    let ids = on(scene.node(), |_| {
        let index = nix::net::if_::if_nametoindex(UPLINK)?;
        Ok(trial::tcx_ingress(index)?)
    })?;
    let place = |id: u32| {
        ids.iter()
            .position(|known| *known == id)
            .context("it is not there")
    };
    let others = others
        .iter()
        .map(|other| place(other.id()?))
        .collect::<Result<Vec<_>>>()?;
    let own = (0..ids.len())
        .find(|at| !others.contains(at))
        .context("ours is not there")?;
    Ok((own, others))
}

/// Beside another program, from before or from later, also once that has moved in the chain.
fn ours_stay_beside_an_others() -> Result<()> {
    if Hook::of_kernel() != Hook::Tcx {
        println!(
            "skipped neighbours::ours_stay_beside_an_others: this kernel has no TCX (Linux 6.6)"
        );
        return Ok(());
    }
    for side in ["before", "after"] {
        let scene = Scene::new()?;
        let attach = |bystander: &Bystander, first| {
            on(scene.node(), |_| {
                let index = nix::net::if_::if_nametoindex(UPLINK)?;
                Ok(bystander.attach_tcx(index, first)?)
            })
        };
        let [head, anchor, tail] = [Bystander::load()?, Bystander::load()?, Bystander::load()?];
        let order = format!("{side}:program:{}", anchor.id()?);
        let _head = attach(&head, true)?;
        let link = attach(&anchor, false)?;
        let _tail = attach(&tail, false)?;
        let config = Config::new(&format!("packets: {{order: \"{order}\"}}"))?;
        let _agent = scene.agent(&config.arguments())?;
        let beside = |wanted: [usize; 4]| {
            eventually(|| {
                let (own, others) = places(&scene, &[&head, &anchor, &tail])?;
                let found = [others[0], own, others[1], others[2]];
                ensure!(found == wanted, "{order}: {found:?}, not {wanted:?}");
                Ok(())
            })
        };
        beside(if side == "before" {
            [0, 1, 2, 3]
        } else {
            [0, 2, 1, 3]
        })?;
        // It comes again, at the wrong side of ours. Any change of interfaces has the agent look at the chain.
        drop(link);
        // The link lives on for as long as an agent that looks at the chain has it open.
        let mut _link = None;
        eventually(|| {
            _link = Some(attach(&anchor, side == "before")?);
            Ok(())
        })?;
        scene
            .node()
            .ip("link add other type veth peer name another")?;
        beside(if side == "before" {
            [2, 0, 1, 3]
        } else {
            [0, 3, 2, 1]
        })?;
    }
    Ok(())
}
