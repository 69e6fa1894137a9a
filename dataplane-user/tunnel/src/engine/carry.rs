//! Outbound connections, which the engine relays through tunnels.

use std::{io, iter, sync::Arc};

use http::Uri;
use identity::Identities;
use model::Workload;
use relay::{
    Baggage, Direction, Flag, Handed, Index, Session, Way,
    socket::{self, Manner},
};
use tokio::{io::Interest, net::TcpStream};

use super::{
    super::{
        copy::Stream,
        headers::{self, Trace},
        outbound::{Connect, Dial, Outbound},
        pool::Key,
    },
    Shared,
    dial::dial,
    id,
    live::Entry,
    reset,
};

/// Relays a connection until it ends.
pub fn carry<I: Identities + 'static>(
    shared: Arc<Shared>,
    handed: Handed,
    outbound: Outbound<I>,
) -> impl Future<Output = ()> + Send + use<I> {
    // In memory of its own, which an established stream does not hold.
    let beginning = Box::pin(begin(shared, handed, outbound));
    async move {
        if let Some((stream, client, entry)) = beginning.await {
            let ended = stream.copy(client, entry.flow()).await;
            entry.end(ended);
        }
    }
}

/// Makes the stream of a connection. Returns `None` if the connection has ended before.
async fn begin<I: Identities + 'static>(
    shared: Arc<Shared>,
    handed: Handed,
    outbound: Outbound<I>,
) -> Option<(Stream, TcpStream, Entry)> {
    let Handed {
        mut session,
        client,
        first,
    } = handed;
    let client = match TcpStream::from_std(client.into()) {
        Ok(client) => client,
        Err(error) => {
            session.failed(error);
            session.end(Flag::Tunnel);
            return None;
        }
    };
    let entry = shared.live.add(session.attached(), Direction::Outbound);
    let connected = tokio::select! {
        biased;
        connected = connect(&shared, &mut session, &outbound) => connected,
        () = entry.flow().until_end() => Err(entry.cause()),
        // Gives the attempt up if the client resets the connection.
        _ = client.ready(Interest::ERROR) => Err(reset(Direction::Outbound, true)),
    };
    let mut stream = match connected {
        Ok(stream) => stream,
        Err(flag) => {
            socket::reset_on_close(&client);
            session.end(flag);
            return None;
        }
    };
    shared.manner.patience.apply(&client);
    entry.reached(session);
    if !first.is_empty() {
        stream.send_first(first, entry.flow());
    }
    Some((stream, client, entry))
}

/// Makes a stream to the endpoint that the session has chosen. Tries the next endpoints if that fails.
async fn connect<I: Identities + 'static>(
    shared: &Arc<Shared>,
    session: &mut Session,
    outbound: &Outbound<I>,
) -> Result<Stream, Flag> {
    loop {
        let (_, index) = shared.relay.index();
        let (flag, error) = match session.way(&index) {
            Way::Tunnel(workload) => match request(shared, session, &index, &workload) {
                Ok(wanted) => match outbound.connect(&wanted).await {
                    Ok(stream) => {
                        let baggage = stream.baggage();
                        session.prove(wanted.key.source, stream.peer().clone(), baggage);
                        session.reached(&index);
                        return Ok(stream);
                    }
                    Err(error) => {
                        let (flag, may_try) = (error.flag(), error.may_try_another());
                        let error = io::Error::other(error);
                        if !may_try {
                            session.failed(error);
                            return Err(flag);
                        }
                        (flag, error)
                    }
                },
                Err(error) => (Flag::Identity, error),
            },
            // A session that began with a tunnel never falls back to plaintext.
            Way::Plain => (
                Flag::Tunnel,
                io::Error::other(
                    "the endpoint does not support HBONE, and the connection to an endpoint that does has failed before",
                ),
            ),
            Way::Unclear => (
                Flag::Tunnel,
                io::Error::other(
                    "no workload or several are known to have the endpoint's address, so the identity to expect is not known yet",
                ),
            ),
        };
        session.failed(error);
        if session.next_endpoint().is_none() {
            return Err(flag);
        }
    }
}

/// Returns the parameters of the stream to the session's endpoint, which is in the workload `to`.
fn request(
    shared: &Arc<Shared>,
    session: &Session,
    index: &Index,
    to: &Workload,
) -> io::Result<Connect> {
    let domain = &shared.manner.trust_domain;
    let attached = session.attached();
    let identity = |workload: &Workload| {
        workload.identity(domain).ok_or_else(|| {
            let name = &workload.name;
            io::Error::other(format!(
                "{name} has no service account, so it has no identity"
            ))
        })
    };
    let own = attached.source(Direction::Outbound, session.client().ip());
    let further = session.further_identities();
    let authority = session.authority().to_string();
    let authority: Uri = authority.parse().map_err(io::Error::other)?;
    let client = (own, session.client().port()).into();
    let snapshot = index.snapshot();
    // Host ports of Pods have no name in DNS.
    let service = session.service().filter(|of| !of.name().contains(':'));
    let host = service.map(|service| snapshot.cluster.host(service));
    let (trace, name) = (Trace::new(), &attached.workload.name);
    tracing::debug!("{name}: connection {trace} from {client} to {authority}");
    let baggage = Baggage::text(&attached.workload, snapshot);
    Ok(Connect {
        key: Key {
            attachment: attached.id,
            source: identity(&attached.workload)?,
            expected: iter::once(identity(to)?)
                .chain(further.iter().cloned())
                .collect(),
            from: own,
            to: session.accepts_tunnels_at(shared.port),
            workload: id(to).into(),
        },
        dial: dialling(shared, session),
        authority,
        headers: headers::request(client, host.as_deref(), trace, &baggage),
    })
}

/// Returns the function that connects from the workload's network namespace, as the proxy does.
fn dialling(shared: &Shared, session: &Session) -> Dial {
    let (attached, mark) = (Arc::clone(session.attached()), shared.manner.mark);
    Arc::new(move |to| {
        let attached = Arc::clone(&attached);
        let manner = Manner {
            mark,
            ..Manner::default()
        };
        Box::pin(async move { dial(&attached, to, manner).await })
    })
}
