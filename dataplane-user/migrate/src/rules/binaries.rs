//! Finds the programs of iptables and nftables on this machine or below another root directory, and runs them.

use std::{
    env, fs,
    io::{self, Read, Write as _},
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use kernel::process::{ends_with_us, keep_network_only};
use nix::{
    sched::{CloneFlags, unshare},
    sys::signal::{Signal, killpg},
    unistd::{self, Pid},
};
use serde::Serialize;

/// Search path below another root, and on a machine without `PATH`.
const PLACES: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Maximum time for a program to print its version.
const PATIENCE: Duration = Duration::from_secs(10);

/// Maximum number of bytes read from the output of `--version`.
const ANSWER: u64 = 4096;

/// Interval at which a running program is polled for its end.
const TICK: Duration = Duration::from_millis(2);

/// An IP family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Family {
    /// IPv4.
    #[serde(rename = "IPv4")]
    V4,
    /// IPv6.
    #[serde(rename = "IPv6")]
    V6,
}

impl Family {
    /// Both families.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// Returns the family's name for messages.
    pub fn word(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }

    /// Returns the family's name in nf_tables.
    pub fn of_tables(self) -> &'static str {
        match self {
            Self::V4 => "ip",
            Self::V6 => "ip6",
        }
    }

    /// Returns the name of the family's iptables program.
    pub fn program(self) -> &'static str {
        match self {
            Self::V4 => "iptables",
            Self::V6 => "ip6tables",
        }
    }
}

/// The kernel subsystem that a program of iptables uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Variant {
    /// x_tables.
    Legacy,
    /// nf_tables.
    Nft,
}

impl Variant {
    /// Returns the variant as it occurs in the names of programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Legacy => "legacy",
            Self::Nft => "nft",
        }
    }
}

/// The function of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// `iptables`: changes individual rules.
    Command,
    /// `iptables-save`: prints all rules.
    Save,
    /// `iptables-restore`: loads a text with rules.
    Restore,
}

impl Role {
    /// All roles.
    pub const ALL: [Self; 3] = [Self::Command, Self::Save, Self::Restore];

    pub(super) fn ending(self) -> &'static str {
        match self {
            Self::Command => "",
            Self::Save => "-save",
            Self::Restore => "-restore",
        }
    }
}

/// Returns the name of a program of iptables: `ip6tables-nft-save`.
pub fn name(family: Family, named: Option<Variant>, role: Role) -> String {
    let named = named.map_or(String::new(), |variant| format!("-{}", variant.word()));
    format!("{}{named}{}", family.program(), role.ending())
}

/// Returns the names of the `iptables` commands for both families and variants.
pub fn commands() -> impl Iterator<Item = (Family, Variant, String)> {
    let variants = |family| [Variant::Nft, Variant::Legacy].map(|variant| (family, variant));
    let all = Family::BOTH.into_iter().flat_map(variants);
    all.map(|(family, variant)| (family, variant, name(family, Some(variant), Role::Command)))
}

/// A program of iptables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Binary {
    /// The name.
    pub name: String,
    /// The family that the program is for.
    pub family: Family,
    /// The variant in the program's name; `None` if the name has none.
    pub named: Option<Variant>,
    /// The program's function.
    pub role: Role,
    /// The path, below the root.
    pub path: PathBuf,
    /// The file behind all symbolic links.
    pub really: PathBuf,
    /// The variant according to the program's own output; `None` if the output does not say.
    pub variant: Option<Variant>,
    /// The version according to the program's own output.
    pub version: Option<String>,
    /// The reason for the value of `variant`, if the program's output does not name a variant.
    pub note: Option<String>,
}

/// The program `nft`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Nft {
    /// The path, below the root.
    pub path: PathBuf,
    /// The version according to the program's own output.
    pub version: Option<String>,
}

/// The programs that were found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Binaries {
    /// The programs of iptables.
    pub iptables: Vec<Binary>,
    /// The program `nft`.
    pub nft: Option<Nft>,
    /// Names of iptables' programs that were not found.
    pub missing: Vec<String>,
}

impl Binaries {
    /// Returns the program of a variant. The variant is the one that the program's output names. Of several programs,
    /// the one with the variant in its name is preferred.
    pub fn program(&self, family: Family, variant: Variant, role: Role) -> Option<&Binary> {
        let fits = |binary: &&Binary| {
            (binary.family, binary.role, binary.variant) == (family, role, Some(variant))
        };
        let all = self.iptables.iter().filter(fits);
        all.max_by_key(|binary| binary.named == Some(variant))
    }
}

