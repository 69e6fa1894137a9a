//! Real clients in a captured pod, with the pod's `resolv.conf`: each has a resolver of its own, and all of them find the
//! same names.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fmt::Write as _,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Command as Local, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::Process;
use serde_json::json;

use crate::{
    cluster::{HTTP, counted, eventually, verdicts},
    dns_hosts::database,
    dns_world::World,
};

scenarios! {
    Dataplane:
    real_clients_find_names,
}

/// The service `hello` of a namespace, whose endpoint is the pod `other`.
fn service(namespace: &str, vip: &str) -> String {
    format!(
        "\
---
apiVersion: v1
kind: Service
metadata: {{name: hello, namespace: {namespace}}}
spec: {{clusterIP: {vip}, ports: [{{port: 80}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: hello-1, namespace: {namespace}, labels: {{kubernetes.io/service-name: hello}}}}
addressType: IPv4
endpoints: [{{addresses: [10.244.1.12]}}]
ports: [{{port: 80}}]
"
    )
}

/// A headless service, whose addresses need more than 512 bytes.
const HEADLESS: &str = "\
---
apiVersion: v1
kind: Service
metadata: {name: pods, namespace: shop}
spec: {clusterIP: None, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: pods-1, namespace: shop, labels: {kubernetes.io/service-name: pods}}
addressType: IPv4
ports: [{port: 80}]
endpoints:
";

/// How many addresses do not fit into 512 bytes.
const MANY: u8 = 60;
/// A host of a ServiceEntry.
const HOST: &str = "orders.db.example.com";
/// A headless service and an external name with [`MANY`] addresses: those of the external name are the pod's own.
const PODS: &str = "pods";
const EXTERNAL_MANY: &str = "many.example.com";

/// Has musl look up names: `NAME ADDRESS…`, a line for each.
const MUSL: &str = r#"
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
        printf("%s", argv[i]);
        getaddrinfo(argv[i], NULL, &hints, &found);
        for (char text[64]; found; found = found->ai_next)
            printf(" %s", inet_ntop(found->ai_family, found->ai_family == AF_INET
                ? (void *)&((struct sockaddr_in *)found->ai_addr)->sin_addr
                : (void *)&((struct sockaddr_in6 *)found->ai_addr)->sin6_addr, text, sizeof text));
        puts("");
    }
}
"#;

/// Has Node look up names by the C library and by c-ares: `HOW NAME ADDRESS…`.
const NODE: &str = "
const { lookup, resolve4 } = require('dns').promises;
const all = name => lookup(name, { all: true }).then(found => found.map(of => of.address));
(async () => {
    for (const name of process.argv.slice(1))
        for (const [how, ask] of [['lookup', all], ['resolve', resolve4]])
            console.log(how, name, ...await ask(name).catch(() => []));
})();
";

/// The addresses that a client found for each name.
type Found = BTreeMap<String, BTreeSet<String>>;

/// The names that a client looks up, each with the expected addresses.
struct Table(Vec<(&'static str, BTreeSet<String>)>);

impl Table {
    /// `host`: the address of the ServiceEntry's host.
    fn new(host: &str) -> Self {
        let one = |address: &str| BTreeSet::from([address.to_owned()]);
        let many = |start: &str| (1..=MANY).map(|last| format!("{start}.{last}")).collect();
        Self(vec![
            ("hello", one("10.96.0.20")),
            ("hello.other", one("10.96.0.21")),
            ("hello.other.svc", one("10.96.0.21")),
            ("hello.shop.svc.cluster.local", one("10.96.0.20")),
            ("site.example.com", one("10.244.1.12")),
            (HOST, one(host)),
            (EXTERNAL_MANY, many("127.0.1")),
            (PODS, many("10.244.9")),
            ("nothing", BTreeSet::new()),
            ("nothing.other.svc.cluster.local", BTreeSet::new()),
            ("nothing.example.com", BTreeSet::new()),
        ])
    }

    fn names(&self) -> Vec<&'static str> {
        self.0.iter().map(|(name, _)| *name).collect()
    }

    /// Checks that a client found what `fits`, of the addresses wanted and found.
    fn check(
        &self,
        client: &str,
        found: &Found,
        fits: impl Fn(&str, &BTreeSet<String>, &BTreeSet<String>) -> bool,
    ) -> Result<()> {
        for (name, wanted) in &self.0 {
            let found = found.get(*name);
            let found = found.with_context(|| format!("{client} says nothing of {name}"))?;
            ensure!(
                fits(name, wanted, found),
                "{client}: {name} is {found:?}, not {wanted:?}"
            );
        }
        Ok(())
    }
}

/// Reads lines `NAME ADDRESS…`. Other words, such as the names that CNAME records lead to, do not count.
fn read(text: &str) -> Found {
    let lines = text
        .lines()
        .filter_map(|line| line.split_once(' ').or(Some((line, ""))));
    let lines = lines.map(|(name, rest)| {
        let words = rest.split_whitespace();
        let addresses = words.filter(|word| word.parse::<IpAddr>().is_ok());
        (name.to_owned(), addresses.map(str::to_owned).collect())
    });
    lines.collect()
}

/// The file of an installed program.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let places = env::split_paths(&path);
    // Where systemd has its own programs.
    let mut places = places.chain(["/usr/lib/systemd".into(), "/lib/systemd".into()]);
    places.find_map(|place| Some(place.join(name)).filter(|file| file.is_file()))
}

