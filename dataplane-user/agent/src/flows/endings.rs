//! Endpoints that went away: ends the flows and sockets that lead to them.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use admin::State;
use dataplane_common::{Protocol, decide::Tables as _, tables::FrontendKey};
use kernel::{conntrack::Conntrack, sockets::Peers, tables::Tables};
use plan::Departed;
use threads::may_panic;
use tracing::{debug, info, warn};

use super::{Job, Stopped};

/// How long to rest at least after a walk for endpoints that went away. While many services change, a walk for each
/// change would take the processor from the thread that updates the tables: p99 of a change was 2.4 ms instead of 0.6
/// ms.
const PAUSE: Duration = Duration::from_millis(250);
/// How soon to look again for sockets that were not found: `connect()` notes the endpoint shortly
/// before the socket has it.
const AGAIN: Duration = Duration::from_secs(1);

/// Ends flows and sockets on request.
pub struct Endings {
    jobs: Receiver<Job>,
    state: Arc<State>,
    /// Finds the sockets to destroy; `None`: no sockets are destroyed.
    peers: Option<Peers>,
    /// The protocols of these sockets.
    destroy: Vec<Protocol>,
    /// The earliest time of the next walk: if endpoints come and go all the time, walks take their share and no more.
    next: Option<Instant>,
}

impl Endings {
    pub const fn new(
        jobs: Receiver<Job>,
        state: Arc<State>,
        peers: Option<Peers>,
        destroy: Vec<Protocol>,
    ) -> Self {
        Self {
            jobs,
            state,
            peers,
            destroy,
            next: None,
        }
    }

    /// Handles jobs for at least `limit`.
    ///
    /// # Errors
    /// If the thread is to end.
    pub fn handle(&mut self, limit: Duration) -> Result<(), Stopped> {
        let end = Instant::now() + limit;
        // Departed endpoints to look for again, and when.
        let mut again: Option<(Departed, Instant)> = None;
        loop {
            let until = again.as_ref().map_or(end, |(_, at)| *at);
            let limit = until.saturating_duration_since(Instant::now());
            let job = self.jobs.recv_timeout(limit);
            may_panic("flows");
            match job {
                Ok(Job::Departed(mut departed)) => {
                    if let Some(next) = self.next.take() {
                        thread::sleep(next.saturating_duration_since(Instant::now()));
                    }
                    for job in self.jobs.try_iter() {
                        match job {
                            Job::Departed(newer) => departed.extend(newer),
                            Job::Stop => return Err(Stopped),
                        }
                    }
                    if let Some((earlier, _)) = again.take() {
                        let newer = std::mem::replace(&mut departed, earlier);
                        departed.extend(newer);
                    }
                    let start = Instant::now();
                    if !self.end(&departed, true) {
                        again = Some((departed, Instant::now() + AGAIN));
                    }
                    let rest = (start.elapsed() * 4).max(PAUSE);
                    self.next = Some(Instant::now() + rest);
                }
                Ok(Job::Stop) | Err(RecvTimeoutError::Disconnected) => return Err(Stopped),
                Err(RecvTimeoutError::Timeout) => match again.take() {
                    Some((departed, _)) => {
                        self.end(&departed, false);
                    }
                    None => return Ok(()),
                },
            }
        }
    }

    /// Ends flows and sockets that lead to endpoints that went away; returns whether all of these sockets were found.
    fn end(&mut self, departed: &Departed, first: bool) -> bool {
        let _busy = self.state.beats.flows.begin();
        // Opened each time, because a grown table replaces the earlier one.
        let tables = match Tables::open(&self.state.paths.bpffs) {
            Ok(tables) => tables,
            Err(error) => {
                warn!("cannot look for flows to endpoints that went away: {error}");
                return false;
            }
        };
        let is_frontend = |key: &FrontendKey| !tables.frontend(key).is_none();
        match Conntrack::open(&self.state.paths.bpffs) {
            Ok(None) => {}
            Ok(Some(conntrack)) => {
                let ended = end_flows(&conntrack, departed, is_frontend);
                if ended > 0 {
                    info!(ended, "ended UDP flows to endpoints that went away");
                    self.state.flows.ended(ended);
                }
            }
            Err(error) => warn!("cannot end flows to endpoints that went away: {error}"),
        }
        let Some(peers) = self.peers.as_ref().filter(|_| departed.has_stale()) else {
            return true;
        };
        let start = Instant::now();
        let destroyed = peers.destroy(&self.destroy, |protocol, peer| {
            departed.is_stale(
                (peer.vip, peer.vip_port),
                protocol,
                (peer.endpoint, peer.endpoint_port),
                is_frontend,
            )
        });
        debug!(
            namespaces = destroyed.namespaces,
            took = ?start.elapsed(),
            "looked for sockets to endpoints that went away"
        );
        if !destroyed.sockets.is_empty() {
            info!(
                destroyed = destroyed.sockets.len(),
                "destroyed sockets that were connected to endpoints that went away"
            );
            self.state.flows.destroyed(&destroyed.sockets);
        }
        if first {
            return destroyed.not_found == 0 && destroyed.errors.is_empty();
        }
        for (path, error) in &destroyed.errors {
            warn!(
                "cannot destroy sockets in the network namespace {}: {error}",
                path.display()
            );
        }
        true
    }
}

/// Ends the UDP flows that lead to endpoints that went away; returns how many. TCP connections stay, as with
/// kube-proxy: their endpoint may still answer them. But a new connection from the same port does not go there.
fn end_flows(
    conntrack: &Conntrack,
    departed: &Departed,
    is_frontend: impl Fn(&FrontendKey) -> bool,
) -> u64 {
    let mut flows = conntrack.flows();
    let mut batch = Vec::new();
    let mut ended = 0;
    while flows.read(&mut batch) {
        for flow in batch.iter().filter(|flow| !flow.holds_port()) {
            if flow.protocol() == Protocol::TCP {
                let vip = (flow.key.dst, flow.key.dst_port);
                let endpoint = (flow.to.endpoint, flow.to.endpoint_port);
                if departed.is_unlisted(vip, endpoint, &is_frontend) {
                    conntrack.depart(flow);
                }
                continue;
            }
            let stale = departed.is_stale(
                (flow.key.dst, flow.key.dst_port),
                flow.protocol(),
                (flow.to.endpoint, flow.to.endpoint_port),
                &is_frontend,
            );
            // A packet that comes now would go to this endpoint as well.
            let same = |now: &kernel::conntrack::Flow| {
                (now.to.endpoint, now.to.endpoint_port) == (flow.to.endpoint, flow.to.endpoint_port)
            };
            if stale && conntrack.remove_if(flow, same) {
                ended += 1;
            }
        }
    }
    ended
}
