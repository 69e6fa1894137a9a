//! Maps: their creation and their elements.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use aya_obj::generated::{bpf_cmd, bpf_map_type};

use super::{attr, bpf, bpf_fd, raw};

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

/// Creates a map. The name is truncated to 15 bytes, the kernel's limit.
pub fn map_create(name: &str, shape: &Shape, max_entries: u32) -> io::Result<OwnedFd> {
    create(name, shape, max_entries, None)
}

/// Creates a table of sockets' storage, one word each: for probing. The kernel requires a description of its types
/// (`bpf_local_storage_map_alloc_check`).
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

/// Removes `count` keys, up to the first that is not there.
pub fn map_delete_batch(map: BorrowedFd<'_>, keys: &[u8], count: u32) -> io::Result<()> {
    let mut attr = attr();
    attr.batch.map_fd = raw(map);
    attr.batch.keys = keys.as_ptr() as u64;
    attr.batch.count = count;
    // SAFETY: `keys` holds `count` keys, by the module's contract; only read.
    unsafe { bpf(bpf_cmd::BPF_MAP_DELETE_BATCH, &mut attr).map(|_| ()) }
}

/// Reads up to `count` keys of a hash. `position` is where to go on, `None` from the start.
/// Returns how many were read, and the next position, `None` at the end.
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
