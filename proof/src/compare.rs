//! Runs one packet through the programs and through the model, and compares the results.

use std::{fmt, io};

use anyhow::{Context as _, Result};
use dataplane_common::{
    Port, Protocol, Reason,
    packet::{FlowKey, Tick, Translation},
    seen,
};
use dataplane_tests::Lab;
use kernel::{
    rig::{Hash, Plain, Rig, SkbContext, Table as Conntrack},
    tc::Direction,
};
use nix::time::{ClockId, clock_gettime};

use crate::{
    generate::Op,
    model::{
        Drawn, Input, Model, Moment, Output, Verdict, flows::Flow, room::Flows, sequences::Numbers,
        table::Table,
    },
    wire::LINK,
};

/// Bytes in hexadecimal digits, in the format of `text2pcap` and similar tools.
pub struct Bytes<'a>(pub &'a [u8]);

impl fmt::Display for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A table of the kernel, of any kind.
pub trait Kernel<K, V> {
    fn get(&self, key: &K) -> io::Result<Option<V>>;
    fn set(&self, key: &K, value: &V) -> io::Result<()>;
    fn remove(&self, key: &K) -> io::Result<bool>;
    fn entries(&self) -> io::Result<Vec<(K, V)>>;
}

impl<K: Plain, V: Plain> Kernel<K, V> for Hash<K, V> {
    fn get(&self, key: &K) -> io::Result<Option<V>> {
        self.get(key)
    }

    fn set(&self, key: &K, value: &V) -> io::Result<()> {
        self.set(key, value)
    }

    fn remove(&self, key: &K) -> io::Result<bool> {
        self.remove(key)
    }

    fn entries(&self) -> io::Result<Vec<(K, V)>> {
        self.entries()
    }
}

impl Kernel<FlowKey, Translation> for Conntrack {
    fn get(&self, key: &FlowKey) -> io::Result<Option<Translation>> {
        Ok(self.get(key))
    }

    fn set(&self, key: &FlowKey, value: &Translation) -> io::Result<()> {
        if self.set(key, value) {
            Ok(())
        } else {
            Err(io::Error::other(format!("there is no room for {key:?}")))
        }
    }

    fn remove(&self, key: &FlowKey) -> io::Result<bool> {
        Ok(self.remove(key))
    }

    fn entries(&self) -> io::Result<Vec<(FlowKey, Translation)>> {
        Ok(self.entries())
    }
}

/// The random choices of the programs, read from the tables.
struct Tables<'a>(&'a Rig);

impl Drawn for Tables<'_> {
    fn flow(&self, key: &FlowKey) -> Option<Translation> {
        self.0.conntrack.get(key)
    }
}

/// Returns the current time by the programs' clocks.
fn now() -> Moment {
    let read = |clock| {
        let time = clock_gettime(clock).map_or_else(|_| std::time::Duration::ZERO, Into::into);
        u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
    };
    Moment {
        tick: Tick::from_ns(read(ClockId::CLOCK_MONOTONIC_COARSE)),
        ns: read(ClockId::CLOCK_MONOTONIC),
    }
}

/// Whether a packet is shorter than an IP header. Since Linux 6.18 a test run refuses such packets
/// (`bpf_prog_test_run_skb` in `net/bpf/test_run.c`). The lab's tests send them.
pub fn too_short(frame: &[u8]) -> bool {
    match frame.get(12..14) {
        Some([0x08, 0x00]) => frame.len() < LINK + 20,
        Some([0x86, 0xdd]) => frame.len() < LINK + 40,
        _ => frame.len() <= LINK,
    }
}

/// Runs a program on a packet in a test run.
pub fn run(rig: &Rig, input: &Input) -> Result<Output> {
    let mut out = vec![0; input.frame.len() + 256];
    let context = SkbContext::new(input.ifindex, u32::from(input.segmented) * 2);
    let direction = if input.leaves {
        Direction::Egress
    } else {
        Direction::Ingress
    };
    let ran = rig
        .run(direction, &context, &input.frame, &mut out)
        .with_context(|| format!("run the program on {} bytes", input.frame.len()))?;
    out.truncate(ran.len);
    let verdict = Verdict::from_number(ran.verdict);
    Ok(Output {
        verdict: verdict.with_context(|| format!("verdict {}", ran.verdict))?,
        frame: Some(out),
        unaddressed: None,
    })
}

