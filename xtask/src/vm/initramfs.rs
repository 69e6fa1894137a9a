//! The guest's only file system: what the tests need, in memory.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::{
    cpio::Archive,
    kernel::{self, Kernel},
    modules,
};
use crate::{command::output, setup};

/// Programs of this machine's that scenarios run; those that are not here are left out, and the
/// scenarios say so.
const PROGRAMS: [&str; 5] = ["ip", "curl", "unshare", "mountpoint", "bash"];

/// Where the guest keeps its own programs.
pub const PROGRAM_DIRECTORY: &str = "/usr/bin";

/// Packs the guest's files. `programs` are copied under their names to [`PROGRAM_DIRECTORY`], with
/// the shared libraries that they load; `task` is the shell script that the guest is for.
pub fn build(
    kernel: &Kernel,
    programs: &[(&str, PathBuf)],
    task: &str,
    marker: &str,
) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in [
        "dev", "proc", "sys", "tmp", "run", "root", "etc", "bin", "sbin", "usr/sbin",
    ] {
        archive.directory(directory);
    }
    // The kernel opens it before anything is mounted.
    archive.device("dev/console", 5, 1);
    let busybox = kernel::fetch("busybox-static")?.join("bin/busybox");
    archive.file("bin/busybox", 0o755, &read(&busybox)?);
    archive.file("init", 0o755, include_bytes!("init.sh"));
    archive.file("task", 0o644, task.as_bytes());
    archive.file("marker", 0o644, marker.as_bytes());

    let mut libraries = BTreeSet::new();
    for (name, path) in programs {
        add(
            &mut archive,
            &format!("{PROGRAM_DIRECTORY}/{name}"),
            path,
            &mut libraries,
        )?;
    }
    for name in PROGRAMS {
        if let Some(path) = setup::on_path(name) {
            add(
                &mut archive,
                &format!("/usr/sbin/{name}"),
                &path,
                &mut libraries,
            )?;
        }
    }
    for library in libraries {
        archive.file(inside(&library), 0o755, &read(Path::new(&library))?);
    }

    let modules = match &kernel.modules {
        Some(directory) => modules::collect(directory)?,
        None => Vec::new(),
    };
    let mut order = String::new();
    for module in &modules {
        archive.file(&format!("modules/{}.ko", module.name), 0o644, &module.bytes);
        order.push_str(&module.name);
        order.push('\n');
    }
    archive.file("modules/order", 0o644, order.as_bytes());
    Ok(archive.finish())
}

fn add(
    archive: &mut Archive,
    to: &str,
    from: &Path,
    libraries: &mut BTreeSet<String>,
) -> Result<()> {
    archive.file(inside(to), 0o755, &read(from)?);
    // The loader itself answers for the program; it fails for one that needs no libraries.
    if let Ok(list) = output(Command::new("ldd").arg(from)) {
        libraries.extend(libraries_in(&list));
    }
    Ok(())
}

/// The paths in what `ldd` prints: `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f...)` and
/// `/lib64/ld-linux-x86-64.so.2 (0x00007f...)`.
fn libraries_in(list: &str) -> impl Iterator<Item = String> {
    list.lines().filter_map(|line| {
        let path = line.split_whitespace().rev().nth(1)?;
        path.starts_with('/').then(|| path.to_owned())
    })
}

fn inside(path: &str) -> &str {
    path.trim_start_matches('/')
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_libraries_and_the_loader() {
        let list = "\tlinux-vdso.so.1 (0x00007ffd0)\n\
                    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f5c)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f5d)\n";
        let found: Vec<String> = libraries_in(list).collect();
        assert_eq!(
            found,
            [
                "/lib/x86_64-linux-gnu/libc.so.6",
                "/lib64/ld-linux-x86-64.so.2"
            ]
        );
        assert_eq!(libraries_in("\tnot a dynamic executable\n").count(), 0);
    }
}
