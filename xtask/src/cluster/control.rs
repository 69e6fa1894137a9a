//! The control plane: etcd, API server, controllers, scheduler, DNS.

use std::{
    env,
    fs::{self, File},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use super::{
    cgroups::{self, CGROUP},
    identity::{ISSUER, file},
    kubectl::Kubectl,
    place::{self, CONTROL, CONTROL_V4, DNS_SERVICE, POD_RANGES, SERVICE_RANGES},
    programs::Programs,
};
use crate::{
    command::{output, shown},
    judges,
};

/// Address of etcd, in the control plane's namespace.
pub const ETCD: &str = "127.0.0.1:2379";
/// The API server's audit log: the agent's requests, one a line.
pub const AUDIT_LOG: &str = "audit.log";

/// A program of the control plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Etcd,
    ApiServer,
    Controllers,
    Scheduler,
    Dns,
    /// The controllers that make EndpointSlices, and the service accounts that Pods need. Other controllers do not run,
    /// so nodes that are only objects stay.
    Slices,
    Istiod,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::Controllers | Self::Slices => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
            Self::Dns => "dns",
            Self::Istiod => "istiod",
        }
    }

    fn pid_file(self) -> PathBuf {
        file(&format!("{}.pid", self.name()))
    }

    /// Returns whether the program runs.
    pub fn runs(self) -> bool {
        fs::read_to_string(self.pid_file()).is_ok_and(|pid| runs(pid.trim()))
    }

    /// Kills the program with SIGKILL and waits until it has ended.
    pub fn kill(self) -> Result<()> {
        let path = self.pid_file();
        let pid =
            fs::read_to_string(&path).with_context(|| format!("{} does not run", self.name()))?;
        kill(Pid::from_raw(pid.trim().parse()?), Signal::SIGKILL)
            .with_context(|| format!("cannot kill {}", self.name()))?;
        let limit = Instant::now() + Duration::from_secs(10);
        while runs(pid.trim()) {
            if Instant::now() > limit {
                bail!("{} does not end", self.name());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Starts the program.
    pub fn start(self, programs: &Programs) -> Result<()> {
        let (program, arguments) = match self {
            Self::Etcd => (PathBuf::from("etcd"), etcd()?),
            Self::ApiServer => (programs.kubernetes(self.name()), api_server()?),
            Self::Controllers => (programs.kubernetes(self.name()), controllers()),
            Self::Scheduler => (programs.kubernetes(self.name()), scheduler()),
            Self::Slices => (programs.kubernetes(self.name()), slices()),
            Self::Istiod => (judges::directory("istio").join("pilot-discovery"), istiod()),
            Self::Dns => (
                env::current_exe().context("cannot find this program's own path")?,
                dns(programs),
            ),
        };
        let log = file(&format!("{}.log", self.name()));
        let log = File::options().create(true).append(true).open(&log);
        let log = log.context("cannot open a log")?;
        let mut command = cgroups::joining(&Path::new(CGROUP).join(CONTROL))?;
        command
            .arg("nsenter")
            .arg(format!("--net={}", place::netns(CONTROL).display()))
            .arg(program)
            .args(arguments)
            .envs(
                if self == Self::Istiod { ISTIOD } else { &[] }
                    .iter()
                    .copied(),
            )
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // The program continues after this process ends, and Ctrl-C in the terminal does not reach it.
            .process_group(0);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}", shown(&command)))?;
        let path = self.pid_file();
        fs::write(&path, child.id().to_string())
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Returns whether a process runs or still holds resources: its threads end one by one. A zombie without other threads
/// holds none.
fn runs(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let Some((_, rest)) = stat.rsplit_once(") ") else {
        return false;
    };
    let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    !rest.starts_with(['Z', 'X']) || threads > 1
}

/// Starts all programs, and waits for the API server.
pub fn start(programs: &Programs, kubectl: &Kubectl) -> Result<()> {
    cgroups::create(&Path::new(CGROUP).join(CONTROL))?;
    Part::Etcd.start(programs)?;
    Part::ApiServer.start(programs)?;
    wait_for_api_server(kubectl)?;
    Part::Controllers.start(programs)?;
    Part::Scheduler.start(programs)?;
    Part::Dns.start(programs)?;
    kubectl.apply(&dns_service())
}

/// Starts the programs that store objects and make EndpointSlices. Does not start programs that need nodes.
pub fn start_without_nodes(programs: &Programs, kubectl: &Kubectl) -> Result<()> {
    cgroups::create(&Path::new(CGROUP).join(CONTROL))?;
    Part::Etcd.start(programs)?;
    Part::ApiServer.start(programs)?;
    wait_for_api_server(kubectl)?;
    Part::Slices.start(programs)
}

/// Waits until the API server is ready.
pub fn wait_for_api_server(kubectl: &Kubectl) -> Result<()> {
    let limit = Instant::now() + Duration::from_mins(3);
    loop {
        match kubectl.run(&["get", "--raw", "/readyz"]) {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() > limit || !Part::ApiServer.runs() => {
                let log = file("kube-apiserver.log");
                return Err(error.context(format!(
                    "the API server has ended, or is not ready after three minutes; its log: {}",
                    log.display()
                )));
            }
            Err(_) => thread::sleep(Duration::from_millis(300)),
        }
    }
}

fn option(name: &str, value: impl AsRef<Path>) -> String {
    format!("--{name}={}", value.as_ref().display())
}

fn etcd() -> Result<Vec<String>> {
    let help = output(Command::new("etcd").arg("--help"))?;
    // As kubeadm sets it. Newer versions of etcd do not call the option experimental any more.
    let progress = if help.contains("--experimental-watch-progress-notify-interval") {
        "experimental-watch-progress-notify-interval"
    } else {
        "watch-progress-notify-interval"
    };
    let client = format!("http://{ETCD}");
    let peer = "http://127.0.0.1:2380";
    Ok(vec![
        "--name=e".into(),
        option("data-dir", file("etcd")),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=e={peer}"),
        "--log-level=warn".into(),
        format!("--{progress}=5s"),
        // The data need not survive a crash of the machine.
        "--unsafe-no-fsync".into(),
    ])
}

fn api_server() -> Result<Vec<String>> {
    let policy = file("audit.yaml");
    let watched = json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            { "level": "Metadata", "users": ["dataplane", "system:serviceaccount:kube-system:dataplane"] },
            { "level": "None" },
        ],
    });
    fs::write(&policy, watched.to_string())
        .with_context(|| format!("cannot write {}", policy.display()))?;
    Ok(vec![
        format!("--etcd-servers=http://{ETCD}"),
        format!("--bind-address={CONTROL_V4}"),
        format!("--advertise-address={CONTROL_V4}"),
        "--secure-port=6443".into(),
        format!("--service-cluster-ip-range={}", SERVICE_RANGES.join(",")),
        format!("--service-account-issuer={ISSUER}"),
        option("service-account-key-file", file("sa.pub")),
        option("service-account-signing-key-file", file("sa.key")),
        option("tls-cert-file", file("api.crt")),
        option("tls-private-key-file", file("api.key")),
        option("client-ca-file", file("ca.crt")),
        "--authorization-mode=Node,RBAC".into(),
        "--allow-privileged=true".into(),
        "--enable-admission-plugins=NodeRestriction".into(),
        option("kubelet-client-certificate", file("kubelet-client.crt")),
        option("kubelet-client-key", file("kubelet-client.key")),
        "--kubelet-preferred-address-types=InternalIP".into(),
        option("requestheader-client-ca-file", file("ca.crt")),
        "--requestheader-allowed-names=front-proxy".into(),
        "--requestheader-username-headers=X-Remote-User".into(),
        "--requestheader-group-headers=X-Remote-Group".into(),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".into(),
        option("proxy-client-cert-file", file("front-proxy.crt")),
        option("proxy-client-key-file", file("front-proxy.key")),
        option("audit-policy-file", policy),
        option("audit-log-path", file(AUDIT_LOG)),
    ])
}

