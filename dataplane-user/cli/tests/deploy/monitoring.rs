//! Dashboard and alerts use only metrics that exist: those of docs/metrics.md, which are those of the code.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde::Deserialize;

use super::*;

/// The fields of the Prometheus Operator's `monitoring.coreos.com/v1` that are used.
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodMonitor {
    api_version: String,
    kind: String,
    metadata: ObjectMeta,
    spec: PodMonitorSpec,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodMonitorSpec {
    job_label: String,
    selector: LabelSelector,
    pod_metrics_endpoints: Vec<PodMetricsEndpoint>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodMetricsEndpoint {
    interval: String,
    scheme: String,
    tls_config: TlsConfig,
    authorization: Authorization,
    relabelings: Vec<RelabelConfig>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct TlsConfig {
    insecure_skip_verify: bool,
}

#[derive(Deserialize, Serialize)]
struct Authorization {
    credentials: SecretKey,
}

#[derive(Deserialize, Serialize)]
struct SecretKey {
    name: String,
    key: String,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct RelabelConfig {
    source_labels: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_label: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    regex: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    replacement: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    action: Option<String>,
}

/// The fields of a PrometheusRule that are used.
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PrometheusRule {
    api_version: String,
    kind: String,
    metadata: ObjectMeta,
    spec: PrometheusRuleSpec,
}

#[derive(Deserialize, Serialize)]
struct PrometheusRuleSpec {
    groups: Vec<RuleGroup>,
}

#[derive(Deserialize, Serialize)]
struct RuleGroup {
    name: String,
    rules: Vec<Rule>,
}

#[derive(Deserialize, Serialize)]
struct Rule {
    alert: String,
    expr: String,
    r#for: String,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

/// Returns the words that begin like a metric of this project.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let ours = |word: &&str| word.starts_with("dataplane_") || word.starts_with("istio_tcp_");
    words.filter(ours).map(str::to_owned).collect()
}

/// Returns the first cells of the rows of docs/metrics.md. `dataplane_proxy_*` stands for the rows of docs/proxy.md.
fn documented() -> BTreeSet<String> {
    let rows = read("docs/metrics.md") + &read("docs/proxy.md");
    let cells = rows
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split_once(" |"));
    cells
        .flat_map(|(cell, _)| metrics_in(cell))
        .filter(|name| name != "dataplane_proxy_")
        .collect()
}

/// Returns the name of a histogram for one of its series.
fn family<'a>(name: &'a str, known: &BTreeSet<String>) -> &'a str {
    let histogram = ["_bucket", "_sum", "_count"]
        .iter()
        .find_map(|end| name.strip_suffix(end));
    histogram
        .filter(|histogram| known.contains(*histogram))
        .unwrap_or(name)
}

fn rules() -> Vec<Value> {
    let object = yaml(&read("deploy/kustomize/monitoring/prometheusrule.yaml"));
    object["spec"]["groups"][0]["rules"]
        .as_array()
        .unwrap()
        .clone()
}

#[test]
fn the_page_lists_the_metrics_of_the_code() {
    let code = [
        "admin/src/metrics.rs",
        "admin/src/mesh.rs",
        "proxy/src/metrics.rs",
        "relay/src/metrics.rs",
    ];
    let code = code
        .map(|file| read(&format!("dataplane-user/{file}")))
        .concat();
    let documented = documented();
    for name in &documented {
        // Counters get their suffix when they are written.
        let name = name.strip_suffix("_total").unwrap_or(name);
        assert!(
            code.contains(&format!("\"{name}\"")),
            "docs: the code has no {name}"
        );
    }
    for word in code
        .split('"')
        .skip(1)
        .step_by(2)
        .filter(|word| metrics_in(word).contains(*word))
    {
        let told = documented.contains(word) || documented.contains(&format!("{word}_total"));
        assert!(
            told,
            "the code has {word}, which is not in docs/metrics.md or docs/proxy.md"
        );
    }
}

#[test]
fn dashboard_and_alerts_ask_for_metrics_that_there_are() {
    let documented = documented();
    let dashboard: Value =
        serde_json::from_str(&read("deploy/kustomize/monitoring/dashboard.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let asked = targets.map(|target| target["expr"].as_str().unwrap().to_owned());
    let mut asked: Vec<String> = asked.collect();
    assert!(asked.len() > 20, "{asked:#?}");
    for rule in rules() {
        asked.push(rule["expr"].as_str().unwrap().to_owned());
    }
    for expression in asked {
        let names = metrics_in(&expression);
        assert!(
            !names.is_empty() || expression.starts_with("up{"),
            "{expression}"
        );
        for name in names {
            let name = family(&name, &documented);
            assert!(
                documented.contains(name),
                "{expression}: there is no {name}"
            );
        }
    }
}

/// The chart and the component have the same dashboard, each in a file of its own: Helm warns of symbolic links at each
/// command, and kustomize refuses those that lead elsewhere.
#[test]
fn the_chart_has_the_dashboard() {
    const CHARTS: &str = "deploy/helm/dataplane/dashboard.json";
    let dashboard = read("deploy/kustomize/monitoring/dashboard.json");
    write_if_asked(CHARTS, &dashboard);
    let metadata = fs::symlink_metadata(deploy().join("..").join(CHARTS)).unwrap();
    assert!(metadata.is_file(), "{CHARTS} is no regular file");
    assert!(
        read(CHARTS) == dashboard,
        "{CHARTS} is not the component's dashboard: {WRITE}"
    );
}

/// Every alert has a section with its remedy.
#[test]
fn every_alert_has_its_page() {
    let page = read("docs/alerts.md");
    let headings: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("## Dataplane"))
        .collect();
    let mut names = Vec::new();
    for rule in rules() {
        let name = rule["alert"].as_str().unwrap();
        let link = format!("docs/alerts.md#{}", name.to_lowercase());
        assert_eq!(rule["annotations"]["runbook_url"], link);
        names.push(name.strip_prefix("Dataplane").unwrap().to_owned());
    }
    assert_eq!(
        headings, names,
        "the headings of docs/alerts.md, and the alerts"
    );
}

#[test]
fn alerts_link_to_where_the_page_is() {
    let values = json!({ "monitoring": {
        "enabled": true,
        "runbooks": "https://wiki.example/dataplane",
        "labels": { "release": "prometheus" },
        "interval": "15s",
    } });
    let objects = chart::render("kube-system", &values);
    let rule = &objects["PrometheusRule dataplane"];
    let first = &rule["spec"]["groups"][0]["rules"][0];
    assert_eq!(
        first["annotations"]["runbook_url"],
        "https://wiki.example/dataplane#dataplanedown"
    );
    assert_eq!(rule["metadata"]["labels"]["release"], "prometheus");
    let monitor = &objects["PodMonitor dataplane"];
    assert_eq!(monitor["metadata"]["labels"]["release"], "prometheus");
    assert_eq!(monitor["spec"]["podMetricsEndpoints"][0]["interval"], "15s");
}

/// Prometheus has a token with permission for the metrics, and for nothing else.
#[test]
fn prometheus_may_read_the_metrics_and_nothing_else() {
    let all = components::with("monitoring");
    let endpoint = &all["PodMonitor dataplane"]["spec"]["podMetricsEndpoints"][0];
    assert_eq!(endpoint["scheme"], "https");
    let credentials = &endpoint["authorization"]["credentials"];
    let secret = &all[&format!("Secret {}", credentials["name"].as_str().unwrap())];
    // The API server writes the token there.
    assert_eq!(credentials["key"], "token");
    assert_eq!(secret["type"], "kubernetes.io/service-account-token");
    let account = &secret["metadata"]["annotations"]["kubernetes.io/service-account.name"];
    let binding = &all["ClusterRoleBinding dataplane-metrics"];
    assert_eq!(binding["subjects"][0]["name"], *account);
    let role = binding["roleRef"]["name"].as_str().unwrap();
    assert_eq!(
        all[&format!("ClusterRole {role}")]["rules"],
        json!([{ "nonResourceURLs": ["/metrics"], "verbs": ["get"] }])
    );
}

/// The PodMonitor scrapes the port of the agent's metrics.
#[test]
fn what_is_scraped_is_what_listens() {
    let monitor = yaml(&read("deploy/kustomize/monitoring/podmonitor.yaml"));
    let text = monitor["spec"]["podMetricsEndpoints"].to_string();
    let port = Listeners::default().metrics().unwrap().port();
    assert_eq!(text.matches(&format!(":{port}\"")).count(), 2, "{text}");
}
