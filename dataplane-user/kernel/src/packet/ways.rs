//! The ways of packets, by the packet path's own code: `packet_way` is attached nowhere and runs only here
//! (`BPF_PROG_TEST_RUN`), on packets that no interface sends.

use std::{
    fs::OpenOptions,
    io,
    net::{IpAddr, SocketAddr},
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::{Path, PathBuf},
};

use aya::{EbpfLoader, programs::Program};
use dataplane_common::{Protocol, first::Way};
use zerocopy::FromBytes as _;

use crate::{
    error::{Doing, Error},
    object,
    pins::{MAPS, Pins},
    programs::{load_error, patiently},
    sys::{self, SkbContext},
};

/// The program's name in the object.
const PROGRAM: &str = "packet_way";
/// Lengths of headers, in bytes.
const ETHERNET: usize = 14;
const IPV4: usize = 20;
const IPV6: usize = 40;
const TCP: usize = 20;
/// Maximum length of a packet that the kernel runs a program on: a page, with room for its own data
/// (`bpf_test_init` in `net/bpf/test_run.c`).
const MAX: usize = 3000;

/// The program that finds the ways of packets, with the tables of a node's packet path.
#[derive(Debug)]
pub struct PacketWays(OwnedFd);

impl PacketWays {
    /// Loads the program. Changes nothing on the node.
    ///
    /// # Errors
    /// If the packet path has no tables, or the kernel refuses.
    pub fn open(bpffs: &Path) -> Result<Self, Error> {
        let pins = Pins::new(bpffs);
        let mut loader = EbpfLoader::new();
        let mut opened = Vec::new();
        for map in &MAPS {
            // The loader makes and pins a table whose pin it does not find, so it gets a path that stays valid while an
            // agent removes its pins.
            let path = pins.map(map.name);
            let pin = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_PATH | libc::O_CLOEXEC)
                .open(&path)
                .doing(|| format!("cannot open {}", path.display()))?;
            let stays = PathBuf::from(format!("/proc/self/fd/{}", pin.as_raw_fd()));
            loader.map_pin_path(map.name, stays);
            opened.push(pin);
        }
        let mut ebpf = loader.load(object::programs()?).map_err(Box::new)?;
        let Some(Program::SchedClassifier(program)) = ebpf.program_mut(PROGRAM) else {
            return Err(Error::Io {
                what: format!("the object has no program {PROGRAM}"),
                source: io::ErrorKind::NotFound.into(),
            });
        };
        patiently(|| program.load()).map_err(|source| load_error(PROGRAM, source))?;
        let fd = program.fd().map_err(|source| load_error(PROGRAM, source))?;
        let fd = fd.as_fd().try_clone_to_owned();
        Ok(Self(fd.doing(|| format!("cannot keep program {PROGRAM}"))?))
    }

    /// Returns the way of a TCP SYN or of a datagram that arrives at an interface of this thread's network namespace.
    /// `length`: of the packet in bytes, from the IP header on; a shorter one than the headers counts as the headers'.
    /// `None`: to the programs, it is no packet of TCP or UDP.
    ///
    /// # Errors
    /// If the two addresses are of different families, the packet is longer than 3 000 bytes, or the kernel refuses.
    pub fn of(
        &self,
        ifindex: u32,
        source: SocketAddr,
        destination: SocketAddr,
        protocol: Protocol,
        length: usize,
    ) -> io::Result<Option<Way>> {
        let frame = frame(source, destination, protocol, length)?;
        let mut out = vec![0; frame.len()];
        let context = SkbContext::new(ifindex, 0);
        let (verdict, ..) = sys::prog_test_run_packet(self.0.as_fd(), &context, &frame, &mut out)?;
        // `TCX_NEXT`: the way is in the frame.
        let is_found = verdict.cast_signed() == -1;
        let way = Way::read_from_prefix(&out).ok().filter(|_| is_found);
        Ok(way.map(|(way, _)| way))
    }
}

/// Returns an Ethernet frame with the packet.
fn frame(
    source: SocketAddr,
    destination: SocketAddr,
    protocol: Protocol,
    length: usize,
) -> io::Result<Vec<u8>> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what);
    let ip = if source.is_ipv4() { IPV4 } else { IPV6 };
    let length = length.max(ip + TCP);
    if length > MAX {
        return Err(invalid(
            "the kernel runs no program on a packet of more than 3000 bytes",
        ));
    }
    let word = |number: usize| u16::try_from(number).unwrap_or(u16::MAX).to_be_bytes();
    let mut frame = vec![0; ETHERNET];
    match (source.ip(), destination.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            frame[12..].copy_from_slice(&[0x08, 0x00]);
            frame.extend([0x45, 0]);
            frame.extend(word(length));
            // Not to be fragmented, as the packets of almost all TCP connections.
            frame.extend([0, 0, 0x40, 0, 64, protocol.number(), 0, 0]);
            frame.extend(from.octets());
            frame.extend(to.octets());
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            frame[12..].copy_from_slice(&[0x86, 0xdd]);
            frame.extend([0x60, 0, 0, 0]);
            frame.extend(word(length - IPV6));
            frame.extend([protocol.number(), 64]);
            frame.extend(from.octets());
            frame.extend(to.octets());
        }
        _ => return Err(invalid("a packet's addresses are of one family")),
    }
    frame.extend(source.port().to_be_bytes());
    frame.extend(destination.port().to_be_bytes());
    if protocol == Protocol::TCP {
        // Sequence numbers, five words of header, SYN.
        frame.extend([0; 8]);
        frame.extend([0x50, 0x02, 0xff, 0xff]);
    } else {
        frame.extend(word(length - ip));
    }
    frame.resize(ETHERNET + length, 0);
    Ok(frame)
}
