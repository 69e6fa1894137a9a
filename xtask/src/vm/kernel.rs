//! The kernel that a guest runs.

use std::{
    env, fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{self, Command},
};

use anyhow::{Context, Result, bail};

use crate::{command::output, progress, setup};

/// A kernel, with its modules.
#[derive(Debug)]
pub struct Kernel {
    /// Name for the user: its package, or its file.
    pub name: String,
    /// A bzImage.
    pub image: PathBuf,
    /// The directory of its modules, if it has any.
    pub modules: Option<PathBuf>,
}

impl Kernel {
    /// Finds a kernel. `debian-6.1` is the newest of Debian's cloud kernels of this series that is
    /// in the cache, or that apt knows. Any other text is the path of a bzImage.
    pub fn find(which: &str, modules: Option<&Path>) -> Result<Self> {
        if let Some(series) = which.strip_prefix("debian-") {
            return debian(series);
        }
        let image = PathBuf::from(which);
        if !image.is_file() {
            bail!(
                "there is no kernel {which}: name a bzImage, or one of Debian's cloud kernels, \
                 such as debian-6.1"
            );
        }
        if !is_bzimage(&image)? {
            bail!(
                "{which} is no bzImage, which is what /boot/vmlinuz-* and arch/x86/boot/bzImage are"
            );
        }
        if let Some(modules) = modules.filter(|modules| !modules.is_dir()) {
            bail!(
                "there is no directory {}: the modules of a kernel are in /lib/modules/VERSION",
                modules.display()
            );
        }
        Ok(Self {
            name: image
                .file_name()
                .map_or(which.into(), |name| name.to_string_lossy().into_owned()),
            image,
            modules: modules.map(Path::to_owned),
        })
    }
}

/// Returns whether a file begins as the kernel's `Documentation/arch/x86/boot.rst` says.
fn is_bzimage(file: &Path) -> Result<bool> {
    let mut start = Vec::new();
    fs::File::open(file)
        .and_then(|file| file.take(0x206).read_to_end(&mut start))
        .with_context(|| format!("cannot read {}", file.display()))?;
    Ok(start.get(0x202..0x206) == Some(b"HdrS"))
}

fn debian(series: &str) -> Result<Kernel> {
    let prefix = format!("linux-image-{series}.");
    let newest = |names: Vec<String>| {
        names
            .into_iter()
            .filter(|name| name.starts_with(&prefix) && name.ends_with("-cloud-amd64"))
            .max_by_key(|name| numbers(name))
    };
    let package = match newest(kept()?) {
        Some(package) => package,
        None => newest(offered(&prefix)?).with_context(|| {
            format!(
                "apt knows no package {prefix}*-cloud-amd64: on a release of Debian that has one, \
                 `apt-get update` helps; elsewhere, name a bzImage with --kernel PATH --modules DIR"
            )
        })?,
    };
    let directory = fetch(&package)?;
    let release = package.strip_prefix("linux-image-").unwrap_or(&package);
    Ok(Kernel {
        image: directory.join(format!("boot/vmlinuz-{release}")),
        modules: Some(directory.join("lib/modules").join(release)),
        name: package,
    })
}

/// Returns the numbers in a package's name, which order versions.
fn numbers(name: &str) -> Vec<u32> {
    name.split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

fn cache() -> Result<PathBuf> {
    Ok(setup::cache()?.join("guest"))
}

/// Returns the packages in the cache.
fn kept() -> Result<Vec<String>> {
    let Ok(entries) = fs::read_dir(cache()?) else {
        return Ok(Vec::new());
    };
    Ok(entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect())
}

fn offered(prefix: &str) -> Result<Vec<String>> {
    let names = output(Command::new("apt-cache").args(["pkgnames", prefix]))?;
    Ok(names.lines().map(str::to_owned).collect())
}

/// Unpacks one of Debian's packages into this user's cache, without installing it. This needs no
/// root, and changes nothing else on the machine.
pub fn fetch(package: &str) -> Result<PathBuf> {
    let directory = cache()?.join(package);
    if directory.is_dir() {
        return Ok(directory);
    }
    // Unpack aside, then move it into place: a directory in place is complete.
    let work = cache()?.join(format!(".{package}-{}", process::id()));
    fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
    let unpacked = unpack(package, &work);
    let moved = unpacked.and_then(|root| match fs::rename(&root, &directory) {
        Err(_) if directory.is_dir() => Ok(()), // Another run was quicker.
        result => result.with_context(|| format!("cannot create {}", directory.display())),
    });
    let _ = fs::remove_dir_all(&work);
    moved.map(|()| directory)
}

fn unpack(package: &str, work: &Path) -> Result<PathBuf> {
    let title = format!("fetching {package}");
    let mut download = Command::new("apt-get");
    download.args(["download", package]).current_dir(work);
    if progress::run(&title, &mut download).is_err() {
        // The package lists may be older than the servers' files.
        let mut update = Command::new("apt-get");
        progress::run("renewing the package lists", update.arg("update"))?;
        progress::run(&title, &mut download)?;
    }
    let archive = fs::read_dir(work)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .with_context(|| format!("apt-get download left no {package}"))?;
    let root = work.join("root");
    let mut extract = Command::new("dpkg-deb");
    output(extract.arg("--extract").arg(archive).arg(&root))?;
    Ok(root)
}

/// Checks whether this machine's programs can run in a guest.
pub fn check_architecture() -> Result<()> {
    if env::consts::ARCH != "x86_64" {
        bail!(
            "the guest runs this machine's own programs, and is set up for x86-64 only, not for {}",
            env::consts::ARCH
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_version_is_greater() {
        assert!(
            numbers("linux-image-6.1.0-9-cloud-amd64")
                < numbers("linux-image-6.1.0-56-cloud-amd64")
        );
        assert!(
            numbers("linux-image-6.12.99+deb12-cloud-amd64")
                < numbers("linux-image-6.12.117+deb12-cloud-amd64")
        );
    }
}