/// Verdicts by reason.
pub type Reasons = [u64; Reason::SLOTS as usize];

/// Runs a packet through the programs and through the model. An error of the inner result describes the difference.
/// `zero`: the programs' counters at the time when the model's counters were zero. The function reads the counters only
/// if `closely` is set, or if packet and tables do not show the program's random choice.
pub fn packet(
    rig: &Rig,
    model: &mut Model<'_>,
    input: &Input,
    zero: &Reasons,
    closely: bool,
) -> Result<Result<Output, String>> {
    let before = now();
    let output = run(rig, input)?;
    let after = now();
    let mut moments = vec![before];
    if after.tick != before.tick {
        // A new tick began during the run. The program may have seen either tick.
        moments.push(Moment {
            ns: before.ns,
            ..after
        });
    }
    let mut differences = Vec::new();
    for moment in moments {
        let mut guess = 0;
        loop {
            let expected = model.step(input, moment, &Tables(rig), guess);
            let difference = match expected {
                Ok(expected) => compare(rig, model, &expected, &output, moment, after)?,
                Err(what) => Some(what),
            };
            let difference = match difference {
                None if closely || model.guesses() > 1 => miscounted(rig, model, zero)?,
                difference => difference,
            };
            match difference {
                None => {
                    model.keep();
                    return Ok(Ok(output));
                }
                Some(what) => differences.push(what),
            }
            model.take_back();
            guess += 1;
            if guess >= model.guesses() {
                break;
            }
        }
    }
    if closely {
        let mut counted = rig.reasons()?;
        for (count, (zero, sum)) in counted.iter_mut().zip(zero.iter().zip(model.reasons)) {
            *count -= zero + sum;
        }
        let all = Reason::ALL.iter().filter(|r| counted[**r as usize] > 0);
        let words: Vec<&str> = all.map(|reason| reason.word()).collect();
        let frame = output.frame.unwrap_or_default();
        let frame = Bytes(&frame);
        differences.push(format!("it was {words:?}: {frame}"));
    }
    Ok(Err(differences.join("\nor: ")))
}

/// Returns a difference between the counters of the programs and the model, after the last packet.
fn miscounted(rig: &Rig, model: &Model<'_>, zero: &Reasons) -> Result<Option<String>> {
    let mut wanted = *zero;
    for (sum, count) in wanted.iter_mut().zip(model.reasons) {
        *sum += count;
    }
    for reason in model.counted() {
        wanted[*reason as usize] += 1;
    }
    let found = rig.reasons()?;
    let differs = |reason: &&Reason| found[**reason as usize] != wanted[**reason as usize];
    Ok(Reason::ALL.iter().find(differs).map(|reason| {
        format!(
            "counted {} times {} in all, not {}",
            found[*reason as usize],
            reason.word(),
            wanted[*reason as usize]
        )
    }))
}

/// Returns a difference between the program's result and the expected result, if any.
fn compare(
    rig: &Rig,
    model: &mut Model<'_>,
    expected: &Output,
    output: &Output,
    before: Moment,
    after: Moment,
) -> Result<Option<String>> {
    if output.verdict != expected.verdict {
        return Ok(Some(format!(
            "{:?}, not {:?} ({:?})",
            output.verdict,
            expected.verdict,
            model.counted()
        )));
    }
    if expected.verdict != Verdict::Drop
        && let (Some(frame), Some(wanted)) = (&output.frame, &expected.frame)
        && frame != wanted
        && Some(frame) != expected.unaddressed.as_ref()
    {
        let at = frame.iter().zip(wanted).position(|(a, b)| a != b);
        return Ok(Some(format!(
            "the packet differs from byte {} on ({:?}):\n    {}\nnot {}",
            at.unwrap_or(frame.len().min(wanted.len())),
            model.counted(),
            Bytes(frame),
            Bytes(wanted)
        )));
    }
    let state = &mut model.state;
    let all = [
        flows_touched(&rig.conntrack, &mut state.flows),
        touched("FRAGMENTS", &rig.fragments, &mut state.fragments, |_, _| {})?,
        touched(
            "AFFINITY",
            rig.affinity(),
            &mut state.affinity,
            |ours, theirs| {
                // Only the program knows the exact nanosecond.
                if ours.used_at == before.ns && (before.ns..=after.ns).contains(&theirs.used_at) {
                    ours.used_at = theirs.used_at;
                }
            },
        )?,
    ];
    Ok(all.into_iter().flatten().next())
}

