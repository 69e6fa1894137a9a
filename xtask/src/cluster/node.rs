//! A node: containerd and a kubelet in namespaces and cgroups of their own.
//!
//! [`start`] makes the namespaces. The node's first process is this program again ([`main`]). It mounts the node's file
//! systems, and starts containerd and the kubelet.

use std::{
    env,
    fs::{self, File},
    os::unix::{fs::symlink, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    sys::{
        signal::{Signal, kill},
        wait::{WaitStatus, waitpid},
    },
    unistd::{Pid, sethostname},
};
use serde_json::json;

use super::{
    cgroups, identity, images,
    place::{self, DNS_SERVICE, Node, SYSTEM},
    programs::Programs,
};
use crate::command::{check, shown};

/// The node's directory, as the node sees it. Mounts over the machine's directories do not hide it.
const HOME: &str = "/run/node";
/// The mount point of the node's cgroup v2 hierarchy on a machine that also has hierarchies of cgroup v1.
const UNIFIED: &str = "/sys/fs/cgroup/unified";

/// The kubelet's cgroup on a node, named as systemd names its unit's: the agent knows probes by it. cgroup v2 allows
/// processes in leaves only, so it is beside the cgroups of pods.
const KUBELET: &str = "kubelet.service";

/// Arguments of the node's first process.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    name: String,
    /// The directory with Kubernetes' programs
    #[arg(long)]
    kubernetes: PathBuf,
    /// The directory with CNI plug-ins
    #[arg(long)]
    cni: PathBuf,
    /// Have CNI's plug-in `portmap` serve host ports
    #[arg(long)]
    portmap: bool,
}

/// Returns whether the machine also has hierarchies of cgroup v1.
pub fn hybrid() -> Result<bool> {
    Ok(cgroups::hierarchies()?
        .iter()
        .any(|one| !one.controllers.is_empty()))
}

/// Returns the mount point of cgroup v2 on a node.
pub fn unified_mount() -> Result<&'static str> {
    Ok(if hybrid()? { UNIFIED } else { "/sys/fs/cgroup" })
}

/// Starts a node. The node is ready some seconds later.
pub fn start(programs: &Programs, node: Node, portmap: bool) -> Result<()> {
    let directory = node.directory();
    for part in [
        "cni",
        "cni-bin",
        "lib",
        "log",
        "containerd",
        "kubelet",
        "settings",
    ] {
        let part = directory.join(part);
        fs::create_dir_all(&part).with_context(|| format!("cannot create {}", part.display()))?;
    }
    link_plugins(programs, &directory.join("cni-bin"))?;
    configure(node, portmap)?;
    cgroups::create(&node.cgroup(SYSTEM))?;

    let own = env::current_exe().context("cannot find this program's own path")?;
    let log = File::create(directory.join("init.log")).context("cannot create a log")?;
    let mut command = cgroups::joining(&node.cgroup(SYSTEM))?;
    command
        .arg("nsenter")
        .arg(format!("--net={}", place::netns(&node.name()).display()))
        .args(["unshare", "--mount", "--pid", "--uts"])
        .args([
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--propagation=private",
        ])
        .arg(own)
        .args(["cluster", "node", &node.name()])
        .arg(format!("--kubernetes={}", programs.kubernetes.display()))
        .arg(format!("--cni={}", programs.cni.display()))
        .args(portmap.then_some("--portmap"))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0);
    let child = command
        .spawn()
        .with_context(|| format!("cannot start {}", shown(&command)))?;
    let limit = Instant::now() + Duration::from_secs(20);
    // `unshare` forks: its child is the node's first process.
    let init = loop {
        if let Some(init) = first_child(child.id()) {
            break init;
        }
        if Instant::now() > limit {
            let log = directory.join("init.log");
            bail!("node {} does not start; see {}", node.name(), log.display());
        }
        thread::sleep(Duration::from_millis(20));
    };
    node.note_init(init)
}

