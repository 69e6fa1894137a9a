//! The files that are read, and the messages about those that cannot be read.

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use dataplane_source::manifests::{self, FAULTS_LISTED, FILE_SIZE_MAX};
use model::Node;

fn service(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
         spec: {{clusterIP: 10.96.0.1, ports: [{{port: 80}}]}}\n"
    )
}

/// Returns the names of the loaded services, or the messages without the directory.
fn load(directory: &Path, paths: &[&str]) -> Result<Vec<String>, String> {
    let paths: Vec<PathBuf> = paths.iter().map(|path| directory.join(path)).collect();
    match manifests::load(&paths, &Node::default()) {
        Ok(loaded) => Ok(loaded
            .snapshot
            .services
            .keys()
            .map(|name| name.name().to_owned())
            .collect()),
        Err(errors) => Err(errors
            .to_string()
            .replace(&format!("{}/", directory.display()), "")),
    }
}

#[test]
fn directories_are_read_to_the_bottom_and_each_file_once() {
    let directory = tempfile::tempdir().unwrap();
    let at = |path: &str| directory.path().join(path);
    fs::create_dir_all(at("a/b")).unwrap();
    fs::create_dir_all(at("a/.hidden")).unwrap();
    for (path, name) in [
        ("a/one.yaml", "one"),
        ("a/two.yml", "two"),
        ("a/b/three.yaml", "three"),
        ("a/.hidden/four.yaml", "four"),
        ("a/.five.yaml", "five"),
        ("a/six.yaml~", "six"),
        ("a/seven.txt", "seven"),
    ] {
        fs::write(at(path), service(name)).unwrap();
    }
    symlink("one.yaml", at("a/again.yaml")).unwrap();
    symlink("..", at("a/b/circle")).unwrap();
    let wanted = ["one", "three", "two"].map(str::to_owned).to_vec();
    assert_eq!(load(directory.path(), &["a"]), Ok(wanted.clone()));
    assert_eq!(
        load(directory.path(), &["a/one.yaml", "a", "a/b", "a/two.yml"]),
        Ok(wanted)
    );
    // A path of a file is read, whatever its name.
    assert_eq!(
        load(directory.path(), &["a/seven.txt"]),
        Ok(vec!["seven".into()])
    );
    assert_eq!(
        load(directory.path(), &["a/.five.yaml"]),
        Ok(vec!["five".into()])
    );
}

#[test]
fn what_cannot_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let at = |path: &str| directory.path().join(path);
    let large = File::create(at("large.yaml")).unwrap();
    large.set_len(50 << 20).unwrap();
    fs::create_dir(at("nothing")).unwrap();
    fs::create_dir(at("broken")).unwrap();
    symlink("gone", at("broken/link.yaml")).unwrap();
    nix::unistd::mkfifo(&at("pipe.yaml"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (path, wanted) in [
        (
            "large.yaml",
            "large.yaml: 50 MiB is too large for a file; expected at most 32 MiB: split it into \
             several in a directory",
        ),
        (
            "nothing",
            "nothing: no manifest in this directory; expected *.yaml, *.yml or *.json (to serve \
             nothing, write `{apiVersion: v1, kind: List, items: []}`)",
        ),
        (
            "broken",
            "broken/link.yaml: cannot be read: No such file or directory (os error 2)",
        ),
        (
            "missing.yaml",
            "missing.yaml: cannot be read: No such file or directory (os error 2)",
        ),
        (
            "pipe.yaml",
            "pipe.yaml: not a regular file; expected a file with manifests",
        ),
    ] {
        assert_eq!(load(directory.path(), &[path]), Err(wanted.into()));
    }
    // If one of several files is bad, no service is served, and every fault is reported.
    fs::write(at("good.yaml"), service("good")).unwrap();
    fs::write(
        at("bad.yaml"),
        service("bad").replace("port: 80", "port: 0"),
    )
    .unwrap();
    assert_eq!(
        load(directory.path(), &["good.yaml", "missing.yaml", "bad.yaml"]),
        Err(
            "bad.yaml:4:45: Service default/bad: spec.ports[0].port: 0 is not a port; expected a \
             number from 1 to 65535\n\
             missing.yaml: cannot be read: No such file or directory (os error 2)"
                .into()
        )
    );
}

#[test]
fn the_largest_file_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("filled.yaml");
    let mut text = service("web");
    let rest = usize::try_from(FILE_SIZE_MAX).unwrap() - text.len();
    text.extend(std::iter::once('#').chain(std::iter::repeat_n('x', rest - 1)));
    fs::write(&path, &text).unwrap();
    assert_eq!(
        load(directory.path(), &["filled.yaml"]),
        Ok(vec!["web".into()])
    );
}

#[test]
fn a_flood_of_faults_is_cut() {
    let directory = tempfile::tempdir().unwrap();
    let bad: Vec<_> = (0..250)
        .map(|n| service(&format!("web-{n}")).replace("port: 80", "port: 0"))
        .collect();
    fs::write(directory.path().join("bad.yaml"), bad.join("---\n")).unwrap();
    let said = load(directory.path(), &["bad.yaml"]).unwrap_err();
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines.len(), FAULTS_LISTED + 1);
    // Each of these documents has five lines, including its marker.
    assert!(
        lines[99].starts_with("bad.yaml:499:45: Service default/web-99: "),
        "{}",
        lines[99]
    );
    assert_eq!(lines[100], "and 150 more");
}
