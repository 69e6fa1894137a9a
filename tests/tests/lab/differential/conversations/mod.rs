//! The packet path's flows and the kernel's: the conversations go, packet by packet, through a node with kube-proxy's
//! rules, whose flows the kernel's own conntrack has, and through a node with the dataplane. After each packet both
//! nodes must have delivered the same packet to the same end, and the flow must be in one state with one timeout.
//!
//! The generator knows TCP and UDP, and knows neither of the two tables. [`DIFFERENCES`] lists the intended
//! differences of the dataplane; each difference has a row in `docs/differences.md`.
//!
//! `DATAPLANE_CONVERSATIONS=100000` asks for the long form, `DATAPLANE_SEED=N` for the conversations of an earlier run.

mod flows;
mod talk;
mod wire;

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_peers::Mode;
use dataplane_tests::Lab;
use rand::{SeedableRng as _, rngs::SmallRng};

use self::{
    flows::TrackedFlow,
    talk::{Conversation, Step, Trouble},
    wire::{Seen, Site},
};
use super::world::{self, Settings, Worker, World};
use crate::manifest::{Manifests, Service};

scenarios! {
    Dataplane:
    conversations_are_the_kernels,
    conversations_are_the_kernels_by_ipv6,
    conversations_end_when_the_kernels_do,
    conversations_through_the_stack_are_the_kernels,
}

/// The default number of conversations; and that for one pair of labs with short timeouts, which pass while packets are
/// sent.
const SHORT: usize = 500;
/// Conversations of one pair of labs: a client has a port for each.
const BATCH: usize = 5000;

/// The timeout of flows in seconds, if the scenario waits for their end.
const SHORT_TIMEOUT: u64 = 20;
/// Every timeout of the kernel's (`net.netfilter.nf_conntrack_…`), and of ours.
const TIMEOUTS: [&str; 12] = [
    "tcp_timeout_syn_sent",
    "tcp_timeout_syn_recv",
    "tcp_timeout_established",
    "tcp_timeout_fin_wait",
    "tcp_timeout_close_wait",
    "tcp_timeout_last_ack",
    "tcp_timeout_time_wait",
    "tcp_timeout_close",
    "tcp_timeout_max_retrans",
    "tcp_timeout_unacknowledged",
    "udp_timeout",
    "udp_timeout_stream",
];
const OUR_TIMEOUTS: &str = "packets: {timeouts: {tcpSynSent: 20s, tcpSynReceived: 20s, tcpEstablished: 20s, \
     tcpFinWait: 20s, tcpCloseWait: 20s, tcpLastAck: 20s, tcpTimeWait: 20s, tcpClose: 20s, udp: 20s, udpStream: 20s}}";

/// The node ports of the service, by TCP and by UDP, and the endpoint's port, which has no listener.
const TCP: u16 = 30_080;
const UDP: u16 = 30_053;
const ENDPOINT: u16 = 7777;

/// Where the dataplane is meant to differ: as the row of the docs has it.
const DIFFERENCES: [&str; 7] = [
    "A TCP connection with data that is not acknowledged",
    "A TCP connection that is reset before it is established",
    "A FIN that is sent again",
    "A TCP connection that both ends open at the same time",
    "A TCP segment outside of the window",
    "A TCP connection that goes on after a RST",
    "A SYN from the port of a connection that both sides have closed",
];
const DOCS: &str = include_str!("../../../../../docs/differences.md");

fn conversations_are_the_kernels() -> Result<()> {
    compare(Kind::default())
}

fn conversations_are_the_kernels_by_ipv6() -> Result<()> {
    compare(Kind {
        v6: true,
        ..Kind::default()
    })
}

/// With short timeouts: both sides have the flow for equally long.
fn conversations_end_when_the_kernels_do() -> Result<()> {
    compare(Kind {
        short: true,
        ..Kind::default()
    })
}

fn conversations_through_the_stack_are_the_kernels() -> Result<()> {
    compare(Kind {
        stack: true,
        ..Kind::default()
    })
}

/// How a campaign runs.
#[derive(Clone, Copy, Default)]
struct Kind {
    /// Whether our packets go through the stack.
    stack: bool,
    v6: bool,
    /// Whether flows have the timeout [`SHORT_TIMEOUT`] in every state, and the scenario waits for their end.
    short: bool,
}

