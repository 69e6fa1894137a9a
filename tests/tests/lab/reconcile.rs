//! `dataplane iptables apply`: rules of a mesh that are there, not there, in part or in another form, with real programs; and the
//! table of nf_tables that lets no packet pass meanwhile.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane::kernel::guard;
use dataplane_tests::{Host, Lab};

use crate::features::on;

scenarios! {
    Dataplane:
    nothing_passes_a_guard_for_its_time,
}

/// A port that nobody else has in a lab's namespace.
const PORT: u16 = 4242;
/// How long a connection attempt waits that nobody answers: less than a second, after which the first packet is sent again.
const SHORT: Duration = Duration::from_millis(200);

fn lab() -> Result<Lab> {
    Ok(Lab::builder()
        .node("node1")
        .pod("node1", "near", "10.244.1.5")
        .build()?)
}

/// Whether a host's connection to an address is made; if not, nobody answered.
fn connects(from: &Host, to: IpAddr) -> Result<bool> {
    on(from, |_| {
        match TcpStream::connect_timeout(&(to, PORT).into(), SHORT) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::TimedOut => Ok(false),
            Err(error) => bail!("{to}: {error}, not dropped"),
        }
    })
}

/// Both families, both directions, TCP and datagrams: nothing passes while the guard is up, and all passes when its time is over,
/// though nobody removes it.
fn nothing_passes_a_guard_for_its_time() -> Result<()> {
    let lab = lab()?;
    let (node, pod) = (lab.node("node1"), lab.pod("near"));
    let any: SocketAddr = format!("[::]:{PORT}").parse()?;
    let (of_node, of_pod) = (node.listen(any)?, pod.listen(any)?);
    let to_pod = pod.addresses();
    let to_node: [IpAddr; 2] = [pod.gateway4().into(), pod.gateway6().into()];
    let all_connect = |wanted: bool| -> Result<()> {
        for (from, to) in to_pod
            .map(|to| (node, to))
            .into_iter()
            .chain(to_node.map(|to| (pod, to)))
        {
            let connects = connects(from, to)?;
            ensure!(connects == wanted, "{} to {to}: {connects}", from.name());
        }
        Ok(())
    };
    all_connect(true)?;
    ensure!(!on(pod, |_| Ok(guard::is_there()?))?);
    let mut held = on(node, |_| Ok(TcpStream::connect((to_pod[0], PORT))?))?;
    let mut accepted = accept_last(&of_pod)?;

    let begin = Instant::now();
    on(pod, |_| Ok(guard::up(Duration::from_secs(30))?))?;
    all_connect(false)?;
    held.write_all(b"x")?;
    accepted.set_read_timeout(Some(SHORT))?;
    ensure!(
        accepted.read(&mut [0]).is_err(),
        "an established connection"
    );
    // The pod to itself, by loopback and by its own address.
    for to in [[127, 0, 0, 1].into(), to_pod[0], to_pod[1]] {
        ensure!(connects(pod, to)?, "the pod to {to} of its own");
    }
    let receiver = on(node, |_| Ok(UdpSocket::bind(any)?))?;
    receiver.set_read_timeout(Some(SHORT))?;
    let send = |to: IpAddr| {
        on(pod, |_| {
            Ok(UdpSocket::bind("[::]:0")?.send_to(b"x", (mapped(to), PORT))?)
        })
    };
    for to in to_node {
        ensure!(
            send(to).is_err_and(|why| why.to_string().contains("not permitted")),
            "a datagram to {to}"
        );
        ensure!(receiver.recv(&mut [0]).is_err(), "a datagram to {to}");
    }
    let listed = pod.command("nft").args(["list", "ruleset"]).run()?;
    for words in [
        "table inet dataplane-guard {",
        "type nf_proto",
        "iif != \"lo\" meta nfproto @up drop",
        "oif != \"lo\" meta nfproto @up drop",
        "no packet passes while rules are changed: dataplane",
    ] {
        ensure!(listed.contains(words), "no {words:?} in {listed}");
    }

    // Renewed for less, it opens by itself; the packets that waited arrive.
    let time = Duration::from_millis(1500);
    let renewed = Instant::now();
    on(pod, |_| Ok(guard::renew(time)?))?;
    while !connects(node, to_pod[0])? {
        ensure!(
            renewed.elapsed() < Duration::from_secs(20),
            "it stays closed"
        );
    }
    ensure!(
        renewed.elapsed() >= time,
        "open after {:?}",
        renewed.elapsed()
    );
    ensure!(
        begin.elapsed() < Duration::from_secs(30),
        "too slow to tell"
    );
    all_connect(true)?;
    accepted.set_read_timeout(Some(Duration::from_secs(30)))?;
    accepted
        .read_exact(&mut [0])
        .context("what was held back")?;
    ensure!(on(pod, |_| Ok(guard::is_there()?))?, "the table stays");

    // Up a second time, and down.
    on(pod, |_| Ok(guard::up(Duration::from_secs(30))?))?;
    ensure!(!connects(node, to_pod[0])?);
    ensure!(on(pod, |_| Ok(guard::down()?))?);
    all_connect(true)?;
    for to in to_node {
        send(to)?;
        receiver.recv(&mut [0]).context("a datagram")?;
    }
    ensure!(!on(pod, |_| Ok(guard::is_there()?))? && !on(pod, |_| Ok(guard::down()?))?);
    ensure!(
        on(pod, |_| Ok(guard::renew(time)))?.is_err_and(|why| why.kind() == ErrorKind::NotFound)
    );
    // What a dead program has left, the clean-up removes.
    on(pod, |_| Ok(guard::up(Duration::from_secs(30))?))?;
    let bpffs = lab.bpffs()?;
    let cleanup = |more: &[&str]| {
        let command = pod.command(lab.programs().dataplane()?).arg("cleanup");
        command
            .arg("--bpffs")
            .arg(&bpffs)
            .args(more)
            .run()
            .map_err(anyhow::Error::from)
    };
    for more in [&["--dry-run"][..], &["-v"]] {
        let said = cleanup(more)?;
        ensure!(said.contains("nft:inet dataplane-guard"), "{said}");
    }
    ensure!(!on(pod, |_| Ok(guard::is_there()?))?);
    drop(of_node);
    Ok(())
}

/// The last connection in a listener's queue.
fn accept_last(listener: &TcpListener) -> Result<TcpStream> {
    let mut last = listener.accept()?.0;
    listener.set_nonblocking(true)?;
    while let Ok((accepted, _)) = listener.accept() {
        last = accepted;
    }
    last.set_nonblocking(false)?;
    Ok(last)
}

/// For a socket of IPv6.
fn mapped(to: IpAddr) -> IpAddr {
    match to {
        IpAddr::V4(to) => to.to_ipv6_mapped().into(),
        to @ IpAddr::V6(_) => to,
    }
}
