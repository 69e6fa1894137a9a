//! Answers from the names of a cluster, without a socket: the table of Kubernetes' specification, search lists, and
//! arbitrary bytes from a client.

mod hosts;
mod names;
mod search;
mod server;
mod specification;
mod wire;

use std::sync::Arc;

use dataplane_dns::{
    Client, LowerName, Stored, Transport, Ttls, Zone,
    answer::{Decision, answer},
    question,
};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use model::{Names, Node, Snapshot};
use source::manifests;

const TTLS: Ttls = Ttls {
    services: 5,
    entries: 30,
};

/// The cluster that tests ask for.
fn cluster() -> Snapshot {
    load(&["cluster.yaml"])
}

/// The snapshot of these files.
fn load(files: &[&str]) -> Snapshot {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/dns/");
    let paths: Vec<_> = files
        .iter()
        .map(|file| format!("{directory}{file}").into())
        .collect();
    let node = Node {
        name: "here".into(),
        ..Node::default()
    };
    let loaded = manifests::load(&paths, &node);
    let snapshot = loaded.unwrap_or_else(|errors| panic!("{errors}")).snapshot;
    assert!(snapshot.whole);
    snapshot
}

fn zone() -> Zone {
    Zone::new(Names::of(&cluster()), TTLS)
}

/// Returns a client without a search list.
fn nobody() -> Arc<Client> {
    Arc::new(Client::unknown(Vec::new()))
}

/// The server's reply to a client about a name.
#[derive(Debug)]
enum Reply {
    Answer(Box<Message>),
    /// The names that resolvers are asked for. `?` follows a name whose records are known if the resolvers have no
    /// answer. Then the code of the answer if none of the names exists.
    Asked(Vec<String>, Option<ResponseCode>),
}

impl Reply {
    /// Its code and records, sorted: each as `TYPE DATA`, or with its name before that if the name was not asked for.
    /// Of resolvers: `ask NAME …`.
    fn text(&self, asked: &str) -> String {
        let message = match self {
            Self::Asked(names, otherwise) => {
                let otherwise = otherwise.map(|code| format!(" else {code:?}"));
                return format!("ask {}{}", names.join(" "), otherwise.unwrap_or_default());
            }
            Self::Answer(message) => message,
        };
        let mut records: Vec<String> = Vec::new();
        for record in &message.answers {
            let name = record.name.to_string();
            let name = if name.eq_ignore_ascii_case(asked) {
                String::new()
            } else {
                format!("{name} ")
            };
            records.push(format!("{name}{} {}", record.record_type(), record.data));
        }
        records.sort();
        let code = message.metadata.response_code;
        let code = format!("{code:?}");
        [&[code], &records[..]].concat().join("; ")
    }
}

fn ask(zone: &Zone, client: &Client, name: &str, of_type: RecordType) -> Reply {
    let name = LowerName::parse(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    let query = question(7, &name, of_type.into(), 1, true);
    let mut out = Vec::new();
    let random = &mut rand::rng();
    match answer(
        zone,
        &query,
        Transport::Udp,
        || Arc::new(client.clone()),
        random,
        &mut out,
    ) {
        Decision::Answered(_) => {
            let message = Message::from_vec(&out).unwrap();
            assert_eq!(message.metadata.id, 7);
            assert!(message.metadata.recursion_available && message.metadata.recursion_desired);
            Reply::Answer(Box::new(message))
        }
        Decision::Ask(ask) => {
            let names = ask.candidates.iter().map(|of| {
                let known = if of.known.is_some() { "?" } else { "" };
                format!("{}{known}", of.name)
            });
            let otherwise = ask.otherwise.as_ref().map(Stored::code);
            Reply::Asked(names.collect(), otherwise)
        }
        other => panic!("{name}: {other:?}"),
    }
}
