//! A guest with another kernel. Its tasks run as root for any user of this machine. It is for tests of programs that
//! must load on other kernels than the builder's.
//!
//! qemu boots the kernel with an initramfs that is made here, without root. It contains the tests with their shared
//! libraries, busybox, iproute2, and the modules that they need. There is no disk and no network.

mod cpio;
mod initramfs;
mod kernel;
mod modules;
mod qemu;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use self::kernel::Kernel;
pub use self::qemu::Accelerator;
use crate::progress::note;

/// Prefix of the guest's last line. The exit status of the task follows.
const MARKER: &str = "the guest's task ended with exit status";

/// The oldest kernel that the dataplane supports.
pub const OLDEST: &str = "debian-6.1";

/// A guest. It boots anew for every task.
#[derive(Debug)]
pub struct Guest {
    kernel: Kernel,
    accelerator: Accelerator,
    /// The directory is deleted when this value is dropped.
    directory: tempfile::TempDir,
}

/// A task for a guest.
#[derive(Debug)]
pub struct Task<'a> {
    /// Programs that the task needs: name in the guest, and path on this machine.
    pub programs: Vec<(&'a str, PathBuf)>,
    /// Shell commands. The exit status of the last one is the status of the task.
    pub script: String,
}

impl Guest {
    /// Fetches a kernel if necessary, and finds out how guests run on this machine. `which` is a name such as
    /// `debian-6.1`, or the path of a bzImage.
    pub fn new(which: &str, modules: Option<&Path>) -> Result<Self> {
        kernel::check_architecture()?;
        let kernel = Kernel::find(which, modules)?;
        let directory = tempfile::tempdir().context("cannot create a temporary directory")?;
        let accelerator = Accelerator::find(&kernel.image, directory.path())?;
        note(&format!(
            "the guest: {}, {}",
            kernel.name,
            match accelerator {
                Accelerator::Kvm => "by KVM",
                Accelerator::Tcg => "emulated, since KVM does not work here",
            }
        ));
        Ok(Self {
            kernel,
            accelerator,
            directory,
        })
    }

    /// Returns the name of the guest's kernel, for the user.
    pub fn kernel(&self) -> &str {
        &self.kernel.name
    }

    /// Returns how the guest's instructions run, for the user.
    pub fn runs_by(&self) -> &'static str {
        match self.accelerator {
            Accelerator::Kvm => "a guest (KVM)",
            Accelerator::Tcg => "a guest, emulated (TCG)",
        }
    }

    /// Boots, runs the task and returns its exit status. Passes each line of the task's output to `line`.
    pub fn run(&self, task: &Task<'_>, line: &mut dyn FnMut(&str)) -> Result<i32> {
        let script = script(task, self.accelerator);
        let bytes = initramfs::build(&self.kernel, &task.programs, &script, MARKER)?;
        let file = self.directory.path().join("initramfs");
        fs::write(&file, bytes).with_context(|| format!("cannot write {}", file.display()))?;
        qemu::run(
            self.accelerator,
            &self.kernel.image,
            &file,
            self.directory.path(),
            MARKER,
            line,
        )
    }
}

/// Returns the guest's task as a shell script.
fn script(task: &Task<'_>, accelerator: Accelerator) -> String {
    let path = |name: &str| format!("{}/{name}", initramfs::PROGRAM_DIRECTORY);
    let emulated = accelerator == Accelerator::Tcg;
    // The kernel patches the code on the path of every packet when the first filter is added and when the last one is
    // removed (`ingress_needed_key`). An emulated processor may then hang forever in its translation of the temporary
    // breakpoint. This was seen with qemu 7.2, after a thousand such changes. So the guest always has one filter. (`tc`
    // needs its path: the shell would run busybox's own `tc`.)
    let keep = if emulated {
        "\"$(which tc)\" qdisc add dev lo clsact || echo 'no clsact: this guest may hang' >&2\n"
    } else {
        ""
    };
    // Users set the scenarios' numbers of connections and flows here; pass them to the guest.
    let mut numbers = String::new();
    for (name, value) in std::env::vars() {
        if name.starts_with("DATAPLANE_") && value.parse::<u64>().is_ok() {
            numbers += &["export ", &name, "=", &value, "\n"].concat();
        }
    }
    format!(
        "{keep}{numbers}export DATAPLANE_BIN={} DATAPLANE_MIGRATE_BIN={} DATAPLANE_PROBE_BIN={} DATAPLANE_REQUIRE_PRIVILEGES=1 \
         DATAPLANE_EMULATED={}\n{}\n",
        path("dataplane"),
        path("dataplane-migrate"),
        path("probe"),
        u8::from(emulated),
        task.script
    )
}
