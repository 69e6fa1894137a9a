//! Peers that must be refused, and the errors about them.

use std::{
    io,
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::{Method, StatusCode};
use rustls::{pki_types::UnixTime, server::danger::ClientCertVerifier};
use tokio::{io::AsyncWriteExt, net::TcpListener};

use super::{fixture::*, raw::*};
use crate::{
    Settings,
    error::{Error, Phase},
    outbound::Connect,
    request::Refusal,
    tls::{Check, Trust},
};

fn to_server(at: std::net::SocketAddr) -> Connect {
    to(at, at)
}

fn nowhere() -> Connect {
    to(
        "127.0.0.1:1".parse().unwrap(),
        "127.0.0.1:1".parse().unwrap(),
    )
}

#[test]
fn each_refusal_has_its_status_and_flag() {
    run(async {
        for (answer, status, word) in [
            (Some(Refusal::BadRequest), 400, "CONNECT"),
            (Some(Refusal::Denied), 401, "DENY"),
            (Some(Refusal::Unavailable), 503, "CONNECT"),
            // No process listens there.
            (None, 503, "CONNECT"),
        ] {
            let mesh = mesh_of(settings(), |server| server.answer = answer);
            let error = mesh
                .connect(to(mesh.at, "127.0.0.1:1".parse().unwrap()))
                .await
                .unwrap_err();
            let Error::Refused { status: got, .. } = &error else {
                panic!("{error}");
            };
            assert_eq!((got.as_u16(), error.flag().word()), (status, word));
            assert_eq!(error.may_try_another(), status != 401);
        }
        let mesh = mesh();
        for other in ["10.9.9.9:80", "web.shop.svc.cluster.local:80"] {
            let connect = Connect {
                authority: other.parse().unwrap(),
                ..to(mesh.at, mesh.at)
            };
            let error = mesh.connect(connect).await.unwrap_err();
            assert!(error.to_string().contains("status 400"), "{error}");
        }
    });
}

#[test]
fn requests_without_connect_are_bad_requests() {
    run(async {
        let mesh = mesh();
        let mut requests = h2_client(&mesh).await;
        for (method, uri) in [
            (Method::GET, "https://127.0.0.1:80/"),
            (Method::POST, "https://127.0.0.1:80/x"),
        ] {
            let request = http::Request::builder()
                .method(method)
                .uri(uri)
                .body(())
                .unwrap();
            let (response, _) = requests.send_request(request, true).unwrap();
            assert_eq!(response.await.unwrap().status(), StatusCode::BAD_REQUEST);
        }
        let application = echo().await.to_string();
        let request = http::Request::builder()
            .method(Method::CONNECT)
            .uri(application)
            .body(())
            .unwrap();
        let (response, mut send) = requests.send_request(request, false).unwrap();
        let response = response.await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        send.send_data("hello".into(), true).unwrap();
        let mut body = response.into_body();
        let mut all = Vec::new();
        while let Some(data) = body.data().await {
            all.extend(data.unwrap());
        }
        assert_eq!(all, b"hello");
    });
}

/// Connects, and returns the errors of the client and of the server.
async fn refused(mesh: &mut Mesh) -> (Error, Error) {
    let here = mesh.connect(to(mesh.at, mesh.at)).await.unwrap_err();
    assert_eq!(here.flag().word(), "TLS_FAILURE", "{here}");
    let there = mesh.failed.recv().await.unwrap();
    assert_eq!(there.flag().word(), "TLS_FAILURE", "{there}");
    (here, there)
}

#[test]
fn certificates_that_must_be_refused_are_refused() {
    run(async {
        let now = SystemTime::now();
        for (account, from, to, text) in [
            ("server", now - 2 * HOUR, now - HOUR, "expired"),
            ("client", now - 2 * HOUR, now - HOUR, "expired"),
            ("server", now + HOUR, now + 2 * HOUR, "not valid before"),
            ("client", now + HOUR, now + 2 * HOUR, "not valid before"),
        ] {
            let certificates = Certificates::new();
            certificates.set(account, 9, from, to);
            let mut mesh = mesh_with(settings(), certificates, None, |_| {});
            let here = mesh.connect(to_server(mesh.at)).await.unwrap_err();
            if account == "client" {
                // The client's side finds this itself.
                let is_own =
                    here.flag().word() == "IDENTITY_ERROR" || matches!(here, Error::Alert { .. });
                assert!(is_own, "{here}");
                let stream = connect(mesh.at, client_config(&mesh.certificates)).await;
                let there = mesh.failed.recv().await.unwrap().to_string();
                assert!(
                    there.contains("this side refuses") && there.contains(text),
                    "{there}"
                );
                drop(stream);
            } else {
                let there = mesh.failed.recv().await.unwrap();
                assert!(matches!(there, Error::Alert { .. }), "{there}");
                let here = here.to_string();
                assert!(
                    here.contains("this side refuses") && here.contains(text),
                    "{here}"
                );
            }
        }
    });
}

#[test]
fn another_authority_is_not_trusted() {
    run(async {
        for client_is_other in [true, false] {
            let (ours, theirs) = (Certificates::new(), Certificates::new());
            // One side trusts the authority of the other side.
            let (trusting, trusted) = if client_is_other {
                (&ours, &theirs)
            } else {
                (&theirs, &ours)
            };
            trusting.roots.send_replace(trusted.roots.borrow().clone());
            let mut mesh = mesh_with(settings(), ours.clone(), Some(theirs.clone()), |_| {});
            let (here, there) = refused(&mut mesh).await;
            let (refusing, refused) = if client_is_other {
                (there, here)
            } else {
                (here, there)
            };
            let text = refusing.to_string();
            assert!(text.contains("not signed by a root"), "{text}");
            assert!(matches!(refused, Error::Alert { .. }), "{refused}");
        }
    });
}

#[test]
fn the_peer_must_be_the_one_that_is_expected() {
    run(async {
        let mut mesh = mesh();
        for (expected, text) in [
            (
                vec![identity("other"), identity("third")],
                "presented spiffe://cluster.local/ns/shop/sa/server, expected spiffe://cluster.local/ns/shop/sa/other",
            ),
            // No identity is expected, so no identity is accepted.
            (vec![], "presented"),
        ] {
            let mut connect = to(mesh.at, mesh.at);
            connect.key.expected = expected.into();
            let error = mesh.connect(connect).await.unwrap_err();
            assert!(
                matches!(error, Error::Peer { .. }) && error.to_string().contains(text),
                "{error}"
            );
            assert!(matches!(
                mesh.failed.recv().await.unwrap(),
                Error::Alert { .. }
            ));
        }
        let mut connect = to(mesh.at, mesh.at);
        connect.key.source = identity("unknown");
        let error = mesh.connect(connect).await.unwrap_err();
        assert_eq!(error.flag().word(), "IDENTITY_ERROR");
    });
}

#[test]
fn a_client_without_certificate_is_refused() {
    run(async {
        let mut mesh = mesh();
        let mut config = client_config(&mesh.certificates);
        config.client_auth_cert_resolver =
            Arc::new(rustls::client::AlwaysResolvesClientRawPublicKeys::new(
                Arc::new(rustls::sign::CertifiedKey::new(
                    vec![],
                    mesh.certificates.get("client").key.clone(),
                )),
            ));
        let _ = connect(mesh.at, config).await;
        let error = mesh.failed.recv().await.unwrap();
        assert_eq!(error.flag().word(), "TLS_FAILURE", "{error}");
        assert!(mesh.server.tunnels().is_empty());
    });
}

#[test]
fn both_sides_demand_http_2() {
    run(async {
        let mut mesh = mesh();
        // A client that offers no protocol by ALPN.
        let mut config = client_config(&mesh.certificates);
        config.alpn_protocols.clear();
        let stream = connect(mesh.at, config).await.unwrap();
        let error = mesh.failed.recv().await.unwrap();
        assert_eq!(error.flag().word(), "H2_HANDSHAKE_FAILURE", "{error}");
        drop(stream);
        // A client that offers h2, and sends HTTP/1.1.
        let mut stream = connect(mesh.at, client_config(&mesh.certificates))
            .await
            .unwrap();
        stream
            .write_all(b"GET / HTTP/1.1\r\nHost: shop\r\n\r\n")
            .await
            .unwrap();
        let error = mesh.failed.recv().await.unwrap();
        assert_eq!(error.flag().word(), "H2_HANDSHAKE_FAILURE", "{error}");
        // Servers that do the same.
        for offers in [true, false] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let at = listener.local_addr().unwrap();
            let mut config = server_config(&mesh.certificates);
            if !offers {
                config.alpn_protocols.clear();
            }
            tokio::spawn(async move {
                let mut stream = accept(listener.accept().await.unwrap().0, config).await;
                let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
                let _ = stream.flush().await;
            });
            let error = mesh.connect(to(at, at)).await.unwrap_err();
            assert_eq!(error.flag().word(), "H2_HANDSHAKE_FAILURE", "{error}");
        }
    });
}

