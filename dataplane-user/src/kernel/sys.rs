//! The `bpf(2)` calls that aya 0.14 has no public form of, each as one small function.
//!
//! Keys and values are byte slices whose lengths the caller guarantees to be the map's: the typed
//! layer over this is [`super::map`].

use std::{
    ffi::{CStr, CString},
    io,
    mem::{size_of, zeroed},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya_obj::generated::{
    bpf_attach_type, bpf_attr, bpf_cmd, bpf_insn, bpf_link_info, bpf_map_info, bpf_map_type,
    bpf_prog_info, bpf_prog_type,
};

/// # Safety
/// Every pointer in `attr` must be valid for what `cmd` does with it.
unsafe fn bpf(cmd: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i64> {
    // SAFETY: the caller's promise; the kernel takes as many bytes as we say there are.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            cmd as libc::c_long,
            std::ptr::from_mut(attr),
            size_of::<bpf_attr>(),
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// # Safety
/// As [`bpf`], and `cmd` must be one that answers a file descriptor.
unsafe fn bpf_fd(cmd: bpf_cmd, attr: &mut bpf_attr) -> io::Result<OwnedFd> {
    // SAFETY: the caller's promise.
    let fd = unsafe { bpf(cmd, attr) }?;
    let fd = i32::try_from(fd).map_err(|_| io::Error::other("bpf() answered no descriptor"))?;
    // SAFETY: the kernel made this descriptor for us just now.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn attr() -> bpf_attr {
    // SAFETY: a union of plain integers, for all of which zero is a value; the kernel wants unused
    // bytes to be zero.
    unsafe { zeroed() }
}

#[expect(clippy::cast_sign_loss, reason = "a descriptor is not negative")]
fn raw(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd() as u32
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

/// The shape of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Its type.
    pub kind: bpf_map_type,
    /// Bytes of a key.
    pub key_size: u32,
    /// Bytes of a value.
    pub value_size: u32,
    /// `BPF_F_…`.
    pub flags: u32,
}

/// Creates a map. The name is cut to what the kernel keeps (15 bytes).
pub fn map_create(name: &str, shape: &Shape, max_entries: u32) -> io::Result<OwnedFd> {
    create(name, shape, max_entries, None)
}

/// Creates a table of what is kept for sockets, one word each: for probing. The kernel wants its
/// types described (`bpf_local_storage_map_alloc_check`).
pub fn socket_storage_create() -> io::Result<OwnedFd> {
    let described = btf_load(&[
        // Header (`struct btf_header`): magic, version 1, length; types and strings after it.
        0x0001_eb9f,
        24,
        0,
        16,
        16,
        5,
        // Type 1 is "int": of four bytes, signed.
        1,
        0x0100_0000,
        4,
        0x0100_0020,
        // Strings: "", "int".
        u32::from_ne_bytes(*b"\0int"),
        0,
    ])?;
    let mut attr = attr();
    // SAFETY: no pointers in this command's attributes; a union field of plain integers.
    unsafe {
        let create = &mut attr.__bindgen_anon_1;
        create.map_type = bpf_map_type::BPF_MAP_TYPE_SK_STORAGE as u32;
        create.key_size = 4;
        create.value_size = 4;
        create.map_flags = 1; // BPF_F_NO_PREALLOC
        create.btf_fd = raw(described.as_fd());
        create.btf_key_type_id = 1;
        create.btf_value_type_id = 1;
        bpf_fd(bpf_cmd::BPF_MAP_CREATE, &mut attr)
    }
}

/// Loads the description of types; `words` is padded, and as long as its header says.
fn btf_load(words: &[u32]) -> io::Result<OwnedFd> {
    let length = words[1] + words[4] + words[5];
    let mut attr = attr();
    // SAFETY: the words live until the call is over and are at least as long; only read.
    unsafe {
        let load = &mut attr.__bindgen_anon_7;
        load.btf = words.as_ptr() as u64;
        load.btf_size = length;
        bpf_fd(bpf_cmd::BPF_BTF_LOAD, &mut attr)
    }
}

/// Creates a map of maps that are like `inner`.
pub fn map_of_maps_create(
    name: &str,
    shape: &Shape,
    max_entries: u32,
    inner: BorrowedFd<'_>,
) -> io::Result<OwnedFd> {
    create(name, shape, max_entries, Some(inner))
}

fn create(
    name: &str,
    shape: &Shape,
    max_entries: u32,
    inner: Option<BorrowedFd<'_>>,
) -> io::Result<OwnedFd> {
    let mut attr = attr();
    // SAFETY: no pointers in this command's attributes; a union field of plain integers.
    unsafe {
        let create = &mut attr.__bindgen_anon_1;
        create.map_type = shape.kind as u32;
        create.key_size = shape.key_size;
        create.value_size = shape.value_size;
        create.max_entries = max_entries;
        create.map_flags = shape.flags;
        create.inner_map_fd = inner.map_or(0, raw);
        for (to, from) in create.map_name.iter_mut().zip(name.bytes().take(15)) {
            *to = from.cast_signed();
        }
        bpf_fd(bpf_cmd::BPF_MAP_CREATE, &mut attr)
    }
}

/// Looks a key up; `false` if it is not there.
pub fn map_lookup(map: BorrowedFd<'_>, key: &[u8], value: &mut [u8]) -> io::Result<bool> {
    let mut attr = attr();
    // SAFETY: key and value are as long as the map's, by the module's contract.
    let result = unsafe {
        let elem = &mut attr.__bindgen_anon_2;
        elem.map_fd = raw(map);
        elem.key = key.as_ptr() as u64;
        elem.__bindgen_anon_1.value = value.as_mut_ptr() as u64;
        bpf(bpf_cmd::BPF_MAP_LOOKUP_ELEM, &mut attr)
    };
    found(result.map(|_| ()))
}

/// Adds or replaces a key.
pub fn map_update(map: BorrowedFd<'_>, key: &[u8], value: &[u8], flags: u64) -> io::Result<()> {
    let mut attr = attr();
    // SAFETY: key and value are as long as the map's, by the module's contract; only read.
    unsafe {
        let elem = &mut attr.__bindgen_anon_2;
        elem.map_fd = raw(map);
        elem.key = key.as_ptr() as u64;
        elem.__bindgen_anon_1.value = value.as_ptr() as u64;
        elem.flags = flags;
        bpf(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr).map(|_| ())
    }
}

/// Removes a key; `false` if it was not there.
pub fn map_delete(map: BorrowedFd<'_>, key: &[u8]) -> io::Result<bool> {
    let mut attr = attr();
    // SAFETY: the key is as long as the map's, by the module's contract; only read.
    let result = unsafe {
        let elem = &mut attr.__bindgen_anon_2;
        elem.map_fd = raw(map);
        elem.key = key.as_ptr() as u64;
        bpf(bpf_cmd::BPF_MAP_DELETE_ELEM, &mut attr)
    };
    found(result.map(|_| ()))
}

fn found(result: io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The key after `key` (none: the first); `false` at the end.
pub fn map_next_key(map: BorrowedFd<'_>, key: Option<&[u8]>, next: &mut [u8]) -> io::Result<bool> {
    let mut attr = attr();
    // SAFETY: keys are as long as the map's, by the module's contract.
    let result = unsafe {
        let elem = &mut attr.__bindgen_anon_2;
        elem.map_fd = raw(map);
        elem.key = key.map_or(0, |key| key.as_ptr() as u64);
        elem.__bindgen_anon_1.next_key = next.as_mut_ptr() as u64;
        bpf(bpf_cmd::BPF_MAP_GET_NEXT_KEY, &mut attr)
    };
    found(result.map(|_| ()))
}

/// Adds or replaces `count` keys. On an error, the number in it says how many were done before.
pub fn map_update_batch(
    map: BorrowedFd<'_>,
    keys: &[u8],
    values: &[u8],
    count: u32,
) -> Result<(), (u32, io::Error)> {
    let mut attr = attr();
    attr.batch.map_fd = raw(map);
    attr.batch.keys = keys.as_ptr() as u64;
    attr.batch.values = values.as_ptr() as u64;
    attr.batch.count = count;
    // SAFETY: `keys` and `values` hold `count` elements, by the module's contract; only read.
    match unsafe { bpf(bpf_cmd::BPF_MAP_UPDATE_BATCH, &mut attr) } {
        Ok(_) => Ok(()),
        // SAFETY: the same union field that was written.
        Err(error) => Err((unsafe { attr.batch.count }, error)),
    }
}

/// Reads up to `count` keys of a hash. `position` is where to go on, `None` from the start.
/// Answers how many were read, and the next position, `None` at the end.
pub fn map_lookup_batch(
    map: BorrowedFd<'_>,
    position: Option<u32>,
    keys: &mut [u8],
    values: &mut [u8],
    count: u32,
) -> io::Result<(u32, Option<u32>)> {
    let mut attr = attr();
    let mut next = 0u32;
    attr.batch.map_fd = raw(map);
    attr.batch.in_batch = position
        .as_ref()
        .map_or(0, |p| std::ptr::from_ref(p) as u64);
    attr.batch.out_batch = std::ptr::from_mut(&mut next) as u64;
    attr.batch.keys = keys.as_mut_ptr() as u64;
    attr.batch.values = values.as_mut_ptr() as u64;
    attr.batch.count = count;
    // SAFETY: room for `count` elements by the module's contract; a hash's position is a bucket
    // number, a u32 (`__htab_map_lookup_and_delete_batch` in kernel/bpf/hashtab.c).
    let result = unsafe { bpf(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr) };
    // SAFETY: the same union field that was written.
    let read = unsafe { attr.batch.count };
    match result {
        Ok(_) => Ok((read, Some(next))),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok((read, None)),
        Err(error) => Err(error),
    }
}

/// Gives an object a name in a bpffs.
pub fn obj_pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let mut attr = attr();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    attr.__bindgen_anon_4.bpf_fd = raw(object);
    // SAFETY: a C string that lives until the call is over.
    unsafe { bpf(bpf_cmd::BPF_OBJ_PIN, &mut attr) }.map(|_| ())
}

/// Opens what is pinned, of whatever kind.
pub fn obj_get(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let mut attr = attr();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    // SAFETY: a C string that lives until the call is over.
    unsafe { bpf_fd(bpf_cmd::BPF_OBJ_GET, &mut attr) }
}

/// Opens a map by its id.
pub fn map_by_id(id: u32) -> io::Result<OwnedFd> {
    by_id(bpf_cmd::BPF_MAP_GET_FD_BY_ID, id)
}

/// Opens a program by its id.
pub fn prog_by_id(id: u32) -> io::Result<OwnedFd> {
    by_id(bpf_cmd::BPF_PROG_GET_FD_BY_ID, id)
}

/// Opens the types of an object that is loaded, by their id.
pub fn btf_by_id(id: u32) -> io::Result<OwnedFd> {
    by_id(bpf_cmd::BPF_BTF_GET_FD_BY_ID, id)
}

fn by_id(cmd: bpf_cmd, id: u32) -> io::Result<OwnedFd> {
    let mut attr = attr();
    // SAFETY: no pointers in these commands' attributes.
    unsafe {
        attr.__bindgen_anon_6.__bindgen_anon_1.map_id = id;
        bpf_fd(cmd, &mut attr)
    }
}

/// Attaches a program to a cgroup by a link.
pub fn link_create_cgroup(
    program: BorrowedFd<'_>,
    cgroup: BorrowedFd<'_>,
    attach_type: bpf_attach_type,
) -> io::Result<OwnedFd> {
    let mut attr = attr();
    // SAFETY: no pointers in this command's attributes.
    unsafe {
        attr.link_create.__bindgen_anon_1.prog_fd = raw(program);
        attr.link_create.__bindgen_anon_2.target_fd = raw(cgroup);
        attr.link_create.attach_type = attach_type as u32;
        bpf_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr)
    }
}

/// Attaches an `sk_lookup` program to a network namespace by a link.
pub fn link_create_netns(
    program: BorrowedFd<'_>,
    namespace: BorrowedFd<'_>,
) -> io::Result<OwnedFd> {
    link_create_cgroup(program, namespace, bpf_attach_type::BPF_SK_LOOKUP)
}

/// Attaches a program to the tracepoint that it was loaded for. Its link knows no other program, and no detaching but
/// by being closed (`bpf_raw_tp_link_lops` in `kernel/bpf/syscall.c`).
pub fn link_create_traced(program: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut attr = attr();
    // SAFETY: no name is given: the program knows its tracepoint.
    unsafe {
        attr.raw_tracepoint.prog_fd = raw(program);
        bpf_fd(bpf_cmd::BPF_RAW_TRACEPOINT_OPEN, &mut attr)
    }
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

/// A place among the programs of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Before or after.
    pub before: bool,
    /// This program, by its id; otherwise all of them.
    pub relative: Option<u32>,
    /// Only while the chain has this revision; 0: whatever it has.
    pub revision: u64,
}

/// The same, at a place; `ESTALE` if the chain has another revision.
pub fn link_create_tcx_at(
    program: BorrowedFd<'_>,
    ifindex: u32,
    attach_type: bpf_attach_type,
    place: Place,
) -> io::Result<OwnedFd> {
    const BEFORE: u32 = 1 << 3; // BPF_F_BEFORE: relative to nothing, so at the head
    const AFTER: u32 = 1 << 4; // BPF_F_AFTER
    const ID: u32 = 1 << 5; // BPF_F_ID
    let mut attr = attr();
    let mut flags = if place.before { BEFORE } else { AFTER };
    // SAFETY: no pointers in this command's attributes.
    unsafe {
        attr.link_create.__bindgen_anon_1.prog_fd = raw(program);
        attr.link_create.__bindgen_anon_2.target_ifindex = ifindex;
        attr.link_create.attach_type = attach_type as u32;
        let tcx = &mut attr.link_create.__bindgen_anon_3.tcx;
        tcx.expected_revision = place.revision;
        if let Some(id) = place.relative {
            flags |= ID;
            tcx.__bindgen_anon_1.relative_id = id;
        }
        attr.link_create.flags = flags;
        bpf_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr)
    }
}

/// Replaces a link's program, atomically.
pub fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = attr();
    // SAFETY: no pointers in this command's attributes.
    unsafe {
        attr.link_update.link_fd = raw(link);
        attr.link_update.__bindgen_anon_1.new_prog_fd = raw(program);
        bpf(bpf_cmd::BPF_LINK_UPDATE, &mut attr).map(|_| ())
    }
}