/// Returns the directories of CNI's configurations and plug-ins, as the node sees them.
pub fn cni_directories() -> [String; 2] {
    ["cni", "cni-bin"].map(|name| format!("{HOME}/{name}"))
}

/// Links the CNI plug-ins into the node's own directory, to which an agent may add one.
fn link_plugins(programs: &Programs, directory: &Path) -> Result<()> {
    let from = &programs.cni;
    let cannot = || format!("cannot link the plug-ins in {}", from.display());
    for plugin in fs::read_dir(from).with_context(cannot)? {
        let plugin = plugin.with_context(cannot)?;
        symlink(plugin.path(), directory.join(plugin.file_name())).with_context(cannot)?;
    }
    Ok(())
}

/// Starts a program that a [`Node::command`] runs. Its output goes to the end of this log in the node's directory.
pub fn spawn(node: Node, command: &mut Command, log: &str) -> Result<Child> {
    let log = File::options()
        .create(true)
        .append(true)
        .open(node.directory().join(log))
        .context("cannot open a log")?;
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot start {}", shown(command)))
}

/// Ends the program that a [`Node::command`] runs, by a signal, and waits until it has ended.
pub fn end(child: &mut Child, signal: Signal) -> Result<()> {
    // The child is `nsenter`, and the program is the child of `nsenter`.
    let Some(pid) = first_child(child.id()) else {
        return Ok(());
    };
    kill(Pid::from_raw(pid.cast_signed()), signal).context("cannot end a program of a node")?;
    let limit = Instant::now() + Duration::from_secs(20);
    while child.try_wait()?.is_none() {
        if Instant::now() > limit {
            bail!("process {pid} does not end");
        }
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Returns the first child of a process.
pub fn first_child(pid: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

fn write(path: &Path, value: &serde_json::Value) -> Result<()> {
    // JSON is valid YAML.
    fs::write(path, serde_json::to_string_pretty(value)?)
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Writes the configurations of kubelet, containerd and CNI.
fn configure(node: Node, portmap: bool) -> Result<()> {
    let directory = node.directory();
    let file = |name: &str| identity::file(&format!("{}.{name}", node.name()));
    let kubelet = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.ipv4(),
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": identity::file("ca.crt") },
        },
        "authorization": { "mode": "Webhook" },
        "tlsCertFile": file("crt"),
        "tlsPrivateKeyFile": file("key"),
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": false,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "volumePluginDir": format!("{HOME}/volumes"),
        "failSwapOn": false,
        "enforceNodeAllocatable": [],
        "clusterDNS": [DNS_SERVICE],
        "clusterDomain": "cluster.local",
        // The machine's resolver does not serve the cluster.
        "resolvConf": "",
        "evictionHard": { "memory.available": "100Mi" },
        "imageGCHighThresholdPercent": 99,
        "oomScoreAdj": 0,
    });
    write(&directory.join("kubelet.yaml"), &kubelet)?;

    let [conf_dir, bin_dir] = cni_directories();
    // containerd's configuration is TOML.
    let containerd = format!(
        r#"version = 2
root = "{HOME}/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{HOME}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{}"
  tolerate_missing_hugetlb_controller = true
  disable_hugetlb_controller = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{bin_dir}"
    conf_dir = "{conf_dir}"
"#,
        images::PAUSE
    );
    let path = directory.join("containerd.toml");
    fs::write(&path, containerd).with_context(|| format!("cannot write {}", path.display()))?;

    let ranges = node.pod_ranges().map(|range| json!([{ "subnet": range }]));
    let mut plugins = vec![json!({
        "type": "ptp",
        "mtu": 1500,
        "ipMasq": false,
        "ipam": {
            "type": "host-local",
            "dataDir": "/run/cni",
            "ranges": ranges,
            "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
        },
    })];
    if portmap {
        plugins.push(json!({ "type": "portmap", "capabilities": { "portMappings": true } }));
    }
    let cni = json!({ "cniVersion": "0.4.0", "name": "cluster", "plugins": plugins });
    write(&directory.join("cni/10-cluster.conflist"), &cni)
}

/// Runs as the node's first process. Does not return while the node runs.
pub fn main(arguments: &Arguments) -> Result<ExitCode> {
    let node = Node::named(&arguments.name)?;
    sethostname(&arguments.name).context("cannot set the host name")?;
    // Join the node's cgroup before the cgroup namespace is made: it becomes the root of the node's view.
    for hierarchy in cgroups::hierarchies()? {
        join(&hierarchy.mount.join(node.cgroup("")))?;
    }
    unshare(CloneFlags::CLONE_NEWCGROUP).context("cannot make a cgroup namespace")?;
    mounts(node)?;
    cgroups::create(Path::new(KUBELET))?;
    let path = env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}:/usr/sbin:/sbin", arguments.kubernetes.display());
    let start = |mut command: Command, log: &str, arguments: &[String]| -> Result<Child> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(Path::new(HOME).join(log))?;
        command
            .args(arguments)
            .env("PATH", &path)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        command
            .spawn()
            .with_context(|| format!("cannot start {}", shown(&command)))
    };
    let containerd = start(
        Command::new("containerd"),
        "containerd.log",
        &[format!("--config={HOME}/containerd.toml")],
    )?;
    wait_for_containerd()?;
    for image in images::archives()? {
        images::import(&image)?;
    }
    let addresses = node
        .addresses()
        .map(|address| address.to_string())
        .join(",");
    let kubelet = [
        format!("--config={HOME}/kubelet.yaml"),
        format!(
            "--kubeconfig={}",
            identity::file(&format!("{}.conf", node.name())).display()
        ),
        format!("--root-dir={HOME}/kubelet"),
        format!("--hostname-override={}", node.name()),
        format!("--node-ip={addresses}"),
        format!("--node-labels=topology.kubernetes.io/zone={}", node.zone()),
        "--v=2".into(),
    ];
    let program = || -> Result<Command> {
        let mut command = cgroups::joining(Path::new(KUBELET))?;
        command.arg(arguments.kubernetes.join("kubelet"));
        Ok(command)
    };
    let mut running = start(program()?, "kubelet.log", &kubelet)?;
    // All orphans of the node become children of this process when their parent ends.
    loop {
        let ended = match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) => {
                pid.as_raw().cast_unsigned()
            }
            Ok(_) | Err(Errno::EINTR) => continue,
            Err(error) => return Err(error).context("cannot wait for the node's processes"),
        };
        if ended == containerd.id() {
            bail!("containerd ended; see containerd.log");
        }
        if ended == running.id() {
            thread::sleep(Duration::from_secs(1));
            running = start(program()?, "kubelet.log", &kubelet)?;
        }
    }
}

