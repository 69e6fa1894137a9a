//! Many packets, one after the other, through the programs and through the model; and what differs,
//! made short.
//!
//! A campaign is a row of epochs. Each begins with nothing remembered, and has so many things happen
//! (`Op`), each of them from a seed of its own and from what is known by then. So an epoch can be
//! played again without some of them.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    fs::File,
    os::fd::AsFd as _,
    path::Path,
    thread,
};

use anyhow::{Context as _, Result, anyhow, bail};
use dataplane::kernel::{
    Direction,
    rig::{Hash, Plain, Rig, SkbContext},
};
use dataplane_common::{
    Reason,
    packet::{FlowKey, Forward, PacketConfig, Tick, seen},
    tables::{Affinity, AffinityKey},
};
use dataplane_tests::Lab;
use nix::{
    sched::{CloneFlags, setns},
    time::{ClockId, clock_gettime},
};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

use crate::{
    generate::{self, Op, Sort},
    model::{
        Drawn, Input, Model, Moment, Output, Verdict,
        read::{self, Read},
        state::Table,
        write,
    },
    wire::LINK,
    world::{self, World},
};

/// How many things happen in an epoch.
const EPOCH: usize = 1024;
/// How many flows there is room for: more than an epoch can make.
const FLOWS: u32 = 8192;

/// The programs and the node, ready for packets.
pub struct Scene {
    /// The programs.
    pub rig: Rig,
    /// The node.
    pub world: World,
    /// The namespace; dropped last.
    pub lab: Lab,
}

/// What became of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// Nothing.
    LeftAlone,
    /// Translated, for this host's stack.
    Up,
    /// Translated and sent on.
    Onward,
    /// An ICMP error went back.
    Answered,
    /// Dropped.
    Dropped,
}

impl Outcome {
    /// The words that a person reads.
    pub fn word(self) -> &'static str {
        match self {
            Self::LeftAlone => "left alone",
            Self::Up => "translated, for this host",
            Self::Onward => "translated, sent on",
            Self::Answered => "answered by an ICMP error",
            Self::Dropped => "dropped",
        }
    }
}

/// What was counted.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Packets.
    pub packets: u64,
    /// Other events: entries that aged, that were pushed out.
    pub events: u64,
    /// Packets without a whole IP header, which newer kernels do not run programs on by hand.
    pub too_short: u64,
    /// Packets by sort and outcome.
    pub outcomes: BTreeMap<(Sort, Outcome), u64>,
    /// Verdicts by reason.
    pub reasons: Reasons,
    /// Changed packets whose checksums are right, computed anew over the whole packet.
    pub right: u64,
    /// Changed packets that came with a wrong checksum, or in fragments, and are wrong by as much.
    pub wrong_before: u64,
}

/// Where the programs differ from the model.
#[derive(Debug)]
pub struct Failure {
    /// What differs.
    pub what: String,
    /// After how many ops.
    at: usize,
}

impl Scene {
    /// Builds the lab and loads the programs.
    ///
    /// # Errors
    /// If this machine cannot.
    pub fn new() -> Result<Self> {
        let lab = world::lab()?;
        let mut rig = Rig::new(&lab.bpffs()?.join("rig"), FLOWS)?;
        let world = World::new(&lab, &mut rig)?;
        Ok(Self { rig, world, lab })
    }