/// Compares the flows that a packet touched. Also compares the lookup by the key of their replies, before and after the
/// change.
fn flows_touched(kernel: &Conntrack, model: &mut Flows) -> Option<String> {
    let touched: Vec<_> = model
        .table()
        .touched()
        .map(|(key, before)| (*key, before))
        .collect();
    let streams = touched
        .iter()
        .filter(|(key, _)| key.protocol == Protocol::UDP);
    for (key, _) in streams {
        let assured = kernel.get(key).map_or(0, |to| to.seen & seen::ASSURED);
        // The flow was answered before; only then the bit may be set.
        if model
            .get(key)
            .is_some_and(|to| to.seen & seen::in_replies(seen::PACKET) != 0)
        {
            model.adopt(key, |to| to.seen |= assured);
        }
    }
    let model = &*model;
    touched.iter().find_map(|(key, before)| {
        let (ours, theirs) = (model.get(key), kernel.get(key));
        if theirs != ours {
            return Some(format!("CONNTRACK has {theirs:?} at {key:?}, not {ours:?}"));
        }
        if let Some(what) = numbers_differ(kernel, model, key) {
            return Some(what);
        }
        let versions = [*before, ours].into_iter().flatten();
        versions
            .map(|to| Flow { key: *key, to })
            .find_map(|flow| replies_differ(kernel, model, &flow))
    })
}

/// Compares the sequence numbers of a flow.
fn numbers_differ(kernel: &Conntrack, model: &Flows, key: &FlowKey) -> Option<String> {
    if key.protocol != Protocol::TCP {
        return None;
    }
    let theirs = Numbers::read(kernel.sequences(key)?);
    let ours = model.numbers(key);
    (theirs != ours).then(|| format!("SEQUENCES has {theirs:?} at {key:?}, not {ours:?}"))
}

/// Compares the lookup by the key of a flow's replies: it must lead to the same flow in both.
fn replies_differ(kernel: &Conntrack, model: &Flows, flow: &Flow) -> Option<String> {
    let (ours, theirs) = if flow.is_foreign() && flow.to.node_addr == 0 {
        return None;
    } else if flow.to.node_addr == 0 {
        let reply = flow.reply_key();
        (model.by_client(&reply), kernel.by_client(&reply))
    } else {
        let port = flow.port_key();
        (model.by_node(&port), kernel.by_node(&port))
    };
    let ours = ours.map(|flow| flow.key);
    (theirs != ours).then(|| format!("the replies of {flow:?} lead to {theirs:?}, not to {ours:?}"))
}

/// Compares all flows, their sequence numbers, and the lookup by the key of their replies.
pub fn flows_differ(kernel: &Conntrack, model: &Flows) -> Result<Option<String>> {
    if let Some(what) = differs("CONNTRACK", kernel, model.table())? {
        return Ok(Some(what));
    }
    let mut keys = model.table().iter().map(|(key, _)| key);
    if let Some(what) = keys.find_map(|key| numbers_differ(kernel, model, key)) {
        return Ok(Some(what));
    }
    let flows = model.table().iter();
    let mut flows = flows.map(|(key, to)| Flow { key: *key, to: *to });
    Ok(flows.find_map(|flow| replies_differ(kernel, model, &flow)))
}

/// Compares the entries that a packet touched.
fn touched<K, V>(
    name: &str,
    kernel: &impl Kernel<K, V>,
    model: &mut Table<K, V>,
    adapt: impl Fn(&mut V, &V),
) -> Result<Option<String>>
where
    K: Copy + Eq + std::hash::Hash + fmt::Debug,
    V: Copy + PartialEq + fmt::Debug,
{
    let keys: Vec<K> = model.touched().map(|(key, _)| *key).collect();
    for key in keys {
        let theirs = kernel.get(&key)?;
        let mut ours = model.get(&key);
        if let (Some(ours), Some(theirs)) = (&mut ours, &theirs) {
            adapt(ours, theirs);
            model.adopt(&key, *ours);
        }
        if theirs != ours {
            return Ok(Some(format!(
                "{name} has {theirs:?} at {key:?}, not {ours:?}"
            )));
        }
    }
    Ok(None)
}

