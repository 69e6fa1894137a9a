//! Tunnels of one thread that new streams may use.

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

/// What streams of one tunnel have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The identity of the workload that connects.
    pub source: Identity,
    /// The identities that the destination may have, sorted; at least one.
    pub expected: Arc<[Identity]>,
    /// The address of the workload that connects.
    pub from: IpAddr,
    /// Where the tunnel leads: the destination's address, and its port for HBONE.
    pub to: SocketAddr,
    /// The UID of the destination, to which the tunnel belongs.
    pub workload: Arc<str>,
}

/// A tunnel's handle for requests.
pub struct Pooled {
    /// Sends requests.
    pub requests: SendRequest<Bytes>,
    /// The tunnel.
    pub tunnel: Arc<Tunnel>,
    /// When the certificate of one side ends: streams that begin later take another tunnel.
    pub until: SystemTime,
}

/// How far the making of a tunnel is.
#[derive(Clone, Debug)]
pub enum Progress {
    /// It waits.
    Waiting(Phase),
    /// It is up, or has failed.
    Done(Result<Arc<Tunnel>, Error>),
}

/// The tunnels of one key.
#[derive(Default)]
struct Group {
    tunnels: Vec<Pooled>,
    /// The one that is being made.
    dial: Option<watch::Receiver<Progress>>,
}

/// The answer of a pool.
pub enum Found {
    /// A tunnel that is up.
    Up(SendRequest<Bytes>, Lease),
    /// A tunnel is being made.
    Wait(watch::Receiver<Progress>),
    /// The caller must make one, and report here.
    Make(watch::Sender<Progress>, watch::Receiver<Progress>),
}

/// The tunnels of one thread.
#[derive(Default)]
pub struct Pool(Mutex<HashMap<Key, Group>>);

impl Pool {
    /// Finds a place for a stream. A tunnel takes at most so many `streams`, and no more than its peer allows. The fullest
    /// one that has a place is the choice, so that others become idle.
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

    /// Takes the tunnel that was made, or why there is none. Returns `false` if nobody wants it any more.
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

    /// Retires a tunnel if no stream is in it, so that it ends.
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

    /// Forgets the tunnels to this workload (its UID), and gives up pending ones.
    pub fn forget(&self, uid: &str) {
        self.lock().retain(|key, _| &*key.workload != uid);
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
