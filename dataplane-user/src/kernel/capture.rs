//! Mesh capture: its tables, and its program in workloads' network namespaces.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya::Ebpf;
use dataplane_common::{
    Addr, Port,
    capture::{
        CaptureConfig, Enrolled, FROM_CLIENT, ListenerKey, Local, MESH_CGROUPS, MESH_GUARD,
        MESH_NAMESPACES, MESH_PACKETS, MESH_PORT, RangeKey, RuleKey, Traffic, TrafficKey,
    },
};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    nsid::{NsidAttribute, NsidMessage},
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType},
    rule::{RuleAction, RuleAttribute, RuleMessage},
};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use zerocopy::{FromBytes, IntoBytes};

use super::{
    answers::{self, Mark},
    error::{Doing, Error},
    map::{Hash, Mapped, Plain},
    pins::{self, Pins, spec},
    programs::{self, INBOUND},
    rtnetlink::Netlink,
    sys, sysctl,
    tables::Tables,
    tc::{self, CaptureProgram, Hook},
};
use crate::plan::Captured;

/// What all captured workloads have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureOptions {
    /// The proxy's port for outbound connections, at loopback in the workload's namespace.
    pub outbound: u16,
    /// The proxy's port for inbound connections.
    pub inbound: u16,
    /// The mark of the agent's proxy's sockets.
    pub mark: u32,
    /// Whether the proxy is not the agent's.
    pub foreign: bool,
    /// Whether connections from namespaces are refused that the agent has not looked at.
    pub guard: bool,
}

/// The routing table by which answers to a client's address come back to the proxy.
pub(super) const TABLE: u32 = 15_006;
/// The backlog of the proxy's listeners; the kernel cuts it to `net.core.somaxconn`.
const BACKLOG: i32 = 65_535;

/// The tables of capture, and the program for namespaces; nothing of it if there is no mesh.
#[derive(Debug)]
pub struct Capture {
    tables: CaptureTables,
    /// What they hold.
    held: Captured,
    options: Option<CaptureOptions>,
    program: Option<OwnedFd>,
    /// For connections to a proxy.
    events: Option<OwnedFd>,
    /// For the interfaces of workloads that are captured by their packets.
    packets: Option<CaptureProgram>,
}

/// The tables, for reading.
#[derive(Debug)]
pub struct CaptureTables {
    config: Mapped<CaptureConfig>,
    namespaces: Hash<u64, Enrolled>,
    cgroups: Hash<u64, Enrolled>,
    locals: Hash<Addr, Local>,
    rules: Hash<RuleKey, u32>,
    ranges: Hash<RangeKey, u32>,
    known: Hash<Addr, u32>,
    listeners: OwnedFd,
    traffic: Hash<TrafficKey, Traffic>,
}

/// A network namespace of this machine.
#[derive(Debug)]
pub struct Namespace {
    /// Keeps it.
    pub file: OwnedFd,
    /// Its number for programs (`SO_NETNS_COOKIE`).
    pub cookie: u64,
    /// Its addresses, but for loopback and link-local ones.
    pub addresses: Vec<std::net::IpAddr>,
    /// Its interfaces, by name.
    pub interfaces: BTreeMap<String, u32>,
}

/// The proxy's listening sockets in one namespace.
#[derive(Debug)]
pub struct Listeners {
    /// For what its workload connects to.
    pub outbound: Vec<TcpListener>,
    /// For what connects to it.
    pub inbound: Vec<TcpListener>,
}

impl CaptureTables {
    /// Opens the pinned tables for reading.
    ///
    /// # Errors
    /// If they are not there, or not ours.
    pub fn open(bpffs: &Path) -> Result<Self, Error> {
        Self::open_pins(&Pins::new(bpffs), false)
    }