    /// Does something in the node's network namespace, where the programs' routes are.
    ///
    /// # Errors
    /// Those of the work.
    pub fn inside<T: Send>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T> + Send,
    ) -> Result<T> {
        let path = Path::new("/run/netns").join(self.lab.node("node1").netns());
        let netns = File::open(&path).with_context(|| format!("open {}", path.display()))?;
        let there = || {
            setns(netns.as_fd(), CloneFlags::CLONE_NEWNET)?;
            work(self)
        };
        thread::scope(|scope| scope.spawn(there).join())
            .unwrap_or_else(|_| Err(anyhow!("it panicked")))
    }

    /// Runs a program on a packet at an interface, whose link-layer address it is for. Answers what
    /// became of it, and why: every reason that was counted. Inside of the namespace.
    ///
    /// # Errors
    /// The kernel's refusal to run it.
    pub fn throw(
        &self,
        interface: &str,
        leaves: bool,
        frame: &[u8],
    ) -> Result<(Output, Vec<Reason>)> {
        let (ifindex, mac) = self.world.interface(interface);
        let mut frame = frame.to_vec();
        frame[..6].copy_from_slice(&mac);
        let input = Input {
            leaves,
            ifindex,
            segmented: false,
            frame,
        };
        let before = self.rig.reasons()?;
        let output = run(&self.rig, &input)?;
        let after = self.rig.reasons()?;
        let counted = Reason::ALL.iter().copied().filter(|reason| {
            let at = *reason as usize;
            after[at] > before[at]
        });
        Ok((output, counted.collect()))
    }

    /// Throws so many packets at the programs, and says what was counted.
    ///
    /// # Errors
    /// The first difference, with the shortest way to it that was found.
    pub fn run(
        &mut self,
        seed: u64,
        packets: u64,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Tally> {
        self.inside(|scene| {
            let mut tally = Tally::default();
            let mut seeds = SmallRng::seed_from_u64(seed);
            while tally.packets < packets {
                let config = seeds.next_u64();
                let ops: Vec<u64> = (0..EPOCH).map(|_| seeds.next_u64()).collect();
                if let Err(failure) = scene.play(config, &ops, &mut tally, false)? {
                    bail!("{}", scene.shorten(config, ops, failure)?);
                }
                progress(tally.packets);
            }
            Ok(tally)
        })
    }

    /// Has things happen, one after the other, from a clean start. `closely`: the counters are
    /// compared after each packet, not only in the end.
    fn play(
        &mut self,
        config: u64,
        ops: &[u64],
        tally: &mut Tally,
        closely: bool,
    ) -> Result<Result<(), Failure>> {
        self.forget()?;
        let Self { rig, world, .. } = self;
        world.configure(rig, generate::config(config))?;
        let before = rig.reasons()?;
        let mut model = Model::new(world);
        for (at, seed) in ops.iter().enumerate() {
            let (op, sort) = generate::op(*seed, world, &model.state);
            let difference = match (&op, sort) {
                (Op::Packet(input), _) if too_short(&input.frame) => {
                    tally.too_short += 1;
                    None
                }
                (Op::Packet(input), Some(sort)) => {
                    match packet(rig, &mut model, input, &before, closely)? {
                        Ok(output) => {
                            tally.add(sort, input, &output, model.counted());
                            None
                        }
                        Err(what) => Some(what),
                    }
                }
                _ => {
                    event(rig, &mut model, &op)?;
                    tally.events += 1;
                    None
                }
            };
            if let Some(what) = difference {
                return Ok(Err(Failure { what, at }));
            }
        }
        let failed = |what: String| {
            Ok(Err(Failure {
                what,
                at: ops.len(),
            }))
        };
        let state = &model.state;
        let all = [
            differs("FORWARD", &rig.forward, &state.forward)?,
            differs("REPLY", &rig.reply, &state.reply)?,
            differs("MASQUERADE", &rig.masquerade, &state.masquerade)?,
            differs("FRAGMENTS", &rig.fragments, &state.fragments)?,
            differs("AFFINITY", rig.affinity(), &state.affinity)?,
        ];
        if let Some(what) = all.into_iter().flatten().next() {
            return failed(what);
        }
        let after = rig.reasons()?;
        for reason in Reason::ALL {
            let counted = after[*reason as usize] - before[*reason as usize];
            let expected = model.reasons[*reason as usize];
            if counted != expected {
                let word = reason.word();
                return failed(format!("counted {counted} times {word}, not {expected}"));
            }
        }
        for (sum, count) in tally.reasons.iter_mut().zip(model.reasons) {
            *sum += count;
        }
        Ok(Ok(()))
    }

    /// Empties what the programs remember.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn forget(&self) -> Result<()> {
        empty(&self.rig.forward)?;
        empty(&self.rig.reply)?;
        empty(&self.rig.masquerade)?;
        empty(&self.rig.fragments)?;
        empty(self.rig.affinity())
    }

    /// Leaves out what is not needed for a difference to show.
    fn shorten(&mut self, config: u64, ops: Vec<u64>, first: Failure) -> Result<String> {
        let mut ops = ops;
        let mut failure = first;
        let fails = |scene: &mut Self, ops: &[u64]| -> Result<Option<Failure>> {
            // Ports and endpoints are drawn anew each time.
            for _ in 0..3 {
                if let Err(failure) = scene.play(config, ops, &mut Tally::default(), true)? {
                    return Ok(Some(failure));
                }
            }
            Ok(None)
        };
        ops.truncate(failure.at + 1);
        let mut size = ops.len().next_power_of_two() / 2;
        while size > 0 {
            let mut from = 0;
            while from < ops.len() {
                let mut fewer = ops.clone();
                fewer.drain(from..(from + size).min(ops.len()));
                match fails(self, &fewer)? {
                    Some(found) => {
                        fewer.truncate(found.at + 1);
                        (ops, failure) = (fewer, found);
                    }
                    None => from += size,
                }
            }
            size /= 2;
        }
        self.explain(config, &ops, &failure)
    }

    /// Plays it once more, and says what happens.
    fn explain(&mut self, config: u64, ops: &[u64], failure: &Failure) -> Result<String> {
        let mut text = format!(
            "the programs differ from the model: {}\nthe shortest way there, with {:?}:\n",
            failure.what,
            generate::config(config)
        );
        self.forget()?;
        let Self { rig, world, .. } = self;
        world.configure(rig, generate::config(config))?;
        let before = rig.reasons()?;
        let mut model = Model::new(world);
        for seed in ops {
            let (op, _) = generate::op(*seed, world, &model.state);
            match &op {
                Op::Packet(input) if too_short(&input.frame) => {}
                Op::Packet(input) => {
                    let name = &world.interfaces[&input.ifindex].name;
                    let way = if input.leaves {
                        "leaves by"
                    } else {
                        "arrives at"
                    };
                    let segmented = if input.segmented { ", segmented" } else { "" };
                    let frame = Bytes(&input.frame);
                    writeln!(text, "{way} {name}{segmented}: {frame}")?;
                    writeln!(text, "    {:?}", read::frame(&input.frame))?;
                    if packet(rig, &mut model, input, &before, true)?.is_err() {
                        break;
                    }
                }
                op => {
                    writeln!(text, "{op:?}")?;
                    event(rig, &mut model, op)?;
                }
            }
        }
        Ok(text)
    }
}

