//! Carries bytes from applications to their proxy past the TCP stack, by programs and tables of their own, which exist
//! while a process holds them. Nothing is pinned: a proxy that is gone has no connections.

use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Map, MapData, SockHash},
    programs::Program,
};
use aya_obj::generated::bpf_attach_type::BPF_CGROUP_SOCK_OPS;
use dataplane_common::{
    accelerate::{CONNECTIONS, PROXIES, ProxyKey},
    capture::Tuple,
};
use zerocopy::IntoBytes;

use super::{
    error::{Doing, Error},
    map::{Hash, Plain},
    object,
    pins::MAPS,
    programs::{absent, load_error, patiently},
    sys,
};

/// The `sockops` program.
const LEGS: &str = "accelerate_legs";
/// `BPF_EXIST`.
const IF_THERE: u64 = 2;
/// The `sk_msg` program.
const SEND: &str = "accelerate_send";

/// The programs, attached to a cgroup, and their tables.
#[derive(Debug)]
pub struct Accelerator {
    proxies: Hash<ProxyKey, u32>,
    grants: Hash<Tuple, u64>,
    /// Dropped first: from then on the program records no socket.
    _link: OwnedFd,
    _ebpf: Ebpf,
}

impl Accelerator {
    /// Loads the programs, and attaches them to the sockets of a cgroup's processes. Nothing is
    /// accelerated before [`Accelerator::add`].
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn start(cgroup: &Path) -> Result<Self, Error> {
        let mut loader = EbpfLoader::new();
        // The object's other tables, which these programs do not use.
        for map in MAPS.iter().filter(|map| map.is_hash() || map.is_of_flows()) {
            loader.map_max_entries(map.name, 1);
        }
        let mut ebpf = loader.load(object::programs()?).map_err(Box::new)?;
        let proxies = hash(&ebpf, "PROXIES", PROXIES)?;
        let grants = hash(&ebpf, "GRANTS", CONNECTIONS)?;
        let Some(map) = ebpf.map("SENDERS") else {
            return Err(absent_map("SENDERS"));
        };
        let doing = || "cannot use table SENDERS".to_owned();
        let senders: SockHash<&MapData, [u64; 6]> =
            map.try_into().map_err(std::io::Error::other).doing(doing)?;
        let senders = senders.fd().try_clone().doing(doing)?;
        let Some(Program::SkMsg(program)) = ebpf.program_mut(SEND) else {
            return Err(absent(SEND));
        };
        patiently(|| program.load())
            .and_then(|()| program.attach(&senders))
            .map_err(|source| load_error(SEND, source))?;
        let Some(Program::SockOps(program)) = ebpf.program_mut(LEGS) else {
            return Err(absent(LEGS));
        };
        patiently(|| program.load()).map_err(|source| load_error(LEGS, source))?;
        let directory =
            File::open(cgroup).doing(|| format!("cannot open the cgroup {}", cgroup.display()))?;
        let fd = program.fd().map_err(|source| load_error(LEGS, source))?;
        let link = sys::link_create_cgroup(fd.as_fd(), directory.as_fd(), BPF_CGROUP_SOCK_OPS)
            .doing(|| format!("cannot attach program {LEGS} to {}", cgroup.display()))?;
        Ok(Self {
            proxies,
            grants,
            _link: link,
            _ebpf: ebpf,
        })
    }

    /// Accelerates connections to these ports of a network namespace, whatever the address; and, if
    /// the proxy marks its sockets, the answers of applications there that it connects to.
    /// Connections that exist stay as they are.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn add(&self, netns: u64, ports: &[u16], mark: Option<u32>) -> Result<(), Error> {
        let ports = ports.iter().map(|port| (u32::from(*port), 1));
        for (port, value) in ports.chain(mark.map(|mark| (0, mark))) {
            self.proxies
                .set(&key(netns, port), &value)
                .doing(|| "cannot add to table PROXIES".to_owned())?;
        }
        Ok(())
    }

    /// Accelerates no more new connections there.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn remove(&self, netns: u64, ports: &[u16]) -> Result<(), Error> {
        for port in ports.iter().map(|port| u32::from(*port)).chain([0]) {
            self.proxies
                .remove(&key(netns, port))
                .doing(|| "cannot remove from table PROXIES".to_owned())?;
        }
        Ok(())
    }

    /// Says how many bytes may have come by a connection past the TCP stack, in all. One that is not
    /// accelerated is none.
    pub fn grant(&self, connection: &Tuple, bytes: u64) {
        let table = self.grants.fd().as_fd();
        let _ = sys::map_update(table, connection.as_bytes(), bytes.as_bytes(), IF_THERE);
    }
}

const fn key(netns: u64, port: u32) -> ProxyKey {
    ProxyKey {
        netns,
        port,
        reserved: 0,
    }
}

fn hash<K: Plain, V: Plain>(ebpf: &Ebpf, name: &str, capacity: u32) -> Result<Hash<K, V>, Error> {
    // Programs that are not loaded yet have its number in their instructions: it stays open.
    match ebpf.map(name) {
        Some(Map::HashMap(map)) => {
            let fd = map.fd().as_fd().try_clone_to_owned();
            let fd = fd.doing(|| format!("cannot keep table {name}"))?;
            Ok(Hash::from_fd(fd, capacity))
        }
        _ => Err(absent_map(name)),
    }
}

fn absent_map(name: &str) -> Error {
    Error::Io {
        what: format!("the object has no table {name}"),
        source: std::io::ErrorKind::NotFound.into(),
    }
}
