//! Lines of the access log in the format of Istio's ztunnel, as text or JSON.
//!
//! The identities, and the address of the stream (`dst.hbone_addr`), are there for connections through tunnels. Bytes are counted
//! from the workload's point of view: `bytes_sent` are the bytes of the client if the connection is outbound.

use std::{
    fmt::Display,
    io::{self, Write},
    net::SocketAddr,
};

use jiff::Timestamp;
use model::{HBONE, Workload};
use serde::Serialize;

use super::Record;
use crate::{direction::Direction, outcome::Flag};

const SCOPE: &str = "access";
const MESSAGE: &str = "connection complete";

/// The fields, in the order in which they are written.
#[derive(Debug, Serialize)]
pub struct Line {
    level: &'static str,
    time: String,
    scope: &'static str,
    message: &'static str,
    #[serde(rename = "src.addr")]
    src_addr: SocketAddr,
    #[serde(rename = "src.workload", skip_serializing_if = "Option::is_none")]
    src_workload: Option<String>,
    #[serde(rename = "src.namespace", skip_serializing_if = "Option::is_none")]
    src_namespace: Option<String>,
    #[serde(rename = "src.identity", skip_serializing_if = "Option::is_none")]
    src_identity: Option<String>,
    #[serde(rename = "src.cluster", skip_serializing_if = "Option::is_none")]
    src_cluster: Option<String>,
    #[serde(rename = "dst.addr")]
    dst_addr: SocketAddr,
    #[serde(rename = "dst.hbone_addr", skip_serializing_if = "Option::is_none")]
    dst_hbone_addr: Option<SocketAddr>,
    #[serde(rename = "dst.service", skip_serializing_if = "Option::is_none")]
    dst_service: Option<String>,
    #[serde(rename = "dst.workload", skip_serializing_if = "Option::is_none")]
    dst_workload: Option<String>,
    #[serde(rename = "dst.namespace", skip_serializing_if = "Option::is_none")]
    dst_namespace: Option<String>,
    #[serde(rename = "dst.identity", skip_serializing_if = "Option::is_none")]
    dst_identity: Option<String>,
    #[serde(rename = "dst.cluster", skip_serializing_if = "Option::is_none")]
    dst_cluster: Option<String>,
    direction: &'static str,
    bytes_sent: u64,
    bytes_recv: u64,
    duration: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// A side of a connection: workload, namespace, identity and cluster.
type Side = [Option<String>; 4];

impl Line {
    /// Returns the line of a connection.
    pub fn of(record: &Record) -> Self {
        // It fails only for years after 9999.
        let time = Timestamp::try_from(record.ended).unwrap_or_default();
        let principals = record.principals.as_deref();
        let tunnelled = principals.filter(|of| !of.is_attested);
        let side = |workload: Option<&Workload>, identity: Option<&model::Identity>| -> Side {
            let name = workload.map(|workload| &workload.name);
            [
                name.map(|name| name.name().to_owned()),
                name.map(|name| name.namespace().to_owned()),
                identity.map(ToString::to_string),
                name.map(|_| record.cluster.name.to_string()),
            ]
        };
        let own = side(Some(&record.workload), principals.map(|of| &of.own));
        let identity = principals.and_then(|of| of.peer.as_ref());
        let mut peer = side(record.peer.as_deref(), identity);
        if record.peer.is_none()
            && let Some(baggage) = principals.and_then(|of| of.baggage.as_ref())
        {
            let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            let namespace = identity.map(|of| of.namespace().to_owned());
            let [workload, cluster] = [&baggage.service, &baggage.cluster].map(|text| some(text));
            peer = [
                workload,
                namespace,
                identity.map(ToString::to_string),
                cluster,
            ];
        }
        let [client, server] = record.bytes;
        let ((src, dst), (bytes_sent, bytes_recv)) = match record.direction {
            Direction::Outbound => ((own, peer), (client, server)),
            Direction::Inbound => ((peer, own), (server, client)),
        };
        let [src_workload, src_namespace, src_identity, src_cluster] = src;
        let [dst_workload, dst_namespace, dst_identity, dst_cluster] = dst;
        let endpoint = record.endpoint.unwrap_or(record.destination);
        let error = record.error();
        let error =
            error.or_else(|| (record.flag != Flag::None).then(|| record.flag.word().into()));
        Self {
            level: if error.is_some() { "error" } else { "info" },
            time: format!("{time:.6}"),
            scope: SCOPE,
            message: MESSAGE,
            src_addr: record.client,
            src_workload,
            src_namespace,
            src_identity,
            src_cluster,
            dst_addr: match (tunnelled, record.authority, record.direction) {
                (Some(_), None, _) | (Some(_), _, Direction::Inbound) => {
                    SocketAddr::new(endpoint.ip(), HBONE)
                }
                _ => endpoint,
            },
            dst_hbone_addr: tunnelled.map(|_| record.authority.unwrap_or(endpoint)),
            dst_service: (record.service.as_ref()).map(|service| record.cluster.host(service)),
            dst_workload,
            dst_namespace,
            dst_identity,
            dst_cluster,
            direction: record.direction.word(),
            bytes_sent,
            bytes_recv,
            duration: format!("{}ms", record.duration.as_millis()),
            error,
        }
    }

