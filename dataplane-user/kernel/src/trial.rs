//! Small programs in raw instructions that test a kernel where our own programs cannot: features that our programs do
//! not need yet, and how our programs run beside another owner's programs. Only for tests; a node does not use them.

use std::{
    fs::{File, OpenOptions},
    io,
    net::SocketAddr,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::Path,
};

use aya_obj::generated::{
    bpf_attach_type::{
        BPF_CGROUP_INET_INGRESS, BPF_CGROUP_INET4_CONNECT, BPF_SK_LOOKUP, BPF_TCX_EGRESS,
        BPF_TCX_INGRESS,
    },
    bpf_map_type::{BPF_MAP_TYPE_ARRAY, BPF_MAP_TYPE_SOCKMAP},
    bpf_prog_type::{
        BPF_PROG_TYPE_CGROUP_SOCK_ADDR, BPF_PROG_TYPE_SCHED_CLS, BPF_PROG_TYPE_SK_LOOKUP,
    },
};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkAttribute, LinkMessage},
};

use dataplane_common::{Addr, Port, Protocol, decide};

use super::{
    Tables,
    error::Error,
    pins::Pins,
    rtnetlink::Netlink,
    sys::{self, Shape},
};

/// Helpers by number (`___BPF_FUNC_MAPPER` in `include/uapi/linux/bpf.h`).
const MAP_LOOKUP_ELEM: i32 = 1;
const SK_RELEASE: i32 = 86;
const SK_ASSIGN: i32 = 124;

/// An instruction as the kernel reads it (`struct bpf_insn`): operation, registers, offset, number.
const fn instruction(operation: u8, to: u8, from: u8, offset: i16, number: i32) -> u64 {
    let registers = if cfg!(target_endian = "little") {
        from << 4 | to
    } else {
        to << 4 | from
    };
    let [o0, o1] = offset.to_ne_bytes();
    let [n0, n1, n2, n3] = number.to_ne_bytes();
    u64::from_ne_bytes([operation, registers, o0, o1, n0, n1, n2, n3])
}

const fn copy(to: u8, from: u8) -> u64 {
    instruction(0xbf, to, from, 0, 0)
}

const fn set(to: u8, number: i32) -> u64 {
    instruction(0xb7, to, 0, 0, number)
}

const fn call(helper: i32) -> u64 {
    instruction(0x85, 0, 0, 0, helper)
}

const EXIT: u64 = instruction(0x95, 0, 0, 0, 0);

/// `r0 = bpf_map_lookup_elem(map, &0u32)`.
fn look_up_first(map: &OwnedFd) -> [u64; 6] {
    [
        instruction(0x62, 10, 0, -4, 0), // *(u32 *)(r10 - 4) = 0
        copy(2, 10),
        instruction(0x07, 2, 0, 0, -4),              // r2 += -4
        instruction(0x18, 1, 1, 0, map.as_raw_fd()), // r1 = map, in two halves
        0,
        call(MAP_LOOKUP_ELEM),
    ]
}

/// Hands every connection to the network namespace, at any port, to a listening socket there, by an `sk_lookup`
/// program. Nothing is rewritten, so `getsockname()` of an accepted connection is the client's original destination.
/// Lasts until the link is dropped.
///
/// # Errors
/// If the kernel refuses.
pub fn steer(netns: BorrowedFd<'_>, listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let shape = Shape {
        kind: BPF_MAP_TYPE_SOCKMAP,
        key_size: 4,
        value_size: 4,
        flags: 0,
    };
    let map = sys::map_create("steer", &shape, 1)?;
    let listener = listener.as_raw_fd().to_ne_bytes();
    sys::map_update(map.as_fd(), &0u32.to_ne_bytes(), &listener, 0)?;
    let mut program = vec![copy(6, 1)];
    program.extend(look_up_first(&map));
    program.extend([
        instruction(0x15, 0, 0, 7, 0), // if it is null, go to the end
        copy(7, 0),
        copy(1, 6),
        copy(2, 7),
        set(3, 0),
        call(SK_ASSIGN),
        copy(1, 7),
        call(SK_RELEASE),
        set(0, 1), // SK_PASS
        EXIT,
    ]);
    let program = sys::prog_load(BPF_PROG_TYPE_SK_LOOKUP, BPF_SK_LOOKUP, &program)?;
    sys::link_create_cgroup(program.as_fd(), netns, BPF_SK_LOOKUP)
}

