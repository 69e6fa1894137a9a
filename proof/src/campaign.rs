//! Runs many packets, one after the other, through the programs and through the model, and shortens the sequence that
//! shows a difference.
//!
//! A campaign consists of epochs. Each epoch starts with empty tables and consists of a fixed number of operations
//! (`Op`). Each operation depends only on its own seed and on the state at that time. So an epoch can be replayed with
//! some of its operations left out.

use std::{fmt::Write as _, fs::File, os::fd::AsFd as _, path::Path, thread};

use anyhow::{Context as _, Result, anyhow, bail};
use dataplane_common::{
    Reason,
    cells::{Memory as _, cells_for},
    packet::PacketConfig,
};
use dataplane_tests::Lab;
use kernel::rig::Rig;
use nix::sched::{CloneFlags, setns};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

use crate::{
    compare::{Bytes, differs, empty, event, flows_differ, packet, run, too_short},
    generate::{self, Op},
    model::{Input, Model, Output, read},
    tally::Tally,
    through::Stack,
    world::{self, World},
};

/// Operations in an epoch.
const EPOCH: usize = 1024;
/// Number of flows that the table has room for. It is small, so that many flows find their home cell taken. It is
/// larger than the number of flows in an epoch, so that a new flow always finds a cell.
const FLOWS: u32 = 512;

/// The programs and the node, ready to process packets.
pub struct Scene {
    /// The loaded programs and their tables.
    pub rig: Rig,
    /// The node: interfaces, routes and services.
    pub world: World,
    /// The programs once more, on the path through the stack, if both paths are to be compared.
    stack: Option<Stack>,
    /// Number of cells for flows.
    cells: u32,
    /// The lab with its network namespace. It is the last field, so it is dropped last.
    pub lab: Lab,
}

/// A difference between the programs and the model.
#[derive(Debug)]
pub struct Failure {
    /// Description of the difference.
    pub what: String,
    /// Index of the operation at which it appeared.
    at: usize,
}

impl Scene {
    /// Builds the lab and loads the programs.
    ///
    /// # Errors
    /// If this machine cannot run the lab or load the programs.
    pub fn new() -> Result<Self> {
        Self::with_flows(FLOWS)
    }

    /// Builds the lab and loads the programs, with room for this many flows.
    ///
    /// # Errors
    /// If this machine cannot run the lab or load the programs.
    pub fn with_flows(flows: u32) -> Result<Self> {
        let lab = world::lab()?;
        let cells = cells_for(flows);
        let mut rig = Rig::new(&lab.bpffs()?.join("rig"), cells)?;
        let world = World::new(&lab, &mut rig)?;
        Ok(Self {
            rig,
            world,
            stack: None,
            cells,
            lab,
        })
    }

    /// Also compares the bytes that leave by the fast path with those that leave through the stack.
    ///
    /// # Errors
    /// If the programs cannot be loaded once more.
    pub fn with_stack(mut self) -> Result<Self> {
        self.stack = Some(Stack::new(&self.lab, self.cells)?);
        Ok(self)
    }

    /// Runs `work` in the node's network namespace, which has the routes that the programs look up.
    ///
    /// # Errors
    /// The errors of `work`, or if the namespace cannot be entered.
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

    /// Runs a program on a packet that is addressed to the interface's link-layer address. Returns the result, and
    /// every reason that the programs counted. Call it inside the namespace ([`Scene::inside`]).
    ///
    /// # Errors
    /// If the kernel refuses to run the program.
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

    /// Sends this many packets through the programs, and returns the counts.
    ///
    /// # Errors
    /// The first difference, with the shortest sequence of operations that shows it.
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

