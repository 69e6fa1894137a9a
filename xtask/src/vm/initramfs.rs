//! The guest's only file system: the files that the tests need, in memory.

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
use crate::command::{on_path, output};

/// Programs of this machine that scenarios run. Programs that are not installed are left out, and
/// the scenarios report this.
const PROGRAMS: &[&str] = &[
    "bash",
    "conntrack",
    "curl",
    "dig",
    "getent",
    "haproxy",
    "ip",
    "ip6tables",
    "ip6tables-legacy",
    "ip6tables-legacy-restore",
    "ip6tables-legacy-save",
    "ip6tables-nft",
    "ip6tables-nft-restore",
    "ip6tables-nft-save",
    "ip6tables-restore",
    "ip6tables-save",
    "iptables",
    "iptables-legacy",
    "iptables-legacy-restore",
    "iptables-legacy-save",
    "iptables-nft",
    "iptables-nft-restore",
    "iptables-nft-save",
    "iptables-restore",
    "iptables-save",
    "mountpoint",
    "nft",
    "nginx",
    "nsenter",
    "ss",
    "tc",
    "unbound",
    "unshare",
];

/// The guest's directory for its own programs.
pub const PROGRAM_DIRECTORY: &str = "/usr/bin";

/// The directory in which Debian's nginx looks for its modules. The module for relaying connections
/// is one of them.
const NGINX_MODULES: &str = "/usr/lib/nginx/modules";

/// Packs the guest's files. Copies `programs` under their names to [`PROGRAM_DIRECTORY`], with the
/// shared libraries that they load. `task` is the shell script that the guest runs.
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
    // The kernel opens this device before anything is mounted.
    archive.device("dev/console", 5, 1);
    let busybox = kernel::fetch("busybox-static")?.join("bin/busybox");
    archive.file("bin/busybox", 0o755, &read(&busybox)?);
    archive.file("init", 0o755, include_bytes!("init.sh"));
    archive.file("task", 0o644, task.as_bytes());
    archive.file("marker", 0o644, marker.as_bytes());

    let mut files = Files::new(archive);
    for (name, path) in programs {
        files.program(&format!("{PROGRAM_DIRECTORY}/{name}"), path)?;
    }
    for name in PROGRAMS {
        if let Some(path) = on_path(name) {
            files.named(name, &path)?;
        }
    }
    files.iptables_extensions()?;
    files.loadable(Path::new(NGINX_MODULES))?;
    let mut archive = files.finish()?;

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

/// Programs of this machine, each once, and the libraries that they load.
struct Files {
    archive: Archive,
    programs: BTreeSet<String>,
    libraries: BTreeSet<String>,
}

impl Files {
    fn new(archive: Archive) -> Self {
        Self {
            archive,
            programs: BTreeSet::new(),
            libraries: BTreeSet::new(),
        }
    }

    /// Adds a program under a name by which scenarios call it. A program with several names that
    /// acts by its name is copied once.
    fn named(&mut self, name: &str, path: &Path) -> Result<()> {
        let real = fs::canonicalize(path)
            .with_context(|| format!("cannot look for {}", path.display()))?;
        let own_name = real.file_name().unwrap_or_default().to_string_lossy();
        self.program(&format!("/usr/sbin/{own_name}"), &real)?;
        if own_name != name {
            self.archive.link(&format!("usr/sbin/{name}"), &own_name);
        }
        Ok(())
    }

    fn program(&mut self, to: &str, from: &Path) -> Result<()> {
        if !self.programs.insert(to.to_owned()) {
            return Ok(());
        }
        self.archive.file(inside(to), 0o755, &read(from)?);
        // `ldd` lists the libraries. It fails for a program that needs none.
        if let Ok(list) = output(Command::new("ldd").arg(from)) {
            self.libraries.extend(libraries_in(&list));
        }
        Ok(())
    }

    /// Adds iptables' matches and targets, which iptables loads by name from a directory beside its
    /// library.
    fn iptables_extensions(&mut self) -> Result<()> {
        let library = self.libraries.iter().find(|l| l.contains("/libxtables."));
        let Some(library) = library else {
            return Ok(());
        };
        let library =
            fs::canonicalize(library).with_context(|| format!("cannot look for {library}"))?;
        self.loadable(&library.parent().unwrap_or(Path::new("/")).join("xtables"))
    }

    /// Adds the files in a directory from which programs load by themselves, if the directory
    /// exists.
    fn loadable(&mut self, directory: &Path) -> Result<()> {
        if !directory.exists() {
            return Ok(());
        }
        let entries = fs::read_dir(directory)
            .with_context(|| format!("cannot look into {}", directory.display()))?;
        for entry in entries {
            let path = entry?.path();
            if let Some(name) = path.to_str() {
                self.program(name, &path)?;
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Archive> {
        for library in &self.libraries {
            self.archive
                .file(inside(library), 0o755, &read(Path::new(library))?);
        }
        Ok(self.archive)
    }
}

/// Returns the paths in the output of `ldd`: `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6
/// (0x00007f...)` and `/lib64/ld-linux-x86-64.so.2 (0x00007f...)`.
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
