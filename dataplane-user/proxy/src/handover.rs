//! Hands over listening sockets from a proxy that ends to the proxy that replaces it: the same sockets, with the
//! connections in their backlogs, so that none is refused in between.
//!
//! The older proxy listens on a Unix socket. The newer proxy connects, and receives the sockets with their names. It
//! then announces that it takes over; the older proxy leaves the path of the Unix socket and confirms. A proxy already
//! accepts at this time, and the older proxy drains at once. An agent still has to load its programs: the older agent
//! accepts until the newer agent reports that it serves ([`outcome`]). If the newer agent ends before that, the older
//! agent can take the path back.

use std::{
    fs,
    io::{self, IoSlice, IoSliceMut, Read as _, Write as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            fs::PermissionsExt as _,
            net::{UnixListener, UnixStream},
        },
    },
    path::Path,
    time::Duration,
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// How many sockets are sent at a time. The kernel takes up to 253.
const SOCKETS: usize = 64;
/// How long their names may be, of those that are sent at a time.
const NAMES: usize = 16 << 10;
/// How long each side waits for the other.
const PATIENCE: Duration = Duration::from_secs(10);
/// "I take your place", and "it is yours".
const TAKEN: [u8; 1] = [1];
/// "I have those, go on".
const NEXT: [u8; 1] = [2];
/// "I serve".
const SERVING: [u8; 1] = [3];

/// The result of a process that took another's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It serves; or it is running and has not reported in time that it serves.
    Stays,
    /// It ended without having served.
    Gone,
}

/// Sockets by name, such as `outbound 127.0.0.1:15001`.
pub type Named = Vec<(String, OwnedFd)>;