/// Detaches a link's program now, whoever else holds the link; also one that is detached already.
pub fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = attr();
    // SAFETY: no pointers in this command's attributes.
    unsafe {
        attr.link_detach.link_fd = raw(link);
        bpf(bpf_cmd::BPF_LINK_DETACH, &mut attr).map(|_| ())
    }
}

/// The ids of the programs that run on a cgroup's hook, those attached to its ancestors included.
pub fn cgroup_programs(
    cgroup: BorrowedFd<'_>,
    attach_type: bpf_attach_type,
) -> io::Result<Vec<u32>> {
    const EFFECTIVE: u32 = 1; // BPF_F_QUERY_EFFECTIVE
    attached_programs(raw(cgroup), attach_type, EFFECTIVE).map(|chain| chain.programs)
}

/// The programs at a hook, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// Their ids.
    pub programs: Vec<u32>,
    /// Their links' ids; 0 for one without a link. TCX only.
    pub links: Vec<u32>,
    /// Changes whenever the chain does. TCX only.
    pub revision: u64,
}

/// The ids of the programs that TCX runs on an interface, in their order. Before Linux 6.6 an
/// invalid argument.
pub fn tcx_programs(ifindex: u32, attach_type: bpf_attach_type) -> io::Result<Vec<u32>> {
    tcx_chain(ifindex, attach_type).map(|chain| chain.programs)
}