fn compare(kind: Kind) -> Result<()> {
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
    let mut troubles: BTreeMap<String, usize> = BTreeMap::new();
    let mut wrong = Vec::new();
    let size = if kind.short { SHORT } else { BATCH };
    for (batch, first) in (seed..).zip((0..all).step_by(size)) {
        let mut rng = SmallRng::seed_from_u64(batch);
        let count = size.min(all - first);
        let talks: Vec<_> = (0..count).map(|_| Conversation::new(&mut rng)).collect();
        for talk in &talks {
            let trouble = talk.trouble.map(|trouble| format!("{trouble:?}"));
            *troubles.entry(trouble.unwrap_or_default()).or_default() += 1;
        }
        let (there, here) = thread::scope(|scope| {
            let there = scope.spawn(|| run(Worker::KubeProxy(Mode::Nftables), &talks, kind));
            let ours = if kind.stack {
                Worker::Stack
            } else {
                Worker::Dataplane
            };
            let here = run(ours, &talks, kind);
            (there.join(), here)
        });
        let (there, here) = (
            there.map_err(|_| anyhow::anyhow!("kube-proxy's side panicked"))??,
            here?,
        );
        for (talk, (there, here)) in talks.iter().zip(there.iter().zip(&here)) {
            let mut before = None;
            for (step, (there, here)) in there.iter().zip(here).enumerate() {
                let step = step.min(talk.steps.len() - 1);
                let earlier = before.replace(here);
                match explained(talk, step, there, here, earlier) {
                    Verdict::Same => {}
                    Verdict::Row(row) => {
                        used[row] += 1;
                        // Only one of them has followed the packet: later states differ, too.
                        if row == 4 && state(there) != state(here) {
                            break;
                        }
                    }
                    Verdict::Unexplained => {
                        let steps = &talk.steps[..=step];
                        wrong.push(format!(
                            "{:?} seed {batch}: {steps:?}:\n  {there:?}\n  {here:?}",
                            talk.trouble
                        ));
                        break;
                    }
                }
            }
        }
    }
    println!("{all} conversations from seed {seed}, with {troubles:?}; differences: {used:?}");
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

/// The observation after a step.
#[derive(Debug, Clone, PartialEq, Eq)]
struct After {
    /// The packets that arrived.
    seen: Vec<Seen>,
    /// The flow, if there is one.
    kept: Option<TrackedFlow>,
    /// For how many seconds the packets of this step were sent, and what came of them was read.
    seconds: u64,
    /// The seconds since the first packet.
    since: u64,
}

/// Runs all conversations at one time: the first steps of all, then the second ones.
fn run(worker: Worker, talks: &[Conversation], kind: Kind) -> Result<Vec<Vec<After>>> {
    let lab = world::lab()?;
    let service = |lab: &Lab| {
        Service::new("talk", &["10.96.0.77", "fd00:10:96::77"])
            .node_port("tcp", 80, ENDPOINT, TCP)
            .node_port("udp", 53, ENDPOINT, UDP)
            .endpoints(&[lab.pod("e1")])
    };
    let manifests = Manifests::new(&[service(&lab)])?;
    let mut settings = Settings::base();
    let node = lab.node("node1");
    // kube-proxy's own.
    let mut times = vec![
        ("tcp_timeout_established", 86_400),
        ("tcp_timeout_close_wait", 3600),
    ];
    if kind.short {
        times = TIMEOUTS.map(|name| (name, SHORT_TIMEOUT)).into();
        settings.config = OUR_TIMEOUTS;
    }
    for (name, seconds) in times {
        node.sysctl(
            &format!("netfilter/nf_conntrack_{name}"),
            &seconds.to_string(),
        )?;
    }
    // The node's own stack then sends IPv6 packets with flow label 0, as it sends IPv4 packets with identification 0.
    node.sysctl("ipv6/auto_flowlabels", "0")?;
    let world = World::start_in(lab, worker, &settings, &manifests.path(), vec![])?;
    let node = world.lab.node("node1");
    let (client, endpoint) = (world.lab.external("ext"), world.lab.pod("e1"));
    let mut site = Site::new(client, endpoint, node, talks, kind.v6)?;
    let kept = || match worker {
        Worker::KubeProxy(_) => flows::of_the_kernel(node, kind.v6),
        _ => flows::of_ours(&world.lab.bpffs()?.join(node.name()), kind.v6),
    };
    let mut all: Vec<Vec<After>> = vec![Vec::new(); talks.len()];
    let steps = talks.iter().map(|talk| talk.steps.len()).max().unwrap_or(0);
    let first = Instant::now();
    for step in 0..steps {
        if talks
            .iter()
            .any(|talk| matches!(talk.steps.get(step), Some(Step::Quiet)))
            && !kind.short
        {
            thread::sleep(Duration::from_millis(2300));
        }
        let start = Instant::now();
        for (number, talk) in talks.iter().enumerate() {
            match talk.steps.get(step) {
                Some(Step::Packet(packet)) => site.send(number, packet)?,
                Some(Step::Complaint(complaint)) => site.complain(number, *complaint)?,
                Some(Step::Quiet) | None => {}
            }
        }
        let mut seen = site.receive()?;
        let kept = kept()?;
        let seconds = start.elapsed().as_secs();
        let since = first.elapsed().as_secs();
        for (number, talk) in talks
            .iter()
            .enumerate()
            .filter(|(_, t)| step < t.steps.len())
        {
            let kept = kept.get(&(talk.udp, Site::port(number))).cloned();
            let seen = std::mem::take(&mut seen[number]);
            all[number].push(After {
                seen,
                kept,
                seconds,
                since,
            });
        }
    }
    if kind.short {
        // Then no flow is left.
        thread::sleep(Duration::from_secs(SHORT_TIMEOUT + 6));
        let kept = kept()?;
        for (number, talk) in talks.iter().enumerate() {
            let kept = kept.get(&(talk.udp, Site::port(number))).cloned();
            all[number].push(After {
                seen: Vec::new(),
                kept,
                seconds: 0,
                since: 0,
            });
        }
    }
    Ok(all)
}

/// The result of a comparison.
enum Verdict {
    Same,
    /// The number of the row of docs/differences.md.
    Row(usize),
    Unexplained,
}

/// Compares the results of both, and finds the difference that explains them. `before`: our result of the step before.
fn explained(
    talk: &Conversation,
    step: usize,
    there: &After,
    here: &After,
    before: Option<&After>,
) -> Verdict {
    let states = [there, here].map(state);
    if talk.is_opened_by_both(step) {
        return Verdict::Row(3);
    }
    if there.kept.is_none() && states[1].is_some() && talk.has_rst(step) {
        return Verdict::Row(1);
    }
    if there.seen != here.seen {
        // The kernel drops it, or answers it as the node's own.
        let passed = |after: &After| {
            after
                .seen
                .iter()
                .any(|seen| is_for_other_side(talk, step, seen))
        };
        // A packet that overtakes is one of the connection's own; a stray SYN-ACK may count as the answer; and after a
        // stray segment, the kernel's window may be the stray one's.
        let own = talk.trouble == Some(Trouble::Order) || talk.has_rst(step);
        let same = states[0] == states[1]
            || before.and_then(state) == states[1]
            || states[1] == Some("syn-received")
            || own;
        let only_here = passed(here) && !passed(there);
        return if only_here && same && talk.trouble.is_some() {
            Verdict::Row(4)
        } else if only_here && talk.has_fin_again(step) && states[0] == Some("syn-sent") {
            // The kernel took the connection for closed, and so a stray SYN for a new one.
            Verdict::Row(2)
        } else {
            Verdict::Unexplained
        };
    }
    let slack = 8 + there.seconds + here.seconds;
    let since = there.since.max(here.since);
    let (there, here) = match (&there.kept, &here.kept) {
        (None, None) => return Verdict::Same,
        (Some(there), Some(here)) => (there, here),
        (None, Some(_)) | (Some(_), None) => return Verdict::Unexplained,
    };
    let same_time = there.seconds.abs_diff(here.seconds) <= slack;
    if there.state == here.state && same_time {
        return Verdict::Same;
    }
    // `nf_conntrack_tcp_timeout_unacknowledged`, five minutes.
    if there.state == here.state
        && (300 - slack.min(100)..=300).contains(&there.seconds)
        && here.seconds > 300
    {
        return Verdict::Row(0);
    }
    if talk.has_fin_again(step) {
        return Verdict::Row(2);
    }
    if there.state == "close" && talk.has_rst(step) {
        return Verdict::Row(5);
    }
    let is_stray = talk.trouble == Some(Trouble::Stray);
    // The kernel does not restart the timeout, which began with the conversation, or later.
    let restarted = there.seconds..=there.seconds + slack + since;
    if is_stray && there.state == here.state && restarted.contains(&here.seconds) {
        return Verdict::Row(4);
    }
    // The kernel's window is that of the stray segment.
    if is_stray && here.state == "close" && talk.has_rst(step) {
        return Verdict::Row(4);
    }
    // For the kernel, a SYN-ACK of the client moves the client's window.
    let states = [&*there.state, &*here.state];
    let stray = states == ["syn-sent", "syn-received"]
        || states == ["syn-received", "established"] && talk.answers_itself(step);
    if is_stray && stray {
        return Verdict::Row(4);
    }
    if talk.is_begun_again(step) && ["syn-sent", "syn-received"].contains(&&*here.state) {
        return Verdict::Row(6);
    }
    Verdict::Unexplained
}

/// Returns the state of the flow, if there is one.
fn state(after: &After) -> Option<&str> {
    after.kept.as_ref().map(|kept| &*kept.state)
}

/// Whether a packet that arrived is the packet of a step, at the other side.
fn is_for_other_side(talk: &Conversation, step: usize, seen: &Seen) -> bool {
    matches!(talk.steps[step], Step::Packet(sent) if sent.by_client != seen.at_client)
}
