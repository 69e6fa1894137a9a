//! The manifests in `deploy/`: Kubernetes' types know all their fields, the chart renders the objects of the kustomize
//! base, and the files agree with each other.
//!
//! If kubectl is installed, `kubectl kustomize` renders base and components, too. An engine for Go's templates renders
//! the chart, and Helm, too, if it is installed.

mod chart;
mod components;
mod monitoring;
mod unit;
mod values;

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
};

use clap::CommandFactory as _;
use dataplane_cli::Cli;
use k8s_openapi::api::{apps::v1 as apps, batch::v1 as batch, core::v1 as core, rbac::v1 as rbac};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use settings::{Listen, Listeners, MetricsAuth, OnExit, Settings, config};

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

/// Reads a file of the project.
fn read(path: &str) -> String {
    let path = deploy().join("..").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The command that writes the files that these tests compare with the code.
const WRITE: &str = "write it by `DATAPLANE_WRITE=1 cargo test -p dataplane-cli --test deploy`";

/// Writes a file of the project if `DATAPLANE_WRITE=1` asks for it.
fn write_if_asked(path: &str, text: &str) {
    if std::env::var_os("DATAPLANE_WRITE").is_some_and(|value| value == "1") {
        fs::write(deploy().join("..").join(path), text).unwrap();
    }
}

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Objects by kind and name.
type Objects = BTreeMap<String, Value>;

fn objects<'a>(texts: impl IntoIterator<Item = &'a str>) -> Objects {
    let mut objects = Objects::new();
    for document in texts.into_iter().flat_map(|text| text.split("\n---\n")) {
        let object = yaml(document);
        // A document that the chart's values switch off.
        if object.is_null() {
            continue;
        }
        let name = object["metadata"]["name"].as_str();
        let (kind, name) = (object["kind"].as_str().unwrap(), name.unwrap());
        let twice = objects.insert(format!("{kind} {name}"), object.clone());
        assert!(twice.is_none(), "{kind} {name} is there twice");
    }
    objects
}

/// Returns the base as kustomize would combine it. It only has a list of files.
fn base() -> Objects {
    let directory = deploy().join("kustomize/base");
    let read = |name: &str| fs::read_to_string(directory.join(name)).unwrap();
    let kustomization = yaml(&read("kustomization.yaml"));
    let fields: Vec<_> = kustomization.as_object().unwrap().keys().collect();
    assert_eq!(fields, ["apiVersion", "kind", "resources"]);
    let files = kustomization["resources"].as_array().unwrap();
    let texts: Vec<String> = files.iter().map(|f| read(f.as_str().unwrap())).collect();
    objects(texts.iter().map(String::as_str))
}

/// Asserts that Kubernetes knows every field, with the right type: an unknown field is missing when the object is
/// written again.
fn is_known<T: DeserializeOwned + Serialize>(object: &Value) {
    let typed: T = serde_path_to_error::deserialize(object)
        .unwrap_or_else(|error| panic!("{}: {error}", object["kind"]));
    let again = serde_json::to_value(typed).unwrap();
    assert_eq!(
        again, *object,
        "as Kubernetes' types know it, and as it is written"
    );
}

fn all_known(objects: &Objects) {
    for object in objects.values() {
        match object["kind"].as_str().unwrap() {
            "ServiceAccount" => is_known::<core::ServiceAccount>(object),
            "ConfigMap" => is_known::<core::ConfigMap>(object),
            "Secret" => is_known::<core::Secret>(object),
            "ClusterRole" => is_known::<rbac::ClusterRole>(object),
            "ClusterRoleBinding" => is_known::<rbac::ClusterRoleBinding>(object),
            "DaemonSet" => is_known::<apps::DaemonSet>(object),
            "Job" => is_known::<batch::Job>(object),
            "PodMonitor" => is_known::<monitoring::PodMonitor>(object),
            "PrometheusRule" => is_known::<monitoring::PrometheusRule>(object),
            other => panic!("a {other}?"),
        }
    }
}

/// Returns the objects with a parsed configuration, so that its notation does not matter.
fn meaning(mut objects: Objects) -> Objects {
    let config = &mut objects.get_mut("ConfigMap dataplane").unwrap()["data"]["config.yaml"];
    *config = yaml(config.as_str().unwrap());
    objects
}

