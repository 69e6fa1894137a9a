//! The pump with pairs of sockets, whose other ends the test has.

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::unix::net::UnixStream,
    thread,
    time::Duration,
};

use rustix::net::sockopt as option;
use socket2::SockRef;

use super::*;

/// A socket of the pump and the test's end of it. Both hold 256 KiB for each other, and do not block.
fn pair() -> (End, UnixStream) {
    let (own, other) = UnixStream::pair().unwrap();
    for stream in [&own, &other] {
        SockRef::from(stream).set_send_buffer_size(1 << 20).unwrap();
        stream.set_nonblocking(true).unwrap();
    }
    (End::new(own.into(), Haste::Ensured), other)
}

/// A connection by TCP: the pump's socket and the test's.
fn connected() -> (End, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    own.set_nonblocking(true).unwrap();
    (End::new(own.into(), Haste::Unsent), other)
}

/// Bytes that differ from their neighbours.
fn pattern(count: usize) -> Vec<u8> {
    (0..=250).cycle().take(count).collect()
}

/// Writes until the peer's socket takes no more, and returns the number of bytes.
fn fill(end: &End) -> usize {
    let mut written = 0;
    while let Ok(count) = net::send(&end.socket, &[0; 1 << 10], SendFlags::NOSIGNAL) {
        written += count;
    }
    written
}

#[test]
fn reads_grow_while_they_are_full_and_shrink_while_they_are_not() {
    const KIB: usize = 1 << 10;
    for (size, read, wanted) in [
        (SMALL, 10, SMALL),
        (SMALL, SMALL, 32 * KIB),
        (32 * KIB, 10, SMALL),
        (64 * KIB, SMALL - 1, 32 * KIB),
        (64 * KIB, SMALL, 64 * KIB),
        (128 * KIB, 128 * KIB, LARGE),
        (LARGE, LARGE, LARGE),
        (LARGE, 60 * KIB, 128 * KIB),
    ] {
        let ((mut from, mut sender), (mut to, mut receiver)) = (pair(), pair());
        let (mut pump, mut buffers) = (Pump::default(), Buffers::new(1 << 30));
        let (bytes, mut count) = (pattern(read), 7);
        sender.write_all(&bytes).unwrap();
        pump.resize(size);
        from.readable = true;
        let step = pump.run(&mut from, &mut to, &mut buffers, &mut count);
        assert_eq!(step, Ok(Step::Waiting));
        assert_eq!((pump.size as usize, count), (wanted, 7 + read as u64));
        assert!(!from.readable && to.writable && pump.held.is_none());
        assert_eq!(to.weighed, read == LARGE, "the bound of a near peer");
        let mut seen = vec![0; read];
        receiver.read_exact(&mut seen).unwrap();
        assert!(seen == bytes, "other bytes");
    }
}

#[test]
fn what_the_receiver_does_not_take_is_held_and_nothing_more_is_read() {
    let ((mut from, mut sender), (mut to, mut receiver)) = (pair(), pair());
    let (mut pump, mut buffers) = (Pump::default(), Buffers::new(1 << 30));
    let full = fill(&to);
    let bytes = pattern(300 << 10);
    let mut count = 0;
    pump.resize(64 << 10);
    sender.write_all(&bytes[..100]).unwrap();
    from.readable = true;
    let step = pump.run(&mut from, &mut to, &mut buffers, &mut count);
    assert_eq!((step, count), (Ok(Step::Waiting), 0));
    assert_eq!(pump.held_bytes(), &bytes[..100]);
    assert_eq!((pump.held(), buffers.held()), (100, 100));
    assert_eq!(pump.size, 32 << 10, "of a reader that does not keep up");
    // More is left where it is.
    sender.write_all(&bytes[100..]).unwrap();
    from.readable = true;
    let step = pump.run(&mut from, &mut to, &mut buffers, &mut count);
    assert_eq!((step, pump.held()), (Ok(Step::Waiting), 100));
    from.broken = true;
    let step = pump.run(&mut from, &mut to, &mut buffers, &mut count);
    assert_eq!(step, Err(Broken::Sender));
    from.broken = false;

    receiver.read_exact(&mut vec![0; full]).unwrap();
    drop(sender);
    let (mut seen, mut chunk) = (Vec::new(), vec![0; 50_000]);
    for _ in 0..1000 {
        (from.readable, to.writable) = (true, true);
        let step = pump.run(&mut from, &mut to, &mut buffers, &mut count);
        assert!(step.is_ok(), "{step:?}");
        match receiver.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => seen.extend_from_slice(&chunk[..read]),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
        }
    }
    assert!(seen == bytes, "{} bytes, or others", seen.len());
    assert_eq!((count, buffers.held()), (bytes.len() as u64, 0));
    let step = pump.run(&mut from, &mut to, &mut buffers, &mut count);
    assert_eq!(step, Ok(Step::Done));
}