/// Bytes in hexadecimal digits, as `text2pcap` and others read them.
struct Bytes<'a>(&'a [u8]);

impl fmt::Display for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Tally {
    fn add(&mut self, sort: Sort, input: &Input, output: &Output, counted: &[Reason]) {
        self.packets += 1;
        let changed = output.frame.as_ref().filter(|frame| **frame != input.frame);
        let errors = [
            Reason::NoEndpoints,
            Reason::PortNotServed,
            Reason::TooBig,
            Reason::TimeExceeded,
        ];
        let outcome = match (output.verdict, changed) {
            (Verdict::Drop, _) => Outcome::Dropped,
            (Verdict::Next, None) => Outcome::LeftAlone,
            (Verdict::Next, Some(_)) => Outcome::Up,
            (Verdict::Redirect, _) if counted.iter().any(|r| errors.contains(r)) => {
                Outcome::Answered
            }
            (Verdict::Redirect, _) => Outcome::Onward,
        };
        *self.outcomes.entry((sort, outcome)).or_default() += 1;
        if let Some(frame) = changed {
            match read::frame(frame) {
                Read::Flow(headers) | Read::Icmp(headers) => {
                    if write::is_right(frame, &headers) {
                        self.right += 1;
                    } else {
                        self.wrong_before += 1;
                    }
                }
                _ => {}
            }
        }
    }
}

/// What the programs drew by lot.
struct Tables<'a>(&'a Rig);

impl Drawn for Tables<'_> {
    fn forward(&self, key: &FlowKey) -> Option<Forward> {
        self.0.forward.get(key).ok().flatten()
    }

    fn affinity(&self, key: &AffinityKey) -> Option<Affinity> {
        self.0.affinity().get(key).ok().flatten()
    }
}

/// Now, as the programs know it.
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

/// Whether a packet has less than an IP header: since Linux 6.18 a test run refuses it
/// (`bpf_prog_test_run_skb` in `net/bpf/test_run.c`). The lab sends such packets.
pub fn too_short(frame: &[u8]) -> bool {
    match frame.get(12..14) {
        Some([0x08, 0x00]) => frame.len() < LINK + 20,
        Some([0x86, 0xdd]) => frame.len() < LINK + 40,
        _ => frame.len() <= LINK,
    }
}

/// Runs a program on a packet.
fn run(rig: &Rig, input: &Input) -> Result<Output> {
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
    })
}

/// Verdicts by reason.
type Reasons = [u64; Reason::SLOTS as usize];

/// A packet through the programs and through the model; an error of the inner result says what
/// differs. `zero`: the programs' counters when the model's were zero; they are read where packet and
/// tables do not tell what was drawn, or if it is to be looked at `closely`.
fn packet(
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
        // The tick began meanwhile, and the program saw either.
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

/// Whether the last packet was counted otherwise than by the model.
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

/// What differs, if anything does.
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
        touched("FORWARD", &rig.forward, &mut state.forward, |_, _| {})?,
        touched("REPLY", &rig.reply, &mut state.reply, |_, _| {})?,
        touched(
            "MASQUERADE",
            &rig.masquerade,
            &mut state.masquerade,
            |_, _| {},
        )?,
        touched("FRAGMENTS", &rig.fragments, &mut state.fragments, |_, _| {})?,
        touched(
            "AFFINITY",
            rig.affinity(),
            &mut state.affinity,
            |ours, theirs| {
                // To the nanosecond only the program knows.
                if ours.used_at == before.ns && (before.ns..=after.ns).contains(&theirs.used_at) {
                    ours.used_at = theirs.used_at;
                }
            },
        )?,
    ];
    Ok(all.into_iter().flatten().next())
}

