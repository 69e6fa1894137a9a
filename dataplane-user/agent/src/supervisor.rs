//! Reports the agent's state to the process that supervises it: systemd's protocol (`sd_notify(3)`), which other
//! supervisors speak, too. Without `NOTIFY_SOCKET` the agent reports nothing.

use std::{
    env,
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    process,
    time::{Duration, Instant},
};

use nix::time::{ClockId, clock_gettime};
use tracing::debug;

/// The shortest interval of watchdog messages: the agent may handle thousands of events in a second.
const ALIVE: Duration = Duration::from_secs(1);

/// The supervisor, if there is one.
#[derive(Debug, Default)]
pub struct Supervisor {
    socket: Option<UnixDatagram>,
    watchdog: bool,
    /// Whether the agent has reported that it is ready.
    ready: bool,
    /// When the last watchdog message was sent.
    told: Option<Instant>,
}

impl Supervisor {
    /// Returns the supervisor that the environment names.
    pub fn from_env() -> Self {
        let Some(name) = env::var_os("NOTIFY_SOCKET") else {
            return Self::default();
        };
        let own = process::id().to_string();
        let watchdog = env::var_os("WATCHDOG_USEC").is_some()
            && env::var("WATCHDOG_PID").map_or(true, |pid| pid == own);
        Self::at(&name, watchdog)
    }

    fn at(name: &OsStr, watchdog: bool) -> Self {
        let socket = connect(name).inspect_err(|error| {
            debug!("cannot tell the supervisor at {}: {error}", name.display());
        });
        Self {
            socket: socket.ok(),
            watchdog,
            ..Self::default()
        }
    }

    /// Reports that the agent serves the objects of its source.
    pub fn ready(&mut self) {
        self.ready = true;
        self.tell("READY=1");
    }

    /// Reports that the source is read again, as after a signal.
    pub fn reloading(&self) {
        // A start is no reload, even if a signal came.
        if let (true, Ok(now)) = (self.ready, clock_gettime(ClockId::CLOCK_MONOTONIC)) {
            let now = Duration::from(now).as_micros();
            self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={now}"));
        }
    }

    /// Reports that the reload is done.
    pub fn reloaded(&self) {
        if self.ready {
            self.tell("READY=1");
        }
    }

    /// Reports that the agent ends.
    pub fn stopping(&self) {
        self.tell("STOPPING=1");
    }

    /// Reports that the calling thread makes progress.
    pub fn alive(&mut self) {
        let recently = |told: Instant| told.elapsed() < ALIVE;
        if self.watchdog && !self.told.is_some_and(recently) {
            self.tell("WATCHDOG=1");
            self.told = Some(Instant::now());
        }
    }

    fn tell(&self, what: &str) {
        if let Some(socket) = &self.socket
            && let Err(error) = socket.send(what.as_bytes())
        {
            debug!("cannot tell the supervisor {what:?}: {error}");
        }
    }
}

/// A name that begins with `@` is an abstract one.
fn connect(name: &OsStr) -> io::Result<UnixDatagram> {
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(name)?,
    };
    let socket = UnixDatagram::unbound()?;
    // The agent does not wait for a supervisor that does not read.
    socket.set_nonblocking(true)?;
    socket.connect_addr(&address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    /// Returns the messages since the last call.
    fn heard(socket: &UnixDatagram) -> Vec<String> {
        socket.set_nonblocking(true).unwrap();
        let mut buffer = [0; 256];
        std::iter::from_fn(|| {
            let length = socket.recv(&mut buffer).ok()?;
            Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
        })
        .collect()
    }

    #[test]
    fn a_supervisor_hears_how_the_agent_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let abstract_name = format!("dataplane-test-{}", process::id());
        let named = SocketAddr::from_abstract_name(&abstract_name).unwrap();
        for (socket, name) in [
            (UnixDatagram::bind(&path).unwrap(), path.into_os_string()),
            (
                UnixDatagram::bind_addr(&named).unwrap(),
                OsString::from(format!("@{abstract_name}")),
            ),
        ] {
            let mut supervisor = Supervisor::at(&name, true);
            supervisor.reloading();
            supervisor.reloaded();
            assert!(heard(&socket).is_empty(), "before it was ready");
            supervisor.alive();
            supervisor.alive();
            supervisor.ready();
            assert_eq!(heard(&socket), ["WATCHDOG=1", "READY=1"]);
            supervisor.reloading();
            supervisor.reloaded();
            supervisor.stopping();
            let heard = heard(&socket);
            assert!(heard[0].starts_with("RELOADING=1\nMONOTONIC_USEC="));
            assert_eq!(heard[1..], ["READY=1", "STOPPING=1"]);
            let mut without = Supervisor::at(&name, false);
            without.alive();
            assert_eq!(self::heard(&socket), Vec::<String>::new());
        }
    }

    #[test]
    fn a_supervisor_that_is_not_there_holds_up_nobody() {
        let mut supervisor = Supervisor::at(OsStr::new("/nonexistent/notify"), true);
        supervisor.alive();
        supervisor.ready();
    }
}
