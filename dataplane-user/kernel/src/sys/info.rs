//! The kernel's information about a map, a program or a link.

use std::{
    ffi::{CStr, c_char},
    io,
    mem::{size_of, zeroed},
    os::fd::{AsRawFd, BorrowedFd},
};

use aya_obj::generated::{bpf_cmd, bpf_link_info, bpf_map_info, bpf_prog_info};

use super::{attr, bpf, raw};

/// # Safety
/// `T` must be the kernel's `struct bpf_*_info` for what `object` is.
unsafe fn info<T>(object: BorrowedFd<'_>) -> io::Result<T> {
    // SAFETY: the kernel's info structures are plain integers.
    let mut info: T = unsafe { zeroed() };
    let mut attr = attr();
    attr.info.bpf_fd = raw(object);
    attr.info.info_len = u32::try_from(size_of::<T>()).expect("an info is small");
    attr.info.info = std::ptr::from_mut(&mut info) as u64;
    // SAFETY: the kernel writes at most `info_len` bytes.
    unsafe { bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr) }?;
    Ok(info)
}

/// The kind of a pinned object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectKind {
    /// A map.
    Map,
    /// A program.
    Program,
    /// A link.
    Link,
    /// Something else.
    Other,
}

/// Returns the kind of object behind a descriptor.
pub fn object_kind(object: BorrowedFd<'_>) -> io::Result<ObjectKind> {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", object.as_raw_fd()))?;
    let name = name.to_string_lossy();
    Ok(match name.as_ref() {
        "anon_inode:bpf-map" => ObjectKind::Map,
        "anon_inode:bpf-prog" => ObjectKind::Program,
        // The underscore is Linux 6.9's and later; the hyphen earlier ones'.
        "anon_inode:bpf_link" | "anon_inode:bpf-link" => ObjectKind::Link,
        _ => ObjectKind::Other,
    })
}

/// A map's name and shape.
#[derive(Clone, Debug)]
pub struct MapInfo {
    /// Its id, unique while the machine runs.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// Type, sizes, flags; the type as the kernel numbers it.
    pub kind: u32,
    /// Bytes of a key.
    pub key_size: u32,
    /// Bytes of a value.
    pub value_size: u32,
    /// Its capacity.
    pub max_entries: u32,
    /// `BPF_F_…`.
    pub flags: u32,
}

/// Returns the kernel's description of a map. The descriptor must be a map's.
pub fn map_info(map: BorrowedFd<'_>) -> io::Result<MapInfo> {
    // SAFETY: of a map, by this function's contract; of anything else, the kernel fills in that
    // thing's info, which is plain integers as well.
    let info: bpf_map_info = unsafe { info(map) }?;
    Ok(MapInfo {
        id: info.id,
        name: name(&info.name),
        kind: info.type_,
        key_size: info.key_size,
        value_size: info.value_size,
        max_entries: info.max_entries,
        flags: info.map_flags,
    })
}

/// A program's name and tag.
#[derive(Clone, Debug)]
pub struct ProgInfo {
    /// Its id, unique while the machine runs.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// A hash of its instructions.
    pub tag: u64,
    /// Bytes of machine code; 0 if it is interpreted.
    pub jited: u32,
}

/// Returns the kernel's description of a program. The descriptor must be a program's.
pub fn prog_info(program: BorrowedFd<'_>) -> io::Result<ProgInfo> {
    // SAFETY: see `map_info`. The pointers and counts in the info are zero: nothing is asked for.
    let info: bpf_prog_info = unsafe { info(program) }?;
    Ok(ProgInfo {
        id: info.id,
        name: name(&info.name),
        tag: u64::from_be_bytes(info.tag),
        jited: info.jited_prog_len,
    })
}

/// The object that a link attaches its program to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkTarget {
    /// A cgroup, by its id (its directory's inode number); 0 if it was removed.
    Cgroup(u64),
    /// An interface in TCX, by its index; 0 if it was removed.
    Tcx(u32),
    /// A network namespace, by its file's inode number; 0 if it was removed.
    Netns(u32),
    /// A tracepoint.
    Tracepoint,
    /// Something else.
    Other,
}

/// A link.
#[derive(Clone, Copy, Debug)]
pub struct LinkInfo {
    /// Its id, unique while the machine runs.
    pub id: u32,
    /// The object that it is attached to.
    pub target: LinkTarget,
    /// Its program.
    pub program: u32,
    /// The hook, as the kernel numbers it; 0 of [`LinkTarget::Tracepoint`] and [`LinkTarget::Other`].
    pub attach_type: u32,
}

impl LinkInfo {
    /// Whether the link's target (cgroup, interface or namespace) still exists.
    pub fn is_attached(&self) -> bool {
        !matches!(
            self.target,
            LinkTarget::Cgroup(0) | LinkTarget::Tcx(0) | LinkTarget::Netns(0)
        )
    }
}

/// Returns the kernel's description of a link. The descriptor must be a link's.
pub fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    const RAW_TRACEPOINT: u32 = 1; // BPF_LINK_TYPE_RAW_TRACEPOINT
    const CGROUP: u32 = 3; // BPF_LINK_TYPE_CGROUP
    const NETNS: u32 = 5; // BPF_LINK_TYPE_NETNS
    const TCX: u32 = 11; // BPF_LINK_TYPE_TCX
    // SAFETY: see `map_info`.
    let info: bpf_link_info = unsafe { info(link) }?;
    let union = &info.__bindgen_anon_1;
    // SAFETY: every variant of the union is plain integers; used only as the type says.
    let (cgroup, tcx, netns) = unsafe { (union.cgroup, union.tcx, union.netns) };
    let (target, attach_type) = match info.type_ {
        CGROUP => (LinkTarget::Cgroup(cgroup.cgroup_id), cgroup.attach_type),
        TCX => (LinkTarget::Tcx(tcx.ifindex), tcx.attach_type),
        NETNS => (LinkTarget::Netns(netns.netns_ino), netns.attach_type),
        RAW_TRACEPOINT => (LinkTarget::Tracepoint, 0),
        _ => (LinkTarget::Other, 0),
    };
    Ok(LinkInfo {
        id: info.id,
        target,
        program: info.prog_id,
        attach_type,
    })
}

#[expect(clippy::cast_sign_loss, reason = "a name's bytes")]
fn name(name: &[c_char; 16]) -> String {
    let bytes = name.map(|c| c as u8);
    CStr::from_bytes_until_nul(&bytes).map_or_else(
        |_| String::from_utf8_lossy(&bytes).into_owned(),
        |name| name.to_string_lossy().into_owned(),
    )
}
