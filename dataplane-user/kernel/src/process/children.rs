//! Programs that end with the process that started them.

use std::{os::unix::process::CommandExt as _, process::Command};

use nix::sys::{prctl::set_pdeathsig, signal::Signal};

/// Makes the kernel kill the program when the thread that starts it ends, so also when this process is killed
/// (`PR_SET_PDEATHSIG`, `prctl(2)`). The program must not have more capabilities than this process: otherwise the
/// kernel clears the setting.
pub fn ends_with_us(command: &mut Command) {
    // SAFETY: between fork and exec, the closure makes one system call and touches no memory of other threads.
    unsafe {
        command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?));
    }
}
