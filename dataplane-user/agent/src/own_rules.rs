//! Pods whose packets have to keep the VIPs, on a thread of its own: the socket programs leave their sockets alone,
//! and the packet path serves their packets.
//!
//! A program at a socket replaces the VIP before any rule of the pod sees it. A sidecar's rules that redirect
//! connections, and rules of a cluster inside of a pod, then see an endpoint. Packets of a raw socket keep the VIP, and
//! belong to a flow of another socket, perhaps. The kernel reports neither in other network namespaces, so the thread
//! looks at them.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    path::PathBuf,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use dataplane_common::{
    packet::Iface,
    tables::by_packets::{ASKED, NESTED, RAW, RULES},
};
use kernel::{
    packet::PacketTables,
    pods::{ByPackets, KnownPods, Own, PodNamespace},
};
use model::Place;
use plan::Served;
use settings::Patterns;
use threads::may_panic;
use tokio::sync::watch;
use tracing::{info, warn};

use super::{Event, deaths, interfaces::PacketSettings};

/// How often to look.
const LOOK: Duration = Duration::from_millis(400);
/// The thread rests so many times as long as a look took, but no longer than [`LONGEST`].
const REST_FOR: u32 = 20;
const LONGEST: Duration = Duration::from_secs(30);
/// How many namespaces of one pod are served by packets only. Further namespaces of this tenant stay as they are, so
/// that the table has room for other tenants'.
const OF_A_POD: usize = 64;

/// The running thread.
#[derive(Debug)]
pub struct OwnRules {
    stop: Sender<Infallible>,
    thread: JoinHandle<Option<()>>,
}

impl OwnRules {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the pinned tables are not ours, or the thread cannot be started.
    pub fn start(
        bpffs: PathBuf,
        served: watch::Receiver<Served>,
        packet: &PacketSettings,
        events: &Sender<Event>,
    ) -> Result<Self, kernel::Error> {
        let (stop, stopped) = mpsc::channel();
        let mut worker = Worker {
            table: ByPackets::open(&bpffs, true)?,
            is_on: packet.attach.is_some(),
            chosen: packet.by_packets.clone(),
            bpffs,
            served,
            known: KnownPods::default(),
            before: None,
            failed: None,
        };
        let thread = threads::start("own-rules", deaths(events), move || worker.run(&stopped));
        let thread = thread.map_err(|source| kernel::Error::Io {
            what: "cannot start the thread that looks at pods' rules".to_owned(),
            source,
        })?;
        Ok(Self { stop, thread })
    }

    /// Ends the thread.
    pub fn stop(self) {
        drop(self.stop);
        let _ = self.thread.join();
    }
}

struct Worker {
    bpffs: PathBuf,
    served: watch::Receiver<Served>,
    table: ByPackets,
    /// Whether there is a packet path that can serve them.
    is_on: bool,
    /// The pods' interfaces by name, if the operator has chosen.
    chosen: Patterns,
    known: KnownPods,
    /// The present contents of the table.
    before: Option<BTreeMap<u64, u64>>,
    /// Why the last look failed.
    failed: Option<String>,
}

impl Worker {
    fn run(&mut self, stopped: &Receiver<Infallible>) {
        loop {
            let start = Instant::now();
            may_panic("own-rules");
            let failed = self.look().err().map(|error| error.to_string());
            if failed.is_some() && failed != self.failed {
                let error = failed.as_deref().unwrap_or_default();
                warn!("cannot look at the rules of pods, trying again: {error}");
            }
            self.failed = failed;
            let rest = (start.elapsed() * REST_FOR).clamp(LOOK, LONGEST);
            match stopped.recv_timeout(rest) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(_) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn look(&mut self) -> Result<(), kernel::Error> {
        let mut wanted = BTreeMap::new();
        let mut of_pods: BTreeMap<u32, usize> = BTreeMap::new();
        if self.is_on {
            let ready = Iface::LOCAL | Iface::ATTACHED;
            let all = PacketTables::open(&self.bpffs)?.ifaces()?.into_iter();
            let pods = all.filter(|(_, iface)| iface.flags & ready == ready);
            let pods: BTreeSet<u32> = pods.map(|(index, _)| index).collect();
            let captured = self.table.captured()?;
            let asked = self.asked();
            for pod in kernel::pods::pod_namespaces(&pods, &mut self.known)? {
                if captured.contains(&pod.cookie) {
                    // A mesh decides about these pods at the socket.
                    continue;
                }
                let name = kernel::tc::name(pod.interface);
                let asked = asked.get(&pod.interface).copied();
                if let Some(value) = value(&pod, &name, asked, &self.chosen) {
                    let others = of_pods.entry(pod.interface).or_insert(0);
                    if *others < OF_A_POD {
                        wanted.insert(pod.cookie, value);
                    }
                    *others += 1;
                }
            }
        }
        if self.before.as_ref() == Some(&wanted) {
            return Ok(());
        }
        self.table.set(&wanted)?;
        let before = self.before.replace(wanted.clone()).unwrap_or_default();
        if before.len() != wanted.len() {
            let namespaces = wanted.len();
            info!(
                namespaces,
                "pods' network namespaces whose sockets are left to the packet path; `dataplane status` lists them"
            );
        }
        Ok(())
    }
}

impl Worker {
    /// The pods' interfaces whose pods choose by an annotation how to be served.
    fn asked(&self) -> BTreeMap<u32, bool> {
        let workloads = self.served.borrow().snapshot.workloads.clone();
        let mut asked = BTreeMap::new();
        for workload in workloads.values() {
            if let (Some(by_packets), Place::Address | Place::Exempt(_)) =
                (workload.by_packets, &workload.place)
            {
                for addr in &workload.addresses {
                    let interface = kernel::interfaces::way_to(*addr).ok().flatten();
                    asked.extend(interface.map(|interface| (interface, by_packets)));
                }
            }
        }
        asked
    }
}

/// Returns the table's value for a namespace; `None`: it is not in the table.
fn value(
    pod: &PodNamespace,
    interface: &str,
    asked: Option<bool>,
    chosen: &Patterns,
) -> Option<u64> {
    let why = match pod.own {
        Some(Own::Rules) => RULES,
        Some(Own::Nested) => NESTED,
        Some(Own::Raw) => RAW,
        None => ASKED,
    };
    chosen
        .select(interface, asked.unwrap_or(pod.own.is_some()))
        .then_some(u64::from(why) << 32 | u64::from(pod.interface))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operator_may_choose_by_interface_and_a_pod_for_itself() {
        let pod = |own| PodNamespace {
            cookie: 7,
            interface: 5,
            own,
        };
        let patterns =
            |all: &[&str]| Patterns::new(all.iter().map(|p| p.parse().unwrap()).collect());
        let (rules, asked) = (u64::from(RULES) << 32 | 5, u64::from(ASKED) << 32 | 5);
        let found = patterns(&[]);
        let of = |own, asked, chosen: &Patterns| value(&pod(own), "veth1", asked, chosen);
        assert_eq!(of(None, None, &found), None);
        assert_eq!(of(Some(Own::Rules), None, &found), Some(rules));
        assert_eq!(of(None, Some(true), &found), Some(asked));
        assert_eq!(of(Some(Own::Rules), Some(false), &found), None);
        let without = patterns(&["!veth1"]);
        assert_eq!(of(Some(Own::Nested), None, &without), None);
        assert_eq!(of(None, Some(true), &without), None);
        assert!(of(Some(Own::Nested), None, &patterns(&["!veth2"])).is_some());
        assert_eq!(of(None, None, &patterns(&["veth*"])), Some(asked));
    }
}
