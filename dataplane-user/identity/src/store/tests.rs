use std::{
    fs,
    os::unix::fs::symlink,
    path::PathBuf,
    sync::atomic::{AtomicI64, Ordering},
    time::Duration,
};

use rcgen::KeyPair;
use tempfile::TempDir;
use tokio::time::{sleep, timeout};

use super::*;
use crate::{
    Authority, IstioCa, PeerError,
    fixture::{self, HOUR, Leaf, now, verify_peer},
};

const WEB: &str = "spiffe://cluster.local/ns/shop/sa/web";
const MINUTE: Duration = Duration::from_mins(1);

fn web() -> Identity {
    WEB.parse().unwrap()
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn start(source: Source, trust: TrustFiles, clock: Clock) -> Store {
    let store = Store::with_clock(source, trust, provider(), clock);
    store.want(&[web()].into());
    store
}

/// A clock that the test moves.
struct Moved(Clock, Arc<AtomicI64>);

impl Moved {
    fn new() -> Self {
        let moved = Arc::new(AtomicI64::new(0));
        let by = moved.clone();
        let clock = move || {
            let minutes = by.load(Ordering::Relaxed);
            let by = Duration::from_mins(minutes.unsigned_abs());
            if minutes < 0 { now() - by } else { now() + by }
        };
        Self(Arc::new(clock), moved)
    }

    /// Moves the clock, and waits until the tasks have noticed.
    async fn pass(&self, minutes: i64) {
        self.1.fetch_add(minutes, Ordering::Relaxed);
        sleep(Duration::from_millis(200)).await;
    }
}

/// The project's own authority, as a source whose certificates are valid for two hours.
fn own() -> (TempDir, Source) {
    let directory = TempDir::new().unwrap();
    Authority::create(directory.path(), "cluster.local", now()).unwrap();
    let source = Source::Authority {
        directory: directory.path().to_owned(),
        lifetime: 2 * HOUR,
    };
    (directory, source)
}

#[tokio::test]
async fn a_certificate_is_renewed_at_half_of_its_lifetime() {
    let (_directory, source) = own();
    let clock = Moved::new();
    let store = start(source, TrustFiles::default(), clock.0.clone());
    let first = store.credential(&web()).await.unwrap();
    clock.pass(50).await;
    let same = store.credential(&web()).await.unwrap();
    assert_eq!(first.serial, same.serial);
    clock.pass(20).await;
    until(async || *store.replaced().borrow() == 2).await;
    let second = store.credential(&web()).await.unwrap();
    assert_ne!(first.serial, second.serial);
    let roots = store.roots().borrow().clone();
    assert_eq!(roots.by_domain["cluster.local"].len(), 1);
    let time = now() + 70 * MINUTE;
    assert_eq!(verify_peer(&second.chain, time, &roots), Ok(web()));
}

#[tokio::test]
async fn a_source_that_is_away_ends_nothing_that_is_valid() {
    let (directory, source) = own();
    let clock = Moved::new();
    let store = start(source, TrustFiles::default(), clock.0.clone());
    let first = store.credential(&web()).await.unwrap();
    let (there, away) = (
        directory.path().join("ca.key"),
        directory.path().join("away"),
    );
    fs::rename(&there, &away).unwrap();
    clock.pass(70).await;
    until(async || store.list()[0].failed.is_some()).await;
    assert_eq!(store.credential(&web()).await.unwrap().serial, first.serial);
    let listed = &store.list()[0];
    assert_eq!(listed.serial.as_deref(), Some(&*first.serial));
    assert!(!listed.overdue);
    let failed = listed.failed.as_ref().unwrap();
    assert!(failed.cause.contains("ca.key: No such file"), "{failed:?}");
    assert!(failed.next >= failed.at);
    clock.pass(15).await;
    assert!(store.list()[0].overdue, "a third of the lifetime is left");
    store.credential(&web()).await.unwrap();
    clock.pass(40).await;
    let error = store.credential(&web()).await.unwrap_err().to_string();
    for part in [WEB, "to 2026-01-01T02:00:00Z", "ca.key: No such file"] {
        assert!(error.contains(part), "{error} without {part}");
    }
    fs::rename(&away, &there).unwrap();
    clock.pass(2).await;
    until(async || store.list()[0].failed.is_none()).await;
    store.credential(&web()).await.unwrap();
}

#[tokio::test]
async fn a_clock_that_jumps_is_noticed() {
    let (_directory, source) = own();
    let clock = Moved::new();
    let store = start(source, TrustFiles::default(), clock.0.clone());
    let first = store.credential(&web()).await.unwrap();
    // Past the end, the old certificate is not served, even if the task has not noticed yet.
    clock.1.fetch_add(300, Ordering::Relaxed);
    let second = store.credential(&web()).await.unwrap();
    assert_ne!(first.serial, second.serial);
    // The clock is set a day before the authority was made, and then right again.
    clock.1.fetch_add(-30 * 60, Ordering::Relaxed);
    let error = store.credential(&web()).await.unwrap_err().to_string();
    assert!(error.contains("valid"), "{error}");
    clock.1.fetch_add(30 * 60, Ordering::Relaxed);
    store.credential(&web()).await.unwrap();
}

#[tokio::test]
async fn what_nobody_wants_is_forgotten() {
    let (_directory, source) = own();
    let store = start(source, TrustFiles::default(), Moved::new().0);
    let weak = Arc::downgrade(&store.credential(&web()).await.unwrap());
    store.want(&BTreeSet::new());
    let error = store.credential(&web()).await.unwrap_err();
    assert!(error.cause.contains("no workload"), "{error}");
    assert!(store.list().is_empty());
    assert!(store.roots().borrow().by_domain.is_empty());
    // The task ends, and with it the last copy of the key.
    until(async || weak.upgrade().is_none()).await;
}

#[tokio::test]
async fn a_source_that_does_not_answer_keeps_nobody_waiting() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (directory, _) = own();
    let file = directory.path().join("ca.crt");
    let source = Source::Istio(IstioCa {
        address: listener.local_addr().unwrap().to_string(),
        server_name: None,
        roots: file.clone(),
        token: {
            let token = directory.path().join("token");
            fs::write(&token, "secret").unwrap();
            token
        },
        cluster: "Kubernetes".to_owned(),
        lifetime: HOUR,
    });
    let store = start(source, TrustFiles::default(), Moved::new().0);
    let error = store.credential(&web()).await.unwrap_err();
    assert!(error.cause.contains("no answer within"), "{error}");
}