/// The same with what is known of them.
pub fn tcx_chain(ifindex: u32, attach_type: bpf_attach_type) -> io::Result<Chain> {
    attached_programs(ifindex, attach_type, 0)
}

/// `target`: a cgroup's descriptor or an interface's number, as the kind of hook wants.
fn attached_programs(target: u32, attach_type: bpf_attach_type, flags: u32) -> io::Result<Chain> {
    let mut ids = vec![0u32; 64];
    loop {
        let mut attr = attr();
        let mut links = vec![0u32; ids.len()];
        let is_tcx = matches!(
            attach_type,
            bpf_attach_type::BPF_TCX_INGRESS | bpf_attach_type::BPF_TCX_EGRESS
        );
        // SAFETY: room for as many ids as we say, of programs and of links.
        let (result, count, revision) = unsafe {
            attr.query.__bindgen_anon_1.target_fd = target;
            attr.query.attach_type = attach_type as u32;
            attr.query.query_flags = flags;
            attr.query.prog_ids = ids.as_mut_ptr() as u64;
            attr.query.__bindgen_anon_2.prog_cnt = u32::try_from(ids.len()).unwrap_or(u32::MAX);
            if is_tcx {
                attr.query.link_ids = links.as_mut_ptr() as u64;
            }
            let result = bpf(bpf_cmd::BPF_PROG_QUERY, &mut attr);
            let count = attr.query.__bindgen_anon_2.prog_cnt;
            (result, count, attr.query.revision)
        };
        match result {
            Ok(_) => {
                ids.truncate(count as usize);
                links.truncate(count as usize);
                return Ok(Chain {
                    programs: ids,
                    links,
                    revision,
                });
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                ids.resize(count as usize + 64, 0);
            }
            Err(error) => return Err(error),
        }
    }
}

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