    fn open_pins(pins: &Pins, writable: bool) -> Result<Self, Error> {
        let open = |name| -> Result<(OwnedFd, u32), Error> {
            let (fd, info) = pins.open_map(spec(name))?.ok_or_else(|| Error::Io {
                what: format!("{} is not there", pins.map(name).display()),
                source: io::ErrorKind::NotFound.into(),
            })?;
            Ok((fd, info.max_entries))
        };
        Ok(Self {
            config: Mapped::map(open("CAPTURE")?.0, 1, writable)
                .doing(|| "cannot map table CAPTURE".to_owned())?,
            namespaces: hash(open("NAMESPACES")?),
            cgroups: hash(open("CGROUPS")?),
            locals: hash(open("LOCALS")?),
            rules: hash(open("RULES")?),
            ranges: hash(open("RANGES")?),
            known: hash(open("KNOWN")?),
            listeners: open("LISTENERS")?.0,
            traffic: hash(open("TRAFFIC")?),
        })
    }

    /// What they hold.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn contents(&self) -> Result<Captured, Error> {
        Ok(Captured {
            namespaces: all("NAMESPACES", &self.namespaces)?,
            cgroups: all("CGROUPS", &self.cgroups)?,
            locals: all("LOCALS", &self.locals)?,
            rules: all("RULES", &self.rules)?,
            ranges: all("RANGES", &self.ranges)?,
            known: all("KNOWN", &self.known)?,
        })
    }

    /// What all captured workloads have in common.
    pub fn config(&self) -> CaptureConfig {
        self.config.get(0).unwrap_or_default()
    }

    /// What connections that went direct have come to.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn traffic(&self) -> Result<Vec<(TrafficKey, Traffic)>, Error> {
        self.traffic
            .entries()
            .doing(|| "cannot read table TRAFFIC".to_owned())
    }

    /// For whom there is somebody who takes connections: of a family, to a network namespace or from
    /// a workload that is captured by its packets.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn listeners(&self) -> Result<BTreeSet<ListenerKey>, Error> {
        // Sockets that were closed are gone by themselves. What is in it the kernel does not tell,
        // but what there is.
        let mut found = BTreeSet::new();
        let mut before: Option<ListenerKey> = None;
        let mut bytes = [0; size_of::<ListenerKey>()];
        loop {
            let from = before.as_ref().map(IntoBytes::as_bytes);
            let more = sys::map_next_key(self.listeners.as_fd(), from, &mut bytes)
                .doing(|| "cannot read table LISTENERS".to_owned())?;
            let Some(key) = more
                .then(|| ListenerKey::read_from_bytes(&bytes).ok())
                .flatten()
            else {
                return Ok(found);
            };
            found.insert(key);
            before = Some(key);
        }
    }
}

/// The cgroup of an agent of another layout, as its CAPTURE tells; 0 if there is none.
fn cgroup_of_another_layout(pins: &Pins) -> u64 {
    let read = |layout: &PathBuf| {
        let map = sys::obj_get(&layout.join("maps").join("CAPTURE")).ok()?;
        let info = sys::map_info(map.as_fd()).ok()?;
        let mut value = vec![0; info.value_size as usize];
        let there = sys::map_lookup(map.as_fd(), 0u32.as_bytes(), &mut value).ok()?;
        let (cgroup, _) = u64::read_from_prefix(&value).ok()?;
        there.then_some(cgroup)
    };
    let layouts = pins.other_layouts();
    layouts.iter().rev().find_map(read).unwrap_or_default()
}

fn hash<K: Plain, V: Plain>((fd, entries): (OwnedFd, u32)) -> Hash<K, V> {
    Hash::from_fd(fd, entries)
}

/// Everything in a table, key by key: tries know no batches everywhere.
fn all<K: Plain + Ord, V: Plain>(name: &str, table: &Hash<K, V>) -> Result<BTreeMap<K, V>, Error> {
    let doing = || format!("cannot read table {name}");
    let mut entries = BTreeMap::new();
    let mut before: Option<K> = None;
    let mut bytes = vec![0; size_of::<K>()];
    loop {
        let from = before.as_ref().map(IntoBytes::as_bytes);
        let more = sys::map_next_key(table.fd().as_fd(), from, &mut bytes).doing(doing)?;
        let Some(key) = more.then(|| K::read_from_bytes(&bytes).ok()).flatten() else {
            return Ok(entries);
        };
        if let Some(value) = table.get(&key).doing(doing)? {
            entries.insert(key, value);
        }
        before = Some(key);
    }
}

