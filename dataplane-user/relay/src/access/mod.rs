//! The access log: one line for each connection, at its end.

mod istio;

use std::{
    io::{self, Write},
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, SystemTime},
};

use jiff::Timestamp;
use model::{Cluster, ServiceName, Workload};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use threads::{Deaths, Recent, may_panic};

use super::{direction::Direction, index::Denied, labels::Principals, outcome::Flag};

/// The maximum number of records that wait to be written. Further records are left out, because a log
/// that cannot be written must not hold up connections.
const QUEUE: usize = 8192;

/// The format of the access log.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum AccessLog {
    /// `key=value` pairs, for people
    #[default]
    Text,
    /// One JSON object for each line
    Json,
    /// As Istio's ztunnel writes it, as text
    Istio,
    /// As Istio's ztunnel writes it, as JSON
    #[serde(rename = "istio-json")]
    IstioJson,
    /// No access log
    Off,
}

/// A connection at its end.
#[derive(Debug)]
pub struct Record {
    /// When it ended.
    pub ended: SystemTime,
    /// The workload whose connection it was.
    pub workload: Arc<Workload>,
    /// Out of the workload or into it.
    pub direction: Direction,
    /// The client.
    pub client: SocketAddr,
    /// The client's original destination.
    pub destination: SocketAddr,
    /// The endpoint that took the connection, or that the last attempt went to; `None`: there was no
    /// attempt.
    pub endpoint: Option<SocketAddr>,
    /// The destination of the stream, if the endpoint is a waypoint.
    pub authority: Option<SocketAddr>,
    /// The service that the client addressed.
    pub service: Option<ServiceName>,
    /// The cluster, whose names some formats have.
    pub cluster: Arc<Cluster>,
    /// From the client to the endpoint, and back.
    pub bytes: [u64; 2],
    /// From accept to the end.
    pub duration: Duration,
    /// How the connection ended.
    pub flag: Flag,
    /// The error of the last endpoint that did not take the connection.
    pub error: Option<io::Error>,
    /// The identities that both sides have proven; `None`: none.
    pub principals: Option<Box<Principals>>,
    /// The workload at the other side, if it is known.
    pub peer: Option<Arc<Workload>>,
    /// The reason if policies refused or ended the connection.
    pub denied: Option<Box<Denied>>,
}

impl Record {
    /// Returns the error of the last endpoint, or else the policies' reason.
    fn error(&self) -> Option<String> {
        let error = self.error.as_ref().map(ToString::to_string);
        error.or_else(|| self.denied.as_ref().map(ToString::to_string))
    }
}

/// A line of the log, with its fields in the order in which they are written.
#[derive(Debug, Serialize)]
struct Line {
    time: String,
    workload: String,
    direction: &'static str,
    src: String,
    dst: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    service: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    endpoint: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<String>,
    /// `attested`, if the identities are those of network namespaces, without a tunnel.
    #[serde(skip_serializing_if = "Option::is_none")]
    security: Option<&'static str>,
    bytes_received: u64,
    bytes_sent: u64,
    duration_ms: f64,
    response_flags: &'static str,
    /// The policy that refused or ended the connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Line {
    fn of(record: &Record) -> Self {
        // It fails only for years after 9999.
        let time = Timestamp::try_from(record.ended).unwrap_or_default();
        let denied = record.denied.as_deref();
        let principals = record.principals.as_deref();
        let peer = principals.and_then(|of| of.peer.as_ref());
        let is_attested = principals.is_some_and(|of| of.is_attested);
        Self {
            time: format!("{time:.3}"),
            workload: record.workload.name.to_string(),
            direction: record.direction.word(),
            src: record.client.to_string(),
            dst: record.destination.to_string(),
            service: record.service.as_ref().map(ToString::to_string),
            endpoint: record.endpoint.map(|endpoint| endpoint.to_string()),
            peer: peer.map(ToString::to_string),
            security: is_attested.then_some("attested"),
            bytes_received: record.bytes[0],
            bytes_sent: record.bytes[1],
            duration_ms: (record.duration.as_secs_f64() * 1e6).round() / 1e3,
            response_flags: record.flag.word(),
            policy: denied.and_then(|of| of.policy.as_ref().map(ToString::to_string)),
            error: record.error(),
        }
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(
            out,
            "{} workload={} {} src={} dst={}",
            self.time, self.workload, self.direction, self.src, self.dst
        )?;
        if let Some(service) = &self.service {
            write!(out, " service={service}")?;
        }
        if let Some(endpoint) = &self.endpoint {
            write!(out, " endpoint={endpoint}")?;
        }
        if let Some(peer) = &self.peer {
            write!(out, " peer={peer}")?;
        }
        if let Some(security) = self.security {
            write!(out, " security={security}")?;
        }
        write!(
            out,
            " bytes_received={} bytes_sent={} duration_ms={} flags={}",
            self.bytes_received, self.bytes_sent, self.duration_ms, self.response_flags
        )?;
        if let Some(policy) = &self.policy {
            write!(out, " policy={policy:?}")?;
        }
        if let Some(error) = &self.error {
            write!(out, " error={error:?}")?;
        }
        writeln!(out)
    }
}

