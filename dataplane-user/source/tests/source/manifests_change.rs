//! Manifests that change on disk: the ways in which they change, and the objects that two snapshots share.

use std::{
    fs,
    future::Future,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use dataplane_source::manifests::{self, Manifests, Watcher};
use model::{Egress, Node, ServiceName, Snapshot, WorkloadName};

/// Much longer than any change takes. A timeout means that a change was not seen.
const PATIENCE: Duration = Duration::from_secs(30);

fn service(name: &str, port: u16) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\n\
         spec: {{clusterIP: 10.96.0.{last}, ports: [{{port: {port}}}]}}\n---\n",
        last = name.bytes().map(u32::from).sum::<u32>() % 200 + 1,
    )
}

fn port(snapshot: &Snapshot, name: &str) -> Option<u16> {
    snapshot
        .services
        .get(&ServiceName::new("shop", name))
        .map(|service| service.ports[0].port)
}

/// Runs a future to its end on a runtime of its own.
fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap()
        .block_on(async {
            tokio::time::timeout(PATIENCE, future)
                .await
                .expect("a change was not seen")
        })
}

/// Waits for changes until `web` has this port.
async fn until(watcher: &mut Watcher, paths: &[PathBuf], wanted: Option<u16>) {
    loop {
        watcher.changed().await;
        let Ok(loaded) = manifests::load(paths, &Node::default()) else {
            continue;
        };
        if port(&loaded.snapshot, "web") == wanted {
            return;
        }
    }
}

#[test]
fn files_written_renamed_over_added_and_removed() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("web.yaml");
    fs::write(&file, service("web", 80)).unwrap();
    fs::write(directory.path().join("other.yaml"), service("other", 80)).unwrap();
    let paths = [directory.path().to_owned()];
    run(async {
        let mut watcher = Watcher::new(&paths).unwrap();
        fs::write(&file, service("web", 81)).unwrap();
        until(&mut watcher, &paths, Some(81)).await;
        // Editors write this way.
        let new = directory.path().join(".web.yaml.swp");
        fs::write(&new, service("web", 82)).unwrap();
        fs::rename(&new, &file).unwrap();
        until(&mut watcher, &paths, Some(82)).await;
        fs::remove_file(&file).unwrap();
        until(&mut watcher, &paths, None).await;
        let below = directory.path().join("below");
        fs::create_dir(&below).unwrap();
        fs::write(below.join("web.json"), to_json("web", 83)).unwrap();
        until(&mut watcher, &paths, Some(83)).await;
        fs::write(below.join("web.json"), to_json("web", 84)).unwrap();
        until(&mut watcher, &paths, Some(84)).await;
    });
}

fn to_json(name: &str, port: u16) -> String {
    format!(
        r#"{{"kind": "Service", "apiVersion": "v1", "metadata": {{"name": "{name}", "namespace":
        "shop"}}, "spec": {{"clusterIP": "10.96.0.1", "ports": [{{"port": {port}}}]}}}}"#
    )
}

/// Writes a version of a mounted ConfigMap as the kubelet does, and swaps `..data` to it.
fn mount(volume: &Path, version: &str, text: &str) {
    let data = volume.join(version);
    fs::create_dir_all(&data).unwrap();
    fs::write(data.join("web.yaml"), text).unwrap();
    symlink(version, volume.join("..data_tmp")).unwrap();
    let old = fs::read_link(volume.join("..data"));
    fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
    _ = symlink("..data/web.yaml", volume.join("web.yaml"));
    if let Ok(old) = old {
        fs::remove_dir_all(volume.join(old)).unwrap();
    }
}

#[test]
fn config_map_as_a_directory_and_as_a_file() {
    let directory = tempfile::tempdir().unwrap();
    for path in [
        directory.path().to_owned(),
        directory.path().join("web.yaml"),
    ] {
        mount(directory.path(), "..2026_1", &service("web", 80));
        let paths = [path];
        run(async {
            let mut watcher = Watcher::new(&paths).unwrap();
            let loaded = manifests::load(&paths, &Node::default()).unwrap();
            assert_eq!((loaded.files, port(&loaded.snapshot, "web")), (1, Some(80)));
            mount(directory.path(), "..2026_2", &service("web", 81));
            until(&mut watcher, &paths, Some(81)).await;
            mount(directory.path(), "..2026_3", &service("web", 82));
            until(&mut watcher, &paths, Some(82)).await;
        });
    }
}