impl Capture {
    /// Opens the tables, and takes what is left of an earlier agent: what it captured goes on being
    /// captured until [`Capture::apply`] says otherwise. Without `options`, nothing is captured from
    /// here on.
    ///
    /// Nothing can be attached before [`Capture::set_programs`].
    pub(super) fn open(
        pins: &Pins,
        tables: &Tables,
        options: Option<CaptureOptions>,
        agent_cgroup: u64,
    ) -> Result<Self, Error> {
        let own = CaptureTables::open_pins(pins, true)?;
        let mut capture = Self {
            held: own.contents()?,
            tables: own,
            options,
            program: None,
            events: None,
            packets: None,
        };
        if let Some(options) = options {
            let earlier = capture.tables.config();
            let before = match earlier.agent_cgroup {
                0 => cgroup_of_another_layout(pins),
                own if own == agent_cgroup => earlier.before_cgroup,
                other => other,
            };
            let cgroups = [agent_cgroup, before];
            capture.set_config(options, cgroups, earlier.levels, &capture.held);
            // Whose they are, only the earlier agent knew.
            for (key, _) in capture.tables.traffic()? {
                let _ = capture.tables.traffic.remove(&key);
            }
        } else {
            tables.set_mesh(0);
            capture.write(&Captured::default())?;
            // What cannot be detached is listed by `cleanup`; without tables it does nothing.
            let _ = tc::keep_no_capture(pins)?;
            let mark = capture.tables.config().mark;
            if mark != 0 {
                // Where there is no such rule, there is nothing to remove.
                let _ = route_answers_no_more(mark | FROM_CLIENT);
            }
            for (path, _) in links(pins) {
                detach(&path)?;
            }
        }
        Ok(capture)
    }

    /// Takes the loaded programs, if something is captured.
    pub(super) fn set_programs(&mut self, ebpf: &Ebpf, hook: Option<Hook>) -> Result<(), Error> {
        if self.options.is_some() {
            self.program = Some(programs::inbound_program(ebpf)?);
            self.events = Some(programs::events_program(ebpf)?);
            let on_interfaces = programs::packet_program(ebpf, tc::Direction::Capture)?;
            self.packets = Some(CaptureProgram::new(on_interfaces, hook)?);
        }
        Ok(())
    }

    /// The cgroups are this agent's and the one's before it; `captured`: what the tables hold, or are about to.
    fn set_config(
        &self,
        options: CaptureOptions,
        [agent_cgroup, before_cgroup]: [u64; 2],
        levels: u32,
        captured: &Captured,
    ) {
        let mut flags = 0;
        if options.foreign {
            flags |= CaptureConfig::FOREIGN;
        }
        if captured.locals.values().any(Local::is_measured) {
            flags |= CaptureConfig::ARRIVALS;
        }
        self.tables.config.set(
            0,
            CaptureConfig {
                agent_cgroup,
                before_cgroup,
                mark: options.mark,
                levels,
                outbound: Port::new(options.outbound),
                inbound: Port::new(options.inbound),
                flags,
            },
        );
    }

    /// What the tables hold.
    pub fn held(&self) -> &Captured {
        &self.held
    }

    /// The tables, for reading.
    pub fn tables(&self) -> &CaptureTables {
        &self.tables
    }

    /// Has a program be told of connections to a proxy if `wanted` has one, or anybody may be one: before the first of
    /// them is made.
    pub(super) fn attach_events(
        &self,
        pins: &Pins,
        cgroup: &Path,
        wanted: &Captured,
    ) -> Result<(), Error> {
        let (Some(options), Some(program)) = (self.options, &self.events) else {
            return Ok(());
        };
        if options.foreign || has_proxy(wanted) {
            programs::attach_events(program.as_fd(), pins, cgroup)?;
        }
        Ok(())
    }

