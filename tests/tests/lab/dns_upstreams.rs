//! Sends the same queries to a real resolver and to the DNS server in front of it. The answers differ in TTLs, and in the
//! points that docs/dns.md lists.

use std::{
    collections::BTreeSet,
    fmt::{self, Write as _},
    fs,
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Host, Lab, Process};

use crate::{
    cluster::eventually,
    dns::{MANIFESTS, unbound_with},
    dns_clients::program,
    proxy::inside,
};

scenarios! {
    Lab:
    answers_are_those_of_the_resolver,
}

/// A zone signed until 2060 by `dnssec-signzone`, in which `bogus` has a wrong signature.
const ZONE: &str = include_str!("../../data/dns/proof.example.zone");
/// The key of the zone.
const DS: &str = "proof.example. IN DS 21085 13 2 \
                  5492DF8DEC8317D5C530019C7C0E25670B36C8C3A956E0D18F12084463B38337";
/// All other names, of which the resolver knows nothing else.
const ROOT: &str = "\
. 300 IN SOA ns.example. host.example. 1 3600 1200 604800 300
. 300 IN NS ns.servers.
ns.servers. 300 IN A 192.0.2.53
www.example.com. 300 IN A 192.0.2.80
80.2.0.192.in-addr.arpa. 300 IN PTR www.proof.example.
";

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(8);

const A: u16 = 1;
const NS: u16 = 2;
const CNAME: u16 = 5;
const SOA: u16 = 6;
const PTR: u16 = 12;
const MX: u16 = 15;
const TXT: u16 = 16;
const RP: u16 = 17;
const AAAA: u16 = 28;
const SRV: u16 = 33;
const DNAME: u16 = 39;
const OPT: u16 = 41;
const DS_TYPE: u16 = 43;
const RRSIG: u16 = 46;
const DNSKEY: u16 = 48;
const CAA: u16 = 257;
const ANY: u16 = 255;

/// Flags of the header.
pub const AA: u16 = 0x0400;
const TC: u16 = 0x0200;
const RD: u16 = 0x0100;
const RA: u16 = 0x0080;
const AD: u16 = 0x0020;
const CD: u16 = 0x0010;
const RESERVED: u16 = 0x0040;

/// Codes.
const NXDOMAIN: u16 = 3;

/// A query, by the parts that cases change.
#[derive(Clone, Debug)]
pub struct Query {
    name: Vec<u8>,
    of_type: u16,
    class: u16,
    flags: u16,
    edns: Option<Edns>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edns {
    payload: u16,
    version: u8,
    dnssec: bool,
    options: Vec<u8>,
}

impl Query {
    pub fn new(name: &str, of_type: u16) -> Self {
        let mut wire = Vec::new();
        for label in name.split('.').filter(|label| !label.is_empty()) {
            wire.push(u8::try_from(label.len()).expect("a label"));
            wire.extend_from_slice(label.as_bytes());
        }
        wire.push(0);
        Self {
            name: wire,
            of_type,
            class: 1,
            flags: RD,
            edns: None,
        }
    }

    /// With EDNS0, and room for so many bytes.
    fn edns(mut self, payload: u16, dnssec: bool) -> Self {
        self.edns = Some(Edns {
            payload,
            version: 0,
            dnssec,
            options: Vec::new(),
        });
        self
    }

    fn flags(mut self, flags: u16) -> Self {
        self.flags = flags;
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = vec![0x12, 0x34];
        out.extend(self.flags.to_be_bytes());
        out.extend([0, 1, 0, 0, 0, 0, 0, u8::from(self.edns.is_some())]);
        out.extend(&self.name);
        out.extend(self.of_type.to_be_bytes());
        out.extend(self.class.to_be_bytes());
        if let Some(edns) = &self.edns {
            out.extend([0, 0, 41]);
            out.extend(edns.payload.to_be_bytes());
            out.extend([0, edns.version, if edns.dnssec { 0x80 } else { 0 }, 0]);
            out.extend(
                u16::try_from(edns.options.len())
                    .expect("short")
                    .to_be_bytes(),
            );
            out.extend(&edns.options);
        }
        out
    }
}

/// A record without its TTL: name in lower case, type, class, and data with whole names.
pub type Record = (Vec<u8>, u16, u16, Vec<u8>);

/// An answer, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Opcode and flags without the code.
    pub flags: u16,
    /// The code, with the upper bits of EDNS.
    pub code: u16,
    /// As the client spelt it.
    question: Vec<u8>,
    /// Answers, authorities, additional records.
    pub sections: [BTreeSet<Record>; 3],
    pub edns: Option<Edns>,
}