#[tokio::test]
async fn waiting_ends_when_nobody_wants_the_identity() {
    let (_directory, source) = own();
    let store = start(source, TrustFiles::default(), Moved::new().0);
    let identity = web();
    let forget = async { store.want(&BTreeSet::new()) };
    let (waits, ()) = tokio::join!(store.credential(&identity), forget);
    assert!(waits.unwrap_err().cause.contains("no workload"));
}

/// A directory of certificates that another program keeps.
struct Files {
    directory: TempDir,
    authority: fixture::Authority,
}

impl Files {
    fn new() -> Self {
        let files = Self {
            directory: TempDir::new().unwrap(),
            authority: fixture::Authority::new(),
        };
        fs::create_dir_all(files.path("shop/web")).unwrap();
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes the named files of a certificate, and returns all files.
    fn write(&self, to: &str, leaf: &Leaf, names: &[&str]) {
        let key = KeyPair::generate().unwrap();
        let certificate = self.authority.sign(leaf, &key);
        let certificate = pem::encode(&pem::Pem::new("CERTIFICATE", certificate.to_vec()));
        for name in names {
            let text = match *name {
                "tls.crt" => certificate.clone(),
                "tls.key" => key.serialize_pem(),
                _ => self.authority.0.pem(),
            };
            fs::write(self.path(to).join(name), text).unwrap();
        }
    }

    fn store(&self, trust: TrustFiles) -> Store {
        let source = Source::Directory(self.directory.path().to_owned());
        start(source, trust, Arc::new(now))
    }
}

const ALL: [&str; 3] = ["tls.crt", "tls.key", "ca.crt"];

/// Waits until a condition holds, for at most five seconds, because polling alone would take ten.
async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    timeout(Duration::from_secs(5), async {
        while !is_so().await {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .expect("it does not become so within 5 s");
}

#[tokio::test]
async fn files_are_taken_when_they_are_whole() {
    let files = Files::new();
    let store = files.store(TrustFiles::default());
    let error = store.credential(&web()).await.unwrap_err();
    assert!(
        error.cause.contains("shop/web/tls.crt: No such file"),
        "{error}"
    );
    files.write("shop/web", &Leaf::of(WEB), &ALL);
    until(async || store.credential(&web()).await.is_ok()).await;
    let first = store.credential(&web()).await.unwrap();
    assert_eq!(*store.replaced().borrow(), 1);

    // A new certificate without its key.
    let other = Leaf {
        serial: 8,
        ..Leaf::of(WEB)
    };
    files.write("shop/web", &other, &["tls.crt"]);
    until(async || store.list()[0].failed.is_some()).await;
    let failed = store.list()[0].failed.clone().unwrap();
    assert!(
        failed
            .cause
            .contains("the key does not belong to the certificate"),
        "{failed:?}"
    );
    assert_eq!(store.credential(&web()).await.unwrap().serial, first.serial);
    // A file that was cut off.
    fs::write(
        files.path("shop/web/tls.crt"),
        "-----BEGIN CERTIFICATE-----\nMII",
    )
    .unwrap();
    until(async || store.list()[0].failed.as_ref() != Some(&failed)).await;
    assert_eq!(store.credential(&web()).await.unwrap().serial, first.serial);

    files.write("shop/web", &other, &ALL);
    until(async || &*store.credential(&web()).await.unwrap().serial == "08").await;
    assert_eq!(*store.replaced().borrow(), 2);
    assert_eq!(store.list()[0].failed, None);
}

#[tokio::test]
async fn a_mounted_secret_is_replaced_at_once() {
    let files = Files::new();
    for (version, serial) in [("..1", 1), ("..2", 2)] {
        fs::create_dir(files.path("shop/web").join(version)).unwrap();
        let leaf = Leaf {
            serial,
            ..Leaf::of(WEB)
        };
        files.write(&format!("shop/web/{version}"), &leaf, &ALL);
    }
    let link = files.path("shop/web/..data");
    symlink("..1", &link).unwrap();
    for name in ALL {
        symlink(format!("..data/{name}"), files.path("shop/web").join(name)).unwrap();
    }
    let store = files.store(TrustFiles::default());
    assert_eq!(&*store.credential(&web()).await.unwrap().serial, "01");
    let new = files.path("shop/web/..new");
    symlink("..2", &new).unwrap();
    fs::rename(&new, &link).unwrap();
    until(async || &*store.credential(&web()).await.unwrap().serial == "02").await;
}

#[tokio::test]
async fn a_wrong_certificate_is_not_served() {
    let leaf = || Leaf::of(WEB);
    for (leaf, message) in [
        (
            Leaf {
                to: now() - MINUTE,
                ..leaf()
            },
            "source presented spiffe://cluster.local/ns/shop/sa/web: certificate expired at 2025-12-31T23:59:00Z",
        ),
        (
            Leaf {
                from: now() + MINUTE,
                ..leaf()
            },
            "not valid before 2026-01-01T00:01:00Z",
        ),
        (
            Leaf::of("spiffe://cluster.local/ns/shop/sa/db"),
            "source presented spiffe://cluster.local/ns/shop/sa/db, expected spiffe://cluster.local/ns/shop/sa/web",
        ),
        (
            Leaf::of("spiffe://elsewhere/ns/shop/sa/web"),
            "source presented spiffe://elsewhere/ns/shop/sa/web, expected",
        ),
        (
            Leaf {
                uris: Vec::new(),
                ..leaf()
            },
            "expected exactly one",
        ),
    ] {
        let files = Files::new();
        files.write("shop/web", &leaf, &ALL);
        let store = files.store(TrustFiles::default());
        let error = store.credential(&web()).await.unwrap_err().to_string();
        assert!(error.contains(message), "{error} without {message}");
    }
    let files = Files::new();
    files.write("shop/web", &leaf(), &ALL);
    fs::write(
        files.path("shop/web/ca.crt"),
        fixture::Authority::new().0.pem(),
    )
    .unwrap();
    let store = files.store(TrustFiles::default());
    let error = store.credential(&web()).await.unwrap_err().to_string();
    assert!(
        error.contains("not signed by a root of trust domain"),
        "{error}"
    );
    assert!(store.roots().borrow().by_domain["cluster.local"].is_empty());
}

#[tokio::test]
async fn a_name_leads_nowhere_else() {
    let files = Files::new();
    let identity: Identity = "spiffe://cluster.local/ns/../sa/web".parse().unwrap();
    let source = Source::Directory(files.path("shop"));
    let store = Store::with_clock(source, TrustFiles::default(), provider(), Arc::new(now));
    store.want(&[identity.clone()].into());
    let error = store.credential(&identity).await.unwrap_err();
    assert!(error.cause.contains("begins with a dot"), "{error}");
}

#[tokio::test]
async fn revoked_certificates_and_roots_of_others_come_from_files() {
    let files = Files::new();
    files.write("shop/web", &Leaf::of(WEB), &ALL);
    let directory = TempDir::new().unwrap();
    let (list, theirs) = (
        directory.path().join("crl"),
        directory.path().join("theirs"),
    );
    let elsewhere = fixture::Authority::named("elsewhere");
    fs::write(&theirs, elsewhere.0.pem()).unwrap();
    let write_list = |serials: &[u64]| {
        let list_of = files.authority.revoke(serials);
        let text = pem::encode(&pem::Pem::new("X509 CRL", list_of.to_vec()));
        fs::write(&list, text).unwrap();
    };
    fs::write(&list, "nothing").unwrap();
    let clock = Moved::new();
    let trust = TrustFiles {
        roots: [("elsewhere".into(), vec![theirs])].into(),
        revoked: vec![list.clone()],
    };
    let source = Source::Directory(files.directory.path().to_owned());
    let store = start(source, trust, clock.0.clone());
    let roots = store.roots();
    store.credential(&web()).await.unwrap();
    // The list cannot be read, so no peer is trusted.
    until(async || !store.problems().is_empty()).await;
    let problem = store.problems().concat();
    assert!(
        problem.contains("crl: no list of revoked") && problem.contains("no peer is trusted"),
        "{problem}"
    );
    assert_eq!(**roots.borrow(), Roots::default());

    write_list(&[1]);
    until(async || store.problems().is_empty()).await;
    let peer = [files.authority.certify(&Leaf::of(WEB))];
    let verify = |chain: &[CertificateDer<'_>]| verify_peer(chain, now(), &roots.borrow());
    assert_eq!(verify(&peer), Ok(web()));
    let other = "spiffe://elsewhere/ns/shop/sa/web";
    assert_eq!(
        verify(&[elsewhere.certify(&Leaf::of(other))]),
        Ok(other.parse().unwrap())
    );
    write_list(&[7]);
    let revoked = Err(PeerError::Revoked { peer: web() });
    until(async || verify(&peer) == revoked).await;
    // The list is damaged, and its former content still counts.
    fs::write(&list, "").unwrap();
    until(async || !store.problems().is_empty()).await;
    assert_eq!(verify(&peer), revoked);
    clock.pass(31).await;
    let problems = store.problems().concat();
    assert!(
        problems.contains("was due at 2026-01-01T00:30:00Z"),
        "{problems}"
    );
}

#[tokio::test]
async fn the_operators_roots_replace_those_of_the_source() {
    let files = Files::new();
    files.write("shop/web", &Leaf::of(WEB), &ALL);
    let (directory, operators) = (TempDir::new().unwrap(), fixture::Authority::new());
    let file = directory.path().join("roots");
    fs::write(&file, operators.0.pem()).unwrap();
    let store = files.store(TrustFiles {
        roots: [("cluster.local".into(), vec![file])].into(),
        revoked: Vec::new(),
    });
    store.credential(&web()).await.unwrap();
    let roots = store.roots();
    until(async || !roots.borrow().by_domain.is_empty()).await;
    assert_eq!(roots.borrow().by_domain["cluster.local"], [operators.der()]);
}

#[tokio::test]
async fn no_key_is_written_out() {
    let files = Files::new();
    files.write("shop/web", &Leaf::of(WEB), &ALL);
    let store = files.store(TrustFiles::default());
    let credential = store.credential(&web()).await.unwrap();
    let said = format!("{credential:?} {:?}", store.list());
    assert!(!said.contains("key"), "{said}");
}
