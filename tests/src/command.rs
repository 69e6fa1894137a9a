//! Runs programs on the hosts of a lab.
//!
//! A program gets there through `probe enter`, which joins the host's cgroup and network namespace
//! and then becomes the program. So no process of ours ever changes its own namespace, and the
//! program's sockets are the host's from the first one on.

use std::{
    ffi::{OsStr, OsString},
    io::{self, BufRead as _, BufReader, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, ExitStatus, Output, Stdio},
    sync::{OnceLock, mpsc},
};

use nix::sys::signal::SigSet;
use serde::de::DeserializeOwned;

use crate::{
    error::{Doing, Error, Result},
    programs::Programs,
};

/// A program to be run on a host of a lab.
#[derive(Debug)]
#[must_use = "nothing runs before `run`, `output`, `status` or `spawn`"]
pub struct Command {
    probe: PathBuf,
    netns: String,
    cgroup: PathBuf,
    /// `None`: the lab's `probe`.
    program: Option<OsString>,
    arguments: Vec<OsString>,
    /// `None`: all.
    capabilities: Option<String>,
    /// `None`: this process's.
    user: Option<u32>,
    /// `None`: the machine's.
    resolv_conf: Option<PathBuf>,
    variables: Vec<(OsString, OsString)>,
    stdin: Option<Stdio>,
    stdout: Option<Stdio>,
    stderr: Option<Stdio>,
}

impl Command {
    pub(crate) fn new(probe: &Path, netns: &str, cgroup: &Path, program: Option<&OsStr>) -> Self {
        Self {
            probe: probe.to_owned(),
            netns: netns.to_owned(),
            cgroup: cgroup.to_owned(),
            program: program.map(OsStr::to_owned),
            arguments: Vec::new(),
            capabilities: None,
            user: None,
            resolv_conf: None,
            variables: Vec::new(),
            stdin: None,
            stdout: None,
            stderr: None,
        }
    }

    /// A program in a namespace and a cgroup that another process made: for `lab exec`.
    ///
    /// # Errors
    /// When the lab's own program, which goes there first, has not been built.
    pub fn in_place(
        programs: &Programs,
        netns: &str,
        cgroup: &Path,
        program: impl AsRef<OsStr>,
    ) -> Result<Self> {
        Ok(Self::new(
            &programs.probe()?,
            netns,
            cgroup,
            Some(program.as_ref()),
        ))
    }

