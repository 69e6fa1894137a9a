//! The cache of the DNS server.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Query, State as Shared},
    response::Response,
};
use dns::LowerName;
use hickory_proto::rr::RecordType;
use serde::Deserialize;

use super::{
    Context, answer,
    events::{MOST, Since},
};
use crate::api::{DnsCache, DnsCacheShare, DnsFlushed, DnsLookup};

const NO_DNS: &str = "the agent answers no DNS queries; set dns.capture in its configuration\n";

/// Answers with the cache and the part of each namespace.
pub async fn get(Shared(context): Shared<Arc<Context>>) -> Response {
    answer(move || {
        let dns = context.state.dns.get().ok_or(NO_DNS)?;
        let shares = dns.cache_shares().into_iter();
        let shares = shares.map(|(namespace, (entries, bytes))| DnsCacheShare {
            namespace: namespace.to_string(),
            entries,
            bytes,
        });
        let namespaces: Vec<_> = shares.collect();
        Ok(Json(DnsCache {
            entries: namespaces.iter().map(|of| of.entries).sum(),
            bytes: namespaces.iter().map(|of| of.bytes).sum(),
            max_bytes: dns.cache_room(),
            namespaces,
        }))
    })
    .await
}

/// The client and the name.
#[derive(Debug, Deserialize)]
pub struct LookupQuery {
    /// The client's network namespace: its cookie.
    netns: u64,
    name: String,
}

/// Answers with the steps by which a captured workload finds addresses for a name.
pub async fn lookup(
    Shared(context): Shared<Arc<Context>>,
    Query(query): Query<LookupQuery>,
) -> Response {
    answer(move || {
        let dns = context.state.dns.get().ok_or(NO_DNS)?;
        let LookupQuery { netns, name } = query;
        let steps = |of_type| {
            let steps = dns.explain(netns, &name, of_type).ok_or_else(|| {
                format!("the agent does not answer the DNS queries of the network namespace with cookie {netns}\n")
            })?;
            steps.map_err(|error| format!("{error}\n"))
        };
        Ok(Json(DnsLookup {
            ipv4: steps(RecordType::A)?,
            ipv6: steps(RecordType::AAAA)?,
        }))
    })
    .await
}

/// Answers with the queries that were answered since the last time.
pub async fn queries(
    Shared(context): Shared<Arc<Context>>,
    Query(Since { from }): Query<Since>,
) -> Response {
    answer(move || {
        let dns = context.state.dns.get().ok_or(NO_DNS)?;
        Ok(Json(dns.queries(from, MOST)))
    })
    .await
}

/// The answers to forget.
#[derive(Debug, Deserialize)]
pub struct FlushQuery {
    /// Their name; without a name, all.
    name: Option<String>,
}

/// Forgets answers, and answers with their number.
pub async fn flush(
    Shared(context): Shared<Arc<Context>>,
    Query(query): Query<FlushQuery>,
) -> Response {
    answer(move || {
        let dns = context.state.dns.get().ok_or(NO_DNS)?;
        let name = query.name.as_deref().map(LowerName::parse).transpose();
        let name = name.map_err(|error| format!("name: {error}\n"))?;
        let flushed = dns.flush(name.as_ref());
        Ok(Json(DnsFlushed { flushed }))
    })
    .await
}