#[test]
fn peers_that_stall_are_given_up_in_each_phase() {
    run(async {
        let settings = Settings {
            connect: Duration::from_millis(300),
            handshake: Duration::from_millis(300),
            ..settings()
        };
        let mut mesh = mesh_of(settings, |server| server.hangs = true);
        let error = mesh.connect(nowhere()).await.unwrap_err();
        assert!(matches!(error, Error::Connect { .. }), "{error}");
        assert_eq!(error.flag().word(), "CONNECT");
        let mut connect = nowhere();
        connect.dial = Arc::new(|_| Box::pin(async { Err(io::ErrorKind::TimedOut.into()) }));
        let error = mesh.connect(connect).await.unwrap_err();
        assert_eq!(error.flag().word(), "NETWORK_POLICY", "{error}");
        let mut connect = nowhere();
        connect.dial = Arc::new(|_| Box::pin(std::future::pending()));
        let error = mesh.connect(connect).await.unwrap_err();
        assert_eq!(error.flag().word(), "NETWORK_POLICY", "{error}");
        assert!(
            matches!(
                error,
                Error::Timeout {
                    phase: Phase::Connecting,
                    ..
                }
            ),
            "{error}"
        );
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let silent = listener.local_addr().unwrap();
        let error = mesh.connect(to(silent, silent)).await.unwrap_err();
        assert!(
            matches!(
                error,
                Error::Timeout {
                    phase: Phase::Handshake,
                    ..
                }
            ),
            "{error}"
        );
        let error = mesh.connect(to(mesh.at, mesh.at)).await.unwrap_err();
        assert!(
            matches!(
                error,
                Error::Timeout {
                    phase: Phase::Answer,
                    ..
                }
            ),
            "{error}"
        );
        // A client that sends nothing.
        let _silent = tokio::net::TcpStream::connect(mesh.at).await.unwrap();
        let error = mesh.failed.recv().await.unwrap();
        assert!(
            matches!(
                error,
                Error::Timeout {
                    phase: Phase::Handshake,
                    ..
                }
            ),
            "{error}"
        );
    });
}

#[test]
fn a_peer_that_is_revoked_during_its_handshake_is_refused() {
    let certificates = Certificates::new();
    let trust = Trust::new(certificates.roots.subscribe());
    let check = Check::new(trust.verifier().unwrap(), None);
    let (chain, at) = (&certificates.get("client").chain, nowhere().key.to);
    let verified = check.verify_client_cert(&chain[0], &[], UnixTime::now());
    verified.expect("the certificate is valid");
    check.renew(&trust, at).expect("the roots have not changed");
    let roots = certificates.authority.roots(&[2]);
    certificates.roots.send_replace(Arc::new(roots));
    check
        .renew(&trust, at)
        .expect("another certificate is revoked");
    let roots = certificates.authority.roots(&[1]);
    certificates.roots.send_replace(Arc::new(roots));
    let error = check.renew(&trust, at).unwrap_err();
    assert!(matches!(error, Error::Peer { .. }), "{error}");
}