/// Returns the objects without the checksum by which the chart restarts agents after a change of the configuration.
fn without_checksum(mut objects: Objects) -> Objects {
    let daemon_set = objects.get_mut("DaemonSet dataplane").unwrap();
    let metadata = &mut daemon_set["spec"]["template"]["metadata"];
    let annotations = metadata.as_object_mut().unwrap().remove("annotations");
    let sum = annotations
        .as_ref()
        .and_then(|all| all["checksum/config"].as_str());
    assert_eq!(sum.map(str::len), Some(64), "{annotations:?}");
    objects
}

fn configured(objects: &Objects) -> Settings {
    let text = &objects["ConfigMap dataplane"]["data"]["config.yaml"];
    config::parse(Path::new("config.yaml"), text.as_str().unwrap())
        .unwrap_or_else(|errors| panic!("{errors}"))
}

#[test]
fn kubernetes_knows_every_field() {
    all_known(&base());
    all_known(&chart::render("kube-system", &json!({})));
}

/// Mounts below the cgroups are read-only, too, if the API has a field for it.
#[test]
fn the_cgroups_are_read_only_with_what_is_mounted_below() {
    let field = |version: &str| {
        let objects = chart::render_for(
            version,
            "kube-system",
            &json!({"cleanup": {"nodes": ["a"]}}),
        );
        let mounts = objects.values().filter_map(|object| {
            object["spec"]["template"]["spec"]["containers"][0]["volumeMounts"].as_array()
        });
        let cgroups = mounts.flatten().filter(|mount| mount["name"] == "cgroup");
        let cgroups = cgroups.inspect(|mount| assert_eq!(mount["readOnly"], true));
        cgroups
            .map(|mount| mount["recursiveReadOnly"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(field("v1.30.1"), [json!("IfPossible"), json!("IfPossible")]);
    assert_eq!(field("v1.29.9"), [Value::Null, Value::Null]);
}

/// The clean-up runs on the nodes of the agent, with the agent's mounts, and with the journals of take-overs, by which it
/// refuses.
#[test]
fn the_cleanup_is_of_the_same_places() {
    let jobs = objects([&*read("deploy/kustomize/cleanup/job.yaml")]);
    all_known(&jobs);
    let base = components::with("cni");
    let job = &jobs["Job dataplane-cleanup"]["spec"]["template"]["spec"];
    let agent = &base["DaemonSet dataplane"]["spec"]["template"]["spec"];
    let (cleanup, run) = (&job["containers"][0], &agent["containers"][0]);
    assert_eq!(cleanup["image"], run["image"]);
    assert_eq!(cleanup["securityContext"], run["securityContext"]);
    let of_agent = |named: &&Value| named["name"] != "takeover";
    let directory = json!({ "path": "/var/lib/dataplane/takeover", "type": "DirectoryOrCreate" });
    let volumes = job["volumes"].as_array().unwrap();
    assert!(volumes.iter().any(|volume| volume["hostPath"] == directory));
    for volume in volumes.iter().filter(of_agent) {
        assert!(
            agent["volumes"].as_array().unwrap().contains(volume),
            "{volume:#}"
        );
    }
    let mounts = cleanup["volumeMounts"].as_array().unwrap();
    assert!(
        mounts
            .iter()
            .any(|mount| mount["mountPath"] == directory["path"])
    );
    for mount in mounts.iter().filter(of_agent) {
        assert!(
            run["volumeMounts"].as_array().unwrap().contains(mount),
            "{mount:#}"
        );
    }
    let kernel = configured(&base).kernel;
    let wanted = json!([
        "cleanup",
        format!("--bpffs={}", kernel.bpffs.unwrap().display()),
        format!("--cgroup={}", kernel.cgroup.unwrap().display()),
    ]);
    assert_eq!(cleanup["args"], wanted);
}

#[test]
#[should_panic(expected = "as Kubernetes' types know it")]
fn a_misspelt_field_would_be_found() {
    let mut objects = base();
    let pod = &mut objects.get_mut("DaemonSet dataplane").unwrap()["spec"]["template"]["spec"];
    pod["hostNetworking"] = true.into();
    all_known(&objects);
}

#[test]
fn kustomize_puts_the_same_together() {
    let directory = deploy().join("kustomize/base");
    let output = Command::new("kubectl")
        .arg("kustomize")
        .arg(directory)
        .output();
    let Ok(output) = output else {
        println!("skipped kustomize_puts_the_same_together: there is no kubectl");
        return;
    };
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(objects([str::from_utf8(&output.stdout).unwrap()]), base());
}

#[test]
fn the_chart_renders_what_the_base_is() {
    let chart = meaning(without_checksum(chart::render("kube-system", &json!({}))));
    let base = meaning(base());
    assert!(chart.keys().eq(base.keys()), "{:?}", chart.keys());
    for (name, object) in &base {
        assert_eq!(chart[name], *object, "{name}: the chart's, and the base's");
    }
}

#[test]
fn the_charts_values_arrive() {
    let values = json!({
        "image": { "repository": "registry.example/dataplane", "tag": "1.2.3", "pullPolicy": "Always" },
        "imagePullSecrets": [{ "name": "secret" }],
        "config": { "source": { "kubernetes": { "apiServer": "https://192.0.2.10:6443" } } },
        "nodeSelector": { "dataplane": "on" },
        "tolerations": [],
        "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{ "matchExpressions": [{ "key": "dataplane", "operator": "Exists" }] }],
        } } },
        "terminationGracePeriodSeconds": 60,
        "resources": { "requests": null, "limits": { "memory": "2Gi" } },
        "updateStrategy": { "type": "OnDelete", "rollingUpdate": null },
    });
    let objects = chart::render("mesh", &values);
    let kubernetes = configured(&objects).source.kubernetes.unwrap();
    assert_eq!(
        kubernetes.api_server.as_deref(),
        Some("https://192.0.2.10:6443")
    );
    let spec = &objects["DaemonSet dataplane"]["spec"];
    let pod = &spec["template"]["spec"];
    let agent = &pod["containers"][0];
    assert_eq!(agent["image"], "registry.example/dataplane:1.2.3");
    assert_eq!(agent["imagePullPolicy"], "Always");
    assert_eq!(agent["resources"]["limits"]["memory"], "2Gi");
    assert_eq!(
        pod["nodeSelector"],
        json!({ "kubernetes.io/os": "linux", "dataplane": "on" })
    );
    assert!(pod.get("tolerations").is_none());
    assert_eq!(pod["affinity"], values["affinity"]);
    assert_eq!(pod["terminationGracePeriodSeconds"], 60);
    all_known(&objects);
    assert_eq!(spec["updateStrategy"]["type"], "OnDelete");
    let account = &objects["ServiceAccount dataplane"];
    assert_eq!(account["imagePullSecrets"][0]["name"], "secret");
    assert_eq!(account["metadata"]["namespace"], "mesh");
    let subject = &objects["ClusterRoleBinding dataplane"]["subjects"][0];
    assert_eq!(subject["namespace"], "mesh");
}

