//! The configuration file: all faults are reported, and kube-proxy's file is imported.

use std::path::Path;

use dataplane_settings::{Settings, config};
use serde_json::Value;

const ALL: &str = include_str!("config/all.yaml");
const KUBEADM: &str = include_str!("config/kubeadm.yaml");

fn parse(text: &str) -> Result<Settings, String> {
    config::parse(Path::new("dataplane.yaml"), text).map_err(|errors| errors.to_string())
}

#[test]
fn nothing_is_a_configuration_too() {
    for text in ["", "# nothing\n", "{}", "source:\nonExit:\n"] {
        assert_eq!(parse(text), Ok(Settings::default()), "{text:?}");
    }
}

#[test]
fn a_key_without_a_value_is_an_empty_object() {
    let config = parse("source:\n  kubernetes:\n").unwrap();
    assert_eq!(
        config.source.kubernetes,
        Some(dataplane_settings::Kubernetes::default())
    );
}

#[test]
fn all_of_it_and_back() {
    let config = parse(ALL).unwrap();
    assert_eq!(parse(&config::to_yaml(&config)), Ok(config));
}

#[test]
fn faults_are_all_named_with_place_and_remedy() {
    let faulty = "\
node:
  Name: a
  nodePortAddresses: [10.0.0.0/8, 10.0.0.0/33, fd00::/8, here]
metrics-addr: off
listen:
  metrics: 9100
  health: localhost:9101
  admin: 0.0.0.0:9102
  healthz: 0.0.0.0:9102
  colour: blue
limits: {frontends: -1, endpoints: 0}
packets: {timeouts: {udp: 10, tcpCloseWait: 500ms}}
onExit: stop
source:
  manifests: [a]
  kubernetes: {kubeConfig: b}
dns: {ttlSeconds: 3601, cacheBytes: 1000, staleSeconds: 700000, serviceEntryTtlSeconds: 4000}
mesh: {rootNamespace: \"\", unsupported: deny, proxy: {uid: 1337}, excludeNamespaces: [\"\"], sameNode: attest, withoutWaypoint: pass}
cni: {confDir: net.d}
";
    let said = parse(faulty).unwrap_err();
    let wanted = [
        "2:9: node.Name: unknown key; did you mean `name`?",
        "3:35: node.nodePortAddresses[1]: `10.0.0.0/33` is not a range of addresses; expected one like \
         10.0.0.0/8 or fd00::/64",
        "3:58: node.nodePortAddresses[3]: `here` is not a range of addresses",
        "4:15: metrics-addr: unknown key; did you mean `listen.metrics`?",
        "6:12: listen.metrics: invalid type: integer `9100`, expected a string",
        "7:11: listen.health: `localhost:9101` is not an address and port; expected ADDRESS:PORT",
        "8:10: listen.admin: 0.0.0.0:9102 is also the value of listen.healthz; expected different addresses",
        "10:11: listen.colour: unknown key; expected one of admin, health, healthz, metrics, \
         metricsAuth, proxyMode, socket",
        "11:21: limits.frontends: invalid value: integer `-1`, expected a whole number from 0",
        "11:36: limits.endpoints: 0; expected a number from 1",
        "12:27: packets.timeouts.udp: invalid type: integer `10`, expected a string",
        "12:45: packets.timeouts.tcpCloseWait: `500ms` is not a timeout; expected whole seconds",
        "13:9: onExit: unknown variant `stop`, expected `keep` or `detach`",
        "15:3: source: both manifests and kubernetes; expected one of them",
        "16:28: source.kubernetes.kubeConfig: unknown key; did you mean `kubeconfig`?",
        "17:19: dns.ttlSeconds: 3601; expected a number from 0 to 3600",
        "17:37: dns.cacheBytes: 1000; expected a number from 1048576 to 4294967296",
        "17:57: dns.staleSeconds: 700000; expected a number from 0 to 604800",
        "17:89: dns.serviceEntryTtlSeconds: 4000; expected a number from 0 to 3600",
        "18:23: mesh.rootNamespace: empty; expected a namespace's name",
        "18:40: mesh.unsupported: deny has no effect: mesh.proxy.uid names another proxy",
        "18:86: mesh.excludeNamespaces[0]: empty; expected a namespace's name",
        "18:101: mesh.sameNode: attest has no effect without mesh.identity",
        "18:126: mesh.withoutWaypoint: pass has no effect without mesh.identity",
        "19:16: cni.confDir: net.d is relative; expected an absolute path",
    ];
    let lines: Vec<&str> = said.lines().collect();
    for (line, wanted) in lines.iter().zip(wanted) {
        assert!(
            line.starts_with(&format!("dataplane.yaml:{wanted}")),
            "{line}\n  is not\n{wanted}\n\n{said}"
        );
    }
    assert_eq!(lines.len(), wanted.len(), "{said}");
}

#[test]
fn what_is_no_yaml_is_said_with_its_line() {
    for (text, wanted) in [
        ("node: {\n", "dataplane.yaml:"),
        (
            "- a\n",
            "dataplane.yaml: not a configuration; expected keys such as `source:`",
        ),
        ("node: {name: a}\nnode: {name: b}\n", "dataplane.yaml:2:"),
    ] {
        let said = parse(text).unwrap_err();
        assert!(said.starts_with(wanted), "{said}");
    }
}

/// Every key of the schema has a description, and occurs in the guide and in the full example.
#[test]
fn every_key_is_documented() {
    let guide = include_str!("../../../docs/configuration.md");
    let example: Value = serde_json::to_value(parse(ALL).unwrap()).unwrap();
    let mut open = vec![(String::new(), config::schema(), example)];
    let mut keys = 0;
    while let Some((path, schema, example)) = open.pop() {
        let inner = schema["anyOf"]
            .as_array()
            .and_then(|all| all.iter().find(|s| s["properties"].is_object()))
            .unwrap_or(&schema);
        for (key, schema) in inner["properties"].as_object().into_iter().flatten() {
            let path = format!("{path}{key}");
            assert!(schema["description"].is_string(), "{path}: {schema:#}");
            assert!(
                guide.contains(&format!("`{path}`")),
                "docs/configuration.md lacks {path}"
            );
            keys += 1;
            // The example has keys that exclude these.
            assert!(
                path.starts_with("source.kubernetes")
                    || path.starts_with("mesh.identity.source.")
                    || path == "mesh.proxy.uid"
                    || path == "packets.podCidrs"
                    || example.get(key).is_some(),
                "tests/config/all.yaml lacks {path}"
            );
            // The keys below are those of mesh.rules.
            if path != "mesh.enforced" {
                let below = example.get(key).cloned().unwrap_or_default();
                open.push((format!("{path}."), schema.clone(), below));
            }
        }
    }
    assert!(keys > 20, "only {keys} keys");
}

#[test]
fn a_mesh_with_identities_has_one_source_of_them() {
    let source = "source: {directory: /certificates}";
    for (identity, wanted) in [
        (
            "{}",
            "mesh.identity: without a source; expected one of source.directory",
        ),
        ("{source: {}}", "mesh.identity: without a source"),
        (
            "{source: {directory: /a, ca: {directory: /b}}}",
            "mesh.identity.source: both directory and ca; expected one of them",
        ),
        (
            "{source: {directory: a}}",
            "mesh.identity.source.directory: a is relative; expected an absolute path",
        ),
        (
            "{source: {ca: {lifetime: 1h}}}",
            "mesh.identity.source.ca.directory: empty; expected an absolute path",
        ),
        (
            "{source: {istio: {address: istiod}}}",
            "mesh.identity.source.istio.address: \"istiod\"; expected HOST:PORT",
        ),
        (
            &format!("{{{source}, trustDomain: a/b}}"),
            "mesh.identity.trustDomain: \"a/b\"; expected a trust domain",
        ),
        (
            &format!("{{{source}, roots: [{{trustDomain: a}}]}}"),
            "mesh.identity.roots[0]: without files",
        ),
        (
            &format!("{{{source}, revoked: [a.pem]}}"),
            "mesh.identity.revoked[0]: a.pem is relative",
        ),
    ] {
        let said = parse(&format!("mesh: {{identity: {identity}}}\n")).unwrap_err();
        assert!(said.starts_with("dataplane.yaml:1:"), "{said}");
        assert!(said.contains(wanted), "{said}");
    }
    let said = parse(&format!(
        "mesh: {{proxy: {{uid: 1500}}, identity: {{{source}}}}}\n"
    ));
    assert!(said.unwrap_err().contains("mesh.identity: has no effect"));
    assert!(parse(&format!("mesh: {{identity: {{{source}}}}}\n")).is_ok());
}

fn notes(imported: &config::Imported) -> Vec<&str> {
    imported.notes.iter().map(|note| &*note.key).collect()
}

#[test]
fn kubeadms_configuration() {
    let imported = config::import(KUBEADM).unwrap();
    assert_eq!(
        config::to_yaml(&imported.config),
        "source:\n  kubernetes:\n    kubeconfig: /var/lib/kube-proxy/kubeconfig.conf\nnode:\n  \
         nodePortAddresses:\n  - 0.0.0.0/0\n  - \"::/0\"\npackets:\n  podCidrs:\n  - 10.244.0.0/16\n"
    );
    assert_eq!(
        imported.config.packets.pod_cidrs,
        ["10.244.0.0/16".parse().unwrap()]
    );
    // The imported settings, written as a file and read again.
    assert_eq!(
        parse(&config::to_yaml(&imported.config)),
        Ok(imported.config.clone())
    );
    assert_eq!(
        notes(&imported),
        [
            "nodePortAddresses",
            "conntrack",
            "bindAddress",
            "clientConnection.kubeconfig"
        ]
    );
}

#[test]
fn what_can_be_carried_over_is() {
    let imported = config::import(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n\
         mode: nftables\nhostnameOverride: worker-1\nhealthzBindAddress: 127.0.0.1\n\
         metricsBindAddress: \"[::]:10249\"\nnodePortAddresses: [10.0.0.0/8, localhost]\n\
         logging: {format: json, verbosity: 5}\nnftables: {masqueradeAll: true, syncPeriod: 30s}\n\
         iptables: {syncPeriod: 30s}\nipvs: {scheduler: lc}\noomScoreAdj: -998\n\
         conntrack: {min: 262144, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 1h30m0s, \
         tcpBeLiberal: true, udpTimeout: 30s, udpStreamTimeout: 90s}\nfeatureGates: {SomeGate: true}\n\
         detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: cali}\n\
         nodeports: [a]\n",
    )
    .unwrap();
    assert_eq!(
        config::to_yaml(&imported.config),
        "source:\n  kubernetes: {}\nlog:\n  format: json\n  level: debug\nnode:\n  name: worker-1\n  \
         nodePortAddresses:\n  - 10.0.0.0/8\nlisten:\n  metrics: \"[::]:10249\"\n  \
         healthz: 127.0.0.1:10256\npackets:\n  podInterfaces:\n  - cali*\n  podsByInterface: true\n  masqueradeAll: true\n"
    );
    assert_eq!(
        notes(&imported),
        [
            "conntrack",
            "featureGates.SomeGate",
            "metricsBindAddress",
            "nftables.syncPeriod",
            "nodeports",
            "oomScoreAdj",
        ]
    );
    let unknown = imported
        .notes
        .iter()
        .find(|n| n.key == "nodeports")
        .unwrap();
    assert!(
        unknown
            .why
            .starts_with("not a key of KubeProxyConfiguration")
    );
}

#[test]
fn other_files_are_refused() {
    for text in [
        "",
        "kind: Pod\napiVersion: v1\n",
        "kind: KubeProxyConfiguration\napiVersion: kubeproxy.config.k8s.io/v1alpha2\n",
        "kind: ConfigMap\ndata: {}\n",
    ] {
        assert!(config::import(text).is_err(), "{text}");
    }
}