#[test]
fn what_is_held_for_a_receiver_can_be_abandoned() {
    let ((mut from, mut sender), (mut to, _receiver)) = (pair(), pair());
    let (mut pump, mut buffers) = (Pump::default(), Buffers::new(1 << 30));
    fill(&to);
    sender.write_all(b"much").unwrap();
    from.readable = true;
    pump.run(&mut from, &mut to, &mut buffers, &mut 0).unwrap();
    assert_eq!(buffers.held(), 4);
    pump.abandon(&mut buffers);
    assert_eq!((pump.held(), buffers.held()), (0, 0));
}

/// The kernel reports a FIN, and a reset, once.
#[test]
fn the_end_is_read_after_the_last_bytes() {
    for (closing, broken, said, wanted) in [
        (false, false, &b"bye"[..], Ok(Step::Waiting)),
        (true, false, b"bye", Ok(Step::Done)),
        (true, true, b"bye", Err(Broken::Sender)),
        (false, false, b"", Ok(Step::Done)),
        (false, true, b"", Err(Broken::Sender)),
    ] {
        let ((mut from, mut sender), (mut to, mut receiver)) = (pair(), pair());
        sender.write_all(said).unwrap();
        drop(sender);
        (from.readable, from.closing, from.broken) = (true, closing, broken);
        let (mut pump, mut buffers) = (Pump::default(), Buffers::new(1 << 30));
        let step = pump.run(&mut from, &mut to, &mut buffers, &mut 0);
        assert_eq!(step, wanted, "{closing} {broken} {said:?}");
        let mut seen = vec![0; said.len()];
        receiver.read_exact(&mut seen).unwrap();
        let end = receiver.read(&mut [0]).ok();
        assert_eq!(end, (wanted == Ok(Step::Done)).then_some(0));
    }
    // A connection without bytes, which has broken or has not.
    for (broken, wanted) in [(false, Ok(Step::Waiting)), (true, Err(Broken::Sender))] {
        let ((mut from, _sender), (mut to, _receiver)) = (pair(), pair());
        (from.readable, from.broken) = (true, broken);
        let step = Pump::default().run(&mut from, &mut to, &mut Buffers::new(0), &mut 0);
        assert_eq!(step, wanted);
    }
}

#[test]
fn the_first_bytes_are_read_before_there_is_a_receiver() {
    let mut buffers = Buffers::new(1 << 30);
    for (said, ends, wanted, readable) in [
        (0, false, 0, true),
        (10, false, 10, false),
        (SMALL, false, SMALL, true),
        (SMALL + 1, false, SMALL, true),
        (0, true, 0, true),
        (10, true, 10, false),
    ] {
        let (mut from, mut sender) = pair();
        sender.write_all(&pattern(said)).unwrap();
        let sender = (!ends).then_some(sender);
        from.readable = said != SMALL;
        let read = Pump::read_first(&mut from, &mut buffers);
        assert_eq!((read, from.readable), (Ok(wanted), readable), "{said}");
        assert!(buffers.shared()[..wanted] == pattern(wanted));
        drop(sender);
    }
    let (mut from, sender) = connected();
    SockRef::from(&sender)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop(sender);
    let read = loop {
        match Pump::read_first(&mut from, &mut buffers) {
            Ok(0) => thread::yield_now(),
            read => break read,
        }
    };
    assert_eq!(read, Err(Broken::Sender));
}

#[test]
fn the_first_bytes_are_written_or_held() {
    let mut buffers = Buffers::new(1 << 30);
    buffers.shared()[..3].copy_from_slice(b"abc");
    let (mut to, mut receiver) = pair();
    let (mut pump, mut count) = (Pump::default(), 5);
    let reached = pump.write_first(&mut to, &mut buffers, 3, &mut count);
    assert_eq!((reached, count, pump.held()), (Ok(true), 8, 0));
    assert!(pump.held.is_none() && to.writable);
    let mut seen = [0; 3];
    receiver.read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"abc");
    fill(&to);
    let reached = pump.write_first(&mut to, &mut buffers, 3, &mut count);
    assert_eq!((reached, count), (Ok(false), 8));
    assert_eq!((pump.held_bytes(), to.writable), (&b"abc"[..], false));
    drop(receiver);
    let mut pump = Pump::default();
    let reached = pump.write_first(&mut to, &mut buffers, 3, &mut count);
    assert!(reached.is_err(), "{reached:?}");
    assert_eq!(pump.held_bytes(), b"abc", "for the next endpoint");
}

#[test]
fn the_first_short_write_leaves_the_sockets_options_alone() {
    for (haste, length, after, is_set) in [
        (Haste::Unsent, SEGMENT, Haste::Sent, false),
        (Haste::Unsent, SEGMENT + 1, Haste::Ensured, true),
        (Haste::Sent, 1, Haste::Ensured, true),
        (Haste::Ensured, 1, Haste::Ensured, false),
    ] {
        let (mut to, _receiver) = connected();
        to.haste = haste;
        assert_eq!(send(&mut to, &pattern(length)), Ok(length));
        let nodelay = option::tcp_nodelay(&to.socket).unwrap();
        assert_eq!((to.haste, nodelay), (after, is_set), "{haste:?} {length}");
        assert!(to.writable);
    }
}
