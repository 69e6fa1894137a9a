//! Sockets of this process on the hosts of a lab, and frames that no socket would send.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_proof::wire::{Packet, fold, octets, pseudo};
use dataplane_tests::{Host, patience};
use kernel::trial::take_device_headers;
use nix::{
    ifaddrs::getifaddrs,
    sys::socket::{
        AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, recv, sendto,
        setsockopt, socket, sockopt,
    },
};

use crate::features::on;

/// How long an answer may take, on a busy machine too.
pub fn enough() -> Duration {
    patience(Duration::from_secs(10))
}

/// A UDP socket on a host, at one of its addresses.
pub fn udp(host: &Host, at: impl Into<SocketAddr>) -> Result<UdpSocket> {
    let at = at.into();
    let socket = on(host, |_| {
        UdpSocket::bind(at).with_context(|| format!("bind to {at}"))
    })?;
    socket.set_read_timeout(Some(enough()))?;
    Ok(socket)
}

/// A TCP connection from a host.
pub fn tcp(host: &Host, to: SocketAddr) -> Result<TcpStream> {
    let stream = on(host, |_| {
        TcpStream::connect_timeout(&to, enough()).with_context(|| format!("connect to {to}"))
    })?;
    stream.set_read_timeout(Some(enough()))?;
    stream.set_write_timeout(Some(enough()))?;
    Ok(stream)
}

/// Bytes that each call repeats, and that differ from place to place.
pub fn bytes(length: usize, salt: u8) -> Vec<u8> {
    let byte = |n: u32| n.wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ salt;
    (0..).map(byte).take(length).collect()
}

/// Sends a datagram to an endpoint and expects it back, behind the endpoint's greeting. Returns the endpoint's name.
pub fn ask(socket: &UdpSocket, to: SocketAddr, data: &[u8]) -> Result<String> {
    socket.send_to(data, to).context("send")?;
    answered(socket, to, data)
}

/// Waits for the answer to a datagram.
pub fn answered(socket: &UdpSocket, to: SocketAddr, data: &[u8]) -> Result<String> {
    let mut answer = vec![0; 66_000];
    let (length, from) = socket
        .recv_from(&mut answer)
        .with_context(|| format!("no answer to {} bytes from {to}", data.len()))?;
    ensure!(from == to, "{from} answered for {to}");
    let answer = &answer[..length];
    let greeting = answer.len().checked_sub(data.len()).context("too short")?;
    ensure!(
        &answer[greeting..] == data,
        "{} bytes came back otherwise",
        data.len()
    );
    let who = String::from_utf8_lossy(&answer[..greeting]);
    Ok(who.split(' ').next().unwrap_or_default().to_owned())
}

/// Sends these bytes over a connection to an endpoint that echoes, and expects them all back. Returns the endpoint's
/// name.
pub fn transfer(stream: &TcpStream, data: &[u8]) -> Result<String> {
    use io::{BufRead as _, BufReader, Read as _, Write as _};
    let mut reader = BufReader::new(stream);
    let mut greeting = String::new();
    reader.read_line(&mut greeting).context("a greeting")?;
    thread::scope(|scope| {
        let writer = scope.spawn(move || {
            let mut stream = stream;
            stream.write_all(data)
        });
        let mut back = vec![0; data.len()];
        let read = reader.read_exact(&mut back);
        let wrote = writer.join().map_err(|_| io::Error::other("a panic"));
        read.with_context(|| format!("{} bytes back", data.len()))?;
        wrote?.context("write")?;
        ensure!(back == data, "{} bytes came back otherwise", data.len());
        Ok(())
    })?;
    Ok(greeting.split(' ').next().unwrap_or_default().to_owned())
}

/// The link-layer address of a host's interface.
pub fn link(host: &Host, interface: &str) -> Result<[u8; 6]> {
    on(host, |_| {
        let link = link_addr(interface)?;
        link.addr().context("an address")
    })
}

fn link_addr(interface: &str) -> Result<LinkAddr> {
    getifaddrs()?
        .filter(|found| found.interface_name == interface)
        .find_map(|found| found.address?.as_link_addr().copied())
        .with_context(|| format!("no interface {interface}"))
}

/// Sees every frame that arrives at a host.
pub fn tap(host: &Host) -> Result<OwnedFd> {
    on(host, |_| {
        let flags = SockFlag::SOCK_NONBLOCK;
        let all = SockProtocol::EthAll;
        let tap = socket(AddressFamily::Packet, SockType::Raw, flags, all)?;
        setsockopt(&tap, sockopt::RcvBuf, &(1 << 20))?;
        Ok(tap)
    })
}

/// Returns the frames that have arrived at a [`tap`] since the last call.
pub fn arrived(tap: &OwnedFd) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let mut frame = [0; 2048];
    while let Ok(length) = recv(tap.as_raw_fd(), &mut frame, MsgFlags::empty()) {
        frames.push(frame[..length].to_vec());
    }
    frames
}

/// Sends frames as they are.
pub fn inject(host: &Host, interface: &str, frames: &[Vec<u8>]) -> Result<()> {
    inject_as(host, interface, frames, false)
}

/// Sends a datagram of UDP whose checksum is left to the device.
pub fn inject_partial(host: &Host, interface: &str, packet: &Packet) -> Result<()> {
    let (mut frame, length) = (packet.frame(), packet.payload().len());
    let start = frame.len() - length;
    let [src, dst] = [packet.src, packet.dst].map(octets);
    let sum = fold(pseudo(&src, &dst, packet.protocol(), length));
    frame[start + 6..start + 8].copy_from_slice(&sum.to_be_bytes());
    let [a, b] = u16::try_from(start)?.to_ne_bytes();
    let [c, d] = 6_u16.to_ne_bytes();
    // `VIRTIO_NET_HDR_F_NEEDS_CSUM`, where the sum begins, and where it goes.
    frame.splice(0..0, [1, 0, 0, 0, 0, 0, a, b, c, d]);
    inject_as(host, interface, &[frame], true)
}

/// `headed`: see [`take_device_headers`].
fn inject_as(host: &Host, interface: &str, frames: &[Vec<u8>], headed: bool) -> Result<()> {
    on(host, |_| {
        let link = link_addr(interface)?;
        let socket = socket(
            AddressFamily::Packet,
            SockType::Raw,
            SockFlag::empty(),
            None,
        )?;
        if headed {
            take_device_headers(socket.as_fd())?;
        }
        for frame in frames {
            sendto(socket.as_raw_fd(), frame, &link, MsgFlags::empty())
                .with_context(|| format!("send a frame of {} bytes", frame.len()))?;
        }
        Ok(())
    })
}

/// An address of a host, of a family.
pub fn address(host: &Host, v4: bool) -> IpAddr {
    host.addresses()[usize::from(!v4)]
}