/// Searches for the programs in `PATH`, or below `root`, and runs each with `--version`. Call it in the network
/// namespace that the programs should see.
///
/// # Errors
/// If the thread cannot change its root to `root`.
pub fn find(root: Option<&Path>) -> io::Result<Binaries> {
    below(root, || {
        let places = match root {
            None => env::var_os("PATH").unwrap_or_else(|| PLACES.into()),
            Some(_) => PLACES.into(),
        };
        let places: Vec<PathBuf> = env::split_paths(&places)
            .filter(|p| p.is_absolute())
            .collect();
        let mut found = Binaries::default();
        for family in Family::BOTH {
            for named in [None, Some(Variant::Legacy), Some(Variant::Nft)] {
                for role in Role::ALL {
                    let name = name(family, named, role);
                    match executable(&places, &name) {
                        None => found.missing.push(name),
                        Some(path) => found.iptables.push(ask(name, family, named, role, path)),
                    }
                }
            }
        }
        found.nft = executable(&places, "nft").map(|path| {
            let said = run(&path, &["--version"], PATIENCE, ANSWER);
            let version = said
                .ok()
                .and_then(|said| version(&String::from_utf8_lossy(&said.stdout)));
            Nft { path, version }
        });
        Ok(found)
    })
}

/// Runs `work` on a new thread with the root directory `root` and with only the capabilities CAP_NET_ADMIN and
/// CAP_NET_RAW. Without a `root`, runs `work` on the calling thread. Programs that `work` starts inherit the thread's
/// root, capabilities and network namespace.
///
/// # Errors
/// If the thread cannot change its root, or if `work` fails.
pub fn below<T: Send>(
    root: Option<&Path>,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    let Some(root) = root else {
        return work();
    };
    let there = || -> io::Result<T> {
        unshare(CloneFlags::CLONE_FS)?;
        unistd::chroot(root)
            .map_err(io::Error::from)
            .map_err(|error| {
                io::Error::new(
                    error.kind(),
                    format!("cannot chroot to {}: {error}", root.display()),
                )
            })?;
        unistd::chdir("/")?;
        // The programs below that root are not trusted. With CAP_SYS_CHROOT they could escape from the root.
        keep_network_only()?;
        work()
    };
    thread::scope(|scope| {
        thread::Builder::new()
            .name("root".to_owned())
            .spawn_scoped(scope, there)?
            .join()
            .map_err(|_| io::Error::other("the thread below another root panicked"))?
    })
}

fn executable(places: &[PathBuf], name: &str) -> Option<PathBuf> {
    places.iter().map(|place| place.join(name)).find(|path| {
        fs::metadata(path)
            .is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
    })
}

fn ask(name: String, family: Family, named: Option<Variant>, role: Role, path: PathBuf) -> Binary {
    let really = fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
    let file = really.file_name().unwrap_or_default().to_string_lossy();
    let (variant, version, note) = if file.contains("iptables-wrapper") {
        // At its first run, the wrapper chooses a variant for the rules it finds and replaces itself by links.
        let note = "a wrapper that chooses the variant, and links it for good, when it is first run: not run";
        (None, None, Some(note.to_owned()))
    } else {
        match run(&path, &["--version"], PATIENCE, ANSWER) {
            Err(error) => (None, None, Some(format!("cannot be run: {error}"))),
            Ok(said) => said_of_itself(&said),
        }
    };
    Binary {
        name,
        family,
        named,
        role,
        path,
        really,
        variant,
        version,
        note,
    }
}

/// Reads the variant and version from output such as `iptables v1.8.9 (nf_tables)`, and a note if the output has no
/// variant. Before 1.8 there was one variant, and `iptables-save` had no option `--version`.
fn said_of_itself(said: &Output) -> (Option<Variant>, Option<String>, Option<String>) {
    let text = String::from_utf8_lossy(&said.stdout);
    let version = version(&text);
    if text.contains("(nf_tables)") {
        (Some(Variant::Nft), version, None)
    } else if text.contains("(legacy)") {
        (Some(Variant::Legacy), version, None)
    } else if version.is_some() || said.stderr.contains("unrecognized option") {
        let note = "its answer to --version has no variant: older than 1.8, so legacy";
        (Some(Variant::Legacy), version, Some(note.to_owned()))
    } else {
        let said = said.stderr.lines().next().unwrap_or_default();
        (
            None,
            None,
            Some(format!("does not say its version: {said}")),
        )
    }
}

/// Returns `1.8.9` for `iptables v1.8.9 (nf_tables)`.
fn version(text: &str) -> Option<String> {
    let mut words = text
        .split_whitespace()
        .filter_map(|word| word.strip_prefix('v'));
    let version = words.find(|word| word.starts_with(|c: char| c.is_ascii_digit()))?;
    Some(version.to_owned())
}

/// The output of a program.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// Whether the program exited with 0.
    pub success: bool,
    /// The standard output.
    pub stdout: Vec<u8>,
    /// The standard error, cut after 4 KiB.
    pub stderr: String,
}

/// Runs a program without input and with an empty environment, and reads its output.
///
/// # Errors
/// If the program cannot be started, runs longer than `patience`, or writes more than `limit` bytes.
pub fn run(
    program: &Path,
    arguments: &[&str],
    patience: Duration,
    limit: u64,
) -> io::Result<Output> {
    run_with(program, arguments, &[], patience, limit)
}

