//! The first datagrams of one flow on two CPUs at once, as those of a resolver that asks for two kinds of records.

use std::{
    hint, iter,
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

use anyhow::{Result, anyhow, ensure};
use dataplane_common::Reason;
use dataplane_proof::{Output, Verdict, campaign::Scene};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

use super::crafted::{NEAR, ip, on, packet, vip};

scenarios! {
    Dataplane:
    two_cpus_begin_one_flow,
}

const CPUS: usize = 2;
/// Of so many flows, half are made on both CPUs within the same fraction of a microsecond.
const FLOWS: u32 = 500;
/// Flows that may be refused as busy: an interrupt, or the hypervisor, stops the CPU that makes the flow for longer than
/// the other CPU waits.
const BUSY: u64 = 5;
/// Where a frame of IPv4 has its destination, the ports included.
const DESTINATION: std::ops::Range<usize> = 30..38;

/// All datagrams reach the same endpoint, whichever CPU was first.
fn two_cpus_begin_one_flow() -> Result<()> {
    on(Scene::new()?, |scene| {
        let before = scene.rig.reasons()?;
        let turn = AtomicU32::new(0);
        let sent: Vec<Vec<Output>> = thread::scope(|scope| {
            let cpus: Vec<_> = (0..CPUS)
                .map(|cpu| {
                    let turn = &turn;
                    scope.spawn(move || send(scene, cpu, turn))
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
            let most = if *reason == Reason::FlowBusy { BUSY } else { 0 };
            let count = counts(*reason);
            ensure!(count <= most, "{count} {}", reason.word());
        }
        let mut busy = 0;
        for (flow, (one, other)) in iter::zip(&sent[0], &sent[1]).enumerate() {
            let [one, other] = [one, other].map(|output| {
                let frame = output.frame.as_deref().unwrap_or_default();
                (output.verdict, frame.get(DESTINATION).map(<[u8]>::to_vec))
            });
            if one.0 == Verdict::Drop || other.0 == Verdict::Drop {
                busy += 1;
                continue;
            }
            ensure!(
                one.0 == Verdict::Redirect && one == other,
                "flow {flow}: {one:02x?}, and {other:02x?}"
            );
        }
        ensure!(busy <= counts(Reason::FlowBusy), "{busy} were dropped");
        Ok(())
    })
}

/// Sends the first datagram of each flow from one CPU, when the other one does.
fn send(scene: &Scene, cpu: usize, turn: &AtomicU32) -> Result<Vec<Output>> {
    let mut only = CpuSet::new();
    only.set(cpu % thread::available_parallelism()?.get())?;
    sched_setaffinity(Pid::from_raw(0), &only)?;
    let mut sent = Vec::new();
    for flow in 0..FLOWS {
        let client = (ip(true, NEAR[0], NEAR[1]), 10_000 + u16::try_from(flow)?);
        let frame = packet(false, client, vip(true, "cluster", 7), 0).frame();
        turn.fetch_add(1, Ordering::SeqCst);
        while turn.load(Ordering::SeqCst) < (flow + 1) * u32::try_from(CPUS)? {
            hint::spin_loop();
        }
        sent.push(scene.throw("veth-near", false, &frame)?.0);
    }
    Ok(sent)
}