fn word(bytes: &[u8], at: usize) -> Result<u16> {
    let bytes = bytes.get(at..at + 2).context("the message is cut")?;
    Ok(u16::from_be_bytes([bytes[0], bytes[1]]))
}

/// The name at a place, and where it ends.
fn name(bytes: &[u8], mut at: usize) -> Result<(Vec<u8>, usize)> {
    let (mut out, mut end) = (Vec::new(), None);
    loop {
        let length = *bytes.get(at).context("a name is cut")?;
        match length {
            0 => {
                out.push(0);
                return Ok((out, end.unwrap_or(at + 1)));
            }
            0xc0.. => {
                end.get_or_insert(at + 2);
                let to = usize::from(word(bytes, at)? & 0x3fff);
                ensure!(to < at, "a pointer forward");
                at = to;
            }
            _ => {
                let next = at + 1 + usize::from(length);
                out.extend(bytes.get(at..next).context("a label is cut")?);
                at = next;
            }
        }
        ensure!(out.len() < 256, "a name is too long");
    }
}

impl Answer {
    pub fn read(bytes: &[u8]) -> Result<Self> {
        let flags = word(bytes, 2)?;
        let counts = [
            word(bytes, 4)?,
            word(bytes, 6)?,
            word(bytes, 8)?,
            word(bytes, 10)?,
        ];
        let mut at = 12;
        for _ in 0..counts[0] {
            at = name(bytes, at)?.1 + 4;
        }
        let mut answer = Self {
            flags: flags & !0xf,
            code: flags & 0xf,
            question: bytes.get(12..at).context("the question is cut")?.to_owned(),
            sections: Default::default(),
            edns: None,
        };
        for (section, count) in answer.sections.iter_mut().zip(&counts[1..]) {
            for _ in 0..*count {
                let (mut owner, next) = name(bytes, at)?;
                owner.make_ascii_lowercase();
                let (of_type, class) = (word(bytes, next)?, word(bytes, next + 2)?);
                let start = next + 10;
                let end = start + usize::from(word(bytes, next + 8)?);
                let data = bytes.get(start..end).context("data is cut")?;
                at = end;
                if of_type == OPT {
                    answer.code |= u16::from(bytes[next + 4]) << 4;
                    answer.edns = Some(Edns {
                        payload: class,
                        version: bytes[next + 5],
                        dnssec: bytes[next + 6] & 0x80 != 0,
                        options: data.to_owned(),
                    });
                    continue;
                }
                // Names in the data of old types may be pointers.
                let (before, names) = match of_type {
                    NS | CNAME | PTR | DNAME => (0, 1),
                    MX => (2, 1),
                    SRV => (6, 1),
                    SOA | RP => (0, 2),
                    _ => (0, 0),
                };
                let mut whole = data.get(..before).context("data is cut")?.to_owned();
                let mut from = start + before;
                for _ in 0..names {
                    let (found, next) = name(bytes, from)?;
                    whole.extend(found.to_ascii_lowercase());
                    from = next;
                }
                whole.extend(bytes.get(from..end).context("data is cut")?);
                section.insert((owner, of_type, class, whole));
            }
        }
        ensure!(
            at == bytes.len(),
            "{} bytes after the answer",
            bytes.len() - at
        );
        Ok(answer)
    }

