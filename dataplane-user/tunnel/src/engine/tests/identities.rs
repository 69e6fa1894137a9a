//! The identities that the other side of a tunnel may have.

use super::*;

/// A tunnel that was made for the service is not used for connections to the workload's own address.
#[test]
fn a_service_accepts_further_identities_of_its_endpoints_and_of_no_others() {
    let world = World::new();
    let change = |further: &[&str]| {
        let mut snapshot = world.proxy.relay().index().1.snapshot().clone();
        let server = Workload {
            account: "gate".into(),
            ..(*workload("server", &[SERVER])).clone()
        };
        snapshot
            .workloads
            .insert(server.name.clone(), Arc::new(server));
        let further = further.iter().map(|account| identity(account));
        let web = Service {
            identities: further.collect(),
            ..service(world.vip, world.application.local_addr().unwrap())
        };
        snapshot.services.insert(web.name.clone(), Arc::new(web));
        world.proxy.set_snapshot(snapshot);
    };
    let is_refused = |to: SocketAddr| {
        let client = TcpStream::connect(to).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let error = read(&client).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    };
    change(&["client"]);
    is_refused(world.vip);
    change(&["client", "server"]);
    let (client, mut server) = (world.connect(), world.accept());
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read(&server).unwrap(), "");
    server.write_all(b"answer").unwrap();
    is_refused((SERVER, world.vip.port()).into());
    drop(server);
    assert_eq!(read(&client).unwrap(), "answer");
    let lines = world.end();
    let wrong = |expected: &str| {
        let text = format!("peer presented {}, expected {expected}", identity("server"));
        let mut lines = lines
            .iter()
            .filter(|line| line.contains("flags=TLS_FAILURE"));
        assert!(
            lines.any(|line| line.contains(&text)),
            "no {text}: {lines:?}"
        );
    };
    wrong(&identity("gate").to_string());
    let proven = format!(" peer={} ", identity("server"));
    assert!(
        lines
            .iter()
            .any(|line| line.contains(&proven) && line.ends_with("flags=-"))
    );
}
