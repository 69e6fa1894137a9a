//! Checks that the dataplane serves the addresses that the rules served: reads the tables, and connects to the
//! services.

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

/// Maximum time to connect to an address or endpoint.
const PATIENCE: Duration = Duration::from_millis(500);
/// Number of connections that are tried at once.
const AT_ONCE: usize = 128;
/// Maximum number of endpoints that are tried directly, for an address that does not answer.
const ENDPOINTS: usize = 2;
/// Maximum number of attempts to connect to an address through the dataplane.
const TRIES: usize = 3;

/// A TCP port of a cluster IP, with its endpoints.
pub type ClusterIp = (SocketAddr, Vec<SocketAddr>);

/// The outcome of the connections to all addresses.
#[derive(Debug, Default)]
pub struct Outcomes {
    /// The addresses that answered through an endpoint that the dataplane's programs chose.
    pub answered: Vec<ClusterIp>,
    /// Number of addresses without an answering endpoint. They cannot be checked.
    pub silent: usize,
    /// The addresses that have an answering endpoint but did not answer through the dataplane, each with the reason.
    pub failed: Vec<(SocketAddr, String)>,
}

/// Connects to each address, and checks the endpoint that answers.
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

/// Connects to all addresses at once.
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