/// Attaches a program of another owner to `connect()` by IPv4 of a cgroup, which admits every call. Lasts until the link is
/// dropped.
///
/// # Errors
/// If the kernel refuses.
pub fn admit_connects(cgroup: &Path) -> io::Result<OwnedFd> {
    let (kind, hook) = (BPF_PROG_TYPE_CGROUP_SOCK_ADDR, BPF_CGROUP_INET4_CONNECT);
    let program = sys::prog_load(kind, hook, &[set(0, 1), EXIT])?;
    sys::link_create_cgroup(program.as_fd(), File::open(cgroup)?.as_fd(), hook)
}

/// A program of another owner on an interface: counts packets, and passes them to the next program.
#[derive(Debug)]
pub struct Bystander {
    program: OwnedFd,
    count: OwnedFd,
}

impl Bystander {
    /// Loads it, and attaches it nowhere.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn load() -> io::Result<Self> {
        let shape = Shape {
            kind: BPF_MAP_TYPE_ARRAY,
            key_size: 4,
            value_size: 8,
            flags: 0,
        };
        let count = sys::map_create("bystander", &shape, 1)?;
        let mut program = look_up_first(&count).to_vec();
        program.extend([
            instruction(0x15, 0, 0, 2, 0), // if it is null, go to the end
            set(1, 1),
            instruction(0xdb, 0, 1, 0, 0), // lock *(u64 *)r0 += r1
            set(0, -1),                    // TCX_NEXT, and TC_ACT_UNSPEC
            EXIT,
        ]);
        let program = sys::prog_load(BPF_PROG_TYPE_SCHED_CLS, BPF_CGROUP_INET_INGRESS, &program)?;
        Ok(Self { program, count })
    }

    /// Gives it a name in a bpffs, by which `tc filter add … bpf object-pinned` finds it.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        sys::obj_pin(self.program.as_fd(), path)
    }

    /// Attaches the program to incoming packets of an interface in this thread's network namespace, by a TCX link:
    /// before all existing programs, or after them. Lasts until the link is dropped.
    ///
    /// # Errors
    /// If the kernel refuses. Kernels before Linux 6.6 have no TCX.
    pub fn attach_tcx(&self, ifindex: u32, first: bool) -> io::Result<OwnedFd> {
        sys::link_create_tcx(self.program.as_fd(), ifindex, BPF_TCX_INGRESS, first)
    }

    /// The kernel's number of it.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn id(&self) -> io::Result<u32> {
        Ok(sys::prog_info(self.program.as_fd())?.id)
    }

    /// How many packets it has seen.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn seen(&self) -> io::Result<u64> {
        let mut count = [0; 8];
        sys::map_lookup(self.count.as_fd(), &0u32.to_ne_bytes(), &mut count)?;
        Ok(u64::from_ne_bytes(count))
    }
}

/// A program of another owner that adds bits to the mark of incoming packets of an interface, before all existing
/// programs, and passes the packets to the next program. Lasts until the link is dropped.
///
/// # Errors
/// If the kernel refuses. Kernels before Linux 6.6 have no TCX.
pub fn mark(ifindex: u32, bits: i32) -> io::Result<OwnedFd> {
    // `mark` of `struct __sk_buff`.
    const MARK: i16 = 8;
    let program = [
        instruction(0x61, 2, 1, MARK, 0), // r2 = *(u32 *)(r1 + MARK)
        instruction(0x47, 2, 0, 0, bits), // r2 |= bits
        instruction(0x63, 1, 2, MARK, 0), // *(u32 *)(r1 + MARK) = r2
        set(0, -1),                       // TCX_NEXT
        EXIT,
    ];
    let program = sys::prog_load(BPF_PROG_TYPE_SCHED_CLS, BPF_CGROUP_INET_INGRESS, &program)?;
    sys::link_create_tcx(program.as_fd(), ifindex, BPF_TCX_INGRESS, true)
}

/// A program of another owner that drops the outgoing packets of an interface. Lasts until the link is dropped.
///
/// # Errors
/// If the kernel refuses. Kernels before Linux 6.6 have no TCX.
pub fn drop_at_egress(ifindex: u32) -> io::Result<OwnedFd> {
    let program = [set(0, 2), EXIT]; // TCX_DROP
    let program = sys::prog_load(BPF_PROG_TYPE_SCHED_CLS, BPF_CGROUP_INET_INGRESS, &program)?;
    sys::link_create_tcx(program.as_fd(), ifindex, BPF_TCX_EGRESS, true)
}

