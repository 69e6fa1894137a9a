//! A guest with another kernel, privileged whoever runs it: for tests of programs that must load on
//! kernels other than the builder's.
//!
//! qemu boots the kernel into an initramfs made here, without root: the tests with their shared
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

/// What the guest's last line begins with; its task's exit status follows.
const MARKER: &str = "the guest's task ended with exit status";

/// The oldest kernel that the dataplane is for.
pub const OLDEST: &str = "debian-6.1";

/// A guest to be booted, once for every task.
#[derive(Debug)]
pub struct Guest {
    kernel: Kernel,
    accelerator: Accelerator,
    /// Deleted with this value.
    directory: tempfile::TempDir,
}

/// What a guest is booted for.
#[derive(Debug)]
pub struct Task<'a> {
    /// Name in the guest, and path here, of the programs that it takes there.
    pub programs: Vec<(&'a str, PathBuf)>,
    /// Shell commands; the last one's exit status is the task's.
    pub script: String,
}

impl Guest {
    /// Fetches a kernel if need be, and finds out how guests run on this machine. `which` is
    /// `debian-6.1` or the like, or a bzImage's path.
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

    /// Its kernel, for a person.
    pub fn kernel(&self) -> &str {
        &self.kernel.name
    }

    /// What runs its instructions, for a person.
    pub fn runs_by(&self) -> &'static str {
        match self.accelerator {
            Accelerator::Kvm => "a guest (KVM)",
            Accelerator::Tcg => "a guest, emulated (TCG)",
        }
    }

    /// Boots, runs the task and returns its exit status; what it prints goes to `line`.
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

/// The guest's task as a shell reads it.
fn script(task: &Task<'_>, accelerator: Accelerator) -> String {
    let path = |name: &str| format!("{}/{name}", initramfs::PROGRAM_DIRECTORY);
    let emulated = accelerator == Accelerator::Tcg;
    // The kernel patches the way of every packet when the first filter comes and when the last one goes
    // (`ingress_needed_key`), and an emulated processor may then hang for good in what it has translated
    // of the breakpoint that stood there meanwhile: seen with qemu 7.2, after a thousand such changes.
    // So there is always one. (By its path: the shell would take busybox's own `tc`.)
    let keep = if emulated {
        "\"$(which tc)\" qdisc add dev lo clsact || echo 'no clsact: this guest may hang' >&2\n"
    } else {
        ""
    };
    // How many connections or flows a scenario is to make is said here, and meant there.
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