    /// Brings the tables in line with `wanted`: new rules first, then the workloads that refer to
    /// them, each in one write, then what nobody refers to any more goes. `levels`: at which levels
    /// of the hierarchy there are cgroups. Answers what the programs are then to be told of it
    /// ([`Tables::set_mesh`]).
    pub(super) fn apply(&mut self, wanted: &Captured, levels: u32) -> Result<Option<u64>, Error> {
        let Some(options) = self.options else {
            return Ok(None);
        };
        let config = self.tables.config();
        let cgroups = [config.agent_cgroup, config.before_cgroup];
        // Levels only ever say where to look: more of them before, fewer after.
        let before = config.levels | levels;
        self.set_config(options, cgroups, before, wanted);
        self.write(wanted)?;
        self.set_config(options, cgroups, levels, wanted);
        let mut mesh = 0;
        if !wanted.namespaces.is_empty() {
            mesh |= MESH_NAMESPACES;
        }
        if !wanted.cgroups.is_empty() {
            mesh |= MESH_CGROUPS;
        }
        if options.guard {
            mesh |= MESH_GUARD | MESH_NAMESPACES;
        }
        if wanted.locals.values().any(Local::is_by_packets) {
            mesh |= MESH_PACKETS;
        }
        if mesh != 0 {
            mesh |= u64::from(Port::new(options.outbound).be()) << MESH_PORT;
        }
        Ok(Some(mesh))
    }

    fn write(&mut self, wanted: &Captured) -> Result<(), Error> {
        let held = &mut self.held;
        let tables = &self.tables;
        add("RULES", &tables.rules, &mut held.rules, &wanted.rules)?;
        add("RANGES", &tables.ranges, &mut held.ranges, &wanted.ranges)?;
        add("KNOWN", &tables.known, &mut held.known, &wanted.known)?;
        add("LOCALS", &tables.locals, &mut held.locals, &wanted.locals)?;
        let namespaces = &mut held.namespaces;
        add(
            "NAMESPACES",
            &tables.namespaces,
            namespaces,
            &wanted.namespaces,
        )?;
        add(
            "CGROUPS",
            &tables.cgroups,
            &mut held.cgroups,
            &wanted.cgroups,
        )?;
        remove(
            "NAMESPACES",
            &tables.namespaces,
            namespaces,
            &wanted.namespaces,
        )?;
        remove(
            "CGROUPS",
            &tables.cgroups,
            &mut held.cgroups,
            &wanted.cgroups,
        )?;
        remove("LOCALS", &tables.locals, &mut held.locals, &wanted.locals)?;
        remove("KNOWN", &tables.known, &mut held.known, &wanted.known)?;
        remove("RULES", &tables.rules, &mut held.rules, &wanted.rules)?;
        remove("RANGES", &tables.ranges, &mut held.ranges, &wanted.ranges)
    }

    /// Has connections of workloads that have gone counted no more: there is room for others.
    pub fn forget_traffic(&self, keys: &[TrafficKey]) {
        for key in keys {
            // If it is not there, it is as it should be.
            let _ = self.tables.traffic.remove(key);
        }
    }

    /// Has inbound connections to a namespace go by our program: attached, or swapped in place.
    pub(super) fn attach(&self, pins: &Pins, namespace: &Namespace) -> Result<(), Error> {
        let Some(program) = &self.program else {
            return Ok(());
        };
        let path = pin(pins, namespace.cookie);
        let doing = || format!("cannot attach program {INBOUND} to a network namespace");
        if let Ok(link) = sys::obj_get(&path) {
            let there = sys::link_info(link.as_fd()).doing(doing)?;
            if there.is_attached() {
                return sys::link_update(link.as_fd(), program.as_fd()).doing(doing);
            }
            fs::remove_file(&path).doing(|| format!("cannot remove {}", path.display()))?;
        }
        let link = sys::link_create_netns(program.as_fd(), namespace.file.as_fd()).doing(doing)?;
        sys::obj_pin(link.as_fd(), &path).doing(|| format!("cannot pin {}", path.display()))
    }

    /// Detaches our program from all namespaces but those of `wanted`.
    pub(super) fn detach_others(pins: &Pins, wanted: impl Fn(u64) -> bool) -> Result<(), Error> {
        for (path, cookie) in links(pins) {
            if !wanted(cookie) {
                detach(&path)?;
            }
        }
        Ok(())
    }

