//! The files of the CNI plug-in: network configurations with its entry, and its program.

use std::{
    fs::{self, File, Permissions},
    io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use admin::cni::PLUGIN;
use serde_json::Value;

use super::list::{self, Fault};

/// Suffix of a saved single-plug-in configuration. Runtimes do not read such files.
const BEFORE: &str = ".before-dataplane";

/// The container runtime's directories.
#[derive(Clone, Debug)]
pub struct Directories {
    /// Network configurations.
    pub conf: PathBuf,
    /// Plug-ins.
    pub bin: PathBuf,
}

impl Directories {
    /// Returns the directories in the settings.
    pub fn of(settings: &settings::Cni) -> Self {
        Self {
            conf: settings.conf_dir(),
            bin: settings.bin_dir(),
        }
    }

    /// Puts the plug-in's entry at the end of the configuration that runtimes use: the first one by name. Returns the
    /// files that this changed.
    ///
    /// # Errors
    /// If there is no configuration, if the plug-in would fail in it, or if a file cannot be read or written.
    pub fn join(&self, entry: &Value) -> Result<Vec<PathBuf>, String> {
        let mut files = files(&self.conf)?;
        // A list that was made of a single plug-in is out of date when the CNI's installer has written that one anew.
        let of = |list: &Path| ["conf", "json"].map(|extension| list.with_extension(extension));
        let is_new = |one: &PathBuf| one.exists() && before(one).exists();
        files.retain(|file| !(is_list(file) && of(file).iter().any(is_new)));
        let mut files = files.into_iter();
        let mut skipped = String::new();
        let mut changed = Vec::new();
        loop {
            let Some(file) = files.next() else {
                return Err(format!(
                    "no network configuration in {}{skipped}; the agent waits for the CNI's installer",
                    self.conf.display()
                ));
            };
            match join_one(&file, entry) {
                Ok(new) => {
                    changed.extend(new);
                    break;
                }
                Err(Fault::NotOne(why)) => skipped = format!(" ({}: {why})", file.display()),
                Err(Fault::Unsupported(why)) => return Err(format!("{}: {why}", file.display())),
            }
        }
        // Runtimes used another file before. A list that has just replaced a single plug-in is not one of them.
        let others: Vec<_> = files.filter(|file| !changed.contains(file)).collect();
        for file in others {
            changed.extend(leave_one(&file)?);
        }
        Ok(changed)
    }

    /// Copies this program to the runtime's plug-ins, unless the copy `installed` is there: an earlier version may be there, or
    /// another program may have removed or replaced the copy.
    ///
    /// # Errors
    /// If the copy cannot be written.
    pub fn install(&self, installed: &mut Option<Installed>) -> Result<(), String> {
        let plugin = self.bin.join(PLUGIN);
        let there = || -> io::Result<Installed> {
            let there = fs::symlink_metadata(&plugin)?;
            Ok((there.ino(), there.len()))
        };
        if installed.is_some() && there().ok() == *installed {
            return Ok(());
        }
        let program = File::open("/proc/self/exe");
        let copied = program.and_then(|program| replace(&plugin, program, 0o755));
        let copied = copied.and_then(|()| there());
        *installed = Some(copied.map_err(|error| cannot("write", &plugin, &error))?);
        Ok(())
    }
}

/// The number and the length of the file of an installed program.
pub type Installed = (u64, u64);

/// Takes the plug-in's entry out of all configurations. Returns the files that this changed. The program stays: CRI-O ends a
/// pod with the configuration with which the pod began, and without the program the pod would never end.
///
/// # Errors
/// If a file cannot be read or written.
pub fn leave(conf: &Path) -> Result<Vec<PathBuf>, String> {
    let mut changed = Vec::new();
    for file in files(conf)? {
        changed.extend(leave_one(&file)?);
    }
    Ok(changed)
}

/// The network configurations, in the order in which runtimes read them; none if there is no directory.
fn files(conf: &Path) -> Result<Vec<PathBuf>, String> {
    let read = || -> io::Result<Vec<PathBuf>> {
        let entries = match fs::read_dir(conf) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        entries.map(|entry| Ok(entry?.path())).collect()
    };
    let mut files = read().map_err(|error| cannot("read", conf, &error))?;
    files.retain(|file| {
        let extension = file.extension().and_then(|extension| extension.to_str());
        matches!(extension, Some("conf" | "conflist" | "json"))
    });
    files.sort_unstable();
    Ok(files)
}

/// Puts the entry into a configuration. Returns the file that this wrote.
fn join_one(file: &Path, entry: &Value) -> Result<Option<PathBuf>, Fault> {
    let io =
        |what: &str, error: &io::Error| Fault::Unsupported(format!("cannot {what} it: {error}"));
    let text = fs::read_to_string(file).map_err(|error| io("read", &error))?;
    if is_list(file) {
        let Some(new) = list::with(&text, entry)? else {
            return Ok(None);
        };
        write(file, file, &new).map_err(|error| io("write", &error))?;
        return Ok(Some(file.to_owned()));
    }
    let new = list::of_one(&text, entry)?;
    let list = file.with_extension("conflist");
    let written = write(&list, file, &new).and_then(|()| fs::rename(file, before(file)));
    written.map_err(|error| io("write", &error))?;
    Ok(Some(list))
}

/// Takes the entry out of a configuration. Returns the file that this wrote.
fn leave_one(file: &Path) -> Result<Option<PathBuf>, String> {
    if !is_list(file) {
        return Ok(None);
    }
    let text = fs::read_to_string(file).map_err(|error| cannot("read", file, &error))?;
    // Runtimes skip such a file. The agent has not written it.
    let Ok(Some(new)) = list::without(&text) else {
        return Ok(None);
    };
    let told = |error: io::Error| cannot("write", file, &error);
    for extension in ["conf", "json"] {
        let one = file.with_extension(extension);
        let saved = before(&one);
        if !saved.exists() {
            continue;
        }
        // First back, then away: the runtime always has one of the two.
        if one.exists() {
            fs::remove_file(saved).map_err(told)?;
        } else {
            fs::rename(saved, &one).map_err(told)?;
        }
        fs::remove_file(file).map_err(told)?;
        return Ok(Some(one));
    }
    write(file, file, &new).map_err(told)?;
    Ok(Some(file.to_owned()))
}

fn is_list(file: &Path) -> bool {
    file.extension()
        .is_some_and(|extension| extension == "conflist")
}

/// The name of a configuration that a list has replaced.
fn before(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(BEFORE);
    name.into()
}

fn cannot(what: &str, path: &Path, error: &io::Error) -> String {
    format!("cannot {what} {}: {error}", path.display())
}

/// Writes a configuration in place of another, `old`, with its mode.
fn write(file: &Path, old: &Path, text: &str) -> io::Result<()> {
    if old.is_symlink() {
        let why = "it is a symbolic link, which the agent would replace by a file";
        return Err(io::Error::other(why));
    }
    let mode = fs::metadata(old)?.mode() & 0o777;
    replace(file, text.as_bytes(), mode)
}

/// Replaces a file in one step: a reader sees the old one or the new one, also after a crash.
fn replace(file: &Path, mut content: impl io::Read, mode: u32) -> io::Result<()> {
    // An agent that ends may write at the same time as its successor.
    let new = file.with_file_name(format!(".dataplane-cni.{}", std::process::id()));
    let mut written = File::create(&new)?;
    written.set_permissions(Permissions::from_mode(mode))?;
    io::copy(&mut content, &mut written)?;
    written.sync_all()?;
    drop(written);
    fs::rename(new, file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use serde_json::json;

    use super::*;

    const LIST: &str = r#"{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"ptp"}]}"#;
    const ONE: &str = r#"{"cniVersion":"1.0.0","name":"net","type":"ptp"}"#;

    fn entry() -> Value {
        json!({ "type": PLUGIN, "socket": "/a" })
    }

    /// Directories with these configurations.
    fn directories(files: &[(&str, &str)]) -> (tempfile::TempDir, Directories) {
        let root = tempfile::tempdir().unwrap();
        let [conf, bin] = ["conf", "bin"].map(|name| root.path().join(name));
        for directory in [&conf, &bin] {
            fs::create_dir(directory).unwrap();
        }
        for (name, text) in files {
            fs::write(conf.join(name), text).unwrap();
        }
        (root, Directories { conf, bin })
    }

    /// The names of the configurations that have the entry, and those of all files.
    fn names(directories: &Directories) -> (Vec<String>, Vec<String>) {
        let mut all = Vec::new();
        for entry in fs::read_dir(&directories.conf).unwrap() {
            all.push(entry.unwrap().file_name().into_string().unwrap());
        }
        all.sort_unstable();
        let has = |name: &&String| {
            let text = fs::read_to_string(directories.conf.join(name)).unwrap();
            text.contains(PLUGIN)
        };
        (all.iter().filter(has).cloned().collect(), all)
    }

    #[test]
    fn the_first_configuration_by_name_has_the_entry_and_no_other() {
        let files = [
            ("00-broken.conflist", "{"),
            ("10-net.conflist", LIST),
            ("20-other.conflist", LIST),
            ("05-README", "text"),
        ];
        let (_root, directories) = directories(&files);
        fs::set_permissions(
            directories.conf.join("10-net.conflist"),
            Permissions::from_mode(0o640),
        )
        .unwrap();
        let changed = directories.join(&entry()).unwrap();
        assert_eq!(changed, [directories.conf.join("10-net.conflist")]);
        let mode = fs::metadata(&changed[0]).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        assert_eq!(directories.join(&entry()), Ok(Vec::new()), "nothing to do");
        // Another CNI comes, and its configuration comes first.
        fs::write(directories.conf.join("05-new.conflist"), LIST).unwrap();
        assert_eq!(directories.join(&entry()).unwrap().len(), 2);
        assert_eq!(names(&directories).0, ["05-new.conflist"]);
        // The CNI's installer writes it anew.
        fs::write(directories.conf.join("05-new.conflist"), LIST).unwrap();
        assert_eq!(directories.join(&entry()).unwrap().len(), 1);
        fs::write(directories.bin.join(PLUGIN), "").unwrap();
        assert_eq!(leave(&directories.conf).unwrap().len(), 1);
        assert_eq!(names(&directories).0, [""; 0]);
        assert!(directories.bin.join(PLUGIN).exists());
        assert_eq!(leave(&directories.conf), Ok(Vec::new()));
    }

    #[test]
    fn a_single_plugin_becomes_a_list_and_comes_back() {
        for name in ["10-net.conf", "10-net.json"] {
            let (_root, directories) = directories(&[(name, ONE)]);
            let saved = format!("{name}{BEFORE}");
            let list = "10-net.conflist";
            directories.join(&entry()).unwrap();
            let all = vec![saved, list.to_owned()];
            let mut sorted = all.clone();
            sorted.sort_unstable();
            assert_eq!(names(&directories), (vec![list.to_owned()], sorted.clone()));
            assert_eq!(directories.join(&entry()), Ok(Vec::new()));
            // The CNI's installer writes it anew.
            fs::write(directories.conf.join(name), ONE).unwrap();
            directories.join(&entry()).unwrap();
            assert_eq!(names(&directories).1, sorted);
            leave(&directories.conf).unwrap();
            assert_eq!(names(&directories), (vec![], vec![name.to_owned()]));
            let text = fs::read_to_string(directories.conf.join(name)).unwrap();
            assert_eq!(text, ONE);
        }
    }

    #[test]
    fn without_a_usable_configuration_nothing_changes() {
        for (files, wanted) in [
            (&[][..], "no network configuration"),
            (&[("10-a.conflist", "{")], "10-a.conflist"),
            (
                &[("10-a.conf", r#"{"type":"ptp"}"#), ("20-b.conflist", LIST)],
                "its cniVersion is 0.1.0",
            ),
        ] {
            let (_root, directories) = directories(files);
            let said = directories.join(&entry()).unwrap_err();
            assert!(said.contains(wanted), "{said}");
            assert_eq!(names(&directories).0, [""; 0]);
        }
        let (_root, mut directories) = directories(&[]);
        directories.conf.push("missing");
        assert!(directories.join(&entry()).is_err());
        assert_eq!(leave(&directories.conf), Ok(Vec::new()));
        // A file in place of the directory.
        directories.conf = "/proc/self/exe".into();
        assert!(
            leave(&directories.conf)
                .unwrap_err()
                .contains("cannot read")
        );
    }

    #[test]
    fn a_symbolic_link_is_used_and_never_replaced() {
        let (root, directories) = directories(&[]);
        let target = root.path().join("managed");
        fs::write(&target, LIST).unwrap();
        let link = directories.conf.join("10-net.conflist");
        symlink(&target, &link).unwrap();
        let said = directories.join(&entry()).unwrap_err();
        assert!(said.contains("symbolic link"), "{said}");
        // Its owner has added the entry.
        let joined = list::with(LIST, &entry()).unwrap().unwrap();
        fs::write(&target, joined).unwrap();
        assert_eq!(directories.join(&entry()), Ok(Vec::new()));
        assert!(
            leave(&directories.conf)
                .unwrap_err()
                .contains("symbolic link")
        );
        assert!(link.is_symlink());
    }

    #[test]
    fn a_program_that_is_gone_or_another_is_copied_again() {
        let (_root, directories) = directories(&[]);
        let plugin = directories.bin.join(PLUGIN);
        let own = fs::metadata("/proc/self/exe").unwrap().len();
        let mut installed = None;
        let mut install = || {
            directories.install(&mut installed).unwrap();
            assert_eq!(fs::metadata(&plugin).unwrap().len(), own);
            fs::metadata(&plugin).unwrap().ino()
        };
        // An earlier agent's.
        fs::write(&plugin, "old").unwrap();
        let first = install();
        assert_eq!(install(), first, "it is there");
        fs::remove_file(&plugin).unwrap();
        install();
        fs::write(&plugin, "another").unwrap();
        install();
    }
}
