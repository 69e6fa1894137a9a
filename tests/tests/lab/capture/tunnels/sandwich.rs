//! A waypoint whose Pods are captured: the agent accepts their tunnels, and tells them the client by a PROXY header.

use std::{
    io::{self, Read as _, copy},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::mpsc,
    thread::{self, JoinHandle},
};

use anyhow::{Result, ensure};
use dataplane_tests::Host;
use ppp::v2::{Addresses, Header};
use serde_json::{Value, json};
use socket2::SockRef;

use super::{HBONE, World, auto::TO_FAR, object, tcp};
use crate::{
    cluster::{ask, eventually, reaches},
    manifest::Service,
    sockets::arrived,
};

/// The port at which the waypoint expects the header.
const PORT: u16 = 15_088;
/// The bytes of a header before its addresses.
const HEAD: usize = 16;

/// The fields of a header: the client's address, the destination, and the client's identity.
type Said = (String, String, String);

/// A stand-in for a waypoint: reads the header of each connection, and connects it to an application.
struct Sandwich {
    seen: mpsc::Receiver<Said>,
    listener: TcpListener,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Sandwich {
    /// Starts it at the loopback interface of a host, which no other host reaches.
    fn start(host: &Host, application: SocketAddr) -> Result<Self> {
        let listener = host.listen(([127, 0, 0, 1], PORT))?;
        let accepting = listener.try_clone()?;
        let (report, seen) = mpsc::channel();
        let thread = host.inside(move || {
            // Accepting fails when the listener is shut down.
            while let Ok((client, _)) = accepting.accept() {
                let ended = serve(client, application, &report);
                if let Err(error) = ended {
                    eprintln!("a connection of the waypoint: {error}");
                }
            }
            Ok(())
        });
        Ok(Self {
            seen,
            listener,
            thread: Some(thread),
        })
    }
}

impl Drop for Sandwich {
    fn drop(&mut self) {
        let shut = SockRef::from(&self.listener).shutdown(Shutdown::Both);
        if let (Ok(()), Some(thread)) = (shut, self.thread.take())
            && let Err(panic) = thread.join()
        {
            eprintln!("the waypoint panicked: {panic:?}");
        }
    }
}

fn serve(
    mut client: TcpStream,
    application: SocketAddr,
    report: &mpsc::Sender<Said>,
) -> io::Result<()> {
    let mut bytes = vec![0; HEAD];
    client.read_exact(&mut bytes)?;
    let length = u16::from_be_bytes([bytes[HEAD - 2], bytes[HEAD - 1]]);
    bytes.resize(HEAD + usize::from(length), 0);
    client.read_exact(&mut bytes[HEAD..])?;
    let header = Header::try_from(&bytes[..]).map_err(io::Error::other)?;
    let Addresses::IPv4(of) = header.addresses else {
        return Err(io::Error::other(format!("{header:?}")));
    };
    let identity = header
        .tlvs()
        .filter_map(Result::ok)
        .find(|of| of.kind == 0xd0);
    let identity = identity.map(|of| String::from_utf8_lossy(&of.value).into_owned());
    // Fails if the scenario has ended.
    let _ = report.send((
        of.source_address.to_string(),
        format!("{}:{}", of.destination_address, of.destination_port),
        identity.unwrap_or_default(),
    ));
    let mut server = TcpStream::connect(application)?;
    let (mut from, mut to) = (client.try_clone()?, server.try_clone()?);
    let up = thread::spawn(move || {
        let copied = copy(&mut from, &mut to);
        to.shutdown(Shutdown::Write).and(copied)
    });
    copy(&mut server, &mut client)?;
    client.shutdown(Shutdown::Write)?;
    let copied = up
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("the copy panicked")));
    copied.map(drop)
}

