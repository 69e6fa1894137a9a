//! Pools of outbound tunnels: each thread has one.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use bytes::Bytes;
use h2::client::SendRequest;
use model::Identity;
use tokio::sync::watch;

use super::{
    error::{Error, Phase},
    tunnel::{Lease, Tunnel},
};

/// The key of a tunnel in a pool: streams with the same key share tunnels.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The attachment of the workload that connects: its tunnels come from its network namespace, and a later workload with
    /// the same identity and address has another.
    pub attachment: u64,
    /// The identity of the workload that connects.
    pub source: Identity,
    /// The identities that the destination may have, sorted. A tunnel needs at least one.
    pub expected: Arc<[Identity]>,
    /// The address of the workload that connects.
    pub from: IpAddr,
    /// The address of the destination, and its port for HBONE.
    pub to: SocketAddr,
    /// The UID of the destination workload.
    pub workload: Arc<str>,
}

/// A tunnel in a pool.
pub struct Pooled {
    /// The handle that sends requests.
    pub requests: SendRequest<Bytes>,
    /// The tunnel.
    pub tunnel: Arc<Tunnel>,
    /// The time at which the first of the two certificates expires: streams that begin later take another tunnel.
    pub until: SystemTime,
}

/// The progress of a pending tunnel.
#[derive(Clone, Debug)]
pub enum Progress {
    /// The tunnel waits for this phase to end.
    Waiting(Phase),
    /// The tunnel is established, or has failed.
    Done(Result<Arc<Tunnel>, Error>),
}

/// The tunnels of one key.
#[derive(Default)]
struct Group {
    tunnels: Vec<Pooled>,
    /// The progress of the pending tunnel.
    dial: Option<watch::Receiver<Progress>>,
}

/// The result of [`Pool::find`].
pub enum Found {
    /// An established tunnel with a place for the stream.
    Up(SendRequest<Bytes>, Lease),
    /// A pending tunnel, which another caller makes.
    Wait(watch::Receiver<Progress>),
    /// No tunnel: the caller must make one, and report the progress.
    Make(watch::Sender<Progress>, watch::Receiver<Progress>),
}

/// The outbound tunnels of one thread.
#[derive(Default)]
pub struct Pool(Mutex<HashMap<Key, Group>>);

impl Pool {
    /// Finds a place for a stream. A tunnel takes at most `streams` streams, and no more than its peer allows. The pool
    /// chooses the fullest tunnel that has a place, so that other tunnels become idle.
    pub fn find(&self, key: &Key, streams: usize) -> Found {
        let mut groups = self.lock();
        let group = groups.entry(key.clone()).or_default();
        let now = SystemTime::now();
        group.tunnels.retain(|pooled| !pooled.tunnel.is_ended());
        let has_place = |pooled: &&Pooled| {
            let allowed = pooled.requests.current_max_send_streams();
            pooled.tunnel.streams() < streams.min(allowed) && now < pooled.until
        };
        let with_place = group.tunnels.iter().filter(has_place);
        if let Some(pooled) = with_place.max_by_key(|pooled| pooled.tunnel.streams()) {
            return Found::Up(pooled.requests.clone(), pooled.tunnel.lease());
        }
        if let Some(dial) = &group.dial {
            return Found::Wait(dial.clone());
        }
        let (report, dial) = watch::channel(Progress::Waiting(Phase::Certificate));
        group.dial = Some(dial.clone());
        Found::Make(report, dial)
    }

    /// Takes the new tunnel, or the error, and reports the result. Returns whether the tunnel is in the pool:
    /// [`Pool::forget`] may have given it up.
    pub fn made(
        &self,
        key: &Key,
        report: &watch::Sender<Progress>,
        made: Result<Pooled, Error>,
    ) -> bool {
        let mut groups = self.lock();
        let group = groups.get_mut(key).filter(|group| {
            let dial = group.dial.as_ref();
            dial.is_some_and(|dial| dial.same_channel(&report.subscribe()))
        });
        let Some(group) = group else {
            let to = key.to;
            report.send_replace(Progress::Done(Err(Error::Ended { to })));
            return false;
        };
        group.dial = None;
        let result = made.map(|pooled| {
            let tunnel = Arc::clone(&pooled.tunnel);
            group.tunnels.push(pooled);
            tunnel
        });
        let is_up = result.is_ok();
        if group.tunnels.is_empty() {
            groups.remove(key);
        }
        report.send_replace(Progress::Done(result));
        is_up
    }

    /// Retires a tunnel that has no stream. The tunnel then ends.
    pub fn retire_if_idle(&self, key: &Key, tunnel: &Arc<Tunnel>) {
        let mut groups = self.lock();
        if tunnel.streams() == 0 {
            tunnel.retire();
            remove(&mut groups, key, tunnel);
        }
    }

    /// Removes a tunnel that has ended, or takes no further streams.
    pub fn remove(&self, key: &Key, tunnel: &Arc<Tunnel>) {
        tunnel.retire();
        remove(&mut self.lock(), key, tunnel);
    }

    /// Forgets tunnels by their attachment and the UID of their destination, and gives up pending ones.
    pub fn forget(&self, is_meant: impl Fn(u64, &str) -> bool) {
        self.lock()
            .retain(|key, _| !is_meant(key.attachment, &key.workload));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Group>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn remove(groups: &mut HashMap<Key, Group>, key: &Key, tunnel: &Arc<Tunnel>) {
    if let Some(group) = groups.get_mut(key) {
        let is_other = |pooled: &Pooled| !Arc::ptr_eq(&pooled.tunnel, tunnel);
        group.tunnels.retain(is_other);
        if group.tunnels.is_empty() && group.dial.is_none() {
            groups.remove(key);
        }
    }
}