    /// Runs the operations one after the other, from an empty state. `closely`: compares the counters after each
    /// packet, not only at the end.
    fn play(
        &mut self,
        config: u64,
        ops: &[u64],
        tally: &mut Tally,
        closely: bool,
    ) -> Result<Result<(), Failure>> {
        self.forget()?;
        let Self {
            rig,
            world,
            stack,
            cells,
            lab,
        } = self;
        world.route(lab, true)?;
        rig.forget_ways()?;
        world.reverse_path = generate::reverse_path(config);
        world.configure_with(rig, generate::config(config), generate::policies(config))?;
        if let Some(stack) = stack {
            stack.configure(world)?;
        }
        let before = rig.reasons()?;
        let mut model = Model::new(world, *cells, (&rig.conntrack).secret());
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
                            match stack {
                                Some(stack) => {
                                    through(stack, rig, &model, (input, &output), tally)?
                                }
                                None => None,
                            }
                        }
                        Err(what) => Some(what),
                    }
                }
                _ => {
                    event(rig, lab, &mut model, &op)?;
                    if let Some(stack) = stack {
                        stack.forget_ways()?;
                    }
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
            flows_differ(&rig.conntrack, &state.flows)?,
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
        for (sum, count) in tally.elsewhere.iter_mut().zip(state.flows.elsewhere()) {
            *sum += count;
        }
        tally.gave_way += state.flows.gave_way();
        Ok(Ok(()))
    }

    /// Empties the tables that hold the programs' state.
    ///
    /// # Errors
    /// If the kernel refuses to remove an entry.
    pub fn forget(&self) -> Result<()> {
        empty(&self.rig.conntrack)?;
        empty(&self.rig.fragments)?;
        empty(self.rig.affinity())
    }

    /// Leaves out the operations that are not needed to show a difference.
    fn shorten(&mut self, config: u64, ops: Vec<u64>, first: Failure) -> Result<String> {
        let mut ops = ops;
        let mut failure = first;
        let fails = |scene: &mut Self, ops: &[u64]| -> Result<Option<Failure>> {
            // The programs choose ports and endpoints anew in each run, so a difference may not show at the first try.
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

    /// Replays the operations once more, and describes each of them.
    fn explain(&mut self, config: u64, ops: &[u64], failure: &Failure) -> Result<String> {
        let mut text = format!(
            "the programs differ from the model: {}\nthe shortest way there, with {:?}:\n",
            failure.what,
            (generate::config(config), generate::policies(config))
        );
        self.forget()?;
        let Self {
            rig,
            world,
            cells,
            lab,
            ..
        } = self;
        world.route(lab, true)?;
        rig.forget_ways()?;
        world.reverse_path = generate::reverse_path(config);
        world.configure_with(rig, generate::config(config), generate::policies(config))?;
        let before = rig.reasons()?;
        let mut model = Model::new(world, *cells, (&rig.conntrack).secret());
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
                    writeln!(text, "    {:?}", read::frame(&input.frame, input.segmented))?;
                    if packet(rig, &mut model, input, &before, true)?.is_err() {
                        break;
                    }
                }
                op => {
                    writeln!(text, "{op:?}")?;
                    event(rig, lab, &mut model, op)?;
                }
            }
        }
        Ok(text)
    }
}

/// Compares the two paths of a packet, and counts it.
fn through(
    stack: &Stack,
    rig: &Rig,
    model: &Model<'_>,
    (input, output): (&Input, &Output),
    tally: &mut Tally,
) -> Result<Option<String>> {
    let compared = stack.compare(rig, model.world, input, output)?;
    tally.through += u64::from(matches!(compared, Some(Ok(()))));
    Ok(compared.and_then(Result::err))
}

/// The configuration that the programs run with if a test does not set another.
pub fn plain_config() -> PacketConfig {
    PacketConfig {
        flags: PacketConfig::DETECT_BY_ADDRESS | PacketConfig::WAYS_BY_ADDRESS,
        ephemeral_first: *world::EPHEMERAL.start(),
        ephemeral_last: *world::EPHEMERAL.end(),
        ..PacketConfig::default()
    }
}
