//! Connections that the proxy ends, refuses or leaves waiting: drains, removed workloads, limits, silence.

use std::time::Instant;

use super::*;

#[test]
fn draining_waits_for_connections_and_cuts_the_rest() {
    let (listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let mut client = connect(vip);
    let server = accept(&listener);
    let (sender, drained) = mpsc::channel();
    thread::spawn(move || {
        proxy.drain(PATIENCE);
        sender.send(()).unwrap();
    });
    // The proxy has closed its listener, and the connection continues.
    while TcpStream::connect(vip).is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    client.write_all(b"still").unwrap();
    assert!(drained.try_recv().is_err());
    drop(client);
    assert_eq!(ending(&server).unwrap(), b"still");
    // The drop also ends connections of the loop above that the endpoint did not accept.
    drop((server, listener));
    drained.recv_timeout(PATIENCE).unwrap();

    let (listener, at) = endpoint();
    let (proxy, vip) = self::proxy(&Settings::default(), &[at], Egress::Allow);
    let client = connect(vip);
    let server = accept(&listener);
    proxy.drain(Duration::from_millis(50));
    assert_eq!(ending(&client), Err(ErrorKind::ConnectionReset));
    assert_eq!(ending(&server), Err(ErrorKind::ConnectionReset));
}

#[test]
fn a_removed_workload_can_be_attached_again() {
    let (listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let again = || Attachment {
        workload: workload(),
        namespace: None,
        outbound: vec![],
        inbound: vec![],
        tunnels: vec![],
        egress: Egress::Allow,
    };
    assert!(matches!(proxy.add(again()), Err(AttachError::Attached(_))));
    let client = connect(vip);
    let server = accept(&listener);
    proxy.remove(&workload().name, Duration::from_millis(100));
    proxy.add(again()).unwrap();
    assert_eq!(
        ending(&client),
        Err(ErrorKind::ConnectionReset),
        "cut at the deadline"
    );
    drop(server);
}

#[test]
fn only_the_removed_workload_accepts_no_more() {
    let (listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let others = closed.local_addr().unwrap();
    proxy
        .add(Attachment {
            workload: Arc::new(Workload::new(
                WorkloadName::new("default", "other"),
                Place::Elsewhere,
            )),
            namespace: None,
            outbound: vec![closed],
            inbound: vec![],
            tunnels: vec![],
            egress: Egress::Allow,
        })
        .unwrap();
    proxy.remove(&WorkloadName::new("default", "other"), PATIENCE);
    while TcpStream::connect(others).is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    let mut client = connect(vip);
    client.write_all(b"still").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(ending(&accept(&listener)).unwrap(), b"still");
}

#[test]
fn connections_go_to_a_worker_that_has_far_fewer() {
    let (_listener, at) = endpoint();
    let (proxy, _) = proxy(&Settings::default(), &[at], Egress::Allow);
    let shared = proxy.engines.shared();
    assert_eq!(shared.less_loaded(0, 8), None);
    for count in 1..=9 {
        shared.loads[1].add();
        let other = (count > 8).then_some(0);
        assert_eq!(shared.less_loaded(1, 8), other, "{count}");
        assert_eq!(shared.less_loaded(0, 8), None);
    }
    shared.loads[0].add();
    assert_eq!(shared.less_loaded(1, 8), None);
    shared.loads[0].sub();
    assert_eq!(shared.loads[1].connections(), 9);
    for _ in 0..9 {
        shared.loads[1].sub();
    }
    let held = [5, 7].map(|bytes| bytes << 10);
    for (load, held) in shared.loads.iter().zip(held) {
        load.set_held(held);
    }
    assert_eq!(shared.held(), 12 << 10);
    let settings = Settings {
        workers: 3,
        ..Settings::default()
    };
    let proxy = Proxy::start(settings, &none_dies()).unwrap();
    let shared = proxy.engines.shared();
    (0..9).for_each(|_| shared.loads[2].add());
    assert_eq!(shared.less_loaded(2, 8), Some(0));
}

#[test]
fn tunnels_are_left_to_another_engine() {
    let (listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let tunnels = TcpListener::bind("127.0.0.1:0").unwrap();
    let (copy, at) = (tunnels.try_clone().unwrap(), tunnels.local_addr().unwrap());
    let other = Workload::new(WorkloadName::new("default", "other"), Place::Elsewhere);
    proxy
        .add(Attachment {
            workload: Arc::new(other),
            namespace: None,
            outbound: vec![],
            inbound: vec![],
            tunnels: vec![tunnels],
            egress: Egress::Allow,
        })
        .unwrap();
    let tunnel = connect(at);
    let relayed = connect(vip);
    accept(&listener);
    thread::sleep(Duration::from_millis(50));
    let (_, from) = copy.accept().expect("it is still in the backlog");
    assert_eq!(from, tunnel.local_addr().unwrap());
    drop(relayed);
}

#[test]
fn connections_beyond_the_limit_wait_in_the_kernel() {
    let (listener, at) = endpoint();
    let settings = Settings {
        max_connections: Some(2),
        ..Settings::default()
    };
    let (proxy, vip) = proxy(&settings, &[at], Egress::Allow);
    let first = [connect(vip), connect(vip)];
    let servers = [accept(&listener), accept(&listener)];
    let mut third = connect(vip);
    third.write_all(b"patience").unwrap();
    thread::sleep(Duration::from_millis(200));
    assert_eq!(proxy.connections(), 2);
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err());
    listener.set_nonblocking(false).unwrap();
    drop((first, servers));
    let server = accept(&listener);
    drop(third);
    assert_eq!(ending(&server).unwrap(), b"patience");
}

/// The effect of keepalive, when the machine of one side is gone.
#[test]
fn a_side_that_breaks_after_its_last_byte_ends_the_connection() {
    let (listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    for of_client in [false, true] {
        let client = connect(vip);
        let server = accept(&listener);
        let (gone, left) = if of_client {
            (client, server)
        } else {
            (server, client)
        };
        gone.shutdown(Shutdown::Write).unwrap();
        assert_eq!((&left).read(&mut [0]).unwrap(), 0);
        SockRef::from(&gone)
            .set_linger(Some(Duration::ZERO))
            .unwrap();
        drop(gone);
        for _ in 0..300 {
            if proxy.connections() == 0 {
                break;
            }
            thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(proxy.connections(), 0, "of the client: {of_client}");
        let error = (&left)
            .write(b"still there?")
            .and_then(|_| (&left).write(b"!"));
        assert!(error.is_err(), "{error:?}");
    }
}

#[test]
fn silence_ends_a_connection_where_that_is_asked_for() {
    let (listener, at) = endpoint();
    let settings = Settings {
        idle_timeout: Some(Duration::from_secs(1)),
        ..Settings::default()
    };
    let (_proxy, vip) = proxy(&settings, &[at], Egress::Allow);
    let client = connect(vip);
    let server = accept(&listener);
    assert_eq!(ending(&client), Err(ErrorKind::ConnectionReset));
    assert_eq!(ending(&server), Err(ErrorKind::ConnectionReset));
}

/// Waits until this is so.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Connects with little room for bytes that the proxy does not read.
fn connect_little(to: SocketAddr) -> TcpStream {
    let stream = connect(to);
    SockRef::from(&stream)
        .set_send_buffer_size(16 << 10)
        .unwrap();
    stream
}

/// Writes what the reader takes now, and returns the number of bytes. The proxy may have ended the connection.
fn fill(mut stream: &TcpStream, chunk: &[u8]) -> usize {
    stream.set_nonblocking(true).unwrap();
    let mut written = 0;
    while let Ok(count) = stream.write(chunk) {
        written += count;
    }
    written
}

#[test]
fn readers_that_stall_cost_their_own_workload_its_connections() {
    // The values in docs/security.md and docs/proxy.md.
    assert_eq!(Settings::default().max_held, 128 << 20);
    let (listener, at) = endpoint();
    // Little fits the endpoint's socket.
    SockRef::from(&listener)
        .set_recv_buffer_size(16 << 10)
        .unwrap();
    let settings = Settings {
        max_held: 2 << 20,
        // Workers count what they hold four times a second.
        patience: Patience {
            keepalive: Some(Duration::from_millis(250)),
            user_timeout: None,
        },
        ..Settings::default()
    };
    let (proxy, vip) = proxy(&settings, &[at], Egress::Allow);
    let other = TcpListener::bind("0.0.0.0:0").unwrap();
    let other_vip = SocketAddr::new(VIP, other.local_addr().unwrap().port());
    let mut snapshot = Snapshot::default();
    for (name, vip) in [("web", vip), ("other", other_vip)] {
        let mut service = service(vip.ip(), vip.port(), &[at]);
        service.name = ServiceName::new("default", name);
        let service = Arc::new(service);
        snapshot.services.insert(service.name.clone(), service);
    }
    proxy.set_snapshot(snapshot);
    let hog = WorkloadName::new("default", "hog");
    proxy
        .add(Attachment {
            workload: Arc::new(Workload::new(hog.clone(), Place::Elsewhere)),
            namespace: None,
            outbound: vec![other],
            inbound: vec![],
            tunnels: vec![],
            egress: Egress::Allow,
        })
        .unwrap();
    let slow = connect_little(vip);
    let slow_server = accept(&listener);
    let (chunk, mut sent) = (vec![7; 64 << 10], 0);
    let held = || proxy.engines.shared().held();
    until("bytes are held for the slow reader", || {
        sent += fill(&slow, &chunk);
        held() > 0
    });
    // How many bytes a connection holds depends on the sizes of the reads before: so there are as many as it takes.
    let (mut hogs, stalled) = (Vec::new(), || proxy.observer().stalled());
    until("some of the hog's connections were ended", || {
        hogs.extend((0..4).map(|_| (connect_little(other_vip), accept(&listener))));
        for (client, _) in &hogs {
            fill(client, &chunk);
        }
        stalled().iter().any(|(_, count)| *count > 5)
    });
    let (stalled, held) = (stalled(), held());
    let [(name, count)] = &stalled[..] else {
        panic!("{stalled:?}")
    };
    assert!(*name == hog && *count < hogs.len() as u64, "{stalled:?}");
    assert!(held <= settings.max_held, "{held} bytes are held");
    // The connection that has stalled for longest is another workload's.
    drop(hogs);
    slow.shutdown(Shutdown::Write).unwrap();
    assert_eq!(ending(&slow_server).unwrap().len(), sent);
}