/// Returns the permissions of a role: to read, to ask about clients, and no other.
fn allowed(role: &Value) -> Vec<String> {
    let mut may = Vec::new();
    for rule in role["rules"].as_array().unwrap() {
        let asks = ["tokenreviews", "subjectaccessreviews"].map(|kind| json!([kind]));
        let verbs = if asks.contains(&rule["resources"]) {
            json!(["create"])
        } else {
            json!(["get", "list", "watch"])
        };
        assert_eq!(rule["verbs"], verbs);
        for resource in rule["resources"].as_array().unwrap() {
            may.push(format!(
                "{}/{}",
                rule["apiGroups"][0].as_str().unwrap(),
                resource.as_str().unwrap()
            ));
        }
    }
    may
}

/// The agent may read namespaces only if there is a mesh.
#[test]
fn a_mesh_may_read_namespaces_too() {
    let values = json!({ "config": { "mesh": { "rules": { "captured": true } } } });
    let chart = chart::render("kube-system", &values);
    assert!(configured(&chart).mesh.is_some());
    let may = allowed(&chart["ClusterRole dataplane"]);
    assert!(may.contains(&"/namespaces".to_owned()), "{may:?}");
    // DNS for all pods needs namespaces, too, because the annotations of pods count.
    let dns = json!({ "config": { "dns": { "capture": "all" } } });
    let of_dns = chart::render("kube-system", &dns);
    let policies = ["authorizationpolicies", "peerauthentications"];
    let policies = policies.map(|of| format!("security.istio.io/{of}"));
    let gateways =
        ["gateways", "gatewayclasses"].map(|of| format!("gateway.networking.k8s.io/{of}"));
    let policies = [&policies[..], &gateways].concat();
    let mut others = may.clone();
    others.retain(|of| !policies.contains(of));
    assert_eq!(others, allowed(&of_dns["ClusterRole dataplane"]));

    let directory = deploy().join("kustomize/mesh");
    let read = |name: &str| fs::read_to_string(directory.join(name)).unwrap();
    assert_eq!(
        yaml(&read("kustomization.yaml"))["resources"],
        json!(["rbac.yaml"])
    );
    // The agent may also write the settings of pods' network namespaces.
    let pod =
        |objects: &Objects| objects["DaemonSet dataplane"]["spec"]["template"]["spec"].clone();
    assert_eq!(pod(&chart), pod(&components::with("mesh")));
    let mounts = pod(&chart)["containers"][0]["volumeMounts"].to_string();
    assert!(mounts.contains("/host/proc/sys/net"), "{mounts}");
    all_known(&chart);
    let component = objects([&*read("rbac.yaml")]);
    all_known(&component);
    let own = [&["/namespaces".to_owned()], &policies[..]].concat();
    assert!(own.iter().all(|of| may.contains(of)), "{may:?}");
    assert_eq!(allowed(&component["ClusterRole dataplane-mesh"]), own);
    let binding = &component["ClusterRoleBinding dataplane-mesh"];
    assert_eq!(binding["roleRef"]["name"], "dataplane-mesh");
    let of_base = &base()["ClusterRoleBinding dataplane"]["subjects"];
    assert_eq!(binding["subjects"], *of_base);
}