/// Creates the Unix socket at which a proxy waits for its successor. Replaces an existing file of this name.
///
/// # Errors
/// If the socket cannot be created.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Offers sockets to the process that has connected, and returns once it has taken them: the time to leave. Pass the
/// returned stream to [`gone`] then.
///
/// # Errors
/// If they were not taken; then nothing has changed.
pub fn offer(stream: UnixStream, sockets: &[(String, BorrowedFd<'_>)]) -> io::Result<UnixStream> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut left = sockets.len();
    loop {
        let (portion, rest) = sockets[sockets.len() - left..].split_at(left.min(SOCKETS));
        left = rest.len();
        send(&stream, portion, left)?;
        if left == 0 {
            break;
        }
        let mut answer = [0];
        (&stream).read_exact(&mut answer)?;
        if answer != NEXT {
            return Err(io::Error::other("an answer that makes no sense"));
        }
    }
    let mut answer = [0];
    (&stream).read_exact(&mut answer)?;
    if answer == TAKEN {
        Ok(stream)
    } else {
        Err(io::Error::other("an answer that makes no sense"))
    }
}

/// Sends some of the sockets, with how many are left and their names.
fn send(stream: &UnixStream, sockets: &[(String, BorrowedFd<'_>)], left: usize) -> io::Result<()> {
    let names: Vec<&str> = sockets.iter().map(|(name, _)| name.as_str()).collect();
    let text = format!("{left}\n{}\n", names.join("\n"));
    if text.len() > NAMES {
        return Err(io::Error::other("the sockets' names are too long"));
    }
    let fds: Vec<BorrowedFd<'_>> = sockets.iter().map(|(_, fd)| *fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    }
    sendmsg(
        stream,
        &[IoSlice::new(text.as_bytes())],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// Confirms to the successor that the path is free.
pub fn gone(mut stream: &UnixStream) {
    // If it is not there, it has no use for it.
    let _ = stream.write_all(&TAKEN);
}

/// Waits until the successor serves or has ended, but at most this long.
pub fn outcome(mut stream: UnixStream, at_most: Duration) -> Outcome {
    let limited = stream.set_read_timeout(Some(at_most));
    match limited.and_then(|()| stream.read(&mut [0])) {
        Ok(0) => Outcome::Gone,
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Outcome::Gone,
        Ok(_) | Err(_) => Outcome::Stays,
    }
}

/// Reports to the predecessor that this proxy serves.
pub fn serves(mut stream: UnixStream) {
    // If it is not there, it has no use for it.
    let _ = stream.write_all(&SERVING);
}

/// Asks the proxy that waits at `path`, if there is one, for its sockets. Pass the stream to [`taken`]; if it is
/// dropped before, nothing has changed.
///
/// # Errors
/// If there is one, and it does not give any.
pub fn ask(path: &Path) -> io::Result<Option<(UnixStream, Named)>> {
    let stream = match UnixStream::connect(path) {
        Ok(stream) => stream,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut named = Named::new();
    loop {
        let (portion, left) = receive(&stream)?;
        named.extend(portion);
        if left == 0 {
            return Ok(Some((stream, named)));
        }
        (&stream).write_all(&NEXT)?;
    }
}

/// Receives the sockets that [`send`] sent.
fn receive(stream: &UnixStream) -> io::Result<(Named, usize)> {
    let mut text = vec![0; NAMES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        stream.as_fd(),
        &mut [IoSliceMut::new(&mut text)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut sockets = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            sockets.extend(fds);
        }
    }
    let text = String::from_utf8_lossy(&text[..received.bytes]);
    let mut lines = text.lines();
    let left = lines.next().and_then(|line| line.parse().ok());
    let names: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    let Some(left) = left.filter(|_| names.len() == sockets.len()) else {
        return Err(io::Error::other(
            "the process at this socket does not use this version's hand-over protocol",
        ));
    };
    let pairs = names.into_iter().map(str::to_owned).zip(sockets);
    Ok((pairs.collect(), left))
}

/// Announces to the older proxy that its place is taken, and waits until it has left. Pass the returned stream to
/// [`serves`]; if it is dropped before, the older proxy comes back if it can.
///
/// # Errors
/// If it does not answer.
pub fn taken(mut stream: UnixStream) -> io::Result<UnixStream> {
    stream.write_all(&TAKEN)?;
    stream.read_exact(&mut [0])?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use std::{env, net::TcpListener, thread};

    use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};

    use super::*;

    #[test]
    fn sockets_are_handed_over_with_what_waits_in_them() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("handover.sock");
        assert!(ask(&path).unwrap().is_none(), "nobody is there");
        let waiting = listen(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "only root connects");
        let old = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = old.local_addr().unwrap();
        let client = std::net::TcpStream::connect(at).unwrap();
        let other = thread::spawn(move || {
            let (stream, _) = waiting.accept().unwrap();
            let stream = offer(stream, &[("outbound x".to_owned(), old.as_fd())]).unwrap();
            drop(old);
            gone(&stream);
        });
        let (stream, mut named) = ask(&path).unwrap().unwrap();
        let (name, socket) = named.pop().unwrap();
        assert_eq!(name, "outbound x");
        taken(stream).unwrap();
        other.join().unwrap();
        let (_, from) = TcpListener::from(socket).accept().unwrap();
        assert_eq!(from, client.local_addr().unwrap());
        assert!(
            ask(&path).unwrap().is_none(),
            "a file that nobody listens at"
        );
    }

    #[test]
    fn any_number_is_handed_over() {
        for count in [0, 1, SOCKETS, SOCKETS + 1, 3 * SOCKETS - 1] {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("handover.sock");
            let waiting = listen(&path).unwrap();
            let socket = TcpListener::bind("127.0.0.1:0").unwrap();
            let other = thread::spawn(move || {
                let (stream, _) = waiting.accept().unwrap();
                let all: Vec<_> = (0..count)
                    .map(|n| (format!("socket {n}"), socket.as_fd()))
                    .collect();
                gone(&offer(stream, &all).unwrap());
            });
            let (stream, sockets) = ask(&path).unwrap().unwrap();
            taken(stream).unwrap();
            other.join().unwrap();
            let names: Vec<_> = sockets.iter().map(|(name, _)| name.as_str()).collect();
            let wanted: Vec<_> = (0..count).map(|n| format!("socket {n}")).collect();
            assert_eq!(names, wanted);
        }
    }

    #[test]
    fn one_that_does_not_get_so_far_is_noticed() {
        let long = Duration::from_secs(10);
        let (old, new) = UnixStream::pair().unwrap();
        serves(new);
        assert_eq!(outcome(old, long), Outcome::Stays);
        let (old, new) = UnixStream::pair().unwrap();
        drop(new);
        assert_eq!(outcome(old, long), Outcome::Gone);
        let (old, _new) = UnixStream::pair().unwrap();
        assert_eq!(outcome(old, Duration::from_millis(1)), Outcome::Stays);
        // With something unread: the kernel says "reset" then.
        let (old, new) = UnixStream::pair().unwrap();
        gone(&old);
        drop(new);
        assert_eq!(outcome(old, long), Outcome::Gone);
    }

    /// Each message to or from any process at the socket is understood or refused, and no descriptor leaks.
    #[test]
    fn any_message_is_taken_or_refused() {
        let file = fs::File::open("/dev/null").unwrap();
        let mut random = SmallRng::seed_from_u64(28);
        let runs = env::var("DATAPLANE_FUZZ_RUNS").map_or(3000, |runs| runs.parse().unwrap());
        let open = || fs::read_dir("/proc/self/fd").unwrap().count();
        let (before, mut taken, mut refused) = (open(), 0, 0);
        for run in 0..runs {
            let (one, other) = UnixStream::pair().unwrap();
            let count = random.random_range(0..4);
            let mut text = format!("{}\n", random.random_range(0..3)).into_bytes();
            for number in 0..count {
                text.extend_from_slice(format!("socket {number}\n").as_bytes());
            }
            text.push(b'\n');
            for _ in 0..random.random_range(0..3) {
                let at = random.random_range(0..text.len());
                text[at] = random.random();
            }
            text.truncate(random.random_range(1..=text.len()));
            let files = vec![file.as_fd(); count];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if count > 0 {
                ancillary.push(SendAncillaryMessage::ScmRights(&files));
            }
            sendmsg(
                &one,
                &[IoSlice::new(&text)],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            )
            .unwrap();
            if run % 2 == 0 {
                match receive(&other) {
                    Ok((sockets, _)) => {
                        assert_eq!(sockets.len(), count);
                        taken += 1;
                    }
                    Err(_) => refused += 1,
                }
            } else {
                // The same bytes from one that asks for sockets.
                one.shutdown(std::net::Shutdown::Write).unwrap();
                let named: Vec<_> = (0..=SOCKETS)
                    .map(|number| (format!("socket {number}"), file.as_fd()))
                    .collect();
                let is_taken = text.starts_with(&[NEXT, TAKEN].concat());
                assert_eq!(offer(other, &named).is_ok(), is_taken, "{text:?}");
            }
        }
        assert!(
            taken > runs / 20 && refused > runs / 20,
            "{taken}, {refused} of {runs}"
        );
        // Other tests open some meanwhile.
        assert!(open() < before + 200, "descriptors are left");
    }

    #[test]
    fn names_that_do_not_fit_a_message_are_refused() {
        let file = fs::File::open("/dev/null").unwrap();
        // Beside the number of sockets that are left, and two ends of lines.
        for (length, is_sent) in [(NAMES - 3, true), (NAMES - 2, false)] {
            let (one, other) = UnixStream::pair().unwrap();
            let name = "n".repeat(length);
            let sent = send(&one, &[(name.clone(), file.as_fd())], 0);
            assert_eq!(sent.is_ok(), is_sent, "{length}");
            if is_sent {
                let (named, left) = receive(&other).unwrap();
                assert!(named[0].0 == name && left == 0);
            }
        }
    }

    #[test]
    fn a_path_that_cannot_be_used_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let error = listen(directory.path()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory, "{error}");
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        // Nobody listens there, and nobody ever can.
        assert!(ask(&file).unwrap().is_none());
        assert!(ask(&file.join("handover.sock")).is_err());
        drop(listen(&file).unwrap());
    }

    #[test]
    fn sockets_that_nobody_takes_stay() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("handover.sock");
        let waiting = listen(&path).unwrap();
        let old = TcpListener::bind("127.0.0.1:0").unwrap();
        let asking = thread::spawn(move || drop(ask(&path).unwrap()));
        let (stream, _) = waiting.accept().unwrap();
        assert!(offer(stream, &[("outbound x".to_owned(), old.as_fd())]).is_err());
        asking.join().unwrap();
    }
}