/// Runs a script in the pod for each of the names. The script prints the result of its lookup of `$name`.
fn each(world: &World, script: &str, names: &[&str]) -> Result<Found> {
    let script = format!("for name; do echo \"$name\" $({script}); done");
    let command = [&["sh", "-c", &script, "sh"], names].concat();
    Ok(read(&world.with_resolv_conf(&command)?))
}

/// Starts systemd-resolved in the pod, without D-Bus and without a network manager. Its resolver is the pod's.
fn resolved(world: &World, program: &Path) -> Result<Process> {
    /// The program changes to this user.
    const USER: &str = "systemd-resolve";
    /// systemd-resolved refuses names below `local` that are not in its list of domains.
    const CONF: &str = "[Resolve]\nDNS=10.96.0.53\nDomains=~cluster.local\nLLMNR=no\n\
                        MulticastDNS=no\nDNSSEC=no\n";
    const SCRIPT: &str = "mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/resolved.conf.d && \
                          cp \"$1\" /run/systemd/resolved.conf.d/pod.conf && \
                          mount --bind \"$2\" /etc/passwd && exec \"$3\"";
    let file = |name: &str| world.directory().join(name);
    fs::write(file("resolved.conf"), CONF)?;
    let mut users = fs::read_to_string("/etc/passwd")?;
    if !users.lines().any(|line| line.starts_with(USER)) {
        writeln!(users, "{USER}:x:65533:65533::/:/usr/sbin/nologin")?;
    }
    fs::write(file("passwd"), users)?;
    let unshare = world
        .app()
        .command("unshare")
        .args(["-m", "sh", "-c", SCRIPT, "sh"]);
    let unshare = unshare
        .arg(file("resolved.conf"))
        .arg(file("passwd"))
        .arg(program);
    Ok(unshare.stderr(Stdio::null()).spawn()?)
}