/// The agent may patch Pods only if the configuration has `mesh.announce`: with `false`, it withdraws its annotations.
#[test]
fn pods_may_be_patched_for_their_annotation_only() {
    let written = json!({ "apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"] });
    for (mesh, is_asked) in [
        (json!(null), false),
        (json!({ "guard": true }), false),
        (json!({ "announce": true }), true),
        (json!({ "announce": false }), true),
    ] {
        let chart = chart::render("kube-system", &json!({ "config": { "mesh": mesh } }));
        all_known(&chart);
        let rules = chart["ClusterRole dataplane"]["rules"].as_array().unwrap();
        assert_eq!(rules.contains(&written), is_asked, "{mesh}");
        let verbs = rules.iter().map(|rule| rule["verbs"].to_string());
        let writes = verbs.filter(|verbs| verbs.contains("patch")).count();
        assert_eq!(writes, usize::from(is_asked), "{mesh}");
    }
    let component = components::with("announce");
    all_known(&component);
    let role = &component["ClusterRole dataplane-announce"];
    assert_eq!(role["rules"], json!([written]));
    let binding = &component["ClusterRoleBinding dataplane-announce"];
    assert_eq!(binding["roleRef"]["name"], "dataplane-announce");
    let of_base = &component["ClusterRoleBinding dataplane"]["subjects"];
    assert_eq!(binding["subjects"], *of_base);
}

/// The agent may read ServiceEntries and routes only if the configuration asks for them.
#[test]
fn entries_and_routes_may_be_read_if_they_are_asked_for() {
    let istio = ["serviceentries", "workloadentries"];
    let gateway = [
        "tcproutes",
        "tlsroutes",
        "httproutes",
        "grpcroutes",
        "referencegrants",
    ];
    for (key, component, group, resources) in [
        (
            "serviceEntries",
            "service-entries",
            "networking.istio.io",
            &istio[..],
        ),
        ("routes", "routes", "gateway.networking.k8s.io", &gateway),
    ] {
        let wanted: Vec<_> = resources.iter().map(|of| format!("{group}/{of}")).collect();
        let values = json!({ "config": { "source": { "kubernetes": { key: true } } } });
        let chart = chart::render("kube-system", &values);
        let source = configured(&chart).source.kubernetes.unwrap();
        assert_eq!(
            [source.service_entries, source.routes],
            [key == "serviceEntries", key == "routes"]
        );
        let may = allowed(&chart["ClusterRole dataplane"]);
        assert!(wanted.iter().all(|of| may.contains(of)), "{may:?}");
        all_known(&chart);
        let name = format!("dataplane-{component}");
        let component = components::with(component);
        all_known(&component);
        assert_eq!(allowed(&component[&*format!("ClusterRole {name}")]), wanted);
        let binding = &component[&*format!("ClusterRoleBinding {name}")];
        assert_eq!(binding["roleRef"]["name"], *name);
        let of_base = &component["ClusterRoleBinding dataplane"]["subjects"];
        assert_eq!(binding["subjects"], *of_base);
    }
}

#[test]
fn it_may_read_what_is_watched_and_write_nothing() {
    let base = base();
    assert_eq!(
        allowed(&base["ClusterRole dataplane"]),
        [
            "/services",
            "/nodes",
            "/pods",
            "discovery.k8s.io/endpointslices",
            "authentication.k8s.io/tokenreviews",
            "authorization.k8s.io/subjectaccessreviews",
        ]
    );
    let binding = &base["ClusterRoleBinding dataplane"];
    assert_eq!(binding["roleRef"]["name"], "dataplane");
    let pod = &base["DaemonSet dataplane"]["spec"]["template"]["spec"];
    assert_eq!(binding["subjects"][0]["name"], pod["serviceAccountName"]);
}

