//! Runs a guest, and reads its output.

use std::{
    fs,
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{sys::stat::Mode, unistd::mkfifo};

use crate::{command::shown, progress::note};

/// The program of the package qemu-system-x86.
const QEMU: &str = "qemu-system-x86_64";

/// Time limits for a guest.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// Time without output after which the guest counts as hanging.
    silence: Duration,
    /// Time after which a guest counts as hanging even if it prints all the time.
    total: Duration,
}

/// Every minute the lab prints the scenarios that run for long, so a working guest is never silent for long. The
/// longest task takes eight minutes.
const LIMITS: Limits = Limits {
    silence: Duration::from_mins(4),
    total: Duration::from_hours(1),
};

/// Time limit for a kernel to find out that it has no file system, on a processor that works.
const KVM_TRIAL: Duration = Duration::from_secs(10);

/// The processor that runs the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// The machine's processor.
    Kvm,
    /// qemu emulates a processor: the result is equal, many times slower.
    Tcg,
}

impl Accelerator {
    /// Finds the accelerator that works on this machine. Some machines have `/dev/kvm`, but guests make no progress
    /// there. So this starts a kernel without any file system, which must fail for this reason.
    pub fn find(image: &Path, directory: &Path) -> Result<Self> {
        if fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_err()
        {
            return Ok(Self::Tcg);
        }
        let console = directory.join("kvm-console");
        let mut qemu = command(Self::Kvm, image, &console);
        qemu.stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut child = qemu
            .spawn()
            .with_context(|| format!("cannot start {QEMU}"))?;
        let limit = Instant::now() + KVM_TRIAL;
        while child.try_wait()?.is_none() {
            if Instant::now() > limit {
                end(&mut child);
                break;
            }
            thread::sleep(Duration::from_millis(50));
        }
        let failed_as_it_should =
            fs::read(&console).is_ok_and(|text| text.windows(12).any(|w| w == b"Kernel panic"));
        Ok(if failed_as_it_should {
            Self::Kvm
        } else {
            Self::Tcg
        })
    }
}

fn command(accelerator: Accelerator, image: &Path, console: &Path) -> Command {
    let mut qemu = Command::new(QEMU);
    qemu.args([
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
    ])
    .args(["-machine", "pc", "-cpu", "max", "-m", "3072"])
    .args(match accelerator {
        Accelerator::Kvm => ["-accel", "kvm"],
        Accelerator::Tcg => ["-accel", "tcg,thread=multi"],
    })
    // An oops ends the guest, so that the run fails at once and not after a time limit.
    .args(["-append", "console=ttyS0 panic=-1 oops=panic"])
    .arg("-kernel")
    .arg(image)
    .arg("-serial")
    .arg(format!("file:{}", console.display()));
    qemu
}

