//! Links, which attach programs, and the programs that are attached to a hook.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

use aya_obj::generated::{bpf_attach_type, bpf_cmd};

use super::{attr, bpf, bpf_fd, raw};

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
    // SAFETY: the name is null: the program knows its tracepoint.
    unsafe {
        attr.raw_tracepoint.prog_fd = raw(program);
        bpf_fd(bpf_cmd::BPF_RAW_TRACEPOINT_OPEN, &mut attr)
    }
}

/// A place among the programs of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Before or after.
    pub before: bool,
    /// This program, by its id; otherwise all of them.
    pub relative: Option<u32>,
    /// The revision that the chain must have; 0: any.
    pub revision: u64,
}

/// Attaches a program to an interface by a link (TCX, Linux 6.6), at a place in its chain. Fails with `ESTALE` if the
/// chain has another revision.
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

/// Detaches a link's program now, even if others hold the link; also one that is detached already.
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

/// The programs that TCX runs on an interface, with their links and the chain's revision.
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