/// The metrics are at the node's own address, in both families, for clients that the API server knows. If the operator
/// configures another address, the DaemonSet does not override it.
#[test]
fn the_metrics_are_not_for_everybody() {
    let base = base();
    let agent = |objects: &Objects| {
        objects["DaemonSet dataplane"]["spec"]["template"]["spec"]["containers"][0].clone()
    };
    let told = |agent: &Value| -> Vec<String> {
        let args = agent["args"].as_array().unwrap();
        args.iter()
            .map(|it| it.as_str().unwrap().to_owned())
            .collect()
    };
    let env = agent(&base)["env"].to_string();
    assert!(env.contains("status.hostIP"), "{env}");
    for ip in ["192.0.2.1", "2001:db8::1"] {
        let mut args = told(&agent(&base));
        for arg in &mut args {
            *arg = arg.replace("$(NODE_IP)", ip);
        }
        args.insert(0, "dataplane".to_owned());
        let text = &base["ConfigMap dataplane"]["data"]["config.yaml"];
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config.yaml");
        fs::write(&file, text.as_str().unwrap()).unwrap();
        args.extend(["--config".to_owned(), file.display().to_string()]);
        let parsed = dataplane_cli::parse(args.into_iter().map(Into::into));
        let settings = format!("{:?}", parsed.unwrap_or_else(|error| panic!("{error:?}")));
        let at = SocketAddr::new(ip.parse().unwrap(), 15020);
        assert!(settings.contains(&format!("{at}")), "{settings}");
        let listeners = Listeners {
            metrics: Some(Listen(Some(at))),
            ..configured(&base).listen
        };
        assert_eq!(listeners.metrics_auth(true), MetricsAuth::Kubernetes);
        assert_eq!(listeners.admin(), None);
    }
    let values = json!({ "config": { "listen": { "metrics": "off" } } });
    let chart = chart::render("kube-system", &values);
    assert_eq!(told(&agent(&chart)), ["run"]);
    assert_eq!(configured(&chart).listen.metrics(), None);
}

/// Ports, paths and mounts occur twice: for Kubernetes and for the agent.
#[test]
fn the_daemon_set_and_the_configuration_agree() {
    let base = base();
    let config = configured(&base);
    assert!(config.source.kubernetes.is_some());
    let spec = &base["DaemonSet dataplane"]["spec"];
    let pod = &spec["template"]["spec"];
    let agent = &pod["containers"][0];

    let health = config.listen.health.and_then(|listen| listen.0).unwrap();
    for (probe, path) in [
        ("startupProbe", "/healthz/live"),
        ("livenessProbe", "/healthz/live"),
        ("readinessProbe", "/healthz/ready"),
    ] {
        let get = &agent[probe]["httpGet"];
        assert_eq!(get["path"], path);
        assert_eq!(get["port"], health.port());
        assert_eq!(get["host"], health.ip().to_string());
    }

    let mounted = |path: &Path, writable: bool| {
        let mounts = agent["volumeMounts"].as_array().unwrap();
        mounts.iter().any(|mount| {
            path.starts_with(mount["mountPath"].as_str().unwrap())
                && writable != (mount["readOnly"] == true)
        })
    };
    assert!(mounted(config.kernel.bpffs.as_deref().unwrap(), true));
    assert!(mounted(config.kernel.cgroup.as_deref().unwrap(), false));
    // The default path of the socket.
    assert!(config.listen.socket.is_none() && mounted(Path::new("/run/dataplane"), true));
    let env = agent["env"].as_array().unwrap();
    let file = env
        .iter()
        .find(|e| e["name"] == "DATAPLANE_CONFIG")
        .unwrap();
    assert!(mounted(Path::new(file["value"].as_str().unwrap()), false));

    // The agent leaves programs and tables when it ends (`--on-exit keep` is the default), so its replacement
    // interrupts no connection.
    assert!(config.on_exit.is_none_or(|it| it == OnExit::Keep));
    assert_eq!(spec["updateStrategy"]["type"], "RollingUpdate");
    assert_eq!(pod["priorityClassName"], "system-node-critical");
    assert_eq!(pod["hostNetwork"], true);
    assert_eq!(pod["tolerations"], json!([{ "operator": "Exists" }]));
    assert!(agent["securityContext"].get("privileged").is_none());
}
