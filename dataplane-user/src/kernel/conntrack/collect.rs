//! Removes flows that are over, a few thousand at a time: whoever calls decides how fast.

use std::collections::{BTreeMap, HashSet};

use dataplane_common::{
    Protocol,
    cells::CellKey,
    packet::{FlowKey, Masqueraded, PortKey, Reply, Tick, seen, timeout},
};

use super::{Conntrack, Entries, Flow, Flows, State, Table, Walk, flow, now, removing};
use crate::kernel::{
    error::{Doing, Error},
    map::Plain,
};

/// What a walk through all flows found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// How many flows there are, by protocol and state. Those that were removed are not among them.
    pub flows: BTreeMap<(Protocol, State), u64>,
    /// Flows that were over, and removed.
    pub removed: u64,
    /// Entries of replies whose flow had been pushed out of a full table, and that were removed.
    pub halves: u64,
    /// How many entries the tables have.
    pub entries: Entries,
}

impl Census {
    /// How many flows there are.
    pub fn total(&self) -> u64 {
        self.flows.values().sum()
    }
}

/// One walk through all flows.
#[derive(Debug)]
pub struct Collector<'a> {
    conntrack: &'a Conntrack,
    phase: Phase<'a>,
    flows: Vec<Flow>,
    census: Census,
    /// Whether room is short ([`Flow::gives_way`]).
    crowded: bool,
    /// What the kernel's own conntrack translates; asked once, if there is reason to.
    foreign: Option<HashSet<FlowKey>>,
}

#[derive(Debug)]
enum Phase<'a> {
    Forward(Flows<'a>),
    Reply(Walk<'a, FlowKey, Reply>),
    Masquerade(Walk<'a, PortKey, Masqueraded>),
    Done,
}

impl<'a> Collector<'a> {
    /// Begins a walk. `crowded`: room is short, so that flows which both sides have closed are removed sooner
    /// ([`Flow::gives_way`]).
    pub fn new(conntrack: &'a Conntrack, crowded: bool) -> Self {
        Self {
            phase: Phase::Forward(conntrack.flows()),
            conntrack,
            flows: Vec::new(),
            census: Census::default(),
            crowded,
            foreign: None,
        }
    }

    /// Looks at the next few thousand entries, and removes those that are over. Answers what was
    /// found, when there are no more.
    ///
    /// `foreign` asks which flows the kernel's own conntrack has; an error of it means that it has
    /// none.
    ///
    /// # Errors
    /// If the kernel does not let the tables be read or written.
    pub fn step(
        &mut self,
        foreign: impl FnOnce() -> HashSet<FlowKey>,
    ) -> Result<Option<Census>, Error> {
        let now = now();
        match &mut self.phase {
            Phase::Forward(flows) => {
                if flows.read(&mut self.flows)? {
                    self.forward(now, foreign)?;
                } else {
                    self.phase = Phase::Reply(self.conntrack.reply.walk());
                }
            }
            Phase::Reply(walk) => {
                let conntrack = self.conntrack;
                let orphan = |key: &FlowKey, reply: &Reply| {
                    let flow = flow::of_reply(key, reply);
                    is_old(key.protocol, reply.seen, reply.used, now).then_some(flow)
                };
                match orphans(&conntrack.reply, walk, conntrack, orphan)? {
                    Some(looked) => {
                        self.census.halves += looked.removed;
                        self.census.entries[1] += looked.left;
                    }
                    None => self.phase = Phase::Masquerade(conntrack.masquerade.walk()),
                }
            }
            Phase::Masquerade(walk) => {
                let conntrack = self.conntrack;
                let orphan = |key: &PortKey, masqueraded: &Masqueraded| {
                    let flow = flow::of_masqueraded(key, masqueraded);
                    is_old(key.protocol, masqueraded.seen, masqueraded.used, now).then_some(flow)
                };
                match orphans(&conntrack.masquerade, walk, conntrack, orphan)? {
                    Some(looked) => {
                        self.census.halves += looked.removed;
                        self.census.entries[2] += looked.left;
                    }
                    None => self.phase = Phase::Done,
                }
            }
            Phase::Done => return Ok(Some(self.census.clone())),
        }
        Ok(None)
    }

    fn forward(
        &mut self,
        now: Tick,
        ask_foreign: impl FnOnce() -> HashSet<FlowKey>,
    ) -> Result<(), Error> {
        let crowded = self.crowded;
        let over = |flow: &Flow| flow.is_over(now) || crowded && flow.gives_way(now);
        if self.foreign.is_none() && self.flows.iter().any(|f| f.is_foreign() && over(f)) {
            self.foreign = Some(ask_foreign());
        }
        for flow in &self.flows {
            let lives_elsewhere = flow.is_foreign()
                && self
                    .foreign
                    .as_ref()
                    .is_some_and(|foreign| foreign.contains(&flow.key));
            if over(flow) && !lives_elsewhere && self.conntrack.remove_if(flow, over)? {
                self.census.removed += 1;
            } else {
                let kind = (flow.protocol(), flow.state());
                *self.census.flows.entry(kind).or_default() += 1;
                self.census.entries[0] += 1;
            }
        }
        Ok(())
    }
}

/// Whether an entry of replies was used so long ago that it is worth a look whether its flow is
/// there still. A flow in use mends itself: the programs look after the other entry with each tick.
fn is_old(protocol: Protocol, what: u8, used: Tick, now: Tick) -> bool {
    let seconds = if protocol != Protocol::TCP {
        timeout::UDP_ANSWERED
    } else if what & seen::RST != 0 {
        timeout::TCP_RESET
    } else if what & seen::FIN != 0 {
        timeout::TCP_CLOSED
    } else {
        timeout::TCP_HALF_CLOSED
    };
    used.age_seconds(now) > seconds
}

/// What became of the entries of a step.
struct Looked {
    removed: u64,
    left: u64,
}

/// Removes those of the next entries that `old` finds to be old, and whose flow is gone; `None` if there were no
/// more.
fn orphans<K: CellKey + Plain, V: Plain>(
    table: &Table<K, V>,
    walk: &mut Walk<'_, K, V>,
    conntrack: &Conntrack,
    old: impl Fn(&K, &V) -> Option<FlowKey>,
) -> Result<Option<Looked>, Error> {
    let read = || "cannot read the tables REPLY and MASQUERADE".to_owned();
    let mut entries = Vec::new();
    if !walk.read(&mut entries).doing(read)? {
        return Ok(None);
    }
    let all = entries.len() as u64;
    let mut removed = 0;
    for (key, value) in entries {
        let Some(flow) = old(&key, &value) else {
            continue;
        };
        // Its flow is there only if that one leads back here.
        if let Some(found) = conntrack.find(&flow)?
            && found.back.used().is_some()
        {
            continue;
        }
        let Some(taken) = table.take(&key).doing(removing)? else {
            continue;
        };
        if old(&key, &taken).is_some() {
            removed += 1;
        } else {
            table.add(&key, &taken).doing(removing)?;
        }
    }
    Ok(Some(Looked {
        removed,
        left: all - removed,
    }))
}