    /// Has the packets of captured workloads on these interfaces go by our program, and on no others.
    /// Answers where that is not possible, and why.
    ///
    /// # Errors
    /// If the kernel cannot be asked what there is.
    pub(super) fn attach_interfaces(
        &self,
        pins: &Pins,
        wanted: &BTreeSet<u32>,
    ) -> Result<BTreeMap<u32, String>, Error> {
        match &self.packets {
            Some(program) => program.attach(pins, wanted),
            None => Ok(BTreeMap::new()),
        }
    }

    /// Says where connections go: inbound ones of a namespace, or those of a workload that is captured
    /// by its packets.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn listen(&self, key: ListenerKey, socket: BorrowedFd<'_>) -> Result<(), Error> {
        sys::map_update(
            self.tables.listeners.as_fd(),
            key.as_bytes(),
            &socket.as_raw_fd().to_ne_bytes(),
            0,
        )
        .doing(|| "cannot hand a listening socket to the kernel".to_owned())
    }

    /// The inverse of [`Capture::listen`].
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn listen_no_more(&self, key: ListenerKey) -> Result<(), Error> {
        sys::map_delete(self.tables.listeners.as_fd(), key.as_bytes())
            .doing(|| "cannot take a listening socket back from the kernel".to_owned())
            .map(|_| ())
    }
}

fn add<K: Plain + Ord, V: Plain + PartialEq>(
    name: &str,
    table: &Hash<K, V>,
    held: &mut BTreeMap<K, V>,
    wanted: &BTreeMap<K, V>,
) -> Result<(), Error> {
    for (key, value) in wanted {
        if held.get(key) != Some(value) {
            table.set(key, value).doing(|| {
                format!(
                    "cannot add to {name}, which has room for {} entries",
                    table.capacity()
                )
            })?;
            held.insert(*key, *value);
        }
    }
    Ok(())
}

fn remove<K: Plain + Ord, V: Plain>(
    name: &str,
    table: &Hash<K, V>,
    held: &mut BTreeMap<K, V>,
    wanted: &BTreeMap<K, V>,
) -> Result<(), Error> {
    let gone: Vec<K> = held
        .keys()
        .filter(|key| !wanted.contains_key(key))
        .copied()
        .collect();
    for key in gone {
        table
            .remove(&key)
            .doing(|| format!("cannot remove from {name}"))?;
        held.remove(&key);
    }
    Ok(())
}

fn pin(pins: &Pins, cookie: u64) -> PathBuf {
    pins.link(&format!("{INBOUND}-{cookie}"))
}

/// The pinned links of namespaces, with their cookies.
fn links(pins: &Pins) -> Vec<(PathBuf, u64)> {
    let Ok(entries) = fs::read_dir(pins.layout().join("links")) else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let name = entry.file_name();
            let cookie = name.to_str()?.strip_prefix(INBOUND)?.strip_prefix('-')?;
            Some((entry.path(), cookie.parse().ok()?))
        })
        .collect()
}

/// Whether anybody's connections go to a proxy.
fn has_proxy(captured: &Captured) -> bool {
    let enrolled = captured
        .namespaces
        .values()
        .chain(captured.cgroups.values());
    let flags = enrolled.map(|enrolled| enrolled.flags);
    let of_addresses = captured.locals.values().map(|local| local.flags);
    flags
        .chain(of_addresses)
        .any(|flags| flags & (Enrolled::PROXY | Enrolled::INBOUND | Enrolled::PACKETS) != 0)
}

fn detach(path: &Path) -> Result<(), Error> {
    let link = sys::obj_get(path).doing(|| format!("cannot open {}", path.display()))?;
    pins::remove_link(&link, path)
}