#[test]
fn a_directory_that_comes_goes_and_comes_again() {
    let directory = tempfile::tempdir().unwrap();
    let inner = directory.path().join("a/b");
    let paths = [inner.clone()];
    run(async {
        let mut watcher = Watcher::new(&paths).unwrap();
        assert!(manifests::load(&paths, &Node::default()).is_err());
        for port in [80, 81] {
            fs::create_dir_all(&inner).unwrap();
            fs::write(inner.join("web.yml"), service("web", port)).unwrap();
            until(&mut watcher, &paths, Some(port)).await;
            fs::remove_dir_all(directory.path().join("a")).unwrap();
            watcher.changed().await;
        }
    });
}

#[test]
fn what_is_no_change_is_not_reported() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("web.yaml");
    fs::write(&file, service("web", 80)).unwrap();
    let paths = [file.clone()];
    run(async {
        let mut watcher = Watcher::new(&paths).unwrap();
        // A read, and a change of a neighbour. The wait gives a false report time to arrive; the test cannot fail
        // because the wait is too short.
        manifests::load(&paths, &Node::default()).unwrap();
        fs::write(directory.path().join("neighbour"), "x").unwrap();
        tokio::select! {
            biased;
            () = watcher.changed() => panic!("nothing has changed"),
            () = tokio::time::sleep(Duration::from_millis(200)) => {}
        }
        fs::write(&file, service("web", 81)).unwrap();
        until(&mut watcher, &paths, Some(81)).await;
    });
}

#[test]
fn unchanged_services_are_shared() {
    let directory = tempfile::tempdir().unwrap();
    let paths = [directory.path().to_owned()];
    let node = Node {
        name: "node1".into(),
        addresses: Vec::new(),
        ..Node::default()
    };
    let write = |name: &str, port| {
        fs::write(
            directory.path().join(format!("{name}.yaml")),
            service(name, port),
        )
        .unwrap();
    };
    for name in ["a", "b", "c"] {
        write(name, 80);
    }
    let mut manifests = Manifests::new(&node);
    let first = manifests.read(&paths).unwrap().snapshot;
    write("b", 81);
    fs::remove_file(directory.path().join("c.yaml")).unwrap();
    write("d", 80);
    let second = manifests.read(&paths).unwrap().snapshot;
    let same = |name: &str| {
        let name = ServiceName::new("shop", name);
        Arc::ptr_eq(&first.services[&name], &second.services[&name])
    };
    assert!(same("a") && !same("b"));
    assert_eq!(port(&second, "b"), Some(81));
    assert_eq!((port(&second, "c"), port(&second, "d")), (None, Some(80)));
    assert_eq!(first.services.diff(&second.services).count(), 3);
    assert!(Arc::ptr_eq(&first.node, &second.node) || *first.node == *second.node);
    // With a fault there is no snapshot at all.
    write("b", 0);
    let errors = manifests.read(&paths).unwrap_err();
    assert_eq!(errors.faults.len(), 1);
    // The objects stay as they were: the same ones, not others like them.
    write("b", 81);
    let third = manifests.read(&paths).unwrap().snapshot;
    assert_eq!(second.services.diff(&third.services).count(), 0);
    let same = |(name, service)| Arc::ptr_eq(service, &third.services[name]);
    assert!(second.services.iter().all(same));
}

#[test]
fn a_namespace_has_no_namespace() {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    let paths = [file.path().to_owned()];
    let namespace = |within: &str| {
        format!(
            "apiVersion: v1\nkind: Namespace\nmetadata: {{name: shop, namespace: {within}, \
             annotations: {{dataplane.io/egress: deny}}}}\n---\n"
        )
    };
    let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: web, namespace: shop}\nspec: {}\n";
    let mut manifests = Manifests::new(&Node::default());
    for within in ["x", "", "y"] {
        fs::write(file.path(), namespace(within) + pod).unwrap();
        let loaded = manifests.read(&paths).unwrap();
        let web = &loaded.view.workloads[&WorkloadName::new("shop", "web")];
        assert_eq!(web.rules.merged().egress, Some(Egress::Deny), "{within:?}");
    }
    fs::write(file.path(), namespace("x") + &namespace("")).unwrap();
    let errors = manifests.read(&paths).unwrap_err().to_string();
    assert!(
        errors.contains("Namespace shop: metadata.name: defined twice"),
        "{errors}"
    );
}