/// Boots the guest, passes on the lines that its task prints, and returns the task's exit status.
///
/// # Errors
/// Fails if the guest ends or becomes silent before its task is done. Then prints the whole console.
pub fn run(
    accelerator: Accelerator,
    image: &Path,
    initramfs: &Path,
    directory: &Path,
    marker: &str,
    line: &mut dyn FnMut(&str),
) -> Result<i32> {
    let console = directory.join("console");
    let complaints = Complaints::pass_on(directory)?;
    let processors = thread::available_parallelism().map_or(1, |n| n.get().min(4));
    let mut qemu = command(accelerator, image, &console);
    qemu.arg("-initrd")
        .arg(initramfs)
        .args(["-smp", &processors.to_string()])
        // The second serial line carries the tests' standard output, the third their standard error.
        .args(["-serial", "stdio"])
        .arg("-chardev")
        .arg(format!(
            "file,id=complaints,path={}",
            complaints.path.display()
        ))
        .args(["-serial", "chardev:complaints"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = qemu
        .spawn()
        .with_context(|| format!("cannot start {}", shown(&qemu)))?;
    let ended = listen(&mut child, marker, LIMITS, line);
    // The guest powers off by itself after the marker. There is no need to wait.
    end(&mut child);
    complaints.wait();
    let said = fs::read(&console).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    match ended {
        Ok(status) => {
            // If all went well, print only complaints of the console.
            said.lines()
                .filter(|line| is_complaint(line))
                .for_each(note);
            Ok(status)
        }
        Err(error) => {
            anstream::eprintln!("\nThe guest's console:\n{said}");
            bail!("{error}; its console is above");
        }
    }
}

/// Passes the tests' standard error on to our own stderr immediately.
///
/// This uses a named pipe. qemu would have to open our stderr again by its path, which may be another user's file.
struct Complaints {
    path: PathBuf,
    done: Receiver<()>,
}

impl Complaints {
    fn pass_on(directory: &Path) -> Result<Self> {
        let path = directory.join("complaints");
        let _ = fs::remove_file(&path);
        mkfifo(&path, Mode::S_IRWXU).with_context(|| format!("cannot make {}", path.display()))?;
        let (sender, done) = mpsc::channel();
        let pipe = path.clone();
        thread::spawn(move || {
            // This waits until qemu opens the pipe too.
            if let Ok(mut pipe) = fs::File::open(pipe) {
                let _ = io::copy(&mut pipe, &mut io::stderr());
            }
            let _ = sender.send(());
        });
        Ok(Self { path, done })
    }

    /// Waits for the last lines after qemu has ended. If qemu never started, waits for the whole time limit.
    fn wait(&self) {
        let _ = self.done.recv_timeout(Duration::from_secs(1));
    }
}

/// Returns whether a line of the console reports a problem that may affect tests: a module that does not load, or a
/// warning of the kernel. (Errors that the kernel does not survive end the guest.)
fn is_complaint(line: &str) -> bool {
    line.starts_with("init: ") || ["WARNING: CPU: ", "BUG: "].iter().any(|w| line.contains(w))
}

/// Passes on the lines that a child writes, until a line begins with the marker. This line contains the exit status of
/// the task.
fn listen(
    child: &mut Child,
    marker: &str,
    limits: Limits,
    line: &mut dyn FnMut(&str),
) -> Result<i32> {
    let stdout = child.stdout.take().context("it was not piped")?;
    let (sender, lines) = mpsc::sync_channel(64);
    thread::spawn(move || {
        for text in BufReader::new(stdout).split(b'\n') {
            let Ok(text) = text else { break };
            if sender
                .send(String::from_utf8_lossy(&text).into_owned())
                .is_err()
            {
                break;
            }
        }
    });
    let end = Instant::now() + limits.total;
    let mut last = String::new();
    loop {
        let left = end.saturating_duration_since(Instant::now());
        match lines.recv_timeout(limits.silence.min(left)) {
            Ok(text) if !left.is_zero() => {
                if let Some(status) = text.strip_prefix(marker) {
                    return status.trim().parse().context("an exit status");
                }
                line(&text);
                last = text;
            }
            Err(RecvTimeoutError::Timeout) if limits.silence <= left => bail!(
                "the guest has said nothing for {} s, and was ended; its last line: {last}",
                limits.silence.as_secs()
            ),
            Ok(_) | Err(RecvTimeoutError::Timeout) => bail!(
                "the guest has not come to an end within {} s, and was ended",
                limits.total.as_secs()
            ),
            Err(RecvTimeoutError::Disconnected) => bail!("the guest ended before its tests did"),
        }
    }
}

fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines from a guest that behaves like this shell script, and the result.
    fn heard(script: &str, silence: u64, total: u64) -> (Vec<String>, Result<i32>) {
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let limits = Limits {
            silence: Duration::from_millis(silence),
            total: Duration::from_millis(total),
        };
        let mut lines = Vec::new();
        let ended = listen(&mut child, "the end:", limits, &mut |line| {
            lines.push(line.to_owned());
        });
        end(&mut child);
        (lines, ended)
    }

    const LONG: u64 = 60_000;

    #[test]
    fn the_marker_has_the_status() {
        let (lines, ended) = heard("echo one; echo two; echo the end: 7; sleep 60", LONG, LONG);
        assert_eq!(lines, ["one", "two"]);
        assert_eq!(ended.unwrap(), 7);
    }

    #[test]
    fn a_guest_that_dies_hangs_or_never_ends_is_not_waited_for() {
        let word = |script: &str, silence, total| {
            let (lines, ended) = heard(script, silence, total);
            assert_eq!(lines[0], "one");
            ended.unwrap_err().to_string()
        };
        let died = word("echo one; exit 3", LONG, LONG);
        assert_eq!(died, "the guest ended before its tests did");
        let hung = word("echo one; exec sleep 60", 500, LONG);
        assert!(hung.starts_with("the guest has said nothing"), "{hung}");
        assert!(hung.ends_with("its last line: one"), "{hung}");
        let endless = word("echo one; exec yes", LONG, 500);
        assert!(
            endless.starts_with("the guest has not come to an end"),
            "{endless}"
        );
    }

    #[test]
    fn only_complaints_of_the_console_are_shown() {
        assert!(is_complaint("init: cannot load module xt_set"));
        assert!(is_complaint(
            "[   12.3] WARNING: CPU: 0 PID: 7 at net/core/dev.c:1 f+0x1/0x2"
        ));
        assert!(!is_complaint("[    0.0] Linux version 6.1.0"));
    }
}
