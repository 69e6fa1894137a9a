//! The process that calls: its workload, and whether it is the agent.

use core::ptr::read_volatile;

use aya_ebpf::{
    bindings::bpf_sock_addr,
    helpers::generated::{
        bpf_get_current_ancestor_cgroup_id, bpf_get_current_cgroup_id, bpf_get_current_uid_gid,
    },
};
use dataplane_common::{
    capture::{self, CaptureConfig, Enrolled, MESH_CGROUPS, MESH_NAMESPACES, has_mark},
    reread::Copied,
};

use super::{Live, config, copy};
use crate::{
    select::Request,
    tables::{CGROUPS, NAMESPACES},
};

/// How many levels of the cgroup hierarchy are searched.
const LEVELS: u32 = 16;

/// Returns the workload of the process that calls.
#[inline(always)]
pub fn enrolled(request: &Request, mesh: u64) -> Copied<Enrolled> {
    let mut enrolled = Enrolled::default();
    match capture_enrolled(request, mesh, &raw mut enrolled) {
        FOUND => Copied::Found(enrolled),
        ABSENT => Copied::Absent,
        _ => Copied::Changing,
    }
}

/// [`capture_enrolled`]: [`Copied::Found`].
const FOUND: u32 = 1;
/// [`capture_enrolled`]: [`Copied::Absent`].
const ABSENT: u32 = 2;

/// [`enrolled`]. With external linkage, as in `packet/table.rs`: the verifier looks at it once, not on each
/// way that leads to it.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn capture_enrolled(request: *const Request, mesh: u64, enrolled: *mut Enrolled) -> u32 {
    // SAFETY: values, or null: the verifier sees to it where it is called.
    let values = unsafe { (request.as_ref(), enrolled.as_mut()) };
    let ((Some(request), Some(enrolled)), Some(config)) = (values, config()) else {
        return 0;
    };
    match find(request, config, mesh) {
        Copied::Found(found) => {
            *enrolled = found;
            FOUND
        }
        Copied::Absent => ABSENT,
        Copied::Changing => 0,
    }
}

#[inline(always)]
fn find(request: &Request, config: &CaptureConfig, mesh: u64) -> Copied<Enrolled> {
    let mut found = Copied::Absent;
    if mesh & MESH_NAMESPACES != 0 {
        found = copy(|| NAMESPACES.get_ptr(request.netns));
    }
    if found == Copied::Absent && request.own_loopback && mesh & MESH_CGROUPS != 0 {
        let id = by_cgroup(config.levels);
        found = copy(|| CGROUPS.get_ptr(id));
    }
    found
}

/// Whether rules leave the process alone by its user or group.
#[inline(always)]
pub fn excludes_user(enrolled: &Enrolled) -> bool {
    capture_excludes_user(enrolled.policy, enrolled.flags) != 0
}

/// With external linkage, too.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn capture_excludes_user(policy: u32, flags: u32) -> u32 {
    let enrolled = Enrolled {
        policy,
        flags,
        ..Enrolled::default()
    };
    // SAFETY: the helper has no preconditions.
    let ids = unsafe { bpf_get_current_uid_gid() };
    let ids = (ids as u32, (ids >> 32) as u32);
    u32::from(capture::excludes_user(&Live, &enrolled, ids))
}

/// `SO_MARK` of the socket.
#[inline(always)]
pub fn mark(ctx: *mut bpf_sock_addr) -> u32 {
    // SAFETY: fields of the context and of the socket.
    unsafe {
        let sk = read_volatile(&raw const (*ctx).__bindgen_anon_1.sk);
        read_volatile(&raw const (*sk).mark)
    }
}

/// Whether a socket is one by which the agent's proxy connects to the target of a connection.
#[inline(always)]
pub fn is_proxys_own(ctx: *mut bpf_sock_addr) -> bool {
    config().is_some_and(|config| {
        config.mark != 0 && has_mark(mark(ctx), config.mark) && is_agent(config)
    })
}

/// Whether the process is the agent's or its predecessor's: by its cgroup, which a process cannot choose for itself.
#[inline(always)]
pub fn is_agent(config: &CaptureConfig) -> bool {
    // SAFETY: the helper has no preconditions.
    let cgroup = unsafe { bpf_get_current_cgroup_id() };
    config.agent_cgroup != 0 && (cgroup == config.agent_cgroup || cgroup == config.before_cgroup)
}

/// The innermost of the process's cgroups that is a workload; 0 if none is.
#[inline(always)]
fn by_cgroup(levels: u32) -> u64 {
    // From the innermost on. Linux 6.1 refuses a loop whose last instruction is a call.
    for level in (0..LEVELS).rev() {
        if levels >> level & 1 == 0 {
            continue;
        }
        // SAFETY: the helper has no preconditions.
        let id = unsafe { bpf_get_current_ancestor_cgroup_id(level.cast_signed()) };
        if CGROUPS.get_ptr(id).is_some() {
            return id;
        }
    }
    0
}