/// What is known of the network namespace that this thread is in.
///
/// # Errors
/// The kernel's refusal.
pub fn this_namespace() -> io::Result<Namespace> {
    let file = fs::File::open("/proc/thread-self/ns/net")?;
    let mut addresses = Vec::new();
    let mut interfaces = BTreeMap::new();
    for interface in nix::ifaddrs::getifaddrs()? {
        let name = interface.interface_name;
        if !interfaces.contains_key(&name) {
            match nix::net::if_::if_nametoindex(name.as_str()) {
                Ok(index) => interfaces.insert(name.clone(), index),
                // The interface has gone since, and its addresses with it.
                Err(nix::errno::Errno::ENODEV | nix::errno::Errno::ENXIO) => continue,
                Err(error) => return Err(error.into()),
            };
        }
        let Some(address) = interface.address else {
            continue;
        };
        if let Some(v4) = address.as_sockaddr_in() {
            addresses.push(std::net::IpAddr::V4(v4.ip()));
        } else if let Some(v6) = address.as_sockaddr_in6() {
            addresses.push(std::net::IpAddr::V6(v6.ip()));
        }
    }
    addresses.retain(|addr| match addr {
        std::net::IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
        std::net::IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
    });
    Ok(Namespace {
        file: file.into(),
        cookie: sys::netns_cookie()?,
        addresses,
        interfaces,
    })
}

/// Whether a network namespace is at the other end of some link of this thread's: the kernel gave it
/// a number here then.
///
/// # Errors
/// The kernel's refusal.
pub fn is_linked(namespace: &Namespace) -> io::Result<bool> {
    let mut message = NsidMessage::default();
    let fd = u32::try_from(namespace.file.as_raw_fd()).unwrap_or(u32::MAX);
    message.attributes = vec![NsidAttribute::Fd(fd)];
    let answers = Netlink::open()?.ask(RouteNetlinkMessage::GetNsId(message))?;
    Ok(answers.iter().any(|answer| match answer {
        RouteNetlinkMessage::NewNsId(found) => found
            .attributes
            .iter()
            .any(|attribute| matches!(attribute, NsidAttribute::Id(id) if *id >= 0)),
        _ => false,
    }))
}

/// Opens the proxy's listening sockets in the network namespace that this thread is in; `inbound`:
/// also those for what connects to the workload.
///
/// # Errors
/// The kernel's refusal: most likely, somebody else listens there.
pub fn open_listeners(options: &CaptureOptions, inbound: bool) -> io::Result<Listeners> {
    Ok(Listeners {
        outbound: listen_at(options.outbound)?,
        inbound: if inbound {
            listen_at(options.inbound)?
        } else {
            Vec::new()
        },
    })
}

/// Opens the proxy's listening sockets for a workload that is captured by its packets, in the network
/// namespace that this thread is in: at ports that the kernel chooses, and taking connections to any
/// address (`IP_TRANSPARENT`), since nobody is led to them but by capture.
///
/// # Errors
/// The kernel's refusal.
pub fn open_transparent_listeners() -> io::Result<Vec<TcpListener>> {
    let sockets = listen_at(0)?;
    for socket in &sockets {
        let options = SockRef::from(socket);
        if socket.local_addr()?.is_ipv4() {
            options.set_ip_transparent_v4(true)?;
        } else {
            options.set_ip_transparent_v6(true)?;
        }
    }
    Ok(sockets)
}

/// At loopback of both families: nobody reaches them from elsewhere, but by capture.
fn listen_at(port: u16) -> io::Result<Vec<TcpListener>> {
    let mut sockets = vec![listen_on((Ipv4Addr::LOCALHOST, port).into())?];
    match listen_on((Ipv6Addr::LOCALHOST, port).into()) {
        Ok(socket) => sockets.push(socket),
        Err(error) if says_v6_is_off(&error) => {}
        Err(error) => return Err(error),
    }
    Ok(sockets)
}

/// Whether IPv6 is off in the network namespace that this thread is in.
fn is_v6_off() -> bool {
    UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_err_and(|error| says_v6_is_off(&error))
}

fn says_v6_is_off(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT)
    )
}