impl World {
    /// Makes `plain` the captured Pod of the Gateway `gate`, and the waypoint of all services, with the bindings of the Gateway
    /// and of its class.
    fn put_gate(&self, bindings: [Option<&str>; 2]) -> Result<()> {
        let pod = |name: &str| self.lab.pod(name);
        let mut gate = object(pod("plain"), "node2", true);
        gate["metadata"]["labels"]["gateway.networking.k8s.io/gateway-name"] = "gate".into();
        let [gateway, class] = bindings.map(|binding| -> Value {
            let name = "ambient.istio.io/waypoint-inbound-binding";
            binding.map_or_else(|| json!({}), |binding| json!({ name: binding }))
        });
        let version = "gateway.networking.k8s.io/v1";
        let objects = [
            object(pod("app"), "node1", true),
            object(pod("far"), "node2", true),
            gate,
            json!({
                "apiVersion": "v1", "kind": "Namespace",
                "metadata": { "name": "default", "labels": { "istio.io/use-waypoint": "gate" } },
            }),
            json!({
                "apiVersion": version, "kind": "Gateway",
                "metadata": { "name": "gate", "namespace": "default", "annotations": gateway },
                "spec": {
                    "gatewayClassName": "sandwich",
                    "listeners": [{ "name": "mesh", "port": PORT, "protocol": "istio.io/PROXY" }],
                },
                "status": { "addresses": [{ "type": "IPAddress", "value": "10.96.0.12" }] },
            }),
            json!({
                "apiVersion": version, "kind": "GatewayClass",
                "metadata": { "name": "sandwich", "annotations": class },
                "spec": { "controllerName": "example.com/sandwich" },
            }),
        ];
        let web = Service::new("web", &["10.96.0.10"]).port("http", 80, 80);
        let web = web.endpoints(&[pod("far")]);
        // As a controller makes it: without the port of tunnels.
        let gate = Service::new("gate", &["10.96.0.12"]).port("mesh", PORT, PORT);
        let gate = gate.endpoints(&[pod("plain")]);
        Ok(self.manifests.write_with(&[web, gate], &objects)?)
    }
}

/// The header has the service's address and the client's identity. Without a binding, streams to the service are refused.
pub fn a_captured_waypoint_learns_the_client_by_a_proxy_header() -> Result<()> {
    let world = World::new(["ca", "ca"])?;
    let (app, plain) = (world.app(), world.lab.pod("plain"));
    let sandwich = Sandwich::start(plain, TO_FAR[0].parse()?)?;
    let vip = TO_FAR[1];
    let wanted = (
        app.addresses()[0].to_string(),
        vip.to_owned(),
        "spiffe://cluster.local/ns/default/sa/app".to_owned(),
    );
    let binding = Some("PROXY/15088");
    for bindings in [[binding, None], [None, binding]] {
        world.put_gate(bindings)?;
        eventually(|| {
            let taps = world.taps()?;
            reaches(app, vip, "http", &["far"])?;
            let seen: Vec<_> = sandwich.seen.try_iter().collect();
            ensure!(!seen.is_empty(), "{bindings:?}: not to the waypoint");
            ensure!(
                seen.iter().all(|of| *of == wanted),
                "{bindings:?}: {seen:?}"
            );
            let ends = [app, plain].map(|host| host.addresses()[0]);
            let frames = taps.iter().flat_map(arrived);
            let ports: Vec<_> = frames
                .filter_map(|frame| {
                    let (from, to, ports) = tcp(&frame)?;
                    (ends.contains(&from) && ends.contains(&to)).then_some(ports)
                })
                .collect();
            ensure!(!ports.is_empty(), "{bindings:?}: no tunnel on the wire");
            let is_tunnel = |ports: &[u16; 2]| ports.contains(&HBONE);
            ensure!(ports.iter().all(is_tunnel), "{bindings:?}: {ports:?}");
            Ok(())
        })?;
        world.put_gate([None, None])?;
        eventually(|| {
            let report = ask(app, vip, "http")?;
            ensure!(report.answered == 0, "{bindings:?}: {report:?}");
            Ok(())
        })?;
        sandwich.seen.try_iter().for_each(drop);
    }
    Ok(())
}