/// The queue in which sessions leave their records.
#[derive(Debug)]
pub struct Log {
    sender: Option<SyncSender<Option<Record>>>,
    lost: AtomicU64,
    cluster: OnceLock<Arc<Cluster>>,
    /// Refused connections, as lines in JSON.
    pub refusals: Recent<Value>,
}

impl Log {
    /// Starts the thread that writes, if the log is on. If it dies, it reports to `deaths`. The thread ends after
    /// [`Log::close`], when everything is written.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(
        format: AccessLog,
        out: impl Write + Send + 'static,
        deaths: Deaths,
    ) -> io::Result<(Self, Option<JoinHandle<Option<()>>>)> {
        let mut log = Self {
            sender: None,
            lost: AtomicU64::new(0),
            cluster: OnceLock::new(),
            refusals: Recent::default(),
        };
        if format == AccessLog::Off {
            return Ok((log, None));
        }
        let (sender, records) = sync_channel(QUEUE);
        let writer = threads::start("access-log", deaths, move || {
            write_all(&records, format, out);
        })?;
        log.sender = Some(sender);
        Ok((log, Some(writer)))
    }

    /// Sets the cluster of records. Only the first call has an effect: the settings have the names of the cluster.
    pub(super) fn set_cluster(&self, cluster: &Arc<Cluster>) {
        self.cluster.get_or_init(|| Arc::clone(cluster));
    }

    /// Returns the cluster of records.
    pub(super) fn cluster(&self) -> Arc<Cluster> {
        self.cluster.get().cloned().unwrap_or_default()
    }

    fn shows(&self, flag: Flag) -> bool {
        flag.is_refusal() && self.refusals.begin().is_some()
    }

    /// Whether the record of a connection with this outcome is written, or shown to a reader of refusals.
    pub fn wants(&self, flag: Flag) -> bool {
        self.sender.is_some() || self.shows(flag)
    }

    /// Leaves a record.
    pub fn record(&self, record: Record) {
        if self.shows(record.flag) {
            let line = serde_json::to_value(Line::of(&record));
            self.refusals.put(line.unwrap_or_default());
        }
        if let Some(sender) = &self.sender
            && sender.try_send(Some(record)).is_err()
        {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Ends the writer once it has written the records that were left before.
    pub fn close(&self) {
        if let Some(sender) = &self.sender {
            // Fails if the writer has ended already.
            let _ = sender.send(None);
        }
    }

    /// The number of records that were left out.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

fn write_all(records: &Receiver<Option<Record>>, format: AccessLog, mut out: impl Write) {
    let mut buffer = Vec::new();
    let mut closed = false;
    while !closed {
        let Ok(first) = records.recv() else { return };
        buffer.clear();
        // All records that wait are written in one call.
        for record in std::iter::once(first).chain(records.try_iter().take(QUEUE)) {
            may_panic("access-log");
            let Some(record) = record else {
                closed = true;
                break;
            };
            // Writing to memory does not fail.
            let _ = match format {
                AccessLog::Json => write_json(&Line::of(&record), &mut buffer),
                AccessLog::Istio => istio::Line::of(&record).write(&mut buffer),
                AccessLog::IstioJson => write_json(&istio::Line::of(&record), &mut buffer),
                AccessLog::Text | AccessLog::Off => Line::of(&record).write(&mut buffer),
            };
        }
        // An error does not matter: the reader is gone.
        let _ = out.write_all(&buffer).and_then(|()| out.flush());
    }
}

fn write_json(line: &impl Serialize, out: &mut Vec<u8>) -> io::Result<()> {
    serde_json::to_writer(&mut *out, line)?;
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddrV4};

    use model::{Place, WorkloadName};
    use threads::none_dies;

    use super::*;

    #[test]
    fn what_was_left_is_written_before_the_end() {
        let workload = Workload::new(WorkloadName::new("a", "b"), Place::Elsewhere);
        let workload = Arc::new(workload);
        let at = |port| SocketAddrV4::new(Ipv4Addr::LOCALHOST, port).into();
        for (format, wanted) in [
            (
                AccessLog::Text,
                "workload=a/b inbound src=127.0.0.1:1 dst=127.0.0.1:2 bytes_received=3 bytes_sent=4 \
                 duration_ms=1.5 flags=UF error=\"no\"\n",
            ),
            (
                AccessLog::Json,
                "\"response_flags\":\"UF\",\"error\":\"no\"}\n",
            ),
        ] {
            let file = tempfile::NamedTempFile::new().unwrap();
            let (log, writer) = Log::start(format, file.reopen().unwrap(), none_dies()).unwrap();
            log.record(Record {
                ended: SystemTime::now(),
                workload: Arc::clone(&workload),
                direction: Direction::Inbound,
                client: at(1),
                destination: at(2),
                endpoint: None,
                authority: None,
                service: None,
                cluster: Arc::default(),
                bytes: [3, 4],
                duration: Duration::from_micros(1500),
                flag: Flag::ConnectFailure,
                error: Some(io::Error::other("no")),
                principals: None,
                peer: None,
                denied: None,
            });
            log.close();
            writer.unwrap().join().unwrap();
            let text = std::fs::read_to_string(file.path()).unwrap();
            assert!(text.ends_with(wanted), "{text}");
        }
    }
}