    /// Adds an argument.
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    pub fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.arguments
            .extend(arguments.into_iter().map(|a| a.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.variables
            .push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Takes all capabilities from the program but these: `["NET_ADMIN"]`.
    pub fn capabilities(mut self, names: &[String]) -> Self {
        self.capabilities = Some(names.join(","));
        self
    }

    /// Runs the program as this user, and the group with the same number.
    pub fn user(mut self, id: u32) -> Self {
        self.user = Some(id);
        self
    }

    /// Has the program see this file as `/etc/resolv.conf`.
    pub fn resolv_conf(mut self, file: impl Into<PathBuf>) -> Self {
        self.resolv_conf = Some(file.into());
        self
    }

    /// Gives the program a pipe to read from; [`Process::close_stdin`] ends it.
    pub fn stdin_piped(mut self) -> Self {
        self.stdin = Some(Stdio::piped());
        self
    }

    /// Makes the program's stdout a pipe, which [`Process::wait_for_line`] and [`Process::wait`] read.
    pub fn stdout_piped(mut self) -> Self {
        self.stdout = Some(Stdio::piped());
        self
    }

    /// Sets where stdout goes.
    pub fn stdout(mut self, stdout: impl Into<Stdio>) -> Self {
        self.stdout = Some(stdout.into());
        self
    }

    /// Sets where stderr goes; by default to this process's own.
    pub fn stderr(mut self, stderr: impl Into<Stdio>) -> Self {
        self.stderr = Some(stderr.into());
        self
    }

    /// The program and its arguments, for messages.
    fn line(&self) -> String {
        let program = self.program.as_deref().unwrap_or(OsStr::new("probe"));
        let mut line = program.to_string_lossy().into_owned();
        for argument in &self.arguments {
            line.push(' ');
            line.push_str(&argument.to_string_lossy());
        }
        line
    }

    fn build(&mut self) -> std::process::Command {
        let mut command = std::process::Command::new(&self.probe);
        command
            .args(["enter", "--parent", &std::process::id().to_string()])
            .args(["--netns", &self.netns])
            .arg("--cgroup")
            .arg(&self.cgroup)
            .args(self.capabilities.iter().flat_map(|c| ["--capabilities", c]))
            .args(
                self.user
                    .iter()
                    .flat_map(|id| ["--user".to_owned(), id.to_string()]),
            )
            .args(
                self.resolv_conf
                    .iter()
                    .flat_map(|file| [OsStr::new("--resolv-conf"), file.as_os_str()]),
            )
            .arg("--")
            .arg(self.program.as_deref().unwrap_or(self.probe.as_os_str()))
            .args(&self.arguments)
            .envs(self.variables.drain(..));
        command
    }

    /// Runs the program in the terminal's foreground, with this process's stdin, stdout and
    /// stderr, and waits for it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn status(mut self) -> Result<ExitStatus> {
        let line = self.line();
        let mut child = spawn(self.build()).doing(|| format!("run {line}"))?;
        child.wait().doing(|| format!("wait for {line}"))
    }

    /// Runs the program and collects its stdout and stderr.
    ///
    /// # Errors
    /// When it cannot be started. A failure of the program is in the [`Output`].
    pub fn output(mut self) -> Result<Output> {
        let line = self.line();
        self.stdout = Some(Stdio::piped());
        self.stderr = Some(Stdio::piped());
        let mut process = self.spawn()?;
        let child = process.child.take().expect("a fresh process has a child");
        child
            .wait_with_output()
            .doing(|| format!("wait for {line}"))
    }

    /// Runs the program, which must succeed, and returns its stdout.
    ///
    /// # Errors
    /// When it cannot be started or fails.
    pub fn run(self) -> Result<String> {
        let program = format!("{} in {}", self.line(), self.netns);
        let output = self.output()?;
        if !output.status.success() {
            let mut stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            if stderr.is_empty() {
                stderr = String::from_utf8_lossy(&output.stdout).into_owned();
            }
            return Err(Error::Failed {
                program,
                status: output.status,
                stderr,
            });
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs the program, which must succeed, and reads its stdout as one JSON document.
    ///
    /// # Errors
    /// When it cannot be started, fails, or answers anything but this document.
    pub fn json<T: DeserializeOwned>(self) -> Result<T> {
        let program = format!("{} in {}", self.line(), self.netns);
        parse(program, &self.run()?)
    }

    /// Starts the program in the background. It ends when the [`Process`] is dropped, and when this process ends in any
    /// way. By default its stdin is empty and its stdout is thrown away.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(mut self) -> Result<Process> {
        let line = self.line();
        let mut command = self.build();
        command
            // A Ctrl-C in the terminal is for this process, which knows in which order to stop.
            .process_group(0)
            .stdin(self.stdin.take().unwrap_or_else(Stdio::null))
            .stdout(self.stdout.take().unwrap_or_else(Stdio::null));
        if let Some(stderr) = self.stderr.take() {
            command.stderr(stderr);
        }
        let mut child = spawn(command).doing(|| format!("run {line}"))?;
        let stdin = child.stdin.take();
        Ok(Process {
            line,
            stdin,
            stdout: None,
            child: Some(child),
        })
    }
}

/// A program running in the background on a host of a lab. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    line: String,
    stdin: Option<ChildStdin>,
    stdout: Option<BufReader<ChildStdout>>,
    child: Option<Child>,
}

impl Process {
    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Returns whether it has ended, and how.
    ///
    /// # Errors
    /// When the operating system does not return it.
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        let line = &self.line;
        let child = self
            .child
            .as_mut()
            .expect("a process has its child until it is waited for");
        child.try_wait().doing(|| format!("wait for {line}"))
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&self, signal: nix::sys::signal::Signal) -> Result<()> {
        let pid = nix::unistd::Pid::from_raw(self.id().cast_signed());
        nix::sys::signal::kill(pid, signal).doing(|| format!("send {signal} to {}", self.line))
    }