/// Returns the ids of the programs that TCX runs on incoming packets of an interface, in their order.
///
/// # Errors
/// If the kernel refuses. Kernels before Linux 6.6 have no TCX.
pub fn tcx_ingress(ifindex: u32) -> io::Result<Vec<u32>> {
    sys::tcx_programs(ifindex, BPF_TCX_INGRESS)
}

/// The work that a network device may do for the stack, or leave to it (`ethtool -K`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// Checksums of sent packets.
    Checksum,
    /// Segmentation of sent packets by the device. Without it, the stack segments packets before the device gets them.
    Segments,
    /// Putting segments together that arrive.
    Receive,
}

/// Makes a tun device in this thread's network namespace: reads of the file return packets that left by the device, and
/// written packets arrive there. Until the file is closed.
///
/// # Errors
/// The kernel's refusal, such as that it has no tun devices.
pub fn tun(interface: &str) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let tun = options
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    sys::tun_make(tun.as_fd(), interface)?;
    Ok(tun)
}

/// Says whether a device of this thread's network namespace does something for the stack.
///
/// # Errors
/// If the kernel refuses.
pub fn set_offload(interface: &str, what: Offload, on: bool) -> io::Result<()> {
    // `include/uapi/linux/ethtool.h`.
    const SET_CHECKSUM: u32 = 0x17;
    const SET_TSO: u32 = 0x1f;
    const SET_GSO: u32 = 0x24;
    const SET_GRO: u32 = 0x2c;
    let commands: &[u32] = match what {
        Offload::Checksum => &[SET_CHECKSUM],
        Offload::Segments => &[SET_TSO, SET_GSO],
        Offload::Receive => &[SET_GRO],
    };
    for command in commands {
        sys::ethtool_set(interface, *command, on.into())?;
    }
    Ok(())
}

/// Makes a packet socket take a header before each frame that says what is left to the device (`struct virtio_net_hdr` in
/// `include/uapi/linux/virtio_net.h`).
///
/// # Errors
/// If the kernel refuses.
pub fn take_device_headers(socket: BorrowedFd<'_>) -> io::Result<()> {
    sys::packet_vnet_hdr(socket)
}

/// Allows packets of this many bytes, still to be segmented, on a device of this thread's network namespace: for both
/// families, for sending and for merging received packets (`IFLA_GSO_MAX_SIZE` and so on). Above 64 KiB this is BIG
/// TCP.
///
/// # Errors
/// If the kernel refuses.
pub fn set_big(interface: &str, size: u32) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = nix::net::if_::if_nametoindex(interface)?;
    link.attributes = vec![
        LinkAttribute::GsoMaxSize(size),
        LinkAttribute::GroMaxSize(size),
        LinkAttribute::GsoIpv4MaxSize(size),
        LinkAttribute::GroIpv4MaxSize(size),
    ];
    Netlink::open()?.request(&RouteNetlinkMessage::SetLink(link), 0)
}

/// The pools of pairs of frontends, which take each other's endpoints again and again: as fast as no agent could write them.
pub struct Flips {
    tables: Tables,
    pools: Vec<[u32; 2]>,
}

impl Flips {
    /// Opens the pinned tables. `pairs`: addresses and ports of services.
    ///
    /// # Errors
    /// If the tables cannot be opened.
    pub fn open(bpffs: &Path, pairs: &[([SocketAddr; 2], Protocol)]) -> Result<Self, Error> {
        let tables = Tables::open_pins(&Pins::new(bpffs), true)?;
        let pool = |to: &SocketAddr, protocol| {
            let (addr, port) = (Addr::from(to.ip()), Port::new(to.port()));
            decide::find_frontend(&tables, addr, port, protocol, false).pool()
        };
        let pools = pairs.iter();
        let pools = pools.map(|(pair, protocol)| pair.each_ref().map(|to| pool(to, *protocol)));
        let pools = pools.collect();
        Ok(Self { tables, pools })
    }

    /// Exchanges the endpoints of the two pools of each pair.
    ///
    /// # Errors
    /// If a service is not in the tables.
    pub fn flip(&mut self) -> Result<(), Error> {
        for pair in &self.pools {
            let [Some(first), Some(second)] =
                pair.map(|pool| decide::Tables::pool(&self.tables, pool))
            else {
                continue;
            };
            self.tables.set_pool(pair[0], &second, false)?;
            self.tables.set_pool(pair[1], &first, false)?;
        }
        Ok(())
    }
}
