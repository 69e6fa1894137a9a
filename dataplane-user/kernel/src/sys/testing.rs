//! System calls that only tests, benchmarks and chores need.

use std::{
    io,
    mem::zeroed,
    net::{Ipv4Addr, UdpSocket},
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
};

use aya_obj::generated::{bpf_attach_type, bpf_cmd, bpf_insn, bpf_prog_type};

use super::{Place, attr, bpf_fd, by_id, link_create_tcx_at, net::checked, raw};

/// Opens the types of an object that is loaded, by their id.
pub fn btf_by_id(id: u32) -> io::Result<OwnedFd> {
    by_id(bpf_cmd::BPF_BTF_GET_FD_BY_ID, id)
}

/// Attaches a program to an interface by a link (TCX, Linux 6.6): before all others, or after them.
pub fn link_create_tcx(
    program: BorrowedFd<'_>,
    ifindex: u32,
    attach_type: bpf_attach_type,
    first: bool,
) -> io::Result<OwnedFd> {
    let place = Place {
        before: first,
        relative: None,
        revision: 0,
    };
    link_create_tcx_at(program, ifindex, attach_type, place)
}

/// The types that a program is loaded with.
pub struct Types<'a> {
    /// The object's types.
    pub btf: BorrowedFd<'a>,
    /// The offset and type of each function: `struct bpf_func_info`.
    pub functions: &'a [u8],
    /// Bytes of one of those.
    pub size: usize,
}

/// Loads a program and returns the verifier's statistics; with an error, also the verifier's log. `traced`: of a
/// program for a tracepoint, that one's type in the kernel's BTF.
pub fn prog_verify(
    kind: bpf_prog_type,
    attach_type: bpf_attach_type,
    instructions: &[bpf_insn],
    types: Option<&Types<'_>>,
    traced: u32,
) -> Result<(OwnedFd, String), (io::Error, String)> {
    const STATISTICS: u32 = 4; // BPF_LOG_STATS in include/linux/bpf_verifier.h
    let mut log = vec![0u8; 64 * 1024];
    let mut attr = attr();
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    // SAFETY: instructions, types, licence and log live until the call is over; types and log are as long as we
    // say.
    let loaded = unsafe {
        let load = &mut attr.__bindgen_anon_3;
        load.prog_type = kind as u32;
        load.expected_attach_type = attach_type as u32;
        load.insns = instructions.as_ptr() as u64;
        load.insn_cnt = u32::try_from(instructions.len()).unwrap_or(u32::MAX);
        load.license = c"GPL".as_ptr() as u64;
        load.attach_btf_id = traced;
        if let Some(types) = types {
            load.prog_btf_fd = raw(types.btf);
            load.func_info = types.functions.as_ptr() as u64;
            load.func_info_rec_size = number(types.size);
            load.func_info_cnt = number(types.functions.len() / types.size);
        }
        load.log_level = STATISTICS;
        load.log_buf = log.as_mut_ptr() as u64;
        load.log_size = u32::try_from(log.len()).unwrap_or(u32::MAX);
        bpf_fd(bpf_cmd::BPF_PROG_LOAD, &mut attr)
    };
    let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
    let log = String::from_utf8_lossy(&log[..end]).into_owned();
    match loaded {
        Ok(program) => Ok((program, log)),
        Err(error) => Err((error, log)),
    }
}

/// Sets one of a network device's values (`struct ethtool_value` in `include/uapi/linux/ethtool.h`).
pub fn ethtool_set(interface: &str, command: u32, value: u32) -> io::Result<()> {
    let mut request = [command, value];
    let mut ifreq = ifreq(interface);
    ifreq.ifr_ifru.ifru_data = request.as_mut_ptr().cast();
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: the request lives until the call is over, and has the two words that such a command
    // reads.
    let result = unsafe {
        libc::ioctl(
            socket.as_fd().as_raw_fd(),
            libc::SIOCETHTOOL as _,
            &raw mut ifreq,
        )
    };
    checked(result)
}

/// Makes a network device whose packets, bare of any link-layer header, are read from and written to
/// `tun`, an open `/dev/net/tun`. It lives as long as that is open.
pub fn tun_make(tun: BorrowedFd<'_>, interface: &str) -> io::Result<()> {
    let mut ifreq = ifreq(interface);
    let flags = i16::try_from(libc::IFF_TUN | libc::IFF_NO_PI);
    ifreq.ifr_ifru.ifru_flags = flags.map_err(io::Error::other)?;
    // SAFETY: the structure lives until the call is over.
    checked(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF as _, &raw mut ifreq) })
}

/// Makes a packet socket take a `struct virtio_net_hdr` before each frame.
pub fn packet_vnet_hdr(socket: BorrowedFd<'_>) -> io::Result<()> {
    const PACKET_VNET_HDR: libc::c_int = 15; // include/uapi/linux/if_packet.h
    const SIZE: libc::socklen_t = 4;
    let on: libc::c_int = 1;
    // SAFETY: the value lives until the call is over, and has the size that we say.
    checked(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            PACKET_VNET_HDR,
            (&raw const on).cast(),
            SIZE,
        )
    })
}

/// A request about a network device.
fn ifreq(interface: &str) -> libc::ifreq {
    // SAFETY: plain data, for which zero is a value.
    let mut ifreq: libc::ifreq = unsafe { zeroed() };
    for (to, from) in ifreq.ifr_name.iter_mut().zip(interface.bytes().take(15)) {
        *to = from.cast_signed();
    }
    ifreq
}
