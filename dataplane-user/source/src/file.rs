//! The text of a file.

use std::{
    fmt,
    fs::{self, File},
    io::{self, Read},
    path::Path,
};

/// The reason why a file cannot be read.
#[derive(Debug)]
pub enum Fault {
    /// The kernel refuses to read it.
    Unreadable(io::Error),
    /// It is a directory, a pipe or a device.
    NotRegular,
    /// Its size, and the largest size that is read, in bytes.
    TooLarge(u64, u64),
    /// The text of this line is not UTF-8.
    NotUtf8(usize),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(error) => write!(f, "cannot be read: {error}"),
            Self::NotRegular => f.write_str("not a regular file"),
            Self::TooLarge(size, most) => {
                let (size, most) = (size.div_ceil(1 << 20), most >> 20);
                write!(
                    f,
                    "{size} MiB is too large for a file; expected at most {most} MiB"
                )
            }
            Self::NotUtf8(line) => write!(f, "line {line} is not UTF-8"),
        }
    }
}

/// Reads a file of at most `most` bytes.
///
/// # Errors
///
/// If the file is larger, is not a regular file, cannot be read, or is not UTF-8.
pub fn read(path: &Path, most: u64) -> Result<String, Fault> {
    // Checks before opening, because opening a pipe would wait for its writer.
    let metadata = fs::metadata(path).map_err(Fault::Unreadable)?;
    if !metadata.is_file() {
        return Err(Fault::NotRegular);
    }
    if metadata.len() > most {
        return Err(Fault::TooLarge(metadata.len(), most));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(metadata.len() + 1).unwrap_or_default());
    // The file may grow during the read.
    File::open(path)
        .and_then(|file| file.take(most + 1).read_to_end(&mut bytes))
        .map_err(Fault::Unreadable)?;
    if bytes.len() as u64 > most {
        return Err(Fault::TooLarge(bytes.len() as u64, most));
    }
    String::from_utf8(bytes).map_err(|error| {
        let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        Fault::NotUtf8(good.split(|&byte| byte == b'\n').count())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_too_large_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rules");
        let file = File::create(&path).unwrap();
        // The file is sparse: a buffer of its size would not fit into memory.
        file.set_len(8 << 40).unwrap();
        let fault = read(&path, 256 << 20).unwrap_err();
        assert!(matches!(fault, Fault::TooLarge(..)), "{fault}");
        fs::write(&path, b"one\ntwo\n\xff").unwrap();
        assert!(matches!(read(&path, 100), Err(Fault::NotUtf8(3))));
        assert!(matches!(read(&path, 8), Err(Fault::TooLarge(9, 8))));
        assert!(matches!(read(directory.path(), 8), Err(Fault::NotRegular)));
    }
}