    fn is_truncated(&self) -> bool {
        self.flags & TC != 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Udp,
    Tcp,
}

/// Sends a message and receives the answer; `None`: there is none. This thread is in the client's network namespace.
pub fn exchange(
    server: SocketAddr,
    transport: Transport,
    query: &[u8],
) -> io::Result<Option<Vec<u8>>> {
    let silent = |error: &io::Error| {
        matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::UnexpectedEof
        )
    };
    let answer = match transport {
        Transport::Udp => {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.connect(server)?;
            socket.send(query)?;
            let mut answer = vec![0; 65536];
            socket.recv(&mut answer).map(|length| {
                answer.truncate(length);
                answer
            })
        }
        Transport::Tcp => {
            let mut stream = TcpStream::connect(server)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            let length = u16::try_from(query.len()).expect("short").to_be_bytes();
            stream.write_all(&[&length[..], query].concat())?;
            let mut length = [0; 2];
            stream.read_exact(&mut length).and_then(|()| {
                let mut answer = vec![0; u16::from_be_bytes(length).into()];
                stream.read_exact(&mut answer).map(|()| answer)
            })
        }
    };
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if silent(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Queries of which the server understands all, or that it forwards.
fn questions() -> Vec<(String, Query)> {
    let mut all = Vec::new();
    let mut add = |what: &str, query: Query| all.push((what.to_owned(), query));
    let long = [
        "l".repeat(63),
        "l".repeat(63),
        "l".repeat(63),
        "l".repeat(47),
    ]
    .join(".");
    let many_labels = vec!["a"; 110].join(".");
    for (of, of_type) in [
        ("", A),
        ("", AAAA),
        ("", NS),
        ("", SOA),
        ("", MX),
        ("", TXT),
        ("", CAA),
        ("", DNSKEY),
        ("", DS_TYPE),
        ("", RRSIG),
        ("www", A),
        ("www", AAAA),
        ("www", 65),
        ("four", AAAA),
        ("alias", A),
        ("alias", AAAA),
        ("alias", CNAME),
        ("alias", MX),
        ("c1", A),
        ("c1", AAAA),
        ("d1", A),
        ("outside", A),
        ("dangling", A),
        ("loop1", A),
        ("_sip._tcp", SRV),
        ("opaque", 65280),
        ("opaque", 65281),
        ("empty", 65281),
        ("below", A),
        ("thing.below", A),
        ("any.wild", A),
        ("x.y.wild", TXT),
        ("x.wild", MX),
        ("www.old", A),
        ("old", DNAME),
        ("www.old", DNAME),
        ("naptr", 35),
        ("key", 44),
        ("_443._tcp.www", 52),
        ("service", 64),
        ("host", 13),
        ("person", RP),
        ("here", 29),
        ("uri", 256),
        ("mixed", A),
        ("bogus", A),
        ("zero", A),
        ("year", A),
        ("big", TXT),
        ("medium", TXT),
        ("many", A),
        ("nothing", A),
        ("nothing", MX),
        ("deep.nothing", A),
        (&long, A),
        (&many_labels, A),
        ("www", ANY),
        ("www", 253),
        ("www", 0),
        ("www", 128),
        ("www", 250),
    ] {
        let name = if of.is_empty() {
            "proof.example".to_owned()
        } else {
            format!("{of}.proof.example")
        };
        let query = Query::new(&name, of_type);
        let of = if of.len() > 40 { &of[..20] } else { of };
        add(&format!("{of} {of_type}"), query.clone());
        add(
            &format!("{of} {of_type} edns"),
            query.clone().edns(1232, false),
        );
        add(&format!("{of} {of_type} do"), query.edns(4096, true));
    }
    for payload in [0, 100, 511, 512, 513, 1232, 1400, 4096, 65535] {
        for of in ["big", "medium", "many", "www"] {
            let query = Query::new(
                &format!("{of}.proof.example"),
                if of == "big" || of == "medium" {
                    TXT
                } else {
                    A
                },
            );
            add(
                &format!("{of}, {payload} bytes"),
                query.edns(payload, false),
            );
        }
    }
    let www = || Query::new("wWw.PrOOf.eXample", A);
    add("mixed case", www());
    for (what, flags) in [
        ("AD", RD | AD),
        ("CD", RD | CD),
        ("AD and CD", RD | AD | CD),
        ("a reserved flag", RD | 0x40),
        ("AA, RA and a code", RD | AA | RA | 3),
    ] {
        add(what, www().flags(flags));
        add(&format!("{what}, do"), www().flags(flags).edns(1232, true));
    }
    add(
        "bogus, CD",
        Query::new("bogus.proof.example", A).flags(RD | CD),
    );
    add(
        "bogus, CD, do",
        Query::new("bogus.proof.example", A)
            .flags(RD | CD)
            .edns(1232, true),
    );
    for (what, name, of_type) in [
        ("the root's servers", "", NS),
        ("the root's start", "", SOA),
        ("a top-level domain", "example", NS),
        ("another zone", "www.example.com", A),
        ("an address", "80.2.0.192.in-addr.arpa", PTR),
        ("an unknown address", "81.2.0.192.in-addr.arpa", PTR),
        ("localhost", "localhost", A),
    ] {
        add(what, Query::new(name, of_type));
    }
    let odd = |labels: &[&[u8]]| {
        let mut query = Query::new("", A);
        query.name.clear();
        for label in labels.iter().chain(&[&b"proof"[..], b"example"]) {
            query.name.push(u8::try_from(label.len()).expect("a label"));
            query.name.extend_from_slice(label);
        }
        query.name.push(0);
        query
    };
    add("a label of any bytes", odd(&[b"\x00\xff\t"]));
    add(
        "a dot in a label",
        Query {
            of_type: TXT,
            ..odd(&[b"a.b"])
        },
    );
    add(
        "a label of letters beyond ASCII",
        odd(&["wörld".as_bytes()]),
    );
    // Options of EDNS: a client's subnet, a cookie, padding, an unknown one.
    for (what, options) in [
        ("subnet", &[0, 8, 0, 7, 0, 1, 24, 0, 192, 0, 2][..]),
        ("cookie", &[0, 10, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("padding", &[0, 12, 0, 4, 0, 0, 0, 0]),
        ("an unknown option", &[0xfd, 0xe9, 0, 2, 1, 2]),
    ] {
        let mut query = www().edns(1232, false);
        query.edns.as_mut().expect("set").options.extend(options);
        add(what, query);
    }
    all
}

/// Messages that the server sends to the resolver as they are.
fn relayed() -> Vec<(String, Vec<u8>)> {
    let www = || Query::new("www.proof.example", A);
    let mut all = Vec::new();
    for opcode in [1, 2, 3, 6, 7, 15] {
        let query = Query {
            of_type: SOA,
            ..Query::new("proof.example", A)
        };
        all.push((
            format!("opcode {opcode}"),
            query.flags(opcode << 11).bytes(),
        ));
    }
    for class in [3, 4, 254, 255, 0] {
        all.push((format!("class {class}"), Query { class, ..www() }.bytes()));
    }
    let version = Query {
        class: 3,
        ..Query::new("version.bind", TXT)
    };
    all.push(("a server's version".to_owned(), version.bytes()));
    all
}

/// Messages that the server itself refuses, and the code of its answer. Resolvers differ here: they repeat some
/// malformed queries, are silent, or overlook the fault.
fn refused() -> Vec<(&'static str, Vec<u8>, u16)> {
    const FORMERR: u16 = 1;
    const REFUSED: u16 = 5;
    const BADVERS: u16 = 16;
    let www = || Query::new("www.proof.example", A);
    let good = www().bytes();
    let with = |at: usize, bytes: &[u8]| {
        let mut query = good.clone();
        query.splice(at..at + bytes.len(), bytes.iter().copied());
        query
    };
    let of_type = |of_type| Query::new("proof.example", of_type).bytes();
    let opt = [0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0];
    let mut version = www().edns(1232, false);
    version.edns.as_mut().expect("set").version = 1;
    vec![
        ("a whole zone", of_type(252), REFUSED),
        ("a zone's changes", of_type(251), REFUSED),
        ("NOTIFY", with(2, &[0x20]), REFUSED),
        ("UPDATE", with(2, &[0x28]), REFUSED),
        ("EDNS version 1", version.bytes(), BADVERS),
        ("type OPT", of_type(OPT), FORMERR),
        ("no question", with(5, &[0])[..12].to_vec(), FORMERR),
        (
            "two questions",
            [&with(5, &[2])[..], &good[12..]].concat(),
            FORMERR,
        ),
        ("a question that is cut", good[..20].to_vec(), FORMERR),
        ("a header alone", good[..12].to_vec(), FORMERR),
        ("a label of 64 bytes", with(12, &[64]), FORMERR),
        ("a pointer to itself", with(12, &[0xc0, 12]), FORMERR),
        ("a record that is not there", with(11, &[1]), FORMERR),
        (
            "two OPT records",
            [&with(11, &[2])[..], &opt, &opt].concat(),
            FORMERR,
        ),
        (
            "an OPT record among answers",
            [&with(7, &[1])[..], &opt].concat(),
            FORMERR,
        ),
    ]
}

/// The resolver's answer as the server gives it, by the list in docs/dns.md.
fn expected(direct: &Answer, query: &Query) -> Answer {
    let mut wanted = direct.clone();
    // Only answers of our own are authoritative, and recursion is there. A reserved flag is not repeated.
    wanted.flags = wanted.flags & !(AA | RESERVED) | RA;
    // Options are for neighbours.
    wanted.edns = wanted.edns.map(|edns| Edns {
        payload: 1232,
        options: Vec::new(),
        ..edns
    });
    // Clients that do not ask whether the answer is authentic do not hear it.
    let asks = query.flags & AD != 0 || query.edns.as_ref().is_some_and(|edns| edns.dnssec);
    if !asks {
        wanted.flags &= !AD;
    }
    wanted
}

/// The answer to the question with the first entry of the client's search list at its end.
fn searched(mut wanted: Answer, query: &Query, asked: &Query) -> Answer {
    let mut question = asked.name.clone();
    question.extend(asked.of_type.to_be_bytes());
    question.extend(asked.class.to_be_bytes());
    wanted.question = question;
    // The record that leads to the name is not authentic.
    wanted.flags &= !AD;
    let lower = |query: &Query| query.name.to_ascii_lowercase();
    let alias = (lower(asked), CNAME, 1, lower(query));
    let is_empty = wanted.code == 0 && wanted.sections[0].is_empty();
    if wanted.code == NXDOMAIN || is_empty {
        // As of a name in our own zone.
        wanted.sections = Default::default();
    } else {
        wanted.sections[0].insert(alias);
        // The first name of the answer is our own.
        wanted.flags |= AA;
    }
    wanted
}

/// Starts BIND with the zones.
fn bind(host: &Host, directory: &Path) -> Result<Process> {
    let directory = directory.display();
    let conf = format!(
        "options {{ directory \"{directory}\"; listen-on {{ {}; }}; listen-on-v6 {{ none; }}; recursion yes;\n \
         allow-query {{ any; }}; allow-transfer {{ none; }}; dnssec-validation no; pid-file none;\n \
         session-keyfile none; version \"bind\"; }};\ncontrols {{ }};\n\
         zone \"proof.example\" {{ type primary; file \"proof.zone\"; }};\n\
         zone \".\" {{ type primary; file \"root.zone\"; }};\n",
        host.ipv4(),
    );
    let file = Path::new(&directory.to_string()).join("named.conf");
    fs::write(&file, conf)?;
    Ok(host
        .command("named")
        .args(["-g", "-n", "1", "-c"])
        .arg(file)
        .stderr(std::process::Stdio::null())
        .spawn()?)
}

/// Starts unbound, which validates the zone.
fn unbound(host: &Host, directory: &Path) -> Result<Process> {
    let mut conf = format!(
        "server:\n directory: \"{0}\"\n chroot: \"\"\n username: \"\"\n pidfile: \"\"\n use-syslog: no\n logfile: \"\"\n \
         verbosity: 0\n do-daemonize: no\n interface: {1}\n access-control: 0.0.0.0/0 allow\n do-ip6: no\n \
         module-config: \"validator iterator\"\n trust-anchor: \"{DS}\"\n aggressive-nsec: no\n \
         remote-control:\n control-enable: no\n",
        directory.display(),
        host.ipv4(),
    );
    for (zone, file) in [("proof.example", "proof.zone"), (".", "root.zone")] {
        write!(
            conf,
            "auth-zone:\n name: \"{zone}\"\n zonefile: \"{file}\"\n for-downstream: no\n for-upstream: yes\n \
             fallback-enabled: no\n"
        )?;
    }
    unbound_with(host, directory, &conf)
}

/// Starts dnsmasq, which asks another resolver.
fn dnsmasq(host: &Host, asks: Ipv4Addr) -> Result<Process> {
    let dnsmasq = host.command("dnsmasq").args([
        "-k",
        "-C",
        "/dev/null",
        "-u",
        "root",
        "--no-resolv",
        "--no-hosts",
    ]);
    let dnsmasq = dnsmasq.args([
        "--bind-interfaces",
        "--pid-file",
        "--proxy-dnssec",
        "--cache-size=0",
        "--log-facility=/dev/null",
    ]);
    Ok(dnsmasq
        .arg(format!("--listen-address={}", host.ipv4()))
        .arg(format!("--server={asks}"))
        .spawn()?)
}

fn answers_are_those_of_the_resolver() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "app", "10.244.1.8")
        .pod("node1", "dns", "10.244.1.10")
        .pod("node1", "unbound", "10.244.1.11")
        .pod("node1", "bind", "10.244.1.12")
        .pod("node1", "dnsmasq", "10.244.1.13")
        .build()?;
    let directory = tempfile::tempdir()?;
    fs::write(directory.path().join("proof.zone"), ZONE)?;
    fs::write(directory.path().join("root.zone"), ROOT)?;
    let manifests = directory.path().join("cluster.yaml");
    fs::write(&manifests, MANIFESTS)?;
    let resolv = directory.path().join("resolv.conf");
    fs::write(&resolv, "nameserver 10.244.1.11\n")?;
    let mut upstreams = vec![("unbound", unbound(lab.pod("unbound"), directory.path())?)];
    let mut absent = Vec::new();
    if program("named").is_some() {
        upstreams.push(("bind", bind(lab.pod("bind"), directory.path())?));
    } else {
        absent.push("BIND (package bind9)");
    }
    if program("dnsmasq").is_some() {
        upstreams.push((
            "dnsmasq",
            dnsmasq(lab.pod("dnsmasq"), lab.pod("unbound").ipv4())?,
        ));
    } else {
        absent.push("dnsmasq (package dnsmasq-base)");
    }
    let mut servers = Vec::new();
    let mut differences = String::new();
    for (port, (upstream, _)) in (5300..).zip(&upstreams) {
        let direct = SocketAddr::new(lab.pod(upstream).ipv4().into(), 53);
        let ours = SocketAddr::new(lab.pod("dns").ipv4().into(), port);
        let serve = lab.pod("dns").command(lab.programs().dataplane()?);
        let serve = serve
            .args(["dns", "serve", "--node-name", "node1", "--manifests"])
            .arg(&manifests);
        let serve = serve.args([
            "--listen",
            &ours.to_string(),
            "--resolver",
            &direct.to_string(),
        ]);
        servers.push(serve.spawn()?);
        let found = inside(lab.pod("app"), move || {
            eventually(|| {
                for server in [direct, ours] {
                    let ready = exchange(server, Transport::Tcp, &Query::new("", NS).bytes())?;
                    let ready = Answer::read(&ready.context("no answer")?)?;
                    ensure!(ready.code == 0, "{server}: {ready:?}");
                }
                Ok(())
            })?;
            compare(direct, ours)
        })?;
        for (what, direct, ours) in found {
            writeln!(
                differences,
                "{upstream}: {what}\n  expected {direct}\n  found    {ours}"
            )?;
        }
    }
    ensure!(differences.is_empty(), "\n{differences}");
    if !absent.is_empty() {
        println!(
            "skipped dns_upstreams::answers_are_those_of_the_resolver: without {}",
            absent.join(", ")
        );
    }
    Ok(())
}

/// Compares all answers, and returns those that differ: the query, the expected answer, and ours.
fn compare(direct: SocketAddr, ours: SocketAddr) -> Result<Vec<(String, String, String)>> {
    use Transport::{Tcp, Udp};
    let mut found = Vec::new();
    let mut count = 0;
    let ask = |server, transport, bytes: &[u8]| -> Result<Answer> {
        let answer = exchange(server, transport, bytes)?;
        let answer = answer.with_context(|| format!("{server} does not answer {bytes:02x?}"))?;
        Answer::read(&answer).with_context(|| format!("{answer:02x?}"))
    };
    let mut check = |what: String, wanted: &Answer, answer: &Answer, alike: bool| {
        count += 1;
        if !alike {
            found.push((what, wanted.to_string(), answer.to_string()));
        }
    };
    for (what, query) in questions() {
        let bytes = query.bytes();
        let whole = expected(&ask(direct, Tcp, &bytes)?, &query);
        let theirs = expected(&ask(direct, Udp, &bytes)?, &query);
        // From the resolver, then from the cache.
        for (round, transport) in [("first", Udp), ("again", Udp), ("by TCP", Tcp)] {
            let answer = ask(ours, transport, &bytes)?;
            // The length of a truncated answer is each server's choice.
            let alike = if transport == Udp && answer.is_truncated() {
                let cut = Answer {
                    sections: answer.sections.clone(),
                    flags: whole.flags | TC,
                    ..whole.clone()
                };
                let mut sections = answer.sections.iter().zip(&whole.sections);
                theirs.is_truncated()
                    && answer == cut
                    && sections.all(|(cut, whole)| cut.is_subset(whole))
            } else {
                answer == whole
            };
            check(format!("{what}, {round}"), &whole, &answer, alike);
        }
        // Resolvers refuse some types with an error, for every name. The server does not look up names with more dots
        // without the search list.
        let is_data = ![0, 128, 250, 253].contains(&query.of_type);
        let is_short = is_data
            && query.name.iter().filter(|byte| **byte < 32).count() <= 5
            && query.name.len() < 200;
        if is_short && query.name.len() > 1 && query.class == 1 {
            let mut asked = query.clone();
            asked.name.pop();
            asked
                .name
                .extend(Query::new("shop.svc.cluster.local", A).name);
            let mut answer = ask(ours, Tcp, &asked.bytes())?;
            if answer.code == NXDOMAIN {
                answer.sections[1].clear();
                answer.flags &= !AA;
            }
            let wanted = searched(whole, &query, &asked);
            check(
                format!("{what}, by the search list"),
                &wanted,
                &answer,
                wanted == answer,
            );
        }
    }
    for transport in [Udp, Tcp] {
        for (what, bytes) in relayed() {
            let theirs = ask(direct, transport, &bytes)?;
            let answer = ask(ours, transport, &bytes)?;
            check(
                format!("{what}, {transport:?}"),
                &theirs,
                &answer,
                theirs == answer,
            );
        }
        for (what, bytes, code) in refused() {
            let answer = ask(ours, transport, &bytes)?;
            ensure!(answer.code == code, "{what}, {transport:?}: {answer}");
        }
    }
    println!("{direct}: {count} answers compared");
    Ok(found)
}

/// An answer in a line.
impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let question = self.question.escape_ascii();
        write!(
            f,
            "{:04x} code {} {question} {:?}",
            self.flags, self.code, self.edns
        )?;
        for section in &self.sections {
            write!(f, " |")?;
            for (name, of_type, class, data) in section {
                let (name, data) = (
                    name.escape_ascii(),
                    data[..data.len().min(30)].escape_ascii(),
                );
                write!(f, " {name} {of_type}/{class} {data},")?;
            }
        }
        Ok(())
    }
}
