//! Where the agent and its tables are.

use std::path::PathBuf;

use admin::client;
use clap::Args;
use settings::{Kernel, Listeners, Settings};

/// Where the kernel's side of things is.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Paths")]
pub struct PathArgs {
    /// Directory for pinned programs and tables, on a BPF file system [default:
    /// /sys/fs/bpf/dataplane]
    #[arg(long, value_name = "DIR", env = "DATAPLANE_BPFFS")]
    pub bpffs: Option<PathBuf>,

    /// Directory of the cgroup v2 whose processes the agent serves [default: the root of cgroup v2]
    #[arg(long, value_name = "DIR", env = "DATAPLANE_CGROUP")]
    pub cgroup: Option<PathBuf>,
}

impl PathArgs {
    /// Returns the paths for commands that only read. If cgroup v2 is not found, guesses its usual place.
    pub fn or_guess(&self) -> kernel::Paths {
        kernel::Paths::find_or_guess(self.bpffs(), self.cgroup.clone())
    }

    /// Returns the directory with the pins.
    pub fn bpffs(&self) -> PathBuf {
        self.kernel().bpffs()
    }

    /// Returns the settings of these options.
    pub fn kernel(&self) -> Kernel {
        Kernel {
            bpffs: self.bpffs.clone(),
            cgroup: self.cgroup.clone(),
        }
    }

    /// Sets the values that the command line does not set from the file.
    pub fn fill_from(&mut self, file: &Settings) {
        fill(&mut self.bpffs, file.kernel.bpffs.as_ref());
        fill(&mut self.cgroup, file.kernel.cgroup.as_ref());
    }
}

/// Where the agent listens.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Paths")]
pub struct SocketArgs {
    /// The agent's Unix socket, which commands such as `status` and `services` ask [default:
    /// /run/dataplane/agent.sock]
    #[arg(long, value_name = "PATH", env = "DATAPLANE_SOCKET")]
    pub socket: Option<PathBuf>,
}

impl SocketArgs {
    /// Returns a client of the agent.
    pub fn client(&self) -> client::Client {
        client::Client::new(&self.path())
    }

    /// Returns the socket's path.
    pub fn path(&self) -> PathBuf {
        let listeners = Listeners {
            socket: self.socket.clone(),
            ..Listeners::default()
        };
        listeners.socket().to_owned()
    }

    /// Sets the value that the command line does not set from the file.
    pub fn fill_from(&mut self, file: &Settings) {
        fill(&mut self.socket, file.listen.socket.as_ref());
    }
}

/// Sets a missing value from the file.
pub fn fill<T: Clone>(said: &mut Option<T>, file: Option<&T>) {
    if said.is_none() {
        *said = file.cloned();
    }
}
