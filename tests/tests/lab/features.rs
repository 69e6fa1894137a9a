//! Features of kernels that differ between versions, and that no other scenario shows.

use std::{
    fs::File,
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd as _,
    path::Path,
    thread,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use dataplane_tests::{Host, Lab};
use kernel::trial;
use nix::sched::{CloneFlags, setns};

use crate::cluster::eventually;

scenarios! {
    Dataplane:
    sk_lookup_steers_connections_to_a_listener,
    each_network_namespace_has_its_cookie,
}

/// Does something in the network namespace of a host, in a thread that ends there.
pub fn on<T: Send>(host: &Host, work: impl FnOnce(&File) -> Result<T> + Send) -> Result<T> {
    let netns = File::open(Path::new("/run/netns").join(host.netns()))?;
    let there = || {
        setns(netns.as_fd(), CloneFlags::CLONE_NEWNET)?;
        work(&netns)
    };
    thread::scope(|scope| scope.spawn(there).join()).unwrap_or_else(|_| Err(anyhow!("it panicked")))
}

/// The basis of a proxy that is reached without any rewriting: one listener takes the connections to other ports, and
/// knows the ports.
fn sk_lookup_steers_connections_to_a_listener() -> Result<()> {
    let lab = Lab::builder().node("node1").build()?;
    on(lab.node("node1"), |netns| {
        let listener = TcpListener::bind("127.0.0.1:15001")?;
        let elsewhere: SocketAddr = "127.0.0.1:8080".parse()?;
        let refused = || match TcpStream::connect(elsewhere) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
            other => Err(anyhow!("nobody listens there: {other:?}")),
        };
        refused()?;
        let link = trial::steer(netns.as_fd(), listener.as_fd()).context("steer")?;
        let client = TcpStream::connect(elsewhere).context("steered")?;
        let (accepted, peer) = listener.accept()?;
        ensure!(
            accepted.local_addr()? == elsewhere && peer == client.local_addr()?,
            "{accepted:?} from {peer} is not {client:?}"
        );
        drop(link);
        // A process that another scenario starts has a copy of the link until it runs its program.
        eventually(refused)
    })
}

/// The programs distinguish pods by it, and the node's own loopback from theirs.
fn each_network_namespace_has_its_cookie() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "a", "10.244.1.5")
        .build()?;
    let cookie = |host| on(host, |_| Ok(kernel::namespaces::netns_cookie()?));
    let (node, pod) = (lab.node("node1"), lab.pod("a"));
    let cookies = [
        cookie(node)?,
        cookie(pod)?,
        kernel::namespaces::netns_cookie()?,
    ];
    let [a, b, c] = cookies;
    ensure!(a != b && b != c && a != c, "not three: {cookies:?}");
    ensure!(
        [cookie(node)?, cookie(pod)?] == [a, b],
        "they change: {cookies:?}"
    );
    Ok(())
}