/// Runs a program as [`run`] does, with an input.
///
/// # Errors
/// If the program cannot be started, runs longer than `patience`, or writes more than `limit` bytes.
pub fn run_with(
    program: &Path,
    arguments: &[&str],
    input: &[u8],
    patience: Duration,
    limit: u64,
) -> io::Result<Output> {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .env("PATH", PLACES)
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    // The program must end with this process. Otherwise it could still change rules later, for example when it gets the
    // lock that it waits for.
    ends_with_us(&mut command);
    let mut child = command.spawn()?;
    // The pipe is needed even without an input: below another root, /dev/null may not exist.
    let stdin = child.stdin.take();
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    thread::scope(|scope| {
        let read = |pipe: Option<Box<dyn Read + Send>>, limit: u64| {
            scope.spawn(move || {
                let mut bytes = Vec::new();
                let pipe = pipe.ok_or_else(|| io::Error::other("no pipe"))?;
                // Output over the limit is not read. The program then gets SIGPIPE.
                pipe.take(limit + 1).read_to_end(&mut bytes)?;
                Ok::<_, io::Error>(bytes)
            })
        };
        // An error of the write is ignored: a program that ends early reports the reason itself.
        scope.spawn(move || stdin.map(|mut stdin| stdin.write_all(input)));
        let stdout = read(stdout.map(|pipe| Box::new(pipe) as _), limit);
        let stderr = read(stderr.map(|pipe| Box::new(pipe) as _), ANSWER);
        let end = Instant::now() + patience;
        let status = loop {
            match child.try_wait()? {
                Some(status) => break status,
                None if Instant::now() < end => thread::sleep(TICK),
                None => {
                    // Kills the whole process group: child processes may hold the pipes open.
                    if let Ok(group) = i32::try_from(child.id()) {
                        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
                    }
                    child.wait()?;
                    let why = format!("did not end within {} s", patience.as_secs());
                    return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                }
            }
        };
        let panicked = |_| io::Error::other("a thread that reads a pipe panicked");
        let stdout = stdout.join().map_err(panicked)??;
        let stderr = stderr.join().map_err(panicked)??;
        if stdout.len() as u64 > limit {
            return Err(io::Error::other(format!("writes more than {limit} bytes")));
        }
        Ok(Output {
            success: status.success(),
            stdout,
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
        })
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn programs_say_what_they_are() {
        let of = |stdout: &str, stderr: &str| {
            let (variant, version, _) = said_of_itself(&Output {
                success: true,
                stdout: stdout.as_bytes().to_vec(),
                stderr: stderr.to_owned(),
            });
            (variant, version.unwrap_or_default())
        };
        for (stdout, stderr, variant, version) in [
            (
                "iptables-save v1.8.9 (nf_tables)\n",
                "",
                Some(Variant::Nft),
                "1.8.9",
            ),
            (
                "ip6tables v1.8.9 (legacy)\n",
                "",
                Some(Variant::Legacy),
                "1.8.9",
            ),
            ("iptables v1.6.1\n", "", Some(Variant::Legacy), "1.6.1"),
            (
                "",
                "iptables-save: unrecognized option '--version'\n",
                Some(Variant::Legacy),
                "",
            ),
            ("", "Permission denied", None, ""),
            ("hello", "", None, ""),
        ] {
            assert_eq!(
                of(stdout, stderr),
                (variant, version.to_owned()),
                "{stdout}{stderr}"
            );
        }
    }

    #[test]
    fn a_wrapper_is_not_run_and_links_are_followed() {
        let directory = tempfile::tempdir().unwrap();
        let wrapper = directory.path().join("iptables-wrapper");
        let ran = directory.path().join("ran");
        fs::write(&wrapper, format!("#!/bin/sh\ntouch {}\n", ran.display())).unwrap();
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
        let link = directory.path().join("iptables");
        symlink(&wrapper, &link).unwrap();
        let places = [directory.path().to_owned()];
        assert_eq!(executable(&places, "iptables"), Some(link.clone()));
        let found = ask("iptables".to_owned(), Family::V4, None, Role::Command, link);
        assert_eq!(
            (found.variant, found.really.file_name()),
            (None, wrapper.file_name())
        );
        assert!(!ran.exists());
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(executable(&places, "iptables"), None);
    }

    #[test]
    fn a_program_has_its_limits() {
        let sh = |script: &str, patience: u64, limit: u64| {
            run(
                Path::new("/bin/sh"),
                &["-c", script],
                Duration::from_millis(patience),
                limit,
            )
        };
        let said = sh("echo abc; echo no >&2; exit 3", 60_000, 4).unwrap();
        assert_eq!(
            (said.success, &*said.stdout, &*said.stderr),
            (false, &b"abc\n"[..], "no\n")
        );
        assert!(sh("echo abc", 60_000, 3).is_err());
        let error = sh("sleep 60", 50, 3).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
