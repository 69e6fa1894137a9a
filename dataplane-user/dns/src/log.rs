//! A log of queries and their answers. It keeps queries only while a reader asks for them.

use std::{
    net::IpAddr,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use hickory_proto::{
    op::Message,
    rr::{RData, RecordType},
};
use serde::{Deserialize, Serialize};
use threads::{Page, Recent};

use super::{
    client::Client,
    wire::{Parsed, Transport},
};

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

/// The most recent answered queries, recorded while a reader is present.
#[derive(Debug, Default)]
pub struct Log(Recent<Answered>);

impl Log {
    /// Returns the time of a query's arrival; none if there is no reader. Without a reader, it costs one load.
    pub fn begin(&self) -> Option<Instant> {
        self.0.begin()
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
        self.0.put(answered);
    }

    /// Returns the queries from a number on, `most` at most; without a number, those that the agent answers from now on.
    pub fn read(&self, from: Option<u64>, most: usize) -> Page<Answered> {
        self.0.read(from, most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LowerName, wire::question};

    #[test]
    fn a_query_is_shown_with_its_client_and_name() {
        let log = Log::default();
        let first = log.read(None, 10);
        let name = LowerName::parse("www.example.com").unwrap();
        let query = question(7, &name, 1, 0, false);
        log.put(
            log.begin().unwrap(),
            (
                &Client::unknown(Vec::new()),
                "::ffff:192.0.2.1".parse().unwrap(),
            ),
            Transport::Udp,
            (&query, &query),
            "cache",
        );
        let page = log.read(Some(first.next), 10);
        assert_eq!(page.events[0].name, "www.example.com.");
        assert_eq!(page.events[0].client, "192.0.2.1");
    }
}
