//! System calls that no crate here has a public form of, each as one small function: `bpf(2)` as far as
//! aya 0.14 lacks it, and a few of network devices and namespaces.
//!
//! Keys and values are byte slices whose lengths the caller guarantees to be the map's: the typed
//! layer over this is [`super::map`].

mod info;
mod link;
mod map;
mod net;
mod program;
#[cfg(feature = "testing")]
mod testing;

use std::{
    ffi::CString,
    io,
    mem::{size_of, zeroed},
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya_obj::generated::{bpf_attr, bpf_cmd};

#[cfg(feature = "testing")]
pub use self::testing::*;
pub use self::{info::*, link::*, map::*, net::*, program::*};
use super::opener;

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

/// Gives an object a name in a bpffs.
pub fn obj_pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let mut attr = attr();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    attr.__bindgen_anon_4.bpf_fd = raw(object);
    // SAFETY: a C string that lives until the call is over.
    unsafe { bpf(bpf_cmd::BPF_OBJ_PIN, &mut attr) }.map(|_| ())
}

/// Opens a pinned object of any kind.
pub fn obj_get(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let mut attr = attr();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    // SAFETY: a C string that lives until the call is over.
    unsafe { bpf_fd(bpf_cmd::BPF_OBJ_GET, &mut attr) }
}

/// Opens a map by its id.
pub fn map_by_id(id: u32) -> io::Result<OwnedFd> {
    opener::map(id).unwrap_or_else(|| by_id(bpf_cmd::BPF_MAP_GET_FD_BY_ID, id))
}

/// Opens a program by its id.
pub fn prog_by_id(id: u32) -> io::Result<OwnedFd> {
    opener::program(id).unwrap_or_else(|| by_id(bpf_cmd::BPF_PROG_GET_FD_BY_ID, id))
}

fn by_id(cmd: bpf_cmd, id: u32) -> io::Result<OwnedFd> {
    let mut attr = attr();
    // SAFETY: no pointers in these commands' attributes.
    unsafe {
        attr.__bindgen_anon_6.__bindgen_anon_1.map_id = id;
        bpf_fd(cmd, &mut attr)
    }
}