fn wait_for_containerd() -> Result<()> {
    let limit = Instant::now() + Duration::from_mins(1);
    loop {
        match crate::command::output(Command::new("ctr").arg("version")) {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() > limit => {
                return Err(error.context("containerd is not ready; see containerd.log"));
            }
            Err(_) => thread::sleep(Duration::from_millis(200)),
        }
    }
}

/// Makes the node's view of the file system: separate /run, /sys and cgroups, and writable directories.
fn mounts(node: Node) -> Result<()> {
    let tmpfs = |place: &str| mounted(Some("tmpfs"), place, Some("tmpfs"), MsFlags::empty(), "");
    let bind = |from: &Path, to: &str| mounted(from.to_str(), to, None, MsFlags::MS_BIND, "");
    let create =
        |place: &str| fs::create_dir_all(place).with_context(|| format!("cannot create {place}"));
    // Unmount the machine's hierarchies: seen from the node's cgroup namespace, they have roots that runc does not
    // understand. Also unmount network namespaces: a mount in this copy would keep the namespace of any program alive.
    let hierarchies = cgroups::hierarchies()?;
    let mounts = fs::read_to_string("/proc/mounts").context("cannot read /proc/mounts")?;
    let places = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    for place in places.rev().filter(|place| {
        Path::new(place).starts_with("/run") || Path::new(place).starts_with("/sys")
    }) {
        umount2(place, MntFlags::MNT_DETACH).with_context(|| format!("cannot unmount {place}"))?;
    }
    tmpfs("/run")?;
    for place in ["/run/netns", "/run/lock", "/run/containerd", HOME] {
        create(place)?;
    }
    bind(&node.directory(), HOME)?;

    // This mount shows the interfaces of the node's network namespace in /sys/class/net.
    let hybrid = hierarchies.iter().any(|one| !one.controllers.is_empty());
    mounted(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), "")?;
    mounted(
        Some("bpf"),
        "/sys/fs/bpf",
        Some("bpf"),
        MsFlags::empty(),
        "",
    )?;
    if hybrid {
        tmpfs("/sys/fs/cgroup")?;
        create(UNIFIED)?;
        mounted(
            Some("cgroup2"),
            UNIFIED,
            Some("cgroup2"),
            MsFlags::empty(),
            "",
        )?;
        for one in hierarchies.iter().filter(|one| !one.controllers.is_empty()) {
            let name = one.mount.file_name().context("a mount's name")?;
            let place = format!("/sys/fs/cgroup/{}", name.display());
            create(&place)?;
            mounted(
                Some("cgroup"),
                &place,
                Some("cgroup"),
                MsFlags::empty(),
                &one.controllers,
            )?;
        }
    } else {
        mounted(
            Some("cgroup2"),
            "/sys/fs/cgroup",
            Some("cgroup2"),
            MsFlags::empty(),
            "",
        )?;
    }
    for hierarchy in cgroups::hierarchies()? {
        join(&hierarchy.mount.join(SYSTEM))?;
        if hierarchy.controllers.is_empty() {
            cgroups::enable_controllers(&hierarchy.mount)?;
        }
    }

    // A kubelet writes these settings of the machine. The mounts restrict the writes to the node.
    for (setting, value) in [
        ("vm/overcommit_memory", "1"),
        ("vm/panic_on_oom", "0"),
        ("kernel/panic", "10"),
        ("kernel/panic_on_oops", "1"),
        ("kernel/keys/root_maxkeys", "1000000"),
        ("kernel/keys/root_maxbytes", "25000000"),
    ] {
        let file = Path::new(HOME)
            .join("settings")
            .join(setting.replace('/', "_"));
        fs::write(&file, format!("{value}\n")).context("cannot write a setting")?;
        bind(&file, &format!("/proc/sys/{setting}"))?;
    }
    // kubelet, containerd and CNI store files in these directories.
    for (name, place) in [("lib", "/var/lib"), ("log", "/var/log")] {
        bind(&Path::new(HOME).join(name), place)?;
    }
    if !Path::new("/var/run").is_symlink() {
        symlink("/run", "/var/run").ok();
    }
    mounted(None, "/", None, MsFlags::MS_SHARED | MsFlags::MS_REC, "")
}

fn join(cgroup: &Path) -> Result<()> {
    let file = cgroup.join("cgroup.procs");
    // 0 stands for the writing process.
    fs::write(&file, "0").with_context(|| format!("cannot write {}", file.display()))
}

fn mounted(
    from: Option<&str>,
    place: &str,
    kind: Option<&str>,
    flags: MsFlags,
    options: &str,
) -> Result<()> {
    mount(from, place, kind, flags, Some(options)).with_context(|| {
        format!(
            "cannot mount {} at {place}",
            kind.or(from).unwrap_or("what is there")
        )
    })
}

/// Has a node import an image.
pub fn import(node: Node, archive: &Path) -> Result<()> {
    let mut ctr = node.command("ctr")?;
    ctr.args(["--namespace=k8s.io", "images", "import"])
        .arg(archive)
        .stdout(Stdio::null());
    check(&mut ctr)
}
