//! The dataplane's agent, run on a node of a lab.

mod builder;

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{self, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{ExitStatus, Output},
    time::{Duration, Instant},
};

use nix::sys::{
    signal::Signal,
    socket::{getsockopt, sockopt::PeerCredentials},
};

use crate::{
    command::{Command, Process},
    error::{Doing, Error, Result},
    identity::create_dir,
    lab::Host,
    patience::patience,
    programs::Programs,
};

pub use self::builder::{AgentBuilder, without_packets};

/// How long an agent may take until it is ready.
const READY: Duration = Duration::from_mins(1);

/// The variable that names the directory in which tests request panics (`threads.rs` in `dataplane-user`).
pub const PANICS: &str = "DATAPLANE_PANICS";

/// An agent on a node. Dropping it kills it and removes its programs and tables.
#[derive(Debug)]
pub struct Agent {
    program: PathBuf,
    programs: Programs,
    probe: PathBuf,
    node: Host,
    cgroup: PathBuf,
    node_cgroup: PathBuf,
    bpffs: PathBuf,
    directory: PathBuf,
    arguments: Vec<OsString>,
    capabilities: Option<Vec<String>>,
    files: Option<[usize; 2]>,
    mounts: Option<String>,
    process: Option<Process>,
}

impl Agent {
    /// The cgroup that it runs in itself, and the commands about it.
    pub fn cgroup(&self) -> &Path {
        &self.cgroup
    }

    /// A line of the memory of its process in `/proc/PID/status`, such as `VmRSS`, in KiB.
    ///
    /// # Errors
    /// When it does not run, or there is no such line.
    pub fn memory(&self, line: &str) -> Result<u64> {
        let file = format!("/proc/{}/status", self.id());
        let status = fs::read_to_string(&file).doing(|| format!("read {file}"))?;
        let number = status.lines().find_map(|all| {
            let rest = all.strip_prefix(line)?.strip_prefix(':')?;
            rest.split_whitespace().next()?.parse().ok()
        });
        number.ok_or_else(|| Error::Io {
            doing: format!("find {line} in {file}"),
            source: io::ErrorKind::NotFound.into(),
        })
    }

    /// The node that it runs on.
    pub fn node(&self) -> &Host {
        &self.node
    }

    /// Where its programs and tables are pinned.
    pub fn bpffs(&self) -> &Path {
        &self.bpffs
    }

    /// The socket that it answers the command line on.
    pub fn socket(&self) -> PathBuf {
        self.directory.join("agent.sock")
    }

    /// Its log so far, also from before a restart.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// The file that it logs to.
    pub fn log_file(&self) -> PathBuf {
        self.directory.join("agent.log")
    }