fn real_clients_find_names() -> Result<()> {
    let mut services = service("shop", "10.96.0.20") + &service("other", "10.96.0.21") + HEADLESS;
    let mut external = " local-data: 'site.example.com. 60 IN A 10.244.1.12'\n".to_owned();
    for last in 1..=MANY {
        writeln!(services, "- {{addresses: [10.244.9.{last}]}}")?;
        writeln!(
            external,
            " local-data: '{EXTERNAL_MANY}. 60 IN A 127.0.1.{last}'"
        )?;
    }
    let entry = database("shop", "orders", "", "10.244.1.12");
    let entry = entry
        .replace("number: 5432", "number: 80")
        .replace("targetPort: 7", "targetPort: 80");
    let world = World::start_with(
        &json!({ "rules": {} }),
        |text| text + &services + &entry,
        &external,
        None,
    )?;
    let serve = |pod: &str, address: &str| {
        let at = format!("{address}:{HTTP}");
        world.lab.pod(pod).serve(&["--http", &at])
    };
    let _servers = [serve("other", "10.244.1.12")?, serve("app", "0.0.0.0")?];
    let told = world.told(&format!("@10.96.0.53 +short {HOST}"))?;
    let table = Table::new(told.trim());
    let names = table.names();
    let all = |_: &str, wanted: &BTreeSet<String>, found: &BTreeSet<String>| wanted == found;
    // No client's queries bypass the agent.
    let captured = |client: &str, work: &dyn Fn() -> Result<()>| -> Result<()> {
        let ((), count) = counted(&world.agent, Reason::CapturedDns, work)?;
        println!("{client}: {count} queries");
        ensure!(count > 0, "the queries of {client} are not captured");
        Ok(())
    };
    let mut absent = Vec::new();

    for options in ["+notcp", "+tcp", "+notcp +noedns"] {
        let client = format!("dig {options}");
        captured(&client, &|| {
            let script = format!("dig +search +short +tries=1 +time=4 {options} \"$name\" A");
            table.check(&client, &each(&world, &script, &names)?, all)
        })?;
    }
    // The client does not fall back to TCP, so it gets the records that fit into a datagram.
    captured("dig +ignore", &|| {
        let script = "dig +search +short +ignore +noedns \"$name\" A";
        let found = each(&world, script, &names)?;
        table.check("dig +ignore", &found, |name, wanted, found| {
            if [PODS, EXTERNAL_MANY].contains(&name) {
                (20..MANY.into()).contains(&found.len()) && found.is_subset(wanted)
            } else {
                wanted == found
            }
        })
    })?;
    for options in ["", "use-vc", "edns0 trust-ad"] {
        let client = format!("getent with options {options}");
        captured(&client, &|| {
            let script =
                format!("RES_OPTIONS='{options}' getent ahosts \"$name\" | cut -d ' ' -f 1");
            table.check(&client, &each(&world, &script, &names)?, all)
        })?;
    }
    // A name without addresses does not exist: no error, and no silence.
    for (name, _) in table.0.iter().filter(|(_, wanted)| wanted.is_empty()) {
        let told = world.with_resolv_conf(&["dig", "+search", "+tries=1", name])?;
        ensure!(told.contains("status: NXDOMAIN"), "{told}");
        let script = "getent ahosts \"$0\"; echo $?";
        let code = world.with_resolv_conf(&["sh", "-c", script, name])?;
        ensure!(code.trim() == "2", "getent {name}: {code}");
    }
    captured("curl", &|| {
        // The addresses of the headless service have no listener.
        let of_servers = table.0.iter().filter(|(name, _)| *name != PODS);
        let of_servers = Table(of_servers.cloned().collect());
        let script = "curl -s -m 10 -o /dev/null -w '%{remote_ip}' \"http://$name/\"";
        let found = each(&world, script, &of_servers.names())?;
        of_servers.check("curl", &found, |_, wanted, found| {
            found.is_subset(wanted) && found.len() == wanted.len().min(1)
        })
    })?;
    if let Some(compiler) = program("musl-gcc") {
        let (source, binary) = (
            world.directory().join("musl.c"),
            world.directory().join("musl"),
        );
        fs::write(&source, MUSL)?;
        let compiler = Local::new(compiler)
            .arg("-static")
            .arg("-o")
            .arg(&binary)
            .arg(&source)
            .output()?;
        ensure!(
            compiler.status.success(),
            "{}",
            String::from_utf8_lossy(&compiler.stderr)
        );
        captured("musl", &|| {
            let binary = binary.to_string_lossy();
            let found = read(&world.with_resolv_conf(&[&[&*binary], &*names].concat())?);
            // Before 1.2.4, musl does not use TCP. It uses the records in a truncated answer.
            table.check("musl", &found, |_, wanted, found| {
                found.is_subset(wanted) && found.len() >= wanted.len().min(20)
            })
        })?;
    } else {
        absent.push("musl's resolver (package musl-tools)");
    }
    if program("hey").is_some() {
        captured("Go", &|| {
            for (name, wanted) in &table.0 {
                if *name == PODS {
                    continue;
                }
                let script = "GODEBUG=netdns=go+2 exec hey -n 1 -c 1 -t 10 \"http://$1/\" 2>&1";
                let told = world.with_resolv_conf(&["sh", "-c", script, "sh", name])?;
                ensure!(
                    told.contains("Go's resolver"),
                    "Go does not use its own resolver:\n{told}"
                );
                let wanted = if wanted.is_empty() {
                    "no such host"
                } else {
                    "[200]\t1 responses"
                };
                ensure!(told.contains(wanted), "Go: {name}: not {wanted}:\n{told}");
            }
            Ok(())
        })?;
    } else {
        absent.push("Go's resolver (package hey)");
    }
    if program("node").is_some() {
        captured("Node", &|| {
            let command = [&["node", "-e", NODE, "--"], &*names].concat();
            let told = world.with_resolv_conf(&command)?;
            for (how, searches) in [("lookup", true), ("resolve", false)] {
                let lines = told
                    .lines()
                    .filter_map(|line| line.strip_prefix(how)?.strip_prefix(' '));
                let lines: Vec<_> = lines.collect();
                // `dns.resolve` has no search list: it asks for the name as it is.
                table.check(
                    &format!("Node's {how}"),
                    &read(&lines.join("\n")),
                    |name, wanted, found| {
                        let whole = ["cluster.local", "example.com"]
                            .iter()
                            .any(|end| name.ends_with(end));
                        if searches || whole {
                            wanted == found
                        } else {
                            found.is_empty()
                        }
                    },
                )?;
            }
            Ok(())
        })?;
    } else {
        absent.push("Node's resolver, c-ares (package nodejs)");
    }
    if let Some(program) = program("systemd-resolved") {
        let mut running = resolved(&world, &program)?;
        eventually(|| {
            ensure!(running.try_wait()?.is_none(), "systemd-resolved ended");
            let dig = world
                .app()
                .command("dig")
                .args(["@127.0.0.53", "+tries=1", "+time=1"]);
            ensure!(
                dig.arg("hello.shop.svc.cluster.local")
                    .run()?
                    .contains("10.96.0.20")
            );
            Ok(())
        })?;
        captured("systemd-resolved", &|| {
            let script = "getent ahosts \"$name\" | cut -d ' ' -f 1";
            let script = format!("for name; do echo \"$name\" $({script}); done");
            let command = [&["sh", "-c", &script, "sh"], &*names].concat();
            let found = read(&world.with_resolver("127.0.0.53", &command)?);
            table.check("systemd-resolved", &found, all)
        })?;
    } else {
        absent.push("systemd-resolved (package systemd-resolved)");
    }
    let bypassed = verdicts(&world.agent, Reason::DnsBypassed)?;
    ensure!(bypassed == 0, "{bypassed} queries went past the agent");
    if !absent.is_empty() {
        println!(
            "skipped dns_clients::real_clients_find_names: without {}",
            absent.join(", ")
        );
    }
    Ok(())
}
