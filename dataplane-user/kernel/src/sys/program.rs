//! Programs: loading them from instructions, and running them once.

use std::{
    io,
    mem::{offset_of, size_of},
    os::fd::{BorrowedFd, OwnedFd},
};

use aya_obj::generated::{bpf_attach_type, bpf_cmd, bpf_insn, bpf_prog_type};

use super::{attr, bpf, bpf_fd, raw};

/// Loads a program from raw instructions, to probe the kernel's abilities.
pub fn prog_load(
    kind: bpf_prog_type,
    attach_type: bpf_attach_type,
    instructions: &[u64],
) -> io::Result<OwnedFd> {
    prog_load_traced(kind, attach_type, instructions, 0)
}

/// Loads a program for a tracepoint from raw instructions. `traced`: the tracepoint's type in the
/// kernel's BTF.
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

/// Loads a program whose instructions contain its tables' descriptors. The name is truncated to 15 bytes, the kernel's
/// limit.
pub fn prog_load_named(
    name: &str,
    kind: bpf_prog_type,
    attach_type: bpf_attach_type,
    instructions: &[bpf_insn],
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
        for (to, from) in load.prog_name.iter_mut().zip(name.bytes().take(15)) {
            *to = from.cast_signed();
        }
        bpf_fd(bpf_cmd::BPF_PROG_LOAD, &mut attr)
    }
}

/// Waits until programs that were detached before this call run no longer: a grace period of RCU (`membarrier(2)`), some
/// milliseconds.
pub fn wait_for_programs() -> io::Result<()> {
    // SAFETY: the call takes two numbers, and touches no memory of ours.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_GLOBAL, 0) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Runs a program once (`BPF_PROG_TEST_RUN`).
#[cfg(test)]
pub fn prog_test_run(program: BorrowedFd<'_>) -> io::Result<u32> {
    let mut attr = attr();
    attr.test.prog_fd = raw(program);
    // SAFETY: the call passes no data and no context.
    unsafe {
        bpf(bpf_cmd::BPF_PROG_TEST_RUN, &mut attr)?;
        Ok(attr.test.retval)
    }
}

/// The settings of a packet's buffer for a test run: `struct __sk_buff` in `include/uapi/linux/bpf.h` up to `gso_size`.
/// All fields that are not named here must be zero (`convert___skb_to_skb` in `net/bpf/test_run.c`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SkbContext {
    before: [u32; 2],
    mark: u32,
    after_mark: [u32; 6],
    ingress_ifindex: u32,
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

    /// Returns this packet with a mark, as another program may have set it.
    #[must_use]
    pub fn marked(self, mark: u32) -> Self {
        Self { mark, ..self }
    }

    /// Returns this packet as one that the stack forwards from an interface.
    #[must_use]
    pub fn forwarded_from(self, ingress_ifindex: u32) -> Self {
        Self {
            ingress_ifindex,
            ..self
        }
    }
}

const _: () = assert!(offset_of!(SkbContext, mark) == 8);
const _: () = assert!(offset_of!(SkbContext, ifindex) == 40);
const _: () = assert!(offset_of!(SkbContext, gso_segs) == 164);
const _: () = assert!(offset_of!(SkbContext, gso_size) == 176);

/// Runs a packet program once on a frame, which is not sent. Returns the program's return value, the length of the
/// resulting frame in `out`, and the run time in nanoseconds.
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
    // SAFETY: frame and context are read only, and as long as we say, as is `out`; the call passes the context in, and
    // does not ask for it back.
    unsafe {
        bpf(bpf_cmd::BPF_PROG_TEST_RUN, &mut attr)?;
        Ok((
            attr.test.retval,
            attr.test.data_size_out as usize,
            attr.test.duration,
        ))
    }
}
