//! Running a guest, and listening to it.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{command::shown, progress::note};

/// The program of the package qemu-system-x86.
const QEMU: &str = "qemu-system-x86_64";

/// A guest that has said nothing for so long hangs: the longest test takes a minute, and emulation
/// makes four of it.
const SILENCE: Duration = Duration::from_mins(4);

/// How long a kernel may take to find out that it has no file system, on a processor that works.
const KVM_TRIAL: Duration = Duration::from_secs(10);

/// What runs the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor.
    Kvm,
    /// qemu: the same result, many times slower.
    Tcg,
}

impl Accelerator {
    /// What works on this machine: `/dev/kvm` is also found where guests do not get anywhere, so a
    /// kernel is started, without any file system, and has to fail for that reason.
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
    // An oops ends the guest, so that it is seen rather than waited for.
    .args(["-append", "console=ttyS0 panic=-1 oops=panic"])
    .arg("-kernel")
    .arg(image)
    .arg("-serial")
    .arg(format!("file:{}", console.display()));
    qemu
}

/// Boots the guest, hands on the lines that its task prints, and returns the task's exit status.
///
/// # Errors
/// If the guest ends or falls silent before its task is done; its console is then printed whole.
pub fn run(
    accelerator: Accelerator,
    image: &Path,
    initramfs: &Path,
    directory: &Path,
    marker: &str,
    line: &mut dyn FnMut(&str),
) -> Result<i32> {
    let console = directory.join("console");
    let processors = thread::available_parallelism().map_or(1, |n| n.get().min(4));
    let mut qemu = command(accelerator, image, &console);
    qemu.arg("-initrd")
        .arg(initramfs)
        .args(["-smp", &processors.to_string()])
        // The second line is what the tests print, the third what they complain of.
        .args(["-serial", "stdio"])
        .args(["-chardev", "file,id=complaints,path=/dev/stderr,append=on"])
        .args(["-serial", "chardev:complaints"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = qemu
        .spawn()
        .with_context(|| format!("cannot start {}", shown(&qemu)))?;
    let stdout = child.stdout.take().expect("was asked for");
    let (sender, lines) = mpsc::channel();
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
    let ended = loop {
        match lines.recv_timeout(SILENCE) {
            Ok(text) => match text.strip_prefix(marker) {
                Some(status) => break status.trim().parse().context("an exit status"),
                None => line(&text),
            },
            Err(RecvTimeoutError::Timeout) => {
                break Err(anyhow::anyhow!(
                    "the guest has said nothing for {} s, and was ended",
                    SILENCE.as_secs()
                ));
            }
            Err(RecvTimeoutError::Disconnected) => {
                break Err(anyhow::anyhow!("the guest ended before its tests did"));
            }
        }
    };
    // It powers off by itself after the marker; there is nothing to wait for.
    end(&mut child);
    let said = fs::read(&console).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    match ended {
        Ok(status) => {
            // What a test may lack. The rest of the console is of no interest if all went well.
            said.lines()
                .filter(|line| line.starts_with("init: "))
                .for_each(note);
            Ok(status)
        }
        Err(error) => {
            anstream::eprintln!("\nThe guest's console:\n{said}");
            bail!("{error}; its console is above");
        }
    }
}

fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}