fn listen_on(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// The sysctl by which answers have the mark of the connection that they answer.
pub(super) const FWMARK_ACCEPT: &str = "ipv4/tcp_fwmark_accept";

/// Says why [`FWMARK_ACCEPT`] cannot be set, and what to do.
pub(super) fn cannot_accept_marks(error: &io::Error) -> String {
    let otherwise = "set mesh.proxy.keepSource to false";
    let reason = sysctl::reason(error, "mesh", "mesh", otherwise);
    format!("cannot set /proc/sys/net/{FWMARK_ACCEPT}: {reason}")
}

/// In the network namespace that this thread is in: has packets that answer the proxy, which has
/// connected from a client's address, come back to it. They have the mark of the connection that
/// they answer (`net.ipv4.tcp_fwmark_accept`, which is set here), and a route of their own.
///
/// # Errors
/// The kernel's refusal.
pub fn route_answers(mark: u32) -> io::Result<()> {
    route_to_sockets(mark)?;
    // It is IPv6's too.
    sysctl::set(FWMARK_ACCEPT, "1").map_err(|error| {
        let text = cannot_accept_marks(&error);
        io::Error::new(error.kind(), text)
    })
}

/// In the network namespace that this thread is in: has packets that have these bits in their mark go to sockets here,
/// whatever their destination.
///
/// # Errors
/// The kernel's refusal.
pub fn route_to_sockets(mark: u32) -> io::Result<()> {
    let mut netlink = Netlink::open()?;
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        match route_family(&mut netlink, family, mark) {
            Err(_) if family == AddressFamily::Inet6 && is_v6_off() => {}
            done => done?,
        }
    }
    Ok(())
}

fn route_family(netlink: &mut Netlink, family: AddressFamily, mark: u32) -> io::Result<()> {
    let route = RouteNetlinkMessage::NewRoute(answers_route(family));
    netlink.request(route, NLM_F_CREATE | NLM_F_REPLACE)?;
    let wanted = Mark::with(mark);
    let rules = answers::rules(netlink, family)?;
    if !rules.contains(&wanted) {
        let rule = RouteNetlinkMessage::NewRule(answers_rule(family, wanted));
        netlink.request(rule, NLM_F_CREATE | NLM_F_EXCL)?;
    }
    // An earlier agent's, which asked for the whole mark.
    for old in rules
        .into_iter()
        .filter(|rule| rule.value == mark && *rule != wanted)
    {
        let rule = RouteNetlinkMessage::DelRule(answers_rule(family, old));
        let _ = netlink.request(rule, 0);
    }
    Ok(())
}

/// The inverse of [`route_answers`] and [`route_to_sockets`], but for the setting, which somebody else may rely on by now.
///
/// # Errors
/// The kernel's refusal.
pub fn route_answers_no_more(mark: u32) -> io::Result<()> {
    let mut netlink = Netlink::open()?;
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        // Several, of agents that did not look. What is not there is gone.
        let rules = answers::rules(&mut netlink, family).unwrap_or_default();
        for known in rules.into_iter().filter(|known| known.value == mark) {
            let rule = RouteNetlinkMessage::DelRule(answers_rule(family, known));
            let _ = netlink.request(rule, 0);
        }
        let route = RouteNetlinkMessage::DelRoute(answers_route(family));
        let _ = netlink.request(route, 0);
    }
    Ok(())
}

pub(super) fn answers_rule(family: AddressFamily, mark: Mark) -> RuleMessage {
    let mut rule = RuleMessage::default();
    rule.header.family = family;
    rule.header.action = RuleAction::ToTable;
    rule.attributes = vec![
        RuleAttribute::FwMark(mark.value),
        RuleAttribute::FwMask(mark.mask),
        RuleAttribute::Table(TABLE),
    ];
    rule
}

pub(super) fn answers_route(family: AddressFamily) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header = RouteHeader {
        address_family: family,
        table: RouteHeader::RT_TABLE_UNSPEC,
        protocol: RouteProtocol::Static,
        scope: RouteScope::Host,
        kind: RouteType::Local,
        ..RouteHeader::default()
    };
    // Loopback is number 1 in every namespace.
    route.attributes = vec![RouteAttribute::Table(TABLE), RouteAttribute::Oif(1)];
    route
}
