//! Additions to the base: kustomize components, and the equivalent values of the chart.

use super::*;

/// Returns the base with a kustomize component: its files, its patches, and the files for its `ConfigMap`.
pub fn with(component: &str) -> Objects {
    let directory = deploy().join("kustomize").join(component);
    let read = |name: &Value| fs::read_to_string(directory.join(name.as_str().unwrap())).unwrap();
    let kustomization = yaml(&read(&"kustomization.yaml".into()));
    assert_eq!(kustomization["kind"], "Component");
    let list = |field: &str| kustomization[field].as_array().cloned().unwrap_or_default();
    let texts: Vec<String> = list("resources").iter().map(read).collect();
    let mut all = base();
    all.extend(objects(texts.iter().map(String::as_str)));
    for patch in list("patches") {
        let target = &patch["target"];
        let (kind, name) = (target["kind"].as_str(), target["name"].as_str());
        let object = all.get_mut(&format!("{} {}", kind.unwrap(), name.unwrap()));
        let object = object.unwrap_or_else(|| panic!("there is no {target}"));
        for change in yaml(patch["patch"].as_str().unwrap()).as_array().unwrap() {
            apply(object, change);
        }
    }
    for generated in list("configMapGenerator") {
        assert_eq!(generated["options"]["disableNameSuffixHash"], true);
        let name = generated["name"].as_str().unwrap();
        let files = generated["files"].as_array().unwrap();
        let data = files
            .iter()
            .map(|file| (file.as_str().unwrap().to_owned(), read(file).into()));
        let object = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": name,
                "namespace": generated["namespace"],
                "labels": generated["options"]["labels"],
            },
            "data": data.collect::<serde_json::Map<_, _>>(),
        });
        all.insert(format!("ConfigMap {name}"), object);
    }
    all
}

/// Applies a change of a JSON patch (RFC 6902). Supports only the operations in use here.
fn apply(object: &mut Value, change: &Value) {
    let path = change["path"].as_str().unwrap();
    let (parent, key) = path.rsplit_once('/').unwrap();
    let parent = object
        .pointer_mut(parent)
        .unwrap_or_else(|| panic!("there is no {parent}"));
    match (change["op"].as_str().unwrap(), parent) {
        ("add", Value::Array(items)) if key == "-" => items.push(change["value"].clone()),
        ("add", Value::Object(fields)) => {
            fields.insert(key.to_owned(), change["value"].clone());
        }
        ("replace", Value::Object(fields)) => {
            let field = fields
                .get_mut(key)
                .unwrap_or_else(|| panic!("there is no {path}"));
            *field = change["value"].clone();
        }
        ("remove", Value::Object(fields)) => {
            fields
                .remove(key)
                .unwrap_or_else(|| panic!("there is no {path}"));
        }
        (op, parent) => panic!("{op} {path} of {parent}"),
    }
}