/// Whether what a packet touched is in the kernel as the model has it.
fn touched<K, V>(
    name: &str,
    kernel: &Hash<K, V>,
    model: &mut Table<K, V>,
    adapt: impl Fn(&mut V, &V),
) -> Result<Option<String>>
where
    K: Copy + Eq + std::hash::Hash + fmt::Debug + Plain,
    V: Copy + PartialEq + fmt::Debug + Plain,
{
    let keys: Vec<K> = model.touched().copied().collect();
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

/// Whether a table is the same in the kernel as in the model.
fn differs<K, V>(name: &str, kernel: &Hash<K, V>, model: &Table<K, V>) -> Result<Option<String>>
where
    K: Copy + Eq + std::hash::Hash + fmt::Debug + Plain,
    V: Copy + PartialEq + fmt::Debug + Plain,
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

fn empty<K: Plain, V: Plain>(table: &Hash<K, V>) -> Result<()> {
    for (key, _) in table.entries()? {
        table.remove(&key)?;
    }
    Ok(())
}

/// Something that is no packet, in the kernel's tables and in the model's.
fn event(rig: &Rig, model: &mut Model<'_>, op: &Op) -> Result<()> {
    let state = &mut model.state;
    let older = |tick: Tick, ticks: u16| {
        let now = u64::from(tick.number());
        Tick::from_ns((now.wrapping_sub(u64::from(ticks)) & 0xffff) << 32)
    };
    match op {
        Op::Packet(_) => {}
        Op::Age(key, [requests, replies], ticks) => {
            let Some(entry) = state.forward.get(key) else {
                return Ok(());
            };
            let (reply, port) = (reply_key(key, &entry), port_key(key, &entry));
            if *requests {
                state
                    .forward
                    .change(key, |e| e.used = older(e.used, *ticks));
            }
            if *replies {
                state
                    .reply
                    .change(&reply, |e| e.used = older(e.used, *ticks));
                state
                    .masquerade
                    .change(&port, |e| e.used = older(e.used, *ticks));
            }
        }
        Op::Forget(key, requests) => {
            let Some(entry) = state.forward.get(key) else {
                return Ok(());
            };
            if *requests {
                state.forward.remove(key);
            } else if entry.node_addr == 0 {
                state.reply.remove(&reply_key(key, &entry));
            } else {
                state.masquerade.remove(&port_key(key, &entry));
            }
        }
        Op::Foreign(key) => {
            if !state.forward.has(key) {
                let entry = Forward {
                    endpoint: dataplane_common::Addr::UNSPECIFIED,
                    endpoint_port: dataplane_common::Port::ANY,
                    node_port: dataplane_common::Port::ANY,
                    used: now().tick,
                    seen: seen::FOREIGN,
                    node_addr: 0,
                };
                state.forward.set(*key, entry);
            }
        }
        Op::AgeClient(key, seconds) => {
            state.affinity.change(key, |entry| {
                entry.used_at = entry.used_at.saturating_sub(seconds * 1_000_000_000);
            });
        }
    }
    push(&rig.forward, &state.forward)?;
    push(&rig.reply, &state.reply)?;
    push(&rig.masquerade, &state.masquerade)?;
    push(rig.affinity(), &state.affinity)?;
    state.keep();
    Ok(())
}

/// What the model changed, into the kernel.
fn push<K, V>(kernel: &Hash<K, V>, model: &Table<K, V>) -> Result<()>
where
    K: Copy + Eq + std::hash::Hash + Plain,
    V: Copy + Plain,
{
    for key in model.touched() {
        match model.get(key) {
            Some(value) => kernel.set(key, &value)?,
            None => {
                kernel.remove(key)?;
            }
        }
    }
    Ok(())
}

fn reply_key(key: &FlowKey, entry: &Forward) -> FlowKey {
    FlowKey::new(
        entry.endpoint,
        entry.endpoint_port,
        key.src,
        key.src_port,
        key.protocol,
    )
}

fn port_key(key: &FlowKey, entry: &Forward) -> dataplane_common::packet::PortKey {
    dataplane_common::packet::PortKey::new(
        entry.endpoint,
        entry.endpoint_port,
        entry.node_port,
        key.protocol,
    )
}

/// What the programs are told unless a test says otherwise.
pub fn plain_config() -> PacketConfig {
    PacketConfig {
        flags: PacketConfig::DETECT_BY_ADDRESS,
        ephemeral_first: *world::EPHEMERAL.start(),
        ephemeral_last: *world::EPHEMERAL.end(),
    }
}
