//! The unit for systemd agrees with the agent.

use settings::{Listeners, MeshProbes};
use terminal::exit;

use super::*;

const UNIT: &str = "deploy/systemd/dataplane.service";

/// Returns the values of a setting, in order.
fn all(setting: &str) -> Vec<String> {
    let unit = read(UNIT);
    let values = unit
        .lines()
        .filter_map(|line| line.strip_prefix(setting)?.strip_prefix('='));
    values.map(str::to_owned).collect()
}

/// Returns the only value of a setting.
fn value(setting: &str) -> String {
    let [value] = all(setting)
        .try_into()
        .unwrap_or_else(|all| panic!("{setting}: {all:?}"));
    value
}

#[test]
fn it_runs_the_agent_with_options_that_there_are() {
    let command = value("ExecStart");
    let words: Vec<&str> = command.split(' ').collect();
    // The configuration file has the source, and this test does not read the file.
    let words_and_source = words.iter().chain(&["--manifests", "."]);
    let matches = Cli::command()
        .try_get_matches_from(words_and_source)
        .unwrap();
    assert_eq!(matches.subcommand_name(), Some("run"));
    let config = matches.get_one::<PathBuf>("config").unwrap();
    // The path of the DaemonSet, and of docs/systemd.md.
    assert_eq!(config, Path::new("/etc/dataplane/config.yaml"));
    let page = read("docs/systemd.md");
    for place in [words[0], "/etc/dataplane/config.yaml", UNIT] {
        assert!(
            page.contains(place),
            "docs/systemd.md does not name {place}"
        );
    }
    assert_eq!(value("RestartPreventExitStatus"), exit::USAGE.to_string());
    assert_eq!(value("ExecReload"), "/bin/kill -HUP $MAINPID");
}

#[test]
fn it_gives_what_the_daemon_set_gives() {
    let base = base();
    let pod = &base["DaemonSet dataplane"]["spec"]["template"]["spec"];
    let added = &pod["containers"][0]["securityContext"]["capabilities"]["add"];
    let capabilities: Vec<Value> = value("CapabilityBoundingSet")
        .split(' ')
        .map(|name| name.strip_prefix("CAP_").unwrap().into())
        .collect();
    assert_eq!(*added, Value::Array(capabilities));
    // The directories in which the agent writes by default.
    let writable = value("ReadWritePaths");
    // The directory does not exist at the first start, and systemd starts no program if a path without `-` is missing.
    let pins = format!("-{}", settings::DEFAULT_BPFFS);
    assert!(writable.split(' ').any(|path| path == pins), "{writable}");
    let listeners = Listeners::default();
    let socket = listeners.socket();
    let directory = Path::new("/run").join(value("RuntimeDirectory"));
    assert_eq!(socket.parent(), Some(&*directory));
}

/// systemd mounts /sys/fs/bpf read-only with `ProtectKernelTunables=`, and `ReadWritePaths=` does not change that: of
/// two settings for one path, systemd takes the stricter. The unit has the paths of that setting instead.
#[test]
fn it_does_not_take_the_pins_directory_away() {
    assert_eq!(all("ProtectKernelTunables"), [""; 0]);
    let words = |setting| -> Vec<String> {
        let lines = all(setting);
        let words = lines.iter().flat_map(|line| line.split(' '));
        words
            .map(|word| word.trim_start_matches('-').to_owned())
            .collect()
    };
    let (writable, read_only) = (words("ReadWritePaths"), words("ReadOnlyPaths"));
    for path in &writable {
        assert!(!read_only.contains(path), "{path} is read-only, too");
    }
    for path in ["/run", "/sys", "/proc/sys", "/proc/sysrq-trigger"] {
        assert!(read_only.iter().any(|is| is == path), "{path} is writable");
    }
}

/// systemd itself reads the unit, with another program in place of the agent, which is not installed here.
#[test]
fn systemd_knows_every_setting() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("dataplane.service");
    let own = std::env::current_exe().unwrap();
    let unit = read(UNIT).replace("/usr/local/bin/dataplane", own.to_str().unwrap());
    fs::write(&file, unit).unwrap();
    let analyze = |arguments: &[&str]| {
        Command::new("systemd-analyze")
            .args(arguments)
            .arg(&file)
            .output()
    };
    let Ok(output) = analyze(&["verify", "--recursive-errors=no", "--man=no"]) else {
        println!("skipped systemd_knows_every_setting: there is no systemd-analyze");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    // systemd ignores an unknown setting with a warning.
    let about: Vec<&str> = said
        .lines()
        .filter(|line| line.contains("dataplane.service"))
        .collect();
    assert!(output.status.success() && about.is_empty(), "{said}");
    // The exposure from 0 to 100, where more is worse. The rest is what the agent needs for its work.
    let output = analyze(&["security", "--offline=true", "--threshold=30", "--no-pager"]).unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The guard's unit runs a command that there is, before every kubelet that it names, and takes a running agent for
/// success.
#[test]
fn the_guards_unit_comes_before_the_kubelet() {
    let unit = read("deploy/systemd/dataplane-guard.service");
    let value = |setting: &str| {
        let mut lines = unit.lines();
        let value = lines.find_map(|line| line.strip_prefix(setting)?.strip_prefix('='));
        value.unwrap_or_else(|| panic!("no {setting}"))
    };
    let words = value("ExecStart").split(' ');
    let matches = Cli::command().try_get_matches_from(words).unwrap();
    assert_eq!(matches.subcommand_name(), Some("guard"));
    let config = matches.get_one::<PathBuf>("config").unwrap();
    assert_eq!(config, Path::new("/etc/dataplane/config.yaml"));
    assert_eq!(value("SuccessExitStatus"), exit::BUSY.to_string());
    let before: Vec<&str> = value("Before").split(' ').collect();
    let required: Vec<&str> = value("RequiredBy").split(' ').collect();
    for kubelet in &required {
        assert!(before.contains(kubelet), "not before {kubelet}");
    }
    // Those whose probes the programs know, except Talos's, which is no unit.
    for unit in MeshProbes::default().cgroups() {
        let is_unit = unit.ends_with(".service");
        assert!(!is_unit || required.contains(&&*unit), "{unit}");
    }
    assert!(before.contains(&"kubelet.service") && before.contains(&"dataplane.service"));
}