/// Compares all entries of a table.
pub fn differs<K, V>(
    name: &str,
    kernel: &impl Kernel<K, V>,
    model: &Table<K, V>,
) -> Result<Option<String>>
where
    K: Copy + Eq + std::hash::Hash + fmt::Debug,
    V: Copy + PartialEq + fmt::Debug,
{
    let entries = kernel.entries()?;
    for (key, theirs) in &entries {
        let ours = model.get(key);
        if ours != Some(*theirs) {
            return Ok(Some(format!(
                "in the end {name} has {theirs:?} at {key:?}, not {ours:?}"
            )));
        }
    }
    let missing = || {
        model
            .iter()
            .find(|(key, _)| !entries.iter().any(|(k, _)| k == *key))
    };
    if entries.len() != model.len() {
        return Ok(Some(format!("in the end {name} lacks {:?}", missing())));
    }
    Ok(None)
}

pub fn empty<K, V>(table: &impl Kernel<K, V>) -> Result<()> {
    for (key, _) in table.entries()? {
        table.remove(&key)?;
    }
    Ok(())
}

/// Applies an operation that is not a packet to the model and to the kernel's tables.
pub fn event(rig: &Rig, lab: &Lab, model: &mut Model<'_>, op: &Op) -> Result<()> {
    let state = &mut model.state;
    let older = |tick: Tick, ticks: u16| {
        let now = u64::from(tick.number());
        Tick::from_ns((now.wrapping_sub(u64::from(ticks)) & 0xffff) << 32)
    };
    match op {
        Op::Packet(_) => {}
        Op::Age(key, ticks) => {
            state
                .flows
                .change(key, |to| to.used = older(to.used, *ticks));
            let mut numbers = state.flows.numbers(key);
            if let (1.., since) = &mut numbers.asked {
                *since = older(*since, *ticks);
                state.flows.set_numbers(key, numbers);
                rig.conntrack.set_sequences(key, numbers.write());
            }
        }
        Op::Forget(key) => state.flows.remove(key),
        Op::Depart(key) => {
            let mut numbers = state.flows.numbers(key);
            numbers.departed = true;
            state.flows.set_numbers(key, numbers);
            rig.conntrack.depart(key);
        }
        Op::Foreign(key, holds_port) => {
            if !state.flows.has(key) {
                let to = Translation {
                    endpoint: key.dst,
                    endpoint_port: key.dst_port,
                    node_port: if *holds_port { key.src_port } else { Port::ANY },
                    used: now().tick,
                    seen: seen::FOREIGN,
                    node_addr: (*holds_port).into(),
                };
                state.flows.enter_quietly(&Flow { key: *key, to });
            }
        }
        Op::Orphan(key, endpoint, seen) => {
            if !state.flows.has(key) {
                let to = Translation {
                    endpoint: endpoint.addr,
                    endpoint_port: endpoint.port,
                    node_port: Port::ANY,
                    used: now().tick,
                    seen: *seen,
                    node_addr: 0,
                };
                state.flows.enter_quietly(&Flow { key: *key, to });
            }
        }
        Op::AgeClient(key, seconds) => {
            state.affinity.change(key, |entry| {
                entry.used_at = entry.used_at.saturating_sub(seconds * 1_000_000_000);
            });
        }
        Op::Route(routed) => {
            model.world.route(lab, *routed)?;
            rig.forget_ways()?;
        }
    }
    push(&rig.conntrack, state.flows.table())?;
    push(rig.affinity(), &state.affinity)?;
    state.keep();
    Ok(())
}

/// Writes the model's changes to the kernel's table.
fn push<K, V>(kernel: &impl Kernel<K, V>, model: &Table<K, V>) -> Result<()>
where
    K: Copy + Eq + std::hash::Hash,
    V: Copy,
{
    for (key, _) in model.touched() {
        match model.get(key) {
            Some(value) => kernel.set(key, &value)?,
            None => {
                kernel.remove(key)?;
            }
        }
    }
    Ok(())
}
