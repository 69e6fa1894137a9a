//! The flows of both, by the client's port.

use std::{collections::HashMap, fs::File, path::Path, thread};

use anyhow::{Context as _, Result, anyhow};
use dataplane_common::Protocol;
use dataplane_tests::Host;
use kernel::conntrack::{Conntrack, now};
use nix::sched::{CloneFlags, setns};

/// A flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrackedFlow {
    /// Its state, in the words of `dataplane conntrack`.
    pub state: String,
    /// Its remaining time in seconds, if no packet comes.
    pub seconds: u64,
}

/// Key of a flow: whether it is UDP, and the client's port.
pub type By = (bool, u16);

/// Runs something in a thread that is in a host's network namespace.
pub fn inside<T: Send>(host: &Host, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let namespace = Path::new("/run/netns").join(host.netns());
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            setns(File::open(namespace)?, CloneFlags::CLONE_NEWNET)?;
            work()
        });
        thread.join().map_err(|_| anyhow!("a thread panicked"))?
    })
}

/// Returns the flows of the kernel's own conntrack (`ct_seq_show` in `net/netfilter/nf_conntrack_standalone.c`).
pub fn of_the_kernel(node: &Host, v6: bool) -> Result<HashMap<By, TrackedFlow>> {
    let text = inside(node, || {
        std::fs::read_to_string("/proc/thread-self/net/nf_conntrack")
            .context("/proc/net/nf_conntrack")
    })?;
    let mut all = HashMap::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let port = words.iter().find_map(|word| word.strip_prefix("sport="));
        let [family, _, protocol @ ("tcp" | "udp"), _, seconds, state, ..] = words[..] else {
            continue;
        };
        if (family == "ipv6") != v6 {
            continue;
        }
        let udp = protocol == "udp";
        let state = match state {
            "SYN_SENT" => "syn-sent",
            "SYN_RECV" => "syn-received",
            "ESTABLISHED" => "established",
            "FIN_WAIT" => "fin-wait",
            "CLOSE_WAIT" => "close-wait",
            "LAST_ACK" => "last-ack",
            "TIME_WAIT" => "time-wait",
            "CLOSE" => "close",
            _ if udp && words.contains(&"[UNREPLIED]") => "unanswered",
            _ if udp && words.contains(&"[ASSURED]") => "stream",
            _ if udp => "answered",
            other => other,
        };
        let kept = TrackedFlow {
            state: state.to_owned(),
            seconds: seconds.parse().with_context(|| line.to_owned())?,
        };
        all.insert((udp, port.context("a port")?.parse()?), kept);
    }
    Ok(all)
}

/// Ours.
pub fn of_ours(bpffs: &Path, v6: bool) -> Result<HashMap<By, TrackedFlow>> {
    let conntrack = Conntrack::open(bpffs)?.context("no tables of flows")?;
    let (timeouts, now) = (conntrack.timeouts(), now());
    let (mut flows, mut batch) = (conntrack.flows(), Vec::new());
    let mut all = HashMap::new();
    while flows.read(&mut batch) {
        for flow in batch.iter().filter(|flow| flow.client().is_ipv6() == v6) {
            if flow.is_over(now, &timeouts) {
                // The flow is over, and will be collected.
                continue;
            }
            let udp = flow.protocol() == Protocol::UDP;
            let left = flow.keep(&timeouts).saturating_sub(flow.idle(now));
            let kept = TrackedFlow {
                state: flow.state().to_string(),
                seconds: left.into(),
            };
            all.insert((udp, flow.client().port()), kept);
        }
    }
    Ok(all)
}
