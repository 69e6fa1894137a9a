//! The cluster's DNS: names of Services and of their endpoints, as Kubernetes specifies them. It knows no other names.
//!
//! The distribution has no package of CoreDNS, and a cluster without a route to the outside needs no more than this
//! server. It is a process beside the API server, and a Service without a selector leads to it.

use std::{
    collections::BTreeMap,
    io::{BufReader, Read, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    path::PathBuf,
    process::{ExitCode, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::{
    kubectl::Kubectl,
    place::{CONTROL_V4, CONTROL_V6},
};

const ZONE: &str = ".cluster.local";
/// TTL of answers in seconds. It is short because answers change with the pods.
const LIFE: u32 = 1;
/// Size of an answer that fits into a datagram on every path. A client with a longer answer asks again by TCP.
const DATAGRAM: usize = 1232;

const A: u16 = 1;
const CNAME: u16 = 5;
const PTR: u16 = 12;
const AAAA: u16 = 28;
const SRV: u16 = 33;
const ANY: u16 = 255;

/// Arguments of the process.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The directory with Kubernetes' programs
    #[arg(long)]
    kubernetes: PathBuf,
}

/// Objects of one kind, by namespace and name.
type Objects = BTreeMap<(String, String), Value>;

#[derive(Debug, Default)]
struct Names {
    services: Objects,
    slices: Objects,
}

/// The data of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Data {
    Address(IpAddr),
    Alias(String),
    Name(String),
    Service { port: u16, host: String },
}

/// Answers queries until the process is killed. The process already runs in the control plane's namespace.
pub fn main(arguments: &Arguments) -> Result<ExitCode> {
    let names = Arc::new(Mutex::new(Names::default()));
    for services in [true, false] {
        let (names, kubectl) = (
            Arc::clone(&names),
            Kubectl::in_directory(&arguments.kubernetes),
        );
        thread::spawn(move || {
            loop {
                if let Err(error) = follow(&kubectl, services, &names) {
                    eprintln!("{error:#}");
                }
                thread::sleep(Duration::from_millis(500));
            }
        });
    }
    let mut serving = Vec::new();
    for address in [IpAddr::from(CONTROL_V4), CONTROL_V6.into()] {
        let at = SocketAddr::new(address, 53);
        let datagrams = UdpSocket::bind(at).with_context(|| format!("cannot listen on {at}"))?;
        let streams = TcpListener::bind(at).with_context(|| format!("cannot listen on {at}"))?;
        let both = (Arc::clone(&names), Arc::clone(&names));
        serving.push(thread::spawn(move || by_datagrams(&datagrams, &both.0)));
        serving.push(thread::spawn(move || by_streams(&streams, &both.1)));
    }
    for server in serving {
        server.join().expect("no server panics");
    }
    Ok(ExitCode::SUCCESS)
}

fn lock(names: &Mutex<Names>) -> MutexGuard<'_, Names> {
    names.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Updates the objects of one kind as kubectl reports them, until kubectl ends.
fn follow(kubectl: &Kubectl, services: bool, names: &Mutex<Names>) -> Result<()> {
    let kind = if services {
        "services"
    } else {
        "endpointslices.discovery.k8s.io"
    };
    let mut child = kubectl
        .command()
        .args([
            "get",
            kind,
            "--all-namespaces",
            "--watch",
            "--output-watch-events",
            "--output=json",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start kubectl")?;
    let stdout = BufReader::new(child.stdout.take().expect("was asked for"));
    let mut first = true;
    for event in serde_json::Deserializer::from_reader(stdout).into_iter::<Value>() {
        let event = event.context("kubectl printed no JSON")?;
        let object = &event["object"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let key = (
            text(&object["metadata"]["namespace"]),
            text(&object["metadata"]["name"]),
        );
        let mut names = lock(names);
        let objects = if services {
            &mut names.services
        } else {
            &mut names.slices
        };
        if first {
            // kubectl begins with all present objects. Objects known before may be gone.
            objects.clear();
            first = false;
        }
        if event["type"] == "DELETED" {
            objects.remove(&key);
        } else {
            objects.insert(key, object.clone());
        }
    }
    child.wait().context("lost kubectl")?;
    Ok(())
}

fn by_datagrams(socket: &UdpSocket, names: &Mutex<Names>) {
    let mut buffer = [0; 4096];
    while let Ok((length, client)) = socket.recv_from(&mut buffer) {
        if let Some(answer) = reply(&lock(names), &buffer[..length], DATAGRAM) {
            // If the client is gone, the error does not matter.
            let _ = socket.send_to(&answer, client);
        }
    }
}

fn by_streams(listener: &TcpListener, names: &Arc<Mutex<Names>>) {
    for stream in listener.incoming().flatten() {
        let names = Arc::clone(names);
        thread::spawn(move || -> Option<()> {
            let mut stream = stream;
            loop {
                let mut length = [0; 2];
                stream.read_exact(&mut length).ok()?;
                let mut question = vec![0; u16::from_be_bytes(length).into()];
                stream.read_exact(&mut question).ok()?;
                let answer = reply(&lock(&names), &question, usize::from(u16::MAX))?;
                let length = u16::try_from(answer.len()).ok()?;
                stream.write_all(&length.to_be_bytes()).ok()?;
                stream.write_all(&answer).ok()?;
            }
        });
    }
}

/// Returns the answer to a message with one question. `None` for other messages.
fn reply(names: &Names, message: &[u8], room: usize) -> Option<Vec<u8>> {
    let header = message.get(..12)?;
    // The message is an answer, or has not exactly one question.
    if header[2] & 0x80 != 0 || header[4..6] != [0, 1] {
        return None;
    }
    let (name, end) = read_name(message, 12)?;
    let kind = u16::from_be_bytes(message.get(end..end + 2)?.try_into().ok()?);
    let question = message.get(12..end + 4)?;
    let found = names.find(&name.to_lowercase(), 0);
    let refused = if found.is_some() { 0 } else { 3 };
    let records: Vec<(String, Data)> = found
        .unwrap_or_default()
        .into_iter()
        .filter(|(_, data)| kind == ANY || data.kind() == kind || data.kind() == CNAME)
        .collect();
    let mut body = Vec::new();
    for (owner, data) in &records {
        write_record(&mut body, owner, data)?;
    }
    let whole = 12 + question.len() + body.len() <= room;
    let count = if whole {
        u16::try_from(records.len()).ok()?
    } else {
        0
    };
    let mut answer = header[..2].to_vec();
    // Flags: an authoritative reply, truncated or not; recursion desired as in the query, and available.
    answer.push(0x84 | (header[2] & 0x01) | if whole { 0 } else { 0x02 });
    answer.push(0x80 | refused);
    answer.extend([0, 1]);
    answer.extend(count.to_be_bytes());
    answer.extend([0; 4]);
    answer.extend(question);
    if whole {
        answer.extend(body);
    }
    Some(answer)
}

/// Reads a name. Returns the name without the last dot, and its end. Names in questions are not compressed.
fn read_name(message: &[u8], mut at: usize) -> Option<(String, usize)> {
    let mut labels = Vec::new();
    loop {
        let length = usize::from(*message.get(at)?);
        at += 1;
        if length == 0 {
            return Some((labels.join("."), at));
        }
        if length > 63 {
            return None;
        }
        labels.push(str::from_utf8(message.get(at..at + length)?).ok()?);
        at += length;
    }
}

fn write_name(into: &mut Vec<u8>, name: &str) -> Option<()> {
    for label in name.split('.').filter(|label| !label.is_empty()) {
        into.push(
            u8::try_from(label.len())
                .ok()
                .filter(|length| *length < 64)?,
        );
        into.extend(label.as_bytes());
    }
    into.push(0);
    Some(())
}

fn write_record(into: &mut Vec<u8>, owner: &str, data: &Data) -> Option<()> {
    write_name(into, owner)?;
    into.extend(data.kind().to_be_bytes());
    into.extend([0, 1]);
    into.extend(LIFE.to_be_bytes());
    let mut value = Vec::new();
    match data {
        Data::Address(IpAddr::V4(address)) => value.extend(address.octets()),
        Data::Address(IpAddr::V6(address)) => value.extend(address.octets()),
        Data::Alias(name) | Data::Name(name) => write_name(&mut value, name)?,
        Data::Service { port, host } => {
            // Priority 0, weight 100.
            value.extend([0, 0, 0, 100]);
            value.extend(port.to_be_bytes());
            write_name(&mut value, host)?;
        }
    }
    into.extend(u16::try_from(value.len()).ok()?.to_be_bytes());
    into.extend(value);
    Some(())
}

impl Data {
    fn kind(&self) -> u16 {
        match self {
            Self::Address(IpAddr::V4(_)) => A,
            Self::Address(IpAddr::V6(_)) => AAAA,
            Self::Alias(_) => CNAME,
            Self::Name(_) => PTR,
            Self::Service { .. } => SRV,
        }
    }
}

fn strings(value: &Value) -> impl Iterator<Item = &str> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
}

/// Returns the host name of an endpoint: its own, or a name made from its address.
fn host_name(endpoint: &Value) -> String {
    let own = endpoint["hostname"]
        .as_str()
        .filter(|name| !name.is_empty());
    own.map_or_else(
        || {
            strings(&endpoint["addresses"])
                .next()
                .unwrap_or_default()
                .replace(['.', ':'], "-")
        },
        str::to_lowercase,
    )
}

impl Names {
    /// Returns all records of a name; `None` if the name does not exist.
    fn find(&self, name: &str, depth: u8) -> Option<Vec<(String, Data)>> {
        if let Some(address) = reversed(name) {
            return self
                .named(address)
                .map(|host| vec![(name.to_owned(), Data::Name(host))]);
        }
        let labels: Vec<&str> = name.strip_suffix(ZONE)?.split('.').collect();
        let all =
            |data: Vec<Data>| Some(data.into_iter().map(|one| (name.to_owned(), one)).collect());
        match *labels.as_slice() {
            [address, _, "pod"] => {
                let address = [address.replace('-', "."), address.replace('-', ":")];
                let address = address.iter().find_map(|text| text.parse().ok())?;
                all(vec![Data::Address(address)])
            }
            // These names exist and have no addresses; there are names below them.
            ["svc"] => all(Vec::new()),
            [namespace, "svc"] => {
                let is = self.services.keys().any(|(of, _)| of == namespace);
                is.then(Vec::new)
            }
            [ref below @ .., service, namespace, "svc"] => {
                let key = (namespace.to_owned(), service.to_owned());
                let object = self.services.get(&key)?;
                let spec = &object["spec"];
                if spec["type"] == "ExternalName" {
                    let target = spec["externalName"]
                        .as_str()?
                        .trim_end_matches('.')
                        .to_owned();
                    let mut found = vec![(name.to_owned(), Data::Alias(target.clone()))];
                    // The depth limit ends circular aliases.
                    if depth < 5 {
                        found.extend(self.find(&target, depth + 1).unwrap_or_default());
                    }
                    return Some(found);
                }
                let found = self.of_service(&key, spec, below);
                if found.is_empty() { None } else { all(found) }
            }
            _ => None,
        }
    }

    /// Returns the records of a service, or of a name below it: a port, or an endpoint of a headless service.
    fn of_service(&self, key: &(String, String), spec: &Value, below: &[&str]) -> Vec<Data> {
        let headless = spec["clusterIP"] == "None";
        let addresses = |endpoint: &Value| -> Vec<Data> {
            let addresses = strings(&endpoint["addresses"]).filter_map(|text| text.parse().ok());
            addresses.map(Data::Address).collect()
        };
        match *below {
            [] if headless => self
                .endpoints(key)
                .flat_map(|(_, endpoint)| addresses(endpoint))
                .collect(),
            [] => strings(&spec["clusterIPs"])
                .filter_map(|text| text.parse().ok())
                .map(Data::Address)
                .collect(),
            [host] if headless => self
                .endpoints(key)
                .filter(|(_, endpoint)| host_name(endpoint) == host)
                .flat_map(|(_, endpoint)| addresses(endpoint))
                .collect(),
            [port, protocol] => {
                let (Some(port), Some(protocol)) =
                    (port.strip_prefix('_'), protocol.strip_prefix('_'))
                else {
                    return Vec::new();
                };
                let host = format!("{}.{}.svc{ZONE}", key.1, key.0);
                let number = |ports: &Value| -> Option<u16> {
                    let mut ports = ports.as_array()?.iter();
                    let one = ports.find(|one| {
                        let of = one["protocol"].as_str().unwrap_or("TCP");
                        one["name"].as_str() == Some(port) && of.eq_ignore_ascii_case(protocol)
                    })?;
                    one["port"].as_u64()?.try_into().ok()
                };
                if headless {
                    let each = self.endpoints(key).filter_map(|(slice, endpoint)| {
                        let host = format!("{}.{host}", host_name(endpoint));
                        Some(Data::Service {
                            port: number(&slice["ports"])?,
                            host,
                        })
                    });
                    each.collect()
                } else {
                    number(&spec["ports"])
                        .map(|port| Data::Service { port, host })
                        .into_iter()
                        .collect()
                }
            }
            _ => Vec::new(),
        }
    }

    /// Returns the ready endpoints of a service, each with its slice. An endpoint without this condition is ready.
    fn endpoints(&self, key: &(String, String)) -> impl Iterator<Item = (&Value, &Value)> {
        let slices = self.slices.iter().filter(move |((namespace, _), slice)| {
            *namespace == key.0
                && slice["metadata"]["labels"]["kubernetes.io/service-name"] == key.1.as_str()
                && slice["addressType"] != "FQDN"
        });
        slices.flat_map(|(_, slice)| {
            let endpoints = slice["endpoints"].as_array().into_iter().flatten();
            let ready = endpoints.filter(|endpoint| endpoint["conditions"]["ready"] != false);
            ready.map(move |endpoint| (slice, endpoint))
        })
    }

    /// Returns the name of an address: a cluster IP, or an endpoint of a headless service.
    fn named(&self, address: IpAddr) -> Option<String> {
        let is = |text: &str| text.parse() == Ok(address);
        self.services.iter().find_map(|(key, service)| {
            let host = format!("{}.{}.svc{ZONE}", key.1, key.0);
            let spec = &service["spec"];
            if spec["clusterIP"] == "None" {
                let mut endpoints = self.endpoints(key);
                let one =
                    endpoints.find(|(_, endpoint)| strings(&endpoint["addresses"]).any(is))?;
                return Some(format!("{}.{host}", host_name(one.1)));
            }
            strings(&spec["clusterIPs"]).any(is).then_some(host)
        })
    }
}

/// Returns the address that a name below in-addr.arpa or ip6.arpa stands for.
fn reversed(name: &str) -> Option<IpAddr> {
    if let Some(digits) = name.strip_suffix(".in-addr.arpa") {
        let mut octets: Vec<u8> = digits
            .split('.')
            .map(|digit| digit.parse().ok())
            .collect::<Option<_>>()?;
        octets.reverse();
        return Some(Ipv4Addr::from(<[u8; 4]>::try_from(octets).ok()?).into());
    }
    let digits: Vec<&str> = name.strip_suffix(".ip6.arpa")?.split('.').collect();
    if digits.len() != 32 || digits.iter().any(|digit| digit.len() != 1) {
        return None;
    }
    let text: String = digits.into_iter().rev().collect();
    Some(Ipv6Addr::from(u128::from_str_radix(&text, 16).ok()?).into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn names() -> Names {
        let mut names = Names::default();
        let key = |name: &str| ("shop".to_owned(), name.to_owned());
        let web = json!({ "spec": { "clusterIP": "10.96.1.2", "clusterIPs": ["10.96.1.2", "fd00:10:96::2"],
            "ports": [{ "name": "http", "port": 80, "protocol": "TCP" }] } });
        names.services.insert(key("web"), web);
        names
            .services
            .insert(key("db"), json!({ "spec": { "clusterIP": "None" } }));
        let elsewhere = json!({ "spec": { "type": "ExternalName", "externalName": "web.shop.svc.cluster.local" } });
        names.services.insert(key("elsewhere"), elsewhere);
        let slice = json!({
            "metadata": { "labels": { "kubernetes.io/service-name": "db" } },
            "addressType": "IPv4",
            "ports": [{ "name": "sql", "port": 5432, "protocol": "TCP" }],
            "endpoints": [
                { "addresses": ["10.244.1.5"], "conditions": { "ready": true }, "hostname": "db-0" },
                { "addresses": ["10.244.2.5"], "conditions": { "ready": false } },
                { "addresses": ["10.244.2.6"] },
            ],
        });
        names.slices.insert(key("db-x"), slice);
        names
    }

    fn found(name: &str) -> Option<Vec<Data>> {
        let found = names().find(name, 0);
        found.map(|all| all.into_iter().map(|(_, data)| data).collect())
    }

    fn addresses(texts: &[&str]) -> Vec<Data> {
        let addresses = texts.iter().map(|text| text.parse().unwrap());
        addresses.map(Data::Address).collect()
    }

    #[test]
    fn services_have_the_names_that_kubernetes_specifies() {
        assert_eq!(
            found("web.shop.svc.cluster.local"),
            Some(addresses(&["10.96.1.2", "fd00:10:96::2"]))
        );
        assert_eq!(
            found("db.shop.svc.cluster.local"),
            Some(addresses(&["10.244.1.5", "10.244.2.6"]))
        );
        assert_eq!(
            found("db-0.db.shop.svc.cluster.local"),
            Some(addresses(&["10.244.1.5"]))
        );
        assert_eq!(
            found("10-244-2-6.db.shop.svc.cluster.local"),
            Some(addresses(&["10.244.2.6"]))
        );
        assert_eq!(
            found("10-244-1-9.shop.pod.cluster.local"),
            Some(addresses(&["10.244.1.9"]))
        );
        let host = "web.shop.svc.cluster.local".to_owned();
        assert_eq!(
            found("_http._tcp.web.shop.svc.cluster.local"),
            Some(vec![Data::Service {
                port: 80,
                host: host.clone()
            }])
        );
        assert_eq!(
            found("_sql._tcp.db.shop.svc.cluster.local").unwrap().len(),
            2
        );
        assert_eq!(
            found("2.1.96.10.in-addr.arpa"),
            Some(vec![Data::Name(host)])
        );
        assert_eq!(
            found("5.1.244.10.in-addr.arpa"),
            Some(vec![Data::Name("db-0.db.shop.svc.cluster.local".into())])
        );
        assert_eq!(found("elsewhere.shop.svc.cluster.local").unwrap().len(), 3);
        assert_eq!(found("shop.svc.cluster.local"), Some(Vec::new()));
        for unknown in [
            "x.shop.svc.cluster.local",
            "x.svc.cluster.local",
            "example.org",
            "5.2.244.10.in-addr.arpa",
        ] {
            assert_eq!(found(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn a_question_is_answered_in_the_format_of_dns() {
        let mut question = vec![0x12, 0x34, 0x01, 0x00, 0, 1, 0, 0, 0, 0, 0, 0];
        write_name(&mut question, "Web.shop.svc.cluster.local").unwrap();
        question.extend([0, 1, 0, 1]);
        let answer = reply(&names(), &question, DATAGRAM).unwrap();
        assert_eq!(
            answer[..12],
            [0x12, 0x34, 0x85, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]
        );
        assert!(answer.ends_with(&[0, 4, 10, 96, 1, 2]));
        // The answer does not fit, so the server sends no records and sets the truncation flag.
        let answer = reply(&names(), &question, 50).unwrap();
        assert_eq!((answer[2] & 0x02, answer[7]), (0x02, 0));
        // The name does not exist.
        let mut question = question[..12].to_vec();
        write_name(&mut question, "example.org").unwrap();
        question.extend([0, 1, 0, 1]);
        assert_eq!(reply(&names(), &question, DATAGRAM).unwrap()[3], 0x83);
        for length in 0..question.len() {
            assert_eq!(
                reply(&names(), &question[..length], DATAGRAM),
                None,
                "{length}"
            );
        }
    }
}
