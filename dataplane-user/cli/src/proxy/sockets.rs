//! The proxy's sockets: opened, or taken over from the former proxy.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
};

use anyhow::Context as _;
use proxy::handover::{self, Named};
use socket2::{Domain, Socket, Type};

use super::ProxyArgs;

/// Maximum length of the backlog. `net.core.somaxconn` may allow less.
const BACKLOG: i32 = 4096;

/// All sockets of a proxy.
pub struct Sockets {
    pub outbound: Vec<TcpListener>,
    pub inbound: Vec<TcpListener>,
    pub metrics: Option<TcpListener>,
    pub admin: Option<TcpListener>,
    pub admin_socket: Option<UnixListener>,
    /// Copies for the proxy that takes over.
    copies: Named,
    /// The former proxy, which waits for a message that the sockets are in use.
    pub before: Option<UnixStream>,
}

impl Sockets {
    /// Takes over the sockets of the former proxy, and opens the others.
    pub fn open(arguments: &ProxyArgs) -> anyhow::Result<Self> {
        let asked = match &arguments.handover {
            None => None,
            Some(path) => ask(path)?,
        };
        let (before, given) = asked.unzip();
        let mut given = given.unwrap_or_default();
        let mut copies = Named::new();
        let mut have = |what: &str, at: SocketAddr, flag: &str| -> anyhow::Result<TcpListener> {
            let name = format!("{what} {at}");
            let place = given.iter().position(|(given, _)| *given == name);
            let socket = match place {
                Some(place) => TcpListener::from(given.swap_remove(place).1),
                None => open(at, arguments.transparent).with_context(|| {
                    format!("cannot listen on {at} for {what}; choose another address with {flag}")
                })?,
            };
            let copy = socket.try_clone().context("cannot copy a socket")?;
            copies.push((name, OwnedFd::from(copy)));
            Ok(socket)
        };
        let defaults: [SocketAddr; 2] = [
            ([127, 0, 0, 1], 15001).into(),
            (std::net::Ipv6Addr::LOCALHOST, 15001).into(),
        ];
        let outbound = if arguments.outbound.is_empty() {
            let [v4, v6] = defaults;
            let mut sockets = vec![have("outbound", v4, "--outbound")?];
            match have("outbound", v6, "--outbound") {
                Ok(socket) => sockets.push(socket),
                Err(error) if is_without_v6(&error) => {
                    tracing::info!("this machine has no IPv6: not listening on {v6}");
                }
                Err(error) => return Err(error),
            }
            sockets
        } else {
            let sockets = arguments.outbound.iter();
            sockets
                .map(|at| have("outbound", *at, "--outbound"))
                .collect::<anyhow::Result<_>>()?
        };
        let inbound = arguments.inbound.iter();
        let inbound = inbound
            .map(|at| have("inbound", *at, "--inbound"))
            .collect::<anyhow::Result<_>>()?;
        let metrics = arguments.listeners().metrics();
        let metrics = metrics.map(|at| have("metrics", at, "--metrics-addr"));
        let admin = arguments.listeners().admin();
        let admin = admin.map(|at| have("the admin endpoint", at, "--admin-addr"));
        let path = arguments.listen.admin_socket.as_deref();
        let admin_socket = path.map(|path| {
            handover::listen(path).with_context(|| {
                format!(
                    "cannot listen on {} for the admin endpoint; choose another path with --admin-socket",
                    path.display()
                )
            })
        });
        Ok(Self {
            outbound,
            inbound,
            metrics: metrics.transpose()?,
            admin: admin.transpose()?,
            admin_socket: admin_socket.transpose()?,
            copies,
            before,
        })
    }

    /// Returns the copies to hand over. While they exist, the sockets stay open.
    pub fn take_copies(&mut self) -> Named {
        std::mem::take(&mut self.copies)
    }
}

/// Returns the sockets for an offer.
pub fn borrowed(named: &Named) -> Vec<(String, BorrowedFd<'_>)> {
    let named = named.iter();
    named.map(|(name, fd)| (name.clone(), fd.as_fd())).collect()
}

fn ask(path: &Path) -> anyhow::Result<Option<(UnixStream, Named)>> {
    handover::ask(path).with_context(|| {
        format!(
            "cannot take over from the proxy that waits at {}; end it, or leave out --handover",
            path.display()
        )
    })
}

fn open(at: SocketAddr, transparent: bool) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM.cloexec(), None)?;
    socket.set_reuse_address(true)?;
    if at.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    if transparent {
        if at.is_ipv4() {
            socket.set_ip_transparent_v4(true)?;
        } else {
            socket.set_ip_transparent_v6(true)?;
        }
    }
    socket.bind(&at.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

fn is_without_v6(error: &anyhow::Error) -> bool {
    use nix::errno::Errno;
    let errno = error
        .downcast_ref::<io::Error>()
        .and_then(io::Error::raw_os_error)
        .map(Errno::from_raw);
    matches!(errno, Some(Errno::EAFNOSUPPORT | Errno::EADDRNOTAVAIL))
}
