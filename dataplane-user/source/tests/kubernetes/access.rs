//! Connections to the server: TLS, tokens, proxies.

use std::{
    fs,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use dataplane_source::kubernetes::{ConnectError, Target};
use dataplane_tests::api::Options;

use crate::site::{Site, endpoints, patience, server, server_with, web};

#[test]
fn without_tls_and_tokens() {
    let options = Options {
        certified: None,
        tokens: Vec::new(),
        ..Options::default()
    };
    let site = Site::with(
        server_with(web(1, &[1]), options),
        patience(),
        |target, _, server| {
            target.server = Some(server.url());
        },
    );
    site.view(|view| endpoints(view, "web-1") == [1]);
}

#[test]
fn a_server_that_somebody_else_certifies_is_not_believed() {
    let stranger = server([]);
    let site = Site::with(
        server(web(1, &[1])),
        patience(),
        |target, directory, server| {
            target.kubeconfig = Some(server.kubeconfig(directory.path()).unwrap());
            fs::write(directory.path().join("ca.crt"), stranger.authority()).unwrap();
        },
    );
    site.wait("it is told", |site| site.health.failure().is_some());
    let (_, text) = site.health.failure().unwrap();
    assert!(text.contains("certificate"), "{text}");
    assert!(site.untaken().is_none());
    // The file becomes valid: it is read again without a restart.
    fs::write(
        site.directory.path().join("ca.crt"),
        site.server.authority(),
    )
    .unwrap();
    site.view(|view| endpoints(view, "web-1") == [1]);
}

#[test]
fn a_server_with_another_name_is_not_believed() {
    let options = Options {
        certified: Some(vec!["kubernetes.example".to_owned()]),
        ..Options::default()
    };
    let site = Site::new(server_with(web(1, &[1]), options));
    site.wait("it is told", |site| site.health.failure().is_some());
    let (_, text) = site.health.failure().unwrap();
    assert!(text.contains("certificate"), "{text}");
}

#[test]
fn as_a_pod_with_a_token_that_changes() {
    let mut site = Site::with(
        server(web(1, &[1])),
        patience(),
        |target, directory, server| {
            server.service_account(directory.path(), "secret").unwrap();
            // An editor adds a line break.
            fs::write(directory.path().join("token"), "secret\n").unwrap();
            target.service_account = directory.path().to_owned();
            target.server = Some(server.url());
        },
    );
    site.view(|view| endpoints(view, "web-1") == [1]);
    site.watching();
    // The old token is no longer accepted when the watches end.
    site.server.accept_tokens(&["newer"]);
    site.cluster().apply_all(web(2, &[2]));
    site.server.go_away();
    site.server.come_back().unwrap();
    // Of three watches, some may still report that the server is down. The condition needs both words in one text.
    site.wait("it is told", |site| {
        site.health
            .failure()
            .is_some_and(|(_, text)| text.contains("401") && text.contains("token"))
    });
    fs::write(site.directory.path().join("token"), "newer\n").unwrap();
    site.view(|view| endpoints(view, "web-2") == [2]);
    assert_eq!(site.lists(), [1, 1, 1]);
}

/// Starts a proxy that forwards connections to the address in `CONNECT`. Returns its address, and the number of
/// connections.
fn proxy() -> io::Result<(SocketAddr, Arc<AtomicUsize>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let passed = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&passed);
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let count = Arc::clone(&count);
            thread::spawn(move || pass_on(client, &count));
        }
    });
    Ok((address, passed))
}

fn pass_on(mut client: TcpStream, count: &AtomicUsize) -> io::Result<()> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        client.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let target = head.split(' ').nth(1).unwrap_or_default();
    if !head.starts_with("CONNECT ") || !head.contains("Basic dXNlcjpwYXNz") {
        return client.write_all(b"HTTP/1.1 407 Who are you?\r\n\r\n");
    }
    let mut server = TcpStream::connect(target)?;
    count.fetch_add(1, Ordering::Relaxed);
    client.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
    let (mut from, mut to) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || io::copy(&mut from, &mut to));
    io::copy(&mut server, &mut client).map(drop)
}

#[test]
fn through_a_proxy_that_wants_to_know_who_asks() {
    let (address, passed) = proxy().unwrap();
    let site = Site::with(
        server(web(1, &[1])),
        patience(),
        |target, directory, server| {
            let path = server.kubeconfig(directory.path()).unwrap();
            let mut config: serde_json::Value =
                serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            config["clusters"][0]["cluster"]["proxy-url"] =
                format!("http://user:pass@{address}").into();
            fs::write(&path, config.to_string()).unwrap();
            target.kubeconfig = Some(path);
        },
    );
    site.view(|view| endpoints(view, "web-1") == [1]);
    assert!(passed.load(Ordering::Relaxed) >= 3);
}

#[test]
fn what_says_nothing_of_use_is_told_before_anything_is_done() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kubeconfig");
    let of_file = Target {
        kubeconfig: Some(path.clone()),
        ..Target::default()
    };
    let text = of_file.check().unwrap_err().to_string();
    assert!(text.contains(&path.display().to_string()), "{text}");
    fs::write(&path, "clusters: 7").unwrap();
    assert!(matches!(
        of_file.check(),
        Err(ConnectError::Kubeconfig { .. })
    ));
    let of_pod = Target {
        server: Some("https://192.0.2.1:6443".to_owned()),
        service_account: directory.path().to_owned(),
        ..Target::default()
    };
    let text = of_pod.check().unwrap_err().to_string();
    assert!(text.contains("token"), "{text}");
    for url in ["", "ftp://192.0.2.1", "https://"] {
        let target = Target {
            server: Some(url.to_owned()),
            ..of_pod.clone()
        };
        assert!(
            matches!(target.check(), Err(ConnectError::Url { .. })),
            "{url:?}"
        );
    }
}

/// Variable that marks this program, started by itself, as the child.
const CHILD: &str = "DATAPLANE_TEST_CHILD";

/// Variables belong to a process, so this test starts itself with them.
#[test]
fn through_the_proxy_that_the_environment_names() {
    if std::env::var_os(CHILD).is_some() {
        let site = Site::new(server(web(1, &[1])));
        site.view(|view| endpoints(view, "web-1") == [1]);
        return;
    }
    let (address, passed) = proxy().unwrap();
    let through = |none: &str| {
        let before = passed.load(Ordering::Relaxed);
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "access::through_the_proxy_that_the_environment_names",
            ])
            .env(CHILD, "1")
            .env("HTTPS_PROXY", format!("http://user:pass@{address}"))
            .env("NO_PROXY", none)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(
            child.status.success() && said.contains("1 passed"),
            "{said}"
        );
        passed.load(Ordering::Relaxed) - before
    };
    assert!(through("192.0.2.0/24,example.com") >= 3);
    assert_eq!(through("127.0.0.0/8"), 0);
}

#[test]
fn another_server_than_the_one_in_the_file() {
    let site = Site::with(
        server(web(1, &[1])),
        patience(),
        |target, directory, server| {
            let path = server.kubeconfig(directory.path()).unwrap();
            let config = fs::read_to_string(&path).unwrap();
            // An address such as the cluster IP in the environment of pods.
            let config = config.replace(&server.url(), "https://192.0.2.1:443");
            fs::write(&path, config).unwrap();
            target.kubeconfig = Some(path);
            target.server = Some(server.address().to_string());
        },
    );
    site.view(|view| endpoints(view, "web-1") == [1]);
}
