//! `dataplane cni`: the CNI plug-in.

mod protocol;

use std::{
    env,
    fs::File,
    io::{self, Read as _, Write as _},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use admin::{
    client::{self, Client},
    cni::{Answer, Attachment, PATH, Request, VERSIONS},
};
use agent::cni_installer;
use clap::{Args, Subcommand};
use kernel::namespaces;
use serde_json::{Value, json};

use self::protocol::{Call, Command, Failure, Pod, code};

/// More than any configuration has, with a result.
const MOST: u64 = 16 << 20;

/// Which pods do not wait.
const WITHOUT_AGENT: &str = "without an agent, only pods start whose namespace is in excludeNamespaces of the plug-in's entry in the \
     network configuration, where the agent writes mesh.excludeNamespaces";

/// Between two requests while no agent runs.
const PAUSE: Duration = Duration::from_millis(100);

/// Hold a pod's start until the pod is captured (a chained CNI plug-in, for container runtimes).
///
/// A container runtime calls the plug-in under the name dataplane-cni, with the variables of the CNI specification and the
/// network configuration on standard input. The plug-in asks the agent over its socket. ADD succeeds when the kernel has
/// the pod's entry, or when the pod is not to be captured.
#[derive(Debug, Default, Args)]
pub struct CniArgs {
    #[command(subcommand)]
    command: Option<Task>,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Take the plug-in out of the container runtime's network configuration
    ///
    /// The program stays, because a runtime may end pods with the configuration with which they began. An agent with the
    /// key `cni` puts the plug-in back: end the agent first.
    Uninstall {
        /// Directory of the network configurations
        #[arg(long, value_name = "DIR", default_value_os_t = settings::Cni::default().conf_dir())]
        conf_dir: PathBuf,
    },
}

impl CniArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        if let Some(Task::Uninstall { conf_dir }) = self.command {
            for file in cni_installer::leave(&conf_dir).map_err(anyhow::Error::msg)? {
                writeln!(io::stdout(), "changed {}", file.display())?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        let mut input = String::new();
        let read = io::stdin().take(MOST).read_to_string(&mut input);
        let read = read.map_err(|error| {
            let text = "cannot read standard input";
            Failure::new(code::IO, text, error.to_string())
        });
        let variables = env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        let call = read.and_then(|_| protocol::read(&variables.collect(), &input));
        let (said, code) = match call.and_then(Call::answer) {
            Ok(said) => (said, ExitCode::SUCCESS),
            Err(failure) => {
                let version = protocol::version(&input);
                let said = protocol::error(&failure, version.as_deref());
                (said.to_string(), ExitCode::FAILURE)
            }
        };
        if !said.is_empty() {
            writeln!(io::stdout(), "{said}")?;
        }
        Ok(code)
    }
}

impl Call {
    /// Does what the runtime asks for. Returns the text to print.
    fn answer(self) -> Result<String, Failure> {
        let client = Client::new(&self.socket);
        let wait = Duration::from_secs(self.wait_seconds);
        match self.command {
            Command::Version => {
                let said: Value =
                    json!({ "cniVersion": self.version, "supportedVersions": VERSIONS });
                Ok(said.to_string())
            }
            // A missing agent does not count: kubelet evicts the pods of a node whose network is not ready, and their
            // connections go on.
            Command::Status | Command::Check(None) => Ok(String::new()),
            Command::Add(pod, result) => {
                if let Some(pod) = pod {
                    let request = Request::Add(attachment(pod)?);
                    until_captured(&client, &request, wait)?;
                }
                Ok(result)
            }
            Command::Check(Some(pod)) => {
                let request = Request::Check(attachment(pod)?);
                until_captured(&client, &request, Duration::ZERO)?;
                Ok(String::new())
            }
            Command::Del(key) => match client.send::<Answer>(PATH, &Request::Del(key)) {
                Err(client::Error::Denied { .. }) => Err(not_permitted(&self.socket)),
                // The agent also notices that the network namespace is gone: a pod's end waits for no agent.
                _ => Ok(String::new()),
            },
            Command::Gc(valid) => {
                let done = client.send::<Answer>(PATH, &Request::Gc(valid));
                done.map(|_| String::new()).map_err(|error| {
                    let text = "the agent does not know which pods have ended";
                    Failure::new(code::TRY_AGAIN, text, error.to_string())
                })
            }
        }
    }
}

fn attachment(pod: Pod) -> Result<Attachment, Failure> {
    let open = || -> io::Result<u64> {
        let file = File::open(&pod.netns)?;
        namespaces::within(file.as_fd(), || {
            namespaces::netns_cookie().map_err(io::Error::other)
        })
    };
    let cookie = open().map_err(|error| {
        let text = format!("cannot enter the network namespace {}", pod.netns.display());
        Failure::new(code::IO, text, error.to_string())
    })?;
    Ok(Attachment {
        key: pod.key,
        namespace: pod.namespace,
        name: pod.name,
        uid: pod.uid,
        cookie,
        addresses: pod.addresses,
    })
}

/// Asks until the pod is captured, or not to be captured; at least once, and for so long at most.
fn until_captured(client: &Client, request: &Request, wait: Duration) -> Result<(), Failure> {
    let until = Instant::now() + wait;
    loop {
        let why = match client.send::<Answer>(PATH, request) {
            Ok(Answer::Done | Answer::NotCaptured) => return Ok(()),
            Ok(Answer::Waiting(why)) => why,
            Err(client::Error::Denied { socket }) => return Err(not_permitted(&socket)),
            Err(error @ client::Error::NotRunning { .. }) => format!("{error}; {WITHOUT_AGENT}"),
            Err(error) => error.to_string(),
        };
        if Instant::now() >= until {
            let (Request::Add(pod) | Request::Check(pod)) = request else {
                return Ok(());
            };
            let text = format!(
                "pod {}/{} is not captured, so it does not start; this is tried again",
                pod.namespace, pod.name
            );
            return Err(Failure::new(code::TRY_AGAIN, text, why));
        }
        thread::sleep(PAUSE);
    }
}

fn not_permitted(socket: &Path) -> Failure {
    Failure::new(
        code::NOT_PERMITTED,
        format!("{}: permission denied", socket.display()),
        "only root can use the agent's socket",
    )
}

#[cfg(test)]
mod tests {
    use std::{io::BufRead as _, os::unix::net::UnixListener};

    use admin::cni::Key;

    use super::*;

    fn request() -> Request {
        Request::Add(Attachment {
            key: Key {
                container: "c1".into(),
                interface: "eth0".into(),
            },
            namespace: "shop".into(),
            name: "web".into(),
            uid: None,
            cookie: 7,
            addresses: Vec::new(),
        })
    }

    #[test]
    fn a_pod_waits_for_an_agent_that_is_away_and_for_its_decision() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let client = Client::new(&socket);
        let failed = until_captured(&client, &request(), PAUSE).unwrap_err();
        assert_eq!(failed.code, code::TRY_AGAIN);
        assert!(failed.msg.contains("shop/web"), "{failed:?}");
        for words in ["no agent listens", "excludeNamespaces"] {
            assert!(failed.details.contains(words), "{failed:?}");
        }
        let waiting =
            thread::spawn(move || until_captured(&client, &request(), Duration::from_secs(20)));
        thread::sleep(3 * PAUSE);
        let listener = UnixListener::bind(&socket).unwrap();
        for answer in [Answer::Waiting("not yet".into()), Answer::Done] {
            let (stream, _) = listener.accept().unwrap();
            let mut reader = io::BufReader::new(&stream);
            let mut length = 0;
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                if let Some(given) = line.strip_prefix("Content-Length: ") {
                    length = given.trim().parse().unwrap();
                }
                if line == "\r\n" {
                    break;
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            assert_eq!(serde_json::from_slice::<Request>(&body).unwrap(), request());
            let body = serde_json::to_string(&answer).unwrap();
            write!(&stream, "HTTP/1.0 200 OK\r\n\r\n{body}").unwrap();
        }
        waiting.join().unwrap().unwrap();
    }
}
