//! A log of queries and their answers. It keeps queries only while a reader asks for them.

use std::{
    collections::VecDeque,
    net::IpAddr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use hickory_proto::{
    op::Message,
    rr::{RData, RecordType},
};
use serde::{Deserialize, Serialize};

use super::{
    client::Client,
    wire::{Parsed, Transport},
};

/// How long the log keeps queries after the last read. So a reader that was killed costs nothing.
const LEASE: Duration = Duration::from_secs(5);
/// Maximum number of queries in the log.
const ROOM: usize = 8192;
/// Maximum number of addresses of a query in the log.
const ADDRESSES: usize = 4;

/// A query that was answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answered {
    /// When it was answered, in seconds since the epoch.
    pub time: f64,
    /// How long that took, in nanoseconds.
    pub took_ns: u64,
    /// The client: a workload as `NAMESPACE/NAME`, or an address.
    pub client: String,
    /// `udp` or `tcp`.
    pub protocol: String,
    /// The name, with a dot at its end.
    pub name: String,
    /// The type of records, such as `AAAA`.
    #[serde(rename = "type")]
    pub of_type: String,
    /// The rule that decided: the word of a [`Rule`](super::Rule), `cache`, or `limit` if the client or its namespace
    /// has too many queries in flight.
    pub by: String,
    /// The code of the answer.
    pub code: String,
    /// The first addresses in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
}

/// A page of the log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Queries {
    /// The queries, in the order in which they were answered.
    pub queries: Vec<Answered>,
    /// The number of the first query of the next page.
    pub next: u64,
    /// How many were gone before they were read.
    pub lost: u64,
}

/// The most recent answered queries, recorded while a reader is present.
#[derive(Debug)]
pub struct Log {
    start: Instant,
    /// The time until which a reader counts as present, in milliseconds from the start.
    until: AtomicU64,
    kept: Mutex<Logged>,
}

#[derive(Debug, Default)]
struct Logged {
    queries: VecDeque<Answered>,
    /// The number of the first of them.
    first: u64,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            until: AtomicU64::new(0),
            kept: Mutex::default(),
        }
    }
}

impl Log {
    fn since_start(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.start);
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }

    /// Returns the time of a query's arrival; none if there is no reader. Without a reader, it costs one load.
    pub fn begin(&self) -> Option<Instant> {
        let until = self.until.load(Ordering::Relaxed);
        if until == 0 {
            return None;
        }
        let now = Instant::now();
        (self.since_start(now) < until).then_some(now)
    }

    /// Adds a query to the log, with its answer.
    pub fn put(
        &self,
        arrived: Instant,
        (client, from): (&Client, IpAddr),
        transport: Transport,
        (query, answer): (&[u8], &[u8]),
        by: &str,
    ) {
        let (Parsed::Query(parsed) | Parsed::Refused(parsed, _)) = Parsed::read(query) else {
            return;
        };
        let took = arrived.elapsed();
        let message = Message::from_vec(answer).ok();
        let addresses = message.iter().flat_map(|message| &message.answers);
        let addresses = addresses.filter_map(|record| match &record.data {
            RData::A(address) => Some(address.0.into()),
            RData::AAAA(address) => Some(address.0.into()),
            _ => None,
        });
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let answered = Answered {
            time: now.unwrap_or_default().as_secs_f64(),
            took_ns: u64::try_from(took.as_nanos()).unwrap_or(u64::MAX),
            client: match &client.workload {
                Some(workload) => workload.to_string(),
                None => from.to_canonical().to_string(),
            },
            protocol: match transport {
                Transport::Udp => "udp",
                Transport::Tcp => "tcp",
            }
            .to_owned(),
            name: parsed.name.to_string(),
            of_type: RecordType::from(parsed.of_type).to_string(),
            by: by.to_owned(),
            code: message.as_ref().map_or_else(String::new, |message| {
                message.metadata.response_code.to_str().to_owned()
            }),
            addresses: addresses.take(ADDRESSES).collect(),
        };
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.queries.push_back(answered);
        if kept.queries.len() > ROOM {
            kept.queries.pop_front();
            kept.first += 1;
        }
    }

    /// Returns the queries from a number on, `most` at most; without a number, those that the agent answers from now on. The
    /// log keeps queries for five seconds after each read.
    pub fn read(&self, from: Option<u64>, most: usize) -> Queries {
        let now = Instant::now();
        let was_read = self.since_start(now) < self.until.load(Ordering::Relaxed);
        let until = self.since_start(now + LEASE).max(1);
        self.until.fetch_max(until, Ordering::Relaxed);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if !was_read {
            // The earlier reader of these queries no longer exists.
            kept.first += kept.queries.len() as u64;
            kept.queries = VecDeque::new();
        }
        let end = kept.first + kept.queries.len() as u64;
        let from = from.map_or(end, |from| from.min(end));
        let lost = kept.first.saturating_sub(from);
        let skip = usize::try_from(from.saturating_sub(kept.first)).unwrap_or(usize::MAX);
        let queries: Vec<_> = kept.queries.iter().skip(skip).take(most).cloned().collect();
        Queries {
            next: from.max(kept.first) + queries.len() as u64,
            queries,
            lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LowerName, wire::question};

    fn put(log: &Log, number: usize) {
        let Some(arrived) = log.begin() else { return };
        let name = LowerName::parse(&format!("{number}.example.com")).unwrap();
        let query = question(7, &name, 1, 0, false);
        let client = Client::unknown(Vec::new());
        let from = "::ffff:192.0.2.1".parse().unwrap();
        log.put(
            arrived,
            (&client, from),
            Transport::Udp,
            (&query, &query),
            "cache",
        );
    }

    #[test]
    fn queries_are_kept_while_somebody_reads() {
        let log = Log::default();
        put(&log, 0);
        let first = log.read(None, 10);
        assert_eq!((first.queries.len(), first.lost), (0, 0));
        put(&log, 1);
        put(&log, 2);
        let second = log.read(Some(first.next), 1);
        assert_eq!(second.queries[0].name, "1.example.com.");
        assert_eq!(second.queries[0].client, "192.0.2.1");
        let third = log.read(Some(second.next), 10);
        assert_eq!(third.queries.len(), 1);
        // A number that is not there yet, from before a restart.
        assert!(log.read(Some(99), 10).queries.is_empty());
        for number in 0..ROOM + 5 {
            put(&log, number);
        }
        let late = log.read(Some(third.next), usize::MAX);
        assert_eq!((late.queries.len(), late.lost), (ROOM, 5));
        assert_eq!(log.read(Some(late.next), 10).queries.len(), 0);
        // No reader has come for long: the log records nothing, and the next reader gets none of its old entries.
        log.until.store(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(2));
        put(&log, 3);
        let next = log.read(Some(late.next), 10);
        assert_eq!((next.queries.len(), next.lost), (0, 0));
    }
}
