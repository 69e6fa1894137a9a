//! Archives that the kernel unpacks into its first file system.
//!
//! The format is cpio's "newc", as in the kernel's
//! `Documentation/driver-api/early-userspace/buffer-format.rst`: a header of 8-digit hexadecimal
//! numbers, the name, and the bytes, each padded to four. This module writes the archive itself,
//! because it can then set owners and devices as numbers, without root.

use std::collections::BTreeSet;

/// An archive under construction.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    directories: BTreeSet<String>,
}

const DIRECTORY: u32 = 0o040_755;
const FILE: u32 = 0o100_000;
const CHARACTER_DEVICE: u32 = 0o020_600;
const LINK: u32 = 0o120_777;

impl Archive {
    /// Adds a directory, with its parents. Paths have no leading slash.
    pub fn directory(&mut self, path: &str) {
        if path.is_empty() || !self.directories.insert(path.to_owned()) {
            return;
        }
        self.parent(path);
        self.entry(path, DIRECTORY, (0, 0), &[]);
    }

    /// Adds a file with these permissions.
    pub fn file(&mut self, path: &str, permissions: u32, bytes: &[u8]) {
        self.parent(path);
        self.entry(path, FILE | permissions, (0, 0), bytes);
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        self.parent(path);
        self.entry(path, LINK, (0, 0), target.as_bytes());
    }

    /// Adds a character device.
    pub fn device(&mut self, path: &str, major: u32, minor: u32) {
        self.parent(path);
        self.entry(path, CHARACTER_DEVICE, (major, minor), &[]);
    }

    /// Returns the whole archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn parent(&mut self, path: &str) {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.directory(parent);
        }
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), bytes: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(bytes.len()).expect("files of less than 4 GiB");
        let name_size = u32::try_from(path.len() + 1).expect("a short name");
        // Inode, mode, owner, group, links, time, size, the file system's device, the number of
        // this device, the size of the name, and a checksum that this format does not have.
        let (major, minor) = device;
        let numbers = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            size,
            0,
            0,
            major,
            minor,
            name_size,
            0,
        ];
        self.bytes.extend(b"070701");
        for number in numbers {
            self.bytes.extend(format!("{number:08x}").bytes());
        }
        self.bytes.extend(path.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(bytes);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads names, modes and contents back, by the rules of the format.
    fn read(bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        let mut at = 0;
        loop {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |n: usize| {
                let from = at + 6 + n * 8;
                u32::from_str_radix(str::from_utf8(&bytes[from..from + 8]).unwrap(), 16).unwrap()
            };
            let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
            let name_at = at + 110;
            let name = &bytes[name_at..name_at + name_size - 1];
            assert_eq!(bytes[name_at + name_size - 1], 0);
            let data = (name_at + name_size).next_multiple_of(4);
            at = (data + size).next_multiple_of(4);
            let name = String::from_utf8(name.to_vec()).unwrap();
            if name == "TRAILER!!!" {
                assert_eq!(at, bytes.len());
                return entries;
            }
            entries.push((name, mode, bytes[data..data + size].to_vec()));
        }
    }

    #[test]
    fn is_read_back_and_has_every_directory_once_and_before_its_files() {
        let mut archive = Archive::default();
        archive.file("usr/bin/x", 0o755, b"12345");
        archive.file("usr/bin/y", 0o644, b"");
        archive.device("dev/console", 5, 1);
        archive.link("usr/bin/z", "y");
        let entries = read(&archive.finish());
        let names: Vec<&str> = entries.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(
            names,
            [
                "usr",
                "usr/bin",
                "usr/bin/x",
                "usr/bin/y",
                "dev",
                "dev/console",
                "usr/bin/z"
            ]
        );
        assert_eq!(entries[2].1, 0o100_755);
        assert_eq!(entries[2].2, b"12345");
        assert_eq!(entries[5].1, 0o020_600);
        assert_eq!(entries[6].1, 0o120_777);
        assert_eq!(entries[6].2, b"y");
    }
}
