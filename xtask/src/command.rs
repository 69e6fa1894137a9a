//! Runs other programs. Errors contain the command and its result.

use std::{
    env,
    ffi::OsString,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

/// Returns the cargo that runs us, in the environment that a shell would set.
///
/// `cargo run` passes the name of this package in variables (`CARGO_PKG_NAME`, `CARGO_MANIFEST_DIR`…). If the next
/// cargo inherited them, it would rebuild all crates that depend on their values: ring, and with it rustls, kube and
/// `dataplane`, each time that a user's cargo and this program alternate.
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

/// Runs the command to its end, with our own standard streams. Fails if the command does not succeed.
pub fn check(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {}", shown(command)))?;
    if !status.success() {
        bail!("{} failed: {status}", shown(command));
    }
    Ok(())
}

/// Returns the standard output of the command. Fails if the command fails.
pub fn output(command: &mut Command) -> Result<String> {
    let bytes = output_bytes(command)?;
    String::from_utf8(bytes).with_context(|| format!("{} wrote no text", shown(command)))
}

/// Returns the standard output as bytes. Fails if the command fails.
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

/// Returns the command as a user would type it.
pub fn shown(command: &Command) -> String {
    let mut program = Path::new(command.get_program());
    if program.is_absolute() && program.ends_with("cargo") {
        // Cargo of the active toolchain: users do not type its path.
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

/// Quotes a word for a shell.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Returns the path of a program, also if it is in a directory that only root has on the search path.
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