/// Returns the components, each with the equivalent values of the chart.
fn pairs() -> [(&'static str, Value); 5] {
    [
        ("surge", json!({ "surge": true })),
        ("selinux", json!({ "seLinuxOptions": { "type": "spc_t" } })),
        ("foreign-proxy", json!({ "foreignProxy": true })),
        ("machine-dns", json!({ "machineDns": true })),
        ("monitoring", json!({ "monitoring": { "enabled": true } })),
    ]
}

#[test]
fn the_charts_values_do_what_the_components_do() {
    for (component, values) in pairs() {
        let chart = without_checksum(chart::render("kube-system", &values));
        all_known(&chart);
        let (chart, component) = (meaning(chart), meaning(with(component)));
        assert!(chart.keys().eq(component.keys()), "{:?}", chart.keys());
        for (name, object) in &component {
            assert_eq!(
                chart[name], *object,
                "{values}: {name}: the chart's, and the component's"
            );
        }
    }
}

#[test]
fn kustomize_adds_the_same() {
    let components = pairs().map(|(component, _)| component);
    for component in components.iter().chain(&[
        "mesh",
        "cni",
        "announce",
        "service-entries",
        "routes",
        "startup-taint",
    ]) {
        let overlay = deploy()
            .join("kustomize")
            .join(format!("test-{}", std::process::id()));
        fs::create_dir(&overlay).unwrap();
        let text = format!("resources: [../base]\ncomponents: [../{component}]\n");
        fs::write(overlay.join("kustomization.yaml"), text).unwrap();
        let output = Command::new("kubectl")
            .arg("kustomize")
            .arg(&overlay)
            .output();
        fs::remove_dir_all(&overlay).unwrap();
        let Ok(output) = output else {
            println!("skipped kustomize_adds_the_same: there is no kubectl");
            return;
        };
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{component}: {error}");
        let rendered = objects([str::from_utf8(&output.stdout).unwrap()]);
        assert_eq!(rendered, with(component), "{component}");
    }
}

/// The chart mounts the container runtime's directories if the configuration has `cni`, although it is empty.
#[test]
fn an_agent_with_a_cni_plugin_has_the_runtimes_directories() {
    let pod =
        |objects: &Objects| objects["DaemonSet dataplane"]["spec"]["template"]["spec"].clone();
    for (cni, wanted) in [(json!({}), pod(&with("cni"))), (json!(null), pod(&base()))] {
        let chart = chart::render("kube-system", &json!({ "config": { "cni": cni } }));
        assert_eq!(pod(&chart), wanted, "{cni}");
        all_known(&chart);
    }
    let other = json!({ "config": { "cni": {} }, "cni": { "confDir": "/a", "binDir": "/b" } });
    let volumes = pod(&chart::render("kube-system", &other))["volumes"].to_string();
    assert!(volumes.contains(r#""path":"/a""#), "{volumes}");
    assert!(volumes.contains(r#""path":"/b""#), "{volumes}");
}

/// The agent may change Nodes only if the configuration names a startup taint.
#[test]
fn nodes_may_be_patched_for_a_startup_taint_only() {
    let patches = |role: &Value| {
        let rules = role["rules"].as_array().unwrap();
        let writes = rules
            .iter()
            .filter(|rule| rule["verbs"] == json!(["patch"]));
        let resources: Vec<_> = writes.map(|rule| rule["resources"].clone()).collect();
        resources
    };
    let taint = json!("dataplane.io/not-ready");
    for (mesh, wanted) in [
        (json!({ "startupTaint": taint }), vec![json!(["nodes"])]),
        (json!({ "guard": true }), vec![]),
    ] {
        let chart = chart::render("kube-system", &json!({ "config": { "mesh": mesh } }));
        assert_eq!(patches(&chart["ClusterRole dataplane"]), wanted, "{mesh}");
        all_known(&chart);
    }
    let component = with("startup-taint");
    all_known(&component);
    let role = &component["ClusterRole dataplane-startup-taint"];
    assert_eq!(patches(role), [json!(["nodes"])]);
    let binding = &component["ClusterRoleBinding dataplane-startup-taint"];
    assert_eq!(binding["roleRef"]["name"], "dataplane-startup-taint");
    let of_base = &component["ClusterRoleBinding dataplane"]["subjects"];
    assert_eq!(binding["subjects"], *of_base);
}

#[test]
fn helm_renders_the_same() {
    let mut all = json!({ "config": { "cni": {}, "mesh": { "rules": { "captured": true } } } });
    for (_, values) in pairs() {
        all.as_object_mut()
            .unwrap()
            .extend(values.as_object().unwrap().clone());
    }
    for values in [json!({}), all] {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("values.yaml");
        fs::write(&file, values.to_string()).unwrap();
        let mut helm = Command::new("helm");
        helm.args(["template", "--namespace", "kube-system", "--values"])
            .arg(&file);
        let output = helm
            .arg("dataplane")
            .arg(deploy().join("helm/dataplane"))
            .output();
        let Ok(output) = output else {
            println!("skipped helm_renders_the_same: there is no helm");
            return;
        };
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        let rendered = objects([str::from_utf8(&output.stdout).unwrap()]);
        let ours = chart::render("kube-system", &values);
        let [rendered, ours] = [rendered, ours].map(|it| meaning(without_checksum(it)));
        assert_eq!(rendered, ours, "{values}");
    }
}

/// A pod in the host's network that declares ports keeps the node from running other pods with them, and so its own
/// successor. The agents must be configured to share the node.
#[test]
fn agents_that_take_each_others_place_can_be_on_one_node() {
    let objects = with("surge");
    let spec = &objects["DaemonSet dataplane"]["spec"];
    assert_eq!(
        spec["updateStrategy"]["rollingUpdate"],
        json!({ "maxSurge": 1, "maxUnavailable": 0 })
    );
    assert_eq!(spec["minReadySeconds"], 30);
    let agent = &spec["template"]["spec"]["containers"][0];
    assert!(agent.get("ports").is_none(), "{agent:#}");
    let run = Cli::command().find_subcommand("run").unwrap().clone();
    for (variable, option) in [("DATAPLANE_REPLACE", "replace"), ("DATAPLANE_STAY", "stay")] {
        let set = json!({ "name": variable, "value": "true" });
        assert!(
            agent["env"].as_array().unwrap().contains(&set),
            "{variable}"
        );
        let option = run
            .get_arguments()
            .find(|argument| argument.get_id() == option)
            .unwrap();
        assert_eq!(
            option.get_env().and_then(|name| name.to_str()),
            Some(variable)
        );
    }
}

/// The pod template changes only if the configuration changes, so that only such a change restarts agents.
#[test]
fn a_changed_configuration_restarts_the_agents() {
    let sum = |values: &Value| {
        let objects = chart::render("kube-system", values);
        objects["DaemonSet dataplane"]["spec"]["template"]["metadata"]["annotations"].clone()
    };
    let before = sum(&json!({}));
    assert_eq!(before, sum(&json!({ "surge": true })));
    let after = sum(&json!({ "config": { "onExit": "detach" } }));
    assert_ne!(before, after);
}

/// The chart's clean-up equals the Job, for each named node.
#[test]
fn the_chart_cleans_up_nodes() {
    let long = "ip-10-0-0-1.".repeat(20) + "ec2.internal";
    let nodes = ["worker-1", &long, &format!("{long}.example")];
    let values = json!({ "cleanup": { "nodes": nodes }, "image": { "tag": "0.1.0" } });
    let chart = chart::render("kube-system", &values);
    all_known(&chart);
    let mut jobs: Vec<Value> = chart
        .values()
        .filter(|o| o["kind"] == "Job")
        .cloned()
        .collect();
    assert_eq!(jobs.len(), nodes.len(), "one each: {jobs:#?}");
    let wanted = &objects([&*read("deploy/kustomize/cleanup/job.yaml")])["Job dataplane-cleanup"];
    for job in &mut jobs {
        let name = job["metadata"]["name"].as_str().unwrap();
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        assert!(name.len() <= 63 && name.chars().all(fits), "{name}");
        // Helm creates the Job again at each upgrade, and waits for it.
        let hook = &job["metadata"]["annotations"]["helm.sh/hook"];
        assert_eq!(hook, "post-install,post-upgrade");
        let node = job["spec"]["template"]["spec"]["nodeName"].take();
        assert!(nodes.contains(&node.as_str().unwrap()), "{node}");
        let mut spec = wanted["spec"].clone();
        assert_eq!(spec["template"]["spec"]["nodeName"].take(), "NODE");
        spec.as_object_mut()
            .unwrap()
            .remove("ttlSecondsAfterFinished");
        assert_eq!(job["spec"], spec);
    }
}