/// What a pinned object is.
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

/// Which kind of object a descriptor is.
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

/// Asks what a map is. The descriptor must be a map's.
pub fn map_info(map: BorrowedFd<'_>) -> io::Result<MapInfo> {
    // SAFETY: of a map, by this function's contract; of anything else, the kernel fills in that
    // thing's info, which is plain integers as well.
    let info: bpf_map_info = unsafe { info(map) }?;
    Ok(MapInfo {
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

/// Asks what a program is. The descriptor must be a program's.
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

/// What a link attaches its program to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkTarget {
    /// A cgroup, by its id (its directory's inode number); 0 once it is gone.
    Cgroup(u64),
    /// An interface, by its number, in TCX; 0 once it is gone.
    Tcx(u32),
    /// A network namespace, by its number (its file's inode); 0 once it is gone.
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
    /// What it is attached to.
    pub target: LinkTarget,
    /// Its program.
    pub program: u32,
    /// The hook, as the kernel numbers it; 0 of [`LinkTarget::Tracepoint`] and [`LinkTarget::Other`].
    pub attach_type: u32,
}

impl LinkInfo {
    /// Whether what it was attached to is there still.
    pub fn is_attached(&self) -> bool {
        !matches!(
            self.target,
            LinkTarget::Cgroup(0) | LinkTarget::Tcx(0) | LinkTarget::Netns(0)
        )
    }
}

/// Asks what a link is. The descriptor must be a link's.
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
fn name(name: &[std::ffi::c_char; 16]) -> String {
    let bytes = name.map(|c| c as u8);
    CStr::from_bytes_until_nul(&bytes).map_or_else(
        |_| String::from_utf8_lossy(&bytes).into_owned(),
        |name| name.to_string_lossy().into_owned(),
    )
}

/// Loads a program from raw instructions: for probing what a kernel knows.
pub fn prog_load(
    kind: bpf_prog_type,
    attach_type: bpf_attach_type,
    instructions: &[u64],
) -> io::Result<OwnedFd> {
    prog_load_traced(kind, attach_type, instructions, 0)
}

/// The same of a program for a tracepoint, whose type in the kernel's BTF is `traced`.
pub fn prog_load_traced(
    kind: bpf_prog_type,
    attach_type: bpf_attach_type,
    instructions: &[u64],
    traced: u32,
) -> io::Result<OwnedFd> {
    let mut attr = attr();
    // SAFETY: instructions and licence live until the call is over; only read.
    unsafe {
        let load = &mut attr.__bindgen_anon_3;
        load.prog_type = kind as u32;
        load.expected_attach_type = attach_type as u32;
        load.insns = instructions.as_ptr() as u64;
        load.insn_cnt = u32::try_from(instructions.len()).unwrap_or(u32::MAX);
        load.license = c"GPL".as_ptr() as u64;
        load.attach_btf_id = traced;
        bpf_fd(bpf_cmd::BPF_PROG_LOAD, &mut attr)
    }
}

/// The types that a program is loaded with.
pub struct Types<'a> {
    /// The object's types.
    pub btf: BorrowedFd<'a>,
    /// Which function begins where, and its type: `struct bpf_func_info`.
    pub functions: &'a [u8],
    /// Bytes of one of those.
    pub size: usize,
}

/// Loads a program with the verifier's statistics, which are returned; with an error, so is what
/// the verifier said. `traced`: of a program for a tracepoint, that one's type in the kernel's BTF.
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

/// Runs a program once (`BPF_PROG_TEST_RUN`).
#[cfg(test)]
pub fn prog_test_run(program: BorrowedFd<'_>) -> io::Result<u32> {
    let mut attr = attr();
    attr.test.prog_fd = raw(program);
    // SAFETY: no data and no context are given.
    unsafe {
        bpf(bpf_cmd::BPF_PROG_TEST_RUN, &mut attr)?;
        Ok(attr.test.retval)
    }
}

/// What a test run lets one say of a packet's buffer: `struct __sk_buff` in `include/uapi/linux/bpf.h`
/// up to `gso_size`. All fields that are not named here must be zero (`convert___skb_to_skb` in
/// `net/bpf/test_run.c`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SkbContext {
    before: [u32; 2],
    mark: u32,
    after_mark: [u32; 7],
    ifindex: u32,
    between: [u32; 29],
    wire_len: u32,
    gso_segs: u32,
    sk: [u32; 2],
    gso_size: u32,
    after: u32,
}

