//! Removes flows that are over, a few thousand at a time: whoever calls decides how fast.

use std::collections::{BTreeMap, HashSet};

use dataplane_common::{
    Protocol,
    packet::{FlowKey, Tick},
};

use super::{Conntrack, Flow, Flows, Held, State, now};

/// What a walk through all flows found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// How many flows there are, by protocol and state. Those that were removed are not among them.
    pub flows: BTreeMap<(Protocol, State), u64>,
    /// Flows that were over, and removed.
    pub removed: u64,
    /// Cells that somebody had held who died meanwhile, and that were freed.
    pub freed: u64,
    /// Cells that were held, for the next walk.
    pub held: Held,
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
    flows: Flows<'a>,
    batch: Vec<Flow>,
    census: Census,
    /// Cells that were held when the walk before this came by.
    held: Held,
    /// What the kernel's own conntrack translates; asked once, if there is reason to.
    foreign: Option<HashSet<FlowKey>>,
}

impl<'a> Collector<'a> {
    /// Begins a walk. `held`: what the walk before found held ([`Census::held`]).
    pub fn new(conntrack: &'a Conntrack, held: Held) -> Self {
        Self {
            conntrack,
            flows: conntrack.flows(),
            batch: Vec::new(),
            census: Census::default(),
            held,
            foreign: None,
        }
    }

    /// Looks at the next few thousand flows, and removes those that are over. Answers what was
    /// found, when there are no more.
    ///
    /// `foreign` asks which flows the kernel's own conntrack has; an error of it means that it has
    /// none.
    pub fn step(&mut self, foreign: impl FnOnce() -> HashSet<FlowKey>) -> Option<Census> {
        if self.flows.read(&mut self.batch) {
            self.remove(now(), foreign);
            return None;
        }
        let held = self.flows.held();
        Some(Census {
            freed: self.conntrack.table.free_stuck(&self.held, held),
            held: held.clone(),
            ..self.census.clone()
        })
    }

    fn remove(&mut self, now: Tick, ask_foreign: impl FnOnce() -> HashSet<FlowKey>) {
        let over = |flow: &Flow| flow.is_over(now);
        if self.foreign.is_none() && self.batch.iter().any(|f| f.is_foreign() && over(f)) {
            self.foreign = Some(ask_foreign());
        }
        for flow in &self.batch {
            let lives_elsewhere = flow.is_foreign()
                && self
                    .foreign
                    .as_ref()
                    .is_some_and(|foreign| foreign.contains(&flow.key));
            if over(flow) && !lives_elsewhere && self.conntrack.remove_if(flow, over) {
                self.census.removed += 1;
            } else {
                let kind = (flow.protocol(), flow.state());
                *self.census.flows.entry(kind).or_default() += 1;
            }
        }
    }
}