    /// The variables by which the `dataplane` program finds this agent.
    pub fn environment(&self) -> [(&'static str, OsString); 3] {
        [
            ("DATAPLANE_BPFFS", self.bpffs.clone().into()),
            ("DATAPLANE_CGROUP", self.node_cgroup.clone().into()),
            ("DATAPLANE_SOCKET", self.socket().into()),
        ]
    }

    /// A `dataplane` command about this agent, to be run on its node.
    pub fn dataplane(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
        self.program(self.program.as_os_str()).args(arguments)
    }

    /// A `dataplane-migrate` command about this agent, to be run on its node.
    ///
    /// # Errors
    /// When the program has not been built.
    pub fn migrate(
        &self,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> Result<Command> {
        let program = self.programs.migrate()?;
        Ok(self.program(program.as_os_str()).args(arguments))
    }

    /// A program with the variables by which it finds this agent.
    fn program(&self, program: &OsStr) -> Command {
        let program = Some(program);
        let mut command = Command::new(&self.probe, self.node.netns(), &self.cgroup, program);
        for (name, value) in self.environment() {
            command = command.env(name, value);
        }
        if let Some(names) = &self.capabilities {
            command = command.capabilities(names);
        }
        command
    }

    /// Starts the agent (again, after [`Agent::kill`] or [`Agent::stop`]) and waits until it is
    /// ready.
    ///
    /// # Errors
    /// When it ends or is not ready in time: the error holds its log.
    pub fn start(&mut self) -> Result<()> {
        self.launch()?;
        self.wait_until_ready()
    }

    /// Starts another agent in the place of the running one, and waits until it is ready. Returns the earlier agent,
    /// which ends by itself.
    ///
    /// # Errors
    /// When it ends or is not ready in time: the error holds its log.
    pub fn replace(&mut self) -> Result<Process> {
        let before = self.process.take().ok_or_else(|| Error::Io {
            doing: "replace an agent".into(),
            source: io::ErrorKind::NotFound.into(),
        })?;
        self.spawn(&["--replace"])?;
        self.wait_until_ready()?;
        Ok(before)
    }

    /// Makes an agent that was replaced the current one again. Returns the other.
    ///
    /// # Errors
    /// When none runs.
    pub fn return_to(&mut self, before: Process) -> Result<Process> {
        self.process.replace(before).ok_or_else(|| Error::Io {
            doing: "return to an earlier agent".into(),
            source: io::ErrorKind::NotFound.into(),
        })
    }

    /// Starts the agent (again) and does not wait.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn launch(&mut self) -> Result<()> {
        self.process = None;
        self.spawn(&[])
    }

    fn spawn(&mut self, more: &[&str]) -> Result<()> {
        let log = self.log_file();
        let file = File::options().create(true).append(true).open(&log);
        let file = file.doing(|| format!("create {}", log.display()))?;
        let second = file
            .try_clone()
            .doing(|| format!("use {} twice", log.display()))?;
        self.process = Some(self.run(more).stdout(file).stderr(second).spawn()?);
        Ok(())
    }

    fn run(&self, more: &[&str]) -> Command {
        let run = match (self.files, &self.mounts) {
            (None, Some(mounts)) => self
                .program(OsStr::new("unshare"))
                .args(["--mount", "sh", "-c"])
                .arg(format!(
                    "mount --make-rprivate / && {mounts} && exec \"$0\" \"$@\""
                ))
                .arg(&self.program),
            (None, None) => self.program(self.program.as_os_str()),
            (Some([soft, hard]), _) => self
                .program(OsStr::new("prlimit"))
                .arg(format!("--nofile={soft}:{hard}"))
                .arg(&self.program),
        };
        let run = run.args(["run", "--node-name", self.node.name()]);
        run.env(PANICS, self.panics())
            .args(&self.arguments)
            .args(more)
    }

    fn panics(&self) -> PathBuf {
        self.directory.join("panics")
    }

    /// Makes a thread of the agent's panic at its next job. Only builds with debug assertions support this.
    ///
    /// # Errors
    /// When the file that requests it cannot be written.
    pub fn have_panic(&self, thread: &str) -> Result<()> {
        let directory = self.panics();
        fs::create_dir_all(&directory)
            .and_then(|()| fs::write(directory.join(thread), ""))
            .doing(|| format!("ask for a panic of {thread}"))
    }

    /// Waits until the agent ends by itself.
    ///
    /// # Errors
    /// When it does not within a minute.
    pub fn wait_until_ended(&mut self) -> Result<ExitStatus> {
        let limit = Instant::now() + patience(READY);
        while Instant::now() < limit {
            if let Some(process) = &mut self.process
                && let Some(status) = process.try_wait()?
            {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Err(Error::Io {
            doing: "wait for the agent's end".into(),
            source: io::ErrorKind::TimedOut.into(),
        })
    }

    /// Starts an agent that would take the running one's place, but cannot: its configuration has one port twice.
    /// Returns its output.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn replace_in_vain(&self) -> Result<Output> {
        self.run(&["--replace", "--metrics-addr", "0.0.0.0:15021"])
            .output()
    }

    /// Waits until `dataplane status` calls it healthy.
    ///
    /// # Errors
    /// When it ends or is not ready in time: the error holds its log.
    pub fn wait_until_ready(&mut self) -> Result<()> {
        let ready = patience(READY);
        let limit = Instant::now() + ready;
        loop {
            if let Some(process) = &mut self.process
                && let Some(status) = process.try_wait()?
            {
                return Err(self.not_ready(format!("it ended with {status}")));
            }
            let is_ready = self.is_ready().unwrap_or(false);
            let is_late = Instant::now() > limit;
            if is_ready || is_late {
                let output = self.dataplane(["status"]).output()?;
                if is_ready && output.status.success() {
                    return Ok(());
                }
                if is_late {
                    let said = [output.stdout, output.stderr].concat();
                    return Err(self.not_ready(format!(
                        "after {} s, `dataplane status` says:\n{}",
                        ready.as_secs(),
                        String::from_utf8_lossy(&said)
                    )));
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asks the agent over its socket whether it is ready, as a probe of Kubernetes does. `dataplane status` looks at
    /// programs and tables, too: asked all the time, it takes the processor's time from agents that start.
    fn is_ready(&self) -> io::Result<bool> {
        /// The socket exists before the agent loads its programs, and is answered afterwards.
        const PATIENCE: Duration = Duration::from_secs(1);

        let mut stream = UnixStream::connect(self.socket())?;
        // The agent that this one replaces may still answer.
        let listener = getsockopt(&stream, PeerCredentials)?;
        if u32::try_from(listener.pid()) != Ok(self.id()) {
            return Ok(false);
        }
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET /healthz/ready HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer.split(' ').nth(1) == Some("200"))
    }

    fn not_ready(&self, reason: String) -> Error {
        let log = self.log();
        let lines: Vec<&str> = log.lines().rev().take(30).collect();
        let log = lines.into_iter().rev().collect::<Vec<_>>().join("\n");
        Error::AgentNotReady {
            node: self.node.name().into(),
            reason,
            log,
        }
    }

    /// Kills it (SIGKILL), as the kernel does when memory is short. Its programs stay.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Moves an agent's pins to the directory of another layout, as if an agent of that layout had made them. Each
    /// layout has its own directory.
    ///
    /// # Errors
    /// When there is nothing, or the directory cannot be moved.
    pub fn change_layout(&self, from: u32, to: u32) -> Result<()> {
        let directory = |layout: u32| self.bpffs.join(format!("v{layout}"));
        fs::rename(directory(from), directory(to))
            .doing(|| format!("move the pins in {}", self.bpffs.display()))
    }

    /// Makes it start in a new cgroup beside its present one from now on, as another pod would.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn move_to_cgroup(&mut self, name: &str) -> Result<()> {
        self.cgroup.set_file_name(name);
        create_dir(&self.cgroup)
    }

    /// Makes this the cgroup to serve from now on, for the agent and the commands about it.
    pub fn serve_cgroup(&mut self, cgroup: PathBuf) {
        self.node_cgroup = cgroup;
    }

    /// Its process id; 0 when it does not run.
    pub fn id(&self) -> u32 {
        self.process.as_ref().map_or(0, Process::id)
    }

    /// Asks it to end (SIGTERM) and waits for it.
    ///
    /// # Errors
    /// When it ends otherwise than with 0, or not within a minute.
    pub fn stop(&mut self) -> Result<()> {
        let Some(mut process) = self.process.take() else {
            return Ok(());
        };
        process.signal(Signal::SIGTERM)?;
        let limit = Instant::now() + patience(READY);
        loop {
            match process.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => {
                    return Err(Error::Failed {
                        program: "dataplane run, after SIGTERM,".into(),
                        status,
                        stderr: self.log(),
                    });
                }
                None if Instant::now() > limit => {
                    return Err(Error::Io {
                        doing: "wait for the agent's end after SIGTERM".into(),
                        source: io::ErrorKind::TimedOut.into(),
                    });
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Runs `dataplane status` and accepts any exit code.
    ///
    /// # Errors
    /// When it cannot be run.
    pub fn status(&self) -> Result<Output> {
        self.dataplane(["status"]).output()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
        self.capabilities = None;
        if let Err(error) = self.dataplane(["cleanup"]).run() {
            anstream::eprintln!("{error}");
        }
    }
}
