//! Whether the dataplane serves what rules served: asked of the tables, and of the services themselves.

use std::{
    collections::{HashMap, HashSet},
    net::{SocketAddr, TcpStream},
    path::Path,
    sync::Mutex,
    thread,
    time::Duration,
};

use anyhow::Context as _;
use kernel::sockets::{self, Peers};

/// How long an endpoint may take to accept a connection.
const PATIENCE: Duration = Duration::from_millis(500);
/// How many connections are tried at once.
const AT_ONCE: usize = 128;
/// As many endpoints are asked whether they answer, of an address that does not.
const ENDPOINTS: usize = 2;
/// How often an address is tried anew that did not answer through the dataplane.
const TRIES: usize = 3;

/// A TCP port of a cluster IP, with its endpoints.
pub type ClusterIp = (SocketAddr, Vec<SocketAddr>);

/// The outcome of the connections to all addresses.
#[derive(Debug, Default)]
pub struct Outcomes {
    /// Those that answered, by an endpoint that the dataplane's programs chose.
    pub answered: Vec<ClusterIp>,
    /// Those with no endpoint that answers, which nobody can check.
    pub silent: usize,
    /// Those with an endpoint that answers, and that did not answer by the dataplane: why not.
    pub failed: Vec<(SocketAddr, String)>,
}

/// Connects to each address.
pub fn ask(addresses: &[ClusterIp], bpffs: &Path) -> anyhow::Result<Outcomes> {
    let peers = Peers::open(bpffs)?.context("the dataplane has no table of connected sockets: restart the agent, and run this command again")?;
    let mut asked = Outcomes::default();
    for batch in addresses.chunks(AT_ONCE) {
        let mut open: Vec<&ClusterIp> = batch.iter().collect();
        let mut whys = HashMap::new();
        for nth in 0..TRIES {
            if open.is_empty() {
                break;
            }
            if nth > 0 {
                thread::sleep(PATIENCE / 2);
            }
            let sockets = connect(&open)?;
            let noted = peers.endpoints();
            let mut left = Vec::new();
            for (address, socket) in open.into_iter().zip(sockets) {
                let why = match &socket {
                    Err(why) => why.clone(),
                    Ok(socket) => match noted.get(&sockets::cookie(socket)?) {
                        Some(endpoint) if address.1.contains(endpoint) => {
                            asked.answered.push(address.clone());
                            continue;
                        }
                        Some(endpoint) => {
                            format!("answered by {endpoint}, which is not among its endpoints")
                        }
                        None => "answered, and not by the dataplane's programs".to_owned(),
                    },
                };
                whys.insert(address.0, why);
                left.push(address);
            }
            open = left;
        }
        let endpoints: Vec<ClusterIp> = (open.iter())
            .flat_map(|(_, endpoints)| endpoints.iter().take(ENDPOINTS))
            .map(|endpoint| (*endpoint, Vec::new()))
            .collect();
        let mut answers = HashSet::new();
        for some in endpoints.chunks(AT_ONCE) {
            let sockets = connect(&some.iter().collect::<Vec<_>>())?;
            let answering = some
                .iter()
                .zip(sockets)
                .filter(|(_, socket)| socket.is_ok());
            answers.extend(answering.map(|((endpoint, _), _)| *endpoint));
        }
        for (address, endpoints) in open {
            if endpoints.iter().any(|endpoint| answers.contains(endpoint)) {
                let why = whys.remove(address).unwrap_or_default();
                asked.failed.push((*address, why));
            } else {
                asked.silent += 1;
            }
        }
    }
    Ok(asked)
}

/// Connects to all at once.
fn connect(addresses: &[&ClusterIp]) -> anyhow::Result<Vec<Result<TcpStream, String>>> {
    let sockets: Vec<Mutex<Option<_>>> = addresses.iter().map(|_| Mutex::new(None)).collect();
    thread::scope(|scope| {
        for (address, socket) in addresses.iter().zip(&sockets) {
            thread::Builder::new()
                .name("connect".to_owned())
                .spawn_scoped(scope, move || {
                    let connected = TcpStream::connect_timeout(&address.0, PATIENCE);
                    *admin::lock(socket) = Some(connected.map_err(|why| why.to_string()));
                })?;
        }
        Ok::<_, anyhow::Error>(())
    })?;
    let all = sockets.into_iter().map(|socket| {
        let socket = socket.into_inner().ok().flatten();
        socket.unwrap_or_else(|| Err("the thread that connects has died".to_owned()))
    });
    Ok(all.collect())
}