    /// Writes a line to its stdin.
    ///
    /// # Errors
    /// When it does not read any more.
    ///
    /// # Panics
    /// When [`Command::stdin_piped`] was not asked for.
    pub fn send_line(&mut self, line: &str) -> Result<()> {
        let stdin = self.stdin.as_mut().expect("`stdin_piped` was asked for");
        let sent = stdin
            .write_all(line.as_bytes())
            .and_then(|()| stdin.write_all(b"\n"));
        sent.doing(|| format!("write to {}", self.line))
    }

    /// Closes its stdin, by which some programs know that they shall finish.
    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    fn reader(&mut self) -> &mut BufReader<ChildStdout> {
        let child = &mut self.child;
        self.stdout.get_or_insert_with(|| {
            let stdout = child.as_mut().and_then(|child| child.stdout.take());
            BufReader::new(stdout.expect("`stdout_piped` was asked for"))
        })
    }

    /// Waits for the next line on its stdout.
    ///
    /// # Errors
    /// When it ends before.
    ///
    /// # Panics
    /// When [`Command::stdout_piped`] was not asked for.
    pub fn wait_for_line(&mut self) -> Result<String> {
        let mut text = String::new();
        self.reader()
            .read_line(&mut text)
            .doing(|| "read from a pipe".into())?;
        if text.is_empty() {
            let child = self.child.as_mut().expect("a process has its child");
            let status = child.wait().doing(|| format!("wait for {}", self.line))?;
            let stderr = "it ended before it was ready; see above".into();
            return Err(Error::Failed {
                program: self.line.clone(),
                status,
                stderr,
            });
        }
        Ok(text)
    }

    /// Closes its stdin, waits until it ends, which it must do successfully, and returns the rest
    /// of its stdout (empty unless [`Command::stdout_piped`] was asked for).
    ///
    /// # Errors
    /// When it fails.
    pub fn wait(mut self) -> Result<String> {
        self.close_stdin();
        let mut text = String::new();
        if self.stdout.is_some() || self.child.as_ref().is_some_and(|c| c.stdout.is_some()) {
            io::Read::read_to_string(self.reader(), &mut text)
                .doing(|| "read from a pipe".into())?;
        }
        let mut child = self.child.take().expect("a process has its child");
        let status = child.wait().doing(|| format!("wait for {}", self.line))?;
        if !status.success() {
            return Err(Error::Failed {
                program: self.line.clone(),
                status,
                stderr: text,
            });
        }
        Ok(text)
    }

    /// Waits for the program as [`Process::wait`] does, and parses its stdout as one JSON document.
    ///
    /// # Errors
    /// When it fails or answers anything but this document.
    pub fn wait_json<T: DeserializeOwned>(self) -> Result<T> {
        let program = self.line.clone();
        parse(program, &self.wait()?)
    }

    /// Kills it (SIGKILL) and waits until it is gone.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn parse<T: DeserializeOwned>(program: String, answer: &str) -> Result<T> {
    serde_json::from_str(answer).map_err(|error| Error::Answer {
        program,
        reason: error.to_string(),
        answer: answer.chars().take(400).collect(),
    })
}

/// Starts a program from a thread that lives as long as this process.
///
/// `probe enter` asks the kernel to kill the program when its parent dies, and the kernel takes
/// the *thread* that started it for the parent: a test's thread may end before its programs shall.
fn spawn(command: std::process::Command) -> io::Result<Child> {
    type Order = (std::process::Command, mpsc::Sender<io::Result<Child>>);
    static SPAWNER: OnceLock<mpsc::Sender<Order>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, orders) = mpsc::channel::<Order>();
        std::thread::Builder::new()
            .name("spawner".into())
            .spawn(move || {
                // A program inherits the signals that its parent's thread blocks.
                let _ = SigSet::all().thread_unblock();
                for (mut command, answer) in orders {
                    let _ = answer.send(command.spawn());
                }
            })
            .expect("a thread can be started");
        sender
    });
    let (answer, child) = mpsc::channel();
    spawner
        .send((command, answer))
        .expect("the spawner lives as long as the process");
    child.recv().expect("the spawner answers")
}