/// Returns the options for a component's kubeconfig, with which the component also authenticates its clients.
fn configs(name: &str) -> Vec<String> {
    let config = file(&format!("{name}.conf"));
    [
        "kubeconfig",
        "authentication-kubeconfig",
        "authorization-kubeconfig",
    ]
    .map(|flag| option(flag, &config))
    .to_vec()
}

fn controllers() -> Vec<String> {
    let mut arguments = configs("controllers");
    arguments.extend([
        "--bind-address=127.0.0.1".into(),
        option("service-account-private-key-file", file("sa.key")),
        option("root-ca-file", file("ca.crt")),
        "--use-service-account-credentials=true".into(),
        "--leader-elect=false".into(),
        "--kube-api-qps=200".into(),
        "--kube-api-burst=400".into(),
        format!("--cluster-cidr={}", POD_RANGES.join(",")),
        format!("--service-cluster-ip-range={}", SERVICE_RANGES.join(",")),
        // Each node's CNI configuration contains the addresses of its pods, so no controller allocates them.
        "--allocate-node-cidrs=false".into(),
        option("flex-volume-plugin-dir", file("flex")),
        // Be patient with nodes: a compilation may use both processors of a machine.
        "--node-monitor-grace-period=5m".into(),
    ]);
    arguments
}