    /// Writes the line as text.
    ///
    /// # Errors
    /// The writer's.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self { time, level, .. } = self;
        write!(
            out,
            "{time}\t{level}\t{SCOPE}\t{MESSAGE}\tsrc.addr={}",
            self.src_addr
        )?;
        let quoted = |text: &Option<String>| text.as_ref().map(|text| format!("{text:?}"));
        let shown = |value: &dyn Display| Some(value.to_string());
        for (name, value) in [
            ("src.workload", quoted(&self.src_workload)),
            ("src.namespace", quoted(&self.src_namespace)),
            ("src.identity", quoted(&self.src_identity)),
            ("src.cluster", quoted(&self.src_cluster)),
            ("dst.addr", shown(&self.dst_addr)),
            (
                "dst.hbone_addr",
                self.dst_hbone_addr.as_ref().map(ToString::to_string),
            ),
            ("dst.service", quoted(&self.dst_service)),
            ("dst.workload", quoted(&self.dst_workload)),
            ("dst.namespace", quoted(&self.dst_namespace)),
            ("dst.identity", quoted(&self.dst_identity)),
            ("dst.cluster", quoted(&self.dst_cluster)),
            ("direction", shown(&format_args!("{:?}", self.direction))),
            ("bytes_sent", shown(&self.bytes_sent)),
            ("bytes_recv", shown(&self.bytes_recv)),
            ("duration", shown(&format_args!("{:?}", self.duration))),
            ("error", quoted(&self.error)),
        ] {
            if let Some(value) = value {
                write!(out, " {name}={value}")?;
            }
        }
        writeln!(out)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::Arc,
        time::{Duration, SystemTime},
    };

    use model::{Identity, Place, ServiceName, WorkloadName};

    use super::*;
    use crate::labels::Principals;

    fn record(direction: Direction) -> Record {
        let workload = |name| {
            Arc::new(Workload::new(
                WorkloadName::new("shop", name),
                Place::Address,
            ))
        };
        let identity = |account| Identity::new("cluster.local", "shop", account).unwrap();
        let at = |text: &str| -> SocketAddr { text.parse().unwrap() };
        Record {
            ended: SystemTime::UNIX_EPOCH,
            workload: workload("own"),
            direction,
            client: at("10.0.0.1:4000"),
            destination: at("10.96.0.1:80"),
            endpoint: Some(at("10.0.0.2:8080")),
            authority: None,
            service: Some(ServiceName::new("shop", "api")),
            cluster: Arc::default(),
            bytes: [3, 4],
            duration: Duration::from_micros(12_900),
            flag: Flag::None,
            error: None,
            principals: Some(Box::new(Principals {
                own: identity("own"),
                peer: Some(identity("peer")),
                is_attested: false,
                baggage: None,
            })),
            peer: Some(workload("peer")),
            denied: None,
        }
    }

    fn text(record: &Record) -> String {
        let mut text = Vec::new();
        Line::of(record).write(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn the_fields_are_those_of_ztunnel() {
        assert_eq!(
            text(&record(Direction::Outbound)),
            "1970-01-01T00:00:00.000000Z\tinfo\taccess\tconnection complete\tsrc.addr=10.0.0.1:4000 src.workload=\"own\" \
             src.namespace=\"shop\" src.identity=\"spiffe://cluster.local/ns/shop/sa/own\" src.cluster=\"Kubernetes\" \
             dst.addr=10.0.0.2:15008 dst.hbone_addr=10.0.0.2:8080 dst.service=\"api.shop.svc.cluster.local\" dst.workload=\"peer\" dst.namespace=\"shop\" \
             dst.identity=\"spiffe://cluster.local/ns/shop/sa/peer\" dst.cluster=\"Kubernetes\" direction=\"outbound\" bytes_sent=3 bytes_recv=4 \
             duration=\"12ms\"\n"
        );
        let mut through = record(Direction::Outbound);
        let waypoint = ["10.0.0.2:15009", "10.96.0.1:80"].map(|of| of.parse().ok());
        [through.endpoint, through.authority] = waypoint;
        let addresses = " dst.addr=10.0.0.2:15009 dst.hbone_addr=10.96.0.1:80 ";
        assert!(text(&through).contains(addresses), "{}", text(&through));
        // The node's proxy has accepted the tunnel to the waypoint.
        through.direction = Direction::Inbound;
        let addresses = " dst.addr=10.0.0.2:15008 dst.hbone_addr=10.96.0.1:80 ";
        assert!(text(&through).contains(addresses), "{}", text(&through));
        let mut plain = record(Direction::Inbound);
        (plain.principals, plain.peer, plain.flag) = (None, None, Flag::ClientReset);
        plain.service = None;
        assert_eq!(
            text(&plain),
            "1970-01-01T00:00:00.000000Z\terror\taccess\tconnection complete\tsrc.addr=10.0.0.1:4000 \
             dst.addr=10.0.0.2:8080 dst.workload=\"own\" dst.namespace=\"shop\" dst.cluster=\"Kubernetes\" direction=\"inbound\" bytes_sent=4 \
             bytes_recv=3 duration=\"12ms\" error=\"DC\"\n"
        );
    }

    #[test]
    fn json_has_the_fields_of_the_text() {
        let json = serde_json::to_value(Line::of(&record(Direction::Inbound))).unwrap();
        let wanted = serde_json::json!({
            "level": "info",
            "time": "1970-01-01T00:00:00.000000Z",
            "scope": "access",
            "message": "connection complete",
            "src.addr": "10.0.0.1:4000",
            "src.workload": "peer",
            "src.namespace": "shop",
            "src.identity": "spiffe://cluster.local/ns/shop/sa/peer",
            "src.cluster": "Kubernetes",
            "dst.addr": "10.0.0.2:15008",
            "dst.hbone_addr": "10.0.0.2:8080",
            "dst.service": "api.shop.svc.cluster.local",
            "dst.workload": "own",
            "dst.namespace": "shop",
            "dst.identity": "spiffe://cluster.local/ns/shop/sa/own",
            "dst.cluster": "Kubernetes",
            "direction": "inbound",
            "bytes_sent": 4,
            "bytes_recv": 3,
            "duration": "12ms",
        });
        assert_eq!(json, wanted);
    }
}
