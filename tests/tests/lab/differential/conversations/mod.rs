//! The packet path's flows and the kernel's: the same conversations go, packet by packet, through a node with
//! kube-proxy's rules, whose flows the kernel's own conntrack keeps, and through a node with the dataplane. After each
//! packet the same must have arrived at the same end, and the flow must be in the same state and be kept for as long.
//!
//! The generator knows TCP and UDP, and nothing of either table. Where the dataplane is meant to differ is
//! listed in [`DIFFERENCES`]; each has a row in `docs/differences.md`.
//!
//! `DATAPLANE_CONVERSATIONS=100000` asks for the long form, `DATAPLANE_SEED=N` for the conversations of an earlier run.

mod flows;
mod talk;
mod wire;

use std::{thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use dataplane_peers::Mode;
use dataplane_tests::Lab;
use rand::{SeedableRng as _, rngs::SmallRng};

use self::{
    flows::Kept,
    talk::{Conversation, Step},
    wire::{Seen, Site},
};
use super::world::{self, Settings, Worker, World};
use crate::manifest::{Manifests, Service};

scenarios! {
    Dataplane:
    conversations_are_the_kernels,
}

/// Conversations that are tried unless more are asked for.
const SHORT: usize = 500;
/// Conversations of one pair of labs: a client has a port for each.
const BATCH: usize = 10_000;

/// The node ports of the service, by TCP and by UDP, and the endpoint's port, at which nobody listens.
const TCP: u16 = 30_080;
const UDP: u16 = 30_053;
const ENDPOINT: u16 = 7777;

/// Where the dataplane is meant to differ: as the row of the docs has it.
const DIFFERENCES: [&str; 3] = [
    "A TCP connection with data that is not acknowledged",
    "A TCP connection that the endpoint refuses with a RST",
    "A FIN that is sent again",
];
const DOCS: &str = include_str!("../../../../../docs/differences.md");

fn conversations_are_the_kernels() -> Result<()> {
    for row in DIFFERENCES {
        ensure!(
            DOCS.contains(&format!("| {row} |")),
            "not in docs/differences.md: {row}"
        );
    }
    let number = |name: &str| -> Result<Option<u64>> {
        let given = std::env::var(name).ok();
        given.map(|text| text.parse().context(text)).transpose()
    };
    let all = number("DATAPLANE_CONVERSATIONS")?.map_or(Ok(SHORT), usize::try_from)?;
    let seed = number("DATAPLANE_SEED")?.unwrap_or(1);
    let mut used = [0; DIFFERENCES.len()];
    let mut wrong = Vec::new();
    for (batch, first) in (seed..).zip((0..all).step_by(BATCH)) {
        let mut rng = SmallRng::seed_from_u64(batch);
        let count = BATCH.min(all - first);
        let talks: Vec<_> = (0..count).map(|_| Conversation::new(&mut rng)).collect();
        let (there, here) = thread::scope(|scope| {
            let there = scope.spawn(|| run(Worker::KubeProxy(Mode::Nftables), &talks));
            let here = run(Worker::Dataplane, &talks);
            (there.join(), here)
        });
        let (there, here) = (
            there.map_err(|_| anyhow::anyhow!("kube-proxy's side panicked"))??,
            here?,
        );
        for (talk, (there, here)) in talks.iter().zip(there.iter().zip(&here)) {
            for (step, (there, here)) in there.iter().zip(here).enumerate() {
                match explained(talk, step, there, here) {
                    Verdict::Same => {}
                    Verdict::Row(row) => used[row] += 1,
                    Verdict::Unexplained => {
                        let steps = &talk.steps[..=step];
                        wrong.push(format!("seed {batch}: {steps:?}:\n  {there:?}\n  {here:?}"));
                        break;
                    }
                }
            }
        }
    }
    println!("{all} conversations from seed {seed}; differences: {used:?}");
    wrong.sort_by_key(String::len);
    let shown: Vec<_> = wrong.iter().take(12).cloned().collect();
    ensure!(
        wrong.is_empty(),
        "{} conversations differ, kube-proxy's and ours:\n{}",
        wrong.len(),
        shown.join("\n")
    );
    Ok(())
}

/// What is seen after a step.
#[derive(Debug, Clone, PartialEq, Eq)]
struct After {
    /// What arrived where.
    seen: Vec<Seen>,
    /// The flow, if it is there.
    kept: Option<Kept>,
}

/// Runs the conversations, all of them at a time: the first steps of all, then the second ones.
fn run(worker: Worker, talks: &[Conversation]) -> Result<Vec<Vec<After>>> {
    let lab = world::lab()?;
    let service = |lab: &Lab| {
        Service::new("talk", &["10.96.0.77"])
            .node_port("tcp", 80, ENDPOINT, TCP)
            .node_port("udp", 53, ENDPOINT, UDP)
            .endpoints(&[lab.pod("e1")])
    };
    let manifests = Manifests::new(&[service(&lab)])?;
    let world = World::start_in(lab, worker, &Settings::base(), &manifests.path(), vec![])?;
    let node = world.lab.node("node1");
    for (name, seconds) in [("established", "86400"), ("close_wait", "3600")] {
        // kube-proxy's own.
        node.sysctl(
            &format!("netfilter/nf_conntrack_tcp_timeout_{name}"),
            seconds,
        )?;
    }
    let mut site = Site::new(world.lab.external("ext"), world.lab.pod("e1"), node, talks)?;
    let mut all: Vec<Vec<After>> = vec![Vec::new(); talks.len()];
    let steps = talks.iter().map(|talk| talk.steps.len()).max().unwrap_or(0);
    for step in 0..steps {
        if talks
            .iter()
            .any(|talk| matches!(talk.steps.get(step), Some(Step::Quiet)))
        {
            thread::sleep(Duration::from_millis(2300));
        }
        for (number, talk) in talks.iter().enumerate() {
            match talk.steps.get(step) {
                Some(Step::Packet(packet)) => site.send(number, packet)?,
                Some(Step::Quiet) | None => {}
            }
        }
        let mut seen = site.receive()?;
        let kept = match worker {
            Worker::KubeProxy(_) => flows::of_the_kernel(node)?,
            Worker::Dataplane => flows::of_ours(&world.lab.bpffs()?.join(node.name()))?,
        };
        for (number, talk) in talks
            .iter()
            .enumerate()
            .filter(|(_, t)| step < t.steps.len())
        {
            let kept = kept.get(&(talk.udp, Site::port(number))).cloned();
            let seen = std::mem::take(&mut seen[number]);
            all[number].push(After { seen, kept });
        }
    }
    Ok(all)
}

/// What becomes of a comparison.
enum Verdict {
    Same,
    /// The number of the row of docs/differences.md.
    Row(usize),
    Unexplained,
}

/// Whether both saw the same, or which difference it is.
fn explained(talk: &Conversation, step: usize, there: &After, here: &After) -> Verdict {
    if there.seen != here.seen {
        return Verdict::Unexplained;
    }
    let (there, here) = match (&there.kept, &here.kept) {
        (None, None) => return Verdict::Same,
        (None, Some(here)) => {
            if here.state == "close" && talk.is_refused(step) {
                return Verdict::Row(1);
            }
            return Verdict::Unexplained;
        }
        (Some(_), None) => return Verdict::Unexplained,
        (Some(there), Some(here)) => (there, here),
    };
    let same_time = there.seconds.abs_diff(here.seconds) <= 8;
    if there.state == here.state && same_time {
        return Verdict::Same;
    }
    // `nf_conntrack_tcp_timeout_unacknowledged`, five minutes.
    if there.state == here.state && (280..=300).contains(&there.seconds) && here.seconds > 300 {
        return Verdict::Row(0);
    }
    if talk.has_fin_again(step) {
        return Verdict::Row(2);
    }
    Verdict::Unexplained
}