fn scheduler() -> Vec<String> {
    let mut arguments = configs("scheduler");
    arguments.extend([
        "--bind-address=127.0.0.1".into(),
        "--leader-elect=false".into(),
    ]);
    arguments
}

fn slices() -> Vec<String> {
    let mut arguments = controllers();
    arguments.push("--controllers=endpointslice-controller,serviceaccount-controller".into());
    arguments
}

/// istiod as it serves ztunnels, without the parts that need webhooks or other replicas.
const ISTIOD: &[(&str, &str)] = &[
    ("PILOT_ENABLE_AMBIENT", "true"),
    ("AMBIENT_ENABLE_DRY_RUN_AUTHORIZATION_POLICY", "true"),
    ("PILOT_ENABLE_IP_AUTOALLOCATE", "true"),
    ("ENABLE_LEADER_ELECTION", "false"),
    ("CA_TRUSTED_NODE_ACCOUNTS", "istio-system/dataplane"),
    ("VALIDATION_WEBHOOK_CONFIG_NAME", ""),
    ("INJECTION_WEBHOOK_CONFIG_NAME", ""),
    ("POD_NAMESPACE", "istio-system"),
    ("POD_NAME", "istiod"),
];

fn istiod() -> Vec<String> {
    vec![
        "discovery".into(),
        option("kubeconfig", file("admin.conf")),
        "--grpcAddr=127.0.0.1:15010".into(),
        "--httpAddr=127.0.0.1:8080".into(),
        "--monitoringAddr=127.0.0.1:15014".into(),
        "--httpsAddr=".into(),
        "--secureGRPCAddr=127.0.0.1:15012".into(),
    ]
}

fn dns(programs: &Programs) -> Vec<String> {
    vec![
        "cluster".into(),
        "dns".into(),
        option("kubernetes", &programs.kubernetes),
    ]
}

/// Returns the Service of the cluster's DNS. It has no selector: DNS runs beside the API server, and pods reach it
/// through the service proxy.
fn dns_service() -> serde_json::Value {
    let ports = [("dns", "UDP"), ("dns-tcp", "TCP")];
    let ports =
        ports.map(|(name, protocol)| json!({ "name": name, "port": 53, "protocol": protocol }));
    let labels = json!({ "k8s-app": "kube-dns", "kubernetes.io/service-name": "kube-dns" });
    json!({ "apiVersion": "v1", "kind": "List", "items": [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": "kube-dns", "namespace": "kube-system", "labels": labels },
            "spec": { "clusterIP": DNS_SERVICE, "ports": ports },
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": { "name": "kube-dns", "namespace": "kube-system", "labels": labels },
            "addressType": "IPv4",
            "ports": ports,
            "endpoints": [{ "addresses": [CONTROL_V4.to_string()], "conditions": { "ready": true } }],
        },
    ] })
}
