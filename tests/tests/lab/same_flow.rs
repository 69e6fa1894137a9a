//! The first datagrams of one flow on two CPUs at once, as those of a resolver that asks for two kinds of records.

use std::{
    hint, iter,
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

use anyhow::{Result, anyhow, bail, ensure};
use dataplane_common::Reason;
use dataplane_proof::{Output, Verdict, campaign::Scene};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

use super::crafted::{NEAR, OUTSIDE, ip, on, packet, vip};

scenarios! {
    Dataplane:
    two_cpus_begin_one_flow,
}

const CPUS: usize = 2;
/// Flows of a round. About half of them are made on both CPUs within the same fraction of a microsecond.
const FLOWS: u16 = 500;
/// Rounds until one must pass without a refused datagram. An interrupt, or the hypervisor, may stop
/// the CPU that makes a flow for longer than the other CPU waits, but not once in each of so many rounds.
const ROUNDS: u16 = 5;
/// Where a frame of IPv4 has its addresses and ports.
const ENDS: std::ops::Range<usize> = 26..38;

/// The first datagrams of a client's flows.
#[derive(Clone, Copy, Debug)]
struct Client {
    /// The interface at which the datagrams arrive.
    at: &'static str,
    /// The client's address.
    from: [&'static str; 2],
    /// The kind of VIP.
    to: &'static str,
}

/// A pod, and a client outside whose flows are masqueraded.
const CLIENTS: [Client; 2] = [
    Client {
        at: "veth-near",
        from: NEAR,
        to: "cluster",
    },
    Client {
        at: "eth0",
        from: OUTSIDE,
        to: "node",
    },
];

/// All datagrams of a flow reach one endpoint, which sees one client, although two CPUs begin the flow at the same time.
fn two_cpus_begin_one_flow() -> Result<()> {
    // Room for all flows of all rounds.
    on(Scene::with_flows(1 << 13)?, |scene| {
        CLIENTS.iter().try_for_each(|client| {
            let mut refused = Vec::new();
            for round in 0..ROUNDS {
                let busy = begin_on_two_cpus(scene, client, 10_000 + round * FLOWS)?;
                if busy == 0 {
                    return Ok(());
                }
                refused.push(busy);
            }
            bail!("{client:?}: datagrams were refused as busy in every round: {refused:?}")
        })
    })
}

/// Begins each flow of a round on all CPUs at once, the first from the client's port `first`.
/// Returns how many datagrams were refused because another CPU was making their flow.
///
/// # Errors
///
/// Datagrams of one flow left with different addresses or ports, a datagram was refused for another reason, or one
/// that was sent again after a refusal did not leave like them.
fn begin_on_two_cpus(scene: &Scene, client: &Client, first: u16) -> Result<u64> {
    let before = scene.rig.reasons()?;
    let turn = AtomicU32::new(0);
    let sent: Vec<Vec<Output>> = thread::scope(|scope| {
        let cpus: Vec<_> = (0..CPUS)
            .map(|cpu| {
                let turn = &turn;
                scope.spawn(move || send(scene, client, cpu, first, turn))
            })
            .collect();
        let end = |cpu: thread::ScopedJoinHandle<'_, Result<_>>| {
            cpu.join().map_err(|_| anyhow!("it panicked")).flatten()
        };
        cpus.into_iter().map(end).collect::<Result<_>>()
    })?;
    let counted = scene.rig.reasons()?;
    let counts = |reason: Reason| counted[reason as usize] - before[reason as usize];
    for reason in Reason::ALL.iter().filter(|reason| reason.is_refusal()) {
        let count = counts(*reason);
        ensure!(
            count == 0 || *reason == Reason::FlowBusy,
            "{count} {}",
            reason.word()
        );
    }
    let mut busy = 0;
    for (port, (one, other)) in (first..).zip(iter::zip(&sent[0], &sent[1])) {
        let mut left = Vec::new();
        for output in [one, other] {
            if output.verdict == Verdict::Drop {
                busy += 1;
                let again = scene.throw(client.at, false, &client.datagram(port))?.0;
                left.push(ends(&again)?);
            } else {
                left.push(ends(output)?);
            }
        }
        ensure!(
            left[0] == left[1],
            "{client:?}: the flow from port {port} left as {left:02x?}"
        );
    }
    ensure!(
        busy == counts(Reason::FlowBusy),
        "{busy} datagrams were dropped"
    );
    Ok(busy)
}

/// The addresses and ports of a redirected datagram, as they are in the frame.
fn ends(output: &Output) -> Result<Vec<u8>> {
    let frame = output.frame.as_deref().unwrap_or_default();
    match frame.get(ENDS) {
        Some(ends) if output.verdict == Verdict::Redirect => Ok(ends.to_vec()),
        _ => bail!("not redirected: {:?}, {frame:02x?}", output.verdict),
    }
}

impl Client {
    /// A datagram to service 16: it has many endpoints, and no session affinity, by which the second datagram would reach
    /// the endpoint of the first in any case.
    fn datagram(&self, port: u16) -> Vec<u8> {
        let client = (ip(true, self.from[0], self.from[1]), port);
        packet(false, client, vip(true, self.to, 16), 0).frame()
    }
}

/// Sends the first datagram of each flow from one CPU, when the other one does.
fn send(
    scene: &Scene,
    client: &Client,
    cpu: usize,
    first: u16,
    turn: &AtomicU32,
) -> Result<Vec<Output>> {
    let mut only = CpuSet::new();
    only.set(cpu % thread::available_parallelism()?.get())?;
    sched_setaffinity(Pid::from_raw(0), &only)?;
    let mut sent = Vec::new();
    for flow in 0..FLOWS {
        let frame = client.datagram(first + flow);
        turn.fetch_add(1, Ordering::SeqCst);
        while turn.load(Ordering::SeqCst) < (u32::from(flow) + 1) * u32::try_from(CPUS)? {
            hint::spin_loop();
        }
        sent.push(scene.throw(client.at, false, &frame)?.0);
    }
    Ok(sent)
}
