//! Running other programs, with errors that say which one and what became of it.

use std::{
    env,
    ffi::OsString,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

/// The cargo that runs us, in the environment that a shell would give it.
///
/// `cargo run` tells this program which package it is (`CARGO_PKG_NAME`, `CARGO_MANIFEST_DIR`…). Passed on, these
/// variables would have the next cargo build again what depends on their values: ring, and rustls, kube and
/// `dataplane` with it, each time that a person and this program take turns.
pub fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
    cargo.current_dir(crate::workspace::root());
    for (name, _) in env::vars_os() {
        let of_this_package = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if of_this_package
            .iter()
            .any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes()))
        {
            cargo.env_remove(name);
        }
    }
    cargo
}

/// Runs to the end, with our own standard streams; anything but success is an error.
pub fn check(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {}", shown(command)))?;
    if !status.success() {
        bail!("{} failed: {status}", shown(command));
    }
    Ok(())
}

/// What the command prints on standard output, if it succeeds.
pub fn output(command: &mut Command) -> Result<String> {
    let bytes = output_bytes(command)?;
    String::from_utf8(bytes).with_context(|| format!("{} wrote no text", shown(command)))
}

/// Likewise, as bytes.
pub fn output_bytes(command: &mut Command) -> Result<Vec<u8>> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {}", shown(command)))?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{} failed: {}: {}",
            shown(command),
            output.status,
            complaint.trim()
        );
    }
    Ok(output.stdout)
}

/// The command as one would type it.
pub fn shown(command: &Command) -> String {
    let mut program = Path::new(command.get_program());
    if program.is_absolute() && program.ends_with("cargo") {
        // The active toolchain's: nobody types its path.
        program = Path::new("cargo");
    }
    let mut words = vec![program.as_os_str()];
    words.extend(command.get_args());
    words
        .iter()
        .map(|word| quoted(&word.to_string_lossy()))
        .collect::<Vec<_>>()
        .join(" ")
}

/// A word as a shell reads it.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Where a program is, also one that only root has on the search path.
pub fn on_path(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path)
        .chain(system)
        .map(|directory| directory.join(name))
        .find(|program| {
            fs::metadata(program).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_what_one_would_type() {
        let mut command = Command::new("/rust/bin/cargo");
        command.args(["run", "--", "it's", "a=b", ""]);
        assert_eq!(shown(&command), r"cargo run -- 'it'\''s' a=b ''");
        assert_eq!(shown(&Command::new("target/my agent")), "'target/my agent'");
    }
}
