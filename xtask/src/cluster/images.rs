//! Images of containers, made here: the dataplane's own, as deploy/Containerfile makes it, and an image with `probe`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result};
use data_encoding::HEXLOWER;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::place;
use crate::command::{check, on_path, output};

/// The image of pods' sandboxes.
pub const PAUSE: &str = "dataplane.test/lab:1";
/// The image with `probe`, a shell and a few other programs.
pub const LAB: &str = PAUSE;
/// The image of the dataplane.
pub const DATAPLANE: &str = "dataplane.test/dataplane";
/// The tags of [`DATAPLANE`]. Both have the same program; a scenario upgrades from the first to the second.
pub const TAGS: [&str; 2] = ["0.1.0", "0.1.1"];

/// Returns the directory of the archives that every node imports when it starts.
pub fn directory() -> PathBuf {
    place::directory().join("images")
}

/// Returns all archives that nodes import.
pub fn archives() -> Result<Vec<PathBuf>> {
    archives_in(&directory())
}

/// Returns all archives in a directory.
pub fn archives_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    let mut archives: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "tar"))
        .collect();
    archives.sort();
    Ok(archives)
}

/// Has this node's containerd import an archive.
pub fn import(archive: &Path) -> Result<()> {
    let mut ctr = Command::new("ctr");
    ctr.args(["--namespace=k8s.io", "images", "import"])
        .arg(archive)
        .stdout(Stdio::null());
    check(&mut ctr)
}

/// Makes the images of the dataplane and of the lab.
pub fn make(dataplane: &Path, probe: &Path) -> Result<()> {
    let mut image = Image::new("dataplane")?;
    image.program(dataplane, "usr/bin/dataplane")?;
    image.write("etc/nsswitch.conf", "hosts: files dns\n")?;
    for place in ["run", "tmp"] {
        image.directory(place)?;
    }
    image.entrypoint = vec!["/usr/bin/dataplane".into()];
    image.command = vec!["run".into()];
    image.names = TAGS
        .iter()
        .map(|tag| format!("{DATAPLANE}:{tag}"))
        .collect();
    image.pack()?;

    let mut image = Image::new("lab")?;
    image.program(probe, "usr/bin/probe")?;
    for name in ["sh", "sleep", "cat", "ls"] {
        let program = on_path(name).with_context(|| format!("there is no {name}"))?;
        image.program(&program, &format!("usr/bin/{name}"))?;
    }
    // Scripts look for the shell at this path.
    image.program(&on_path("sh").context("there is no sh")?, "bin/sh")?;
    image.write("etc/passwd", "root:x:0:0:root:/:/bin/sh\n")?;
    image.directory("tmp")?;
    image.entrypoint = vec!["/usr/bin/sleep".into()];
    image.command = vec!["infinity".into()];
    image.names = vec![LAB.into()];
    image.pack()
}

/// An image under construction: a directory, and the image's configuration.
pub struct Image {
    name: String,
    place: PathBuf,
    root: PathBuf,
    pub entrypoint: Vec<String>,
    pub command: Vec<String>,
    pub names: Vec<String>,
}

impl Image {
    /// Starts an empty image. `name` is the name of its archive, which nodes import when they start.
    fn new(name: &str) -> Result<Self> {
        Self::new_in(&directory(), name)
    }

    /// Starts an empty image whose archive is written to this directory.
    pub fn new_in(place: &Path, name: &str) -> Result<Self> {
        let root = place.join(format!("{name}.root"));
        if root.exists() {
            fs::remove_dir_all(&root)
                .with_context(|| format!("cannot remove {}", root.display()))?;
        }
        fs::create_dir_all(&root).with_context(|| format!("cannot create {}", root.display()))?;
        Ok(Self {
            name: name.into(),
            place: place.to_owned(),
            root,
            entrypoint: Vec::new(),
            command: Vec::new(),
            names: Vec::new(),
        })
    }

    /// Returns the directory that becomes the image's root.
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn directory(&self, place: &str) -> Result<()> {
        let path = self.root.join(place);
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))
    }

    pub fn write(&self, place: &str, text: &str) -> Result<()> {
        let path = self.root.join(place);
        self.directory_of(&path)?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    fn directory_of(&self, path: &Path) -> Result<()> {
        let directory = path.parent().unwrap_or(&self.root);
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot create {}", directory.display()))
    }

    /// Copies a program, and the libraries that the dynamic linker loads for it, to the same paths.
    pub fn program(&self, program: &Path, place: &str) -> Result<()> {
        let copy = |from: &Path, to: &Path| -> Result<()> {
            self.directory_of(to)?;
            fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
            Ok(())
        };
        copy(program, &self.root.join(place))?;
        // `ldd` fails for a program that needs no libraries.
        let libraries = output(Command::new("ldd").arg(program)).unwrap_or_default();
        for word in libraries
            .split_whitespace()
            .filter(|word| word.starts_with('/'))
        {
            copy(
                Path::new(word),
                &self.root.join(word.trim_start_matches('/')),
            )?;
        }
        Ok(())
    }

    /// Writes the archive in the format of `docker save`, which containerd imports.
    pub fn pack(self) -> Result<()> {
        let work = self.place.join(format!("{}.work", self.name));
        fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
        let layer = work.join("layer.tar");
        check(
            Command::new("tar")
                .args([
                    "--sort=name",
                    "--numeric-owner",
                    "--owner=0",
                    "--group=0",
                    "--create",
                ])
                .arg("--file")
                .arg(&layer)
                .arg("--directory")
                .arg(&self.root)
                .arg("."),
        )?;
        let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let config = json!({
            "architecture": architecture,
            "os": "linux",
            "config": {
                "Env": [path],
                "Entrypoint": self.entrypoint,
                "Cmd": self.command,
                "WorkingDir": "/",
            },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", digest(&layer)?)] },
        });
        fs::write(work.join("config.json"), config.to_string()).context("cannot write an image")?;
        let manifest =
            json!([{ "Config": "config.json", "RepoTags": self.names, "Layers": ["layer.tar"] }]);
        fs::write(work.join("manifest.json"), manifest.to_string())
            .context("cannot write an image")?;
        check(
            Command::new("tar")
                .arg("--create")
                .arg("--file")
                .arg(self.place.join(format!("{}.tar", self.name)))
                .arg("--directory")
                .arg(&work)
                .args(["manifest.json", "config.json", "layer.tar"]),
        )?;
        for directory in [&work, &self.root] {
            fs::remove_dir_all(directory)
                .with_context(|| format!("cannot remove {}", directory.display()))?;
        }
        Ok(())
    }
}

/// Returns the SHA-256 of a file, in hexadecimal.
fn digest(path: &Path) -> Result<String> {
    let mut file =
        fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut hasher = Sha256::new();
    std::io::copy(&mut file, &mut hasher)
        .with_context(|| format!("cannot read {}", path.display()))?;
    Ok(HEXLOWER.encode(&hasher.finalize()))
}