impl SkbContext {
    /// How many bytes of data each segment has of a packet that is to be segmented.
    pub const SEGMENT: u32 = 1380;

    /// A packet at an interface of this thread's network namespace; `segments`: how many packets
    /// it will be segmented to, 0 if it will not.
    pub fn new(ifindex: u32, segments: u32) -> Self {
        Self {
            ifindex,
            gso_segs: segments,
            gso_size: if segments == 0 { 0 } else { Self::SEGMENT },
            ..Self::default()
        }
    }

    /// The same packet with a mark that somebody gave it.
    #[must_use]
    pub fn marked(self, mark: u32) -> Self {
        Self { mark, ..self }
    }
}

const _: () = assert!(std::mem::offset_of!(SkbContext, mark) == 8);
const _: () = assert!(std::mem::offset_of!(SkbContext, ifindex) == 40);
const _: () = assert!(std::mem::offset_of!(SkbContext, gso_segs) == 164);
const _: () = assert!(std::mem::offset_of!(SkbContext, gso_size) == 176);

/// Runs a program for packets once, on a frame that is sent nowhere. Answers what the program
/// returned, how many bytes of `out` the frame then has, and how many nanoseconds it took.
pub fn prog_test_run_packet(
    program: BorrowedFd<'_>,
    context: &SkbContext,
    frame: &[u8],
    out: &mut [u8],
) -> io::Result<(u32, usize, u32)> {
    let mut attr = attr();
    attr.test.prog_fd = raw(program);
    attr.test.repeat = 1;
    attr.test.data_in = frame.as_ptr() as u64;
    attr.test.data_size_in = u32::try_from(frame.len()).map_err(io::Error::other)?;
    attr.test.data_out = out.as_mut_ptr() as u64;
    attr.test.data_size_out = u32::try_from(out.len()).map_err(io::Error::other)?;
    attr.test.ctx_in = std::ptr::from_ref(context) as u64;
    attr.test.ctx_size_in = u32::try_from(size_of::<SkbContext>()).map_err(io::Error::other)?;
    // SAFETY: frame and context are read only, and as long as we say, as is `out`; the context is
    // given, but not asked for.
    unsafe {
        bpf(bpf_cmd::BPF_PROG_TEST_RUN, &mut attr)?;
        Ok((
            attr.test.retval,
            attr.test.data_size_out as usize,
            attr.test.duration,
        ))
    }
}

/// Sets one of a network device's values (`struct ethtool_value` in `include/uapi/linux/ethtool.h`).
pub fn ethtool_set(interface: &str, command: u32, value: u32) -> io::Result<()> {
    let mut request = [command, value];
    let mut ifreq = ifreq(interface);
    ifreq.ifr_ifru.ifru_data = request.as_mut_ptr().cast();
    let socket = std::net::UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, 0))?;
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

/// A request about a network device.
fn ifreq(interface: &str) -> libc::ifreq {
    // SAFETY: plain data, for which zero is a value.
    let mut ifreq: libc::ifreq = unsafe { zeroed() };
    for (to, from) in ifreq.ifr_name.iter_mut().zip(interface.bytes().take(15)) {
        *to = from.cast_signed();
    }
    ifreq
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// The cookie of the network namespace that this thread is in (`SO_NETNS_COOKIE`, Linux 5.14).
pub fn netns_cookie() -> io::Result<u64> {
    let socket = std::net::UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, 0))?;
    let mut cookie = 0u64;
    let mut len: libc::socklen_t = 8;
    // SAFETY: eight bytes of room, as `len` says.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            std::ptr::from_mut(&mut cookie).cast(),
            &raw mut len,
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(cookie)
    }
}
