//! Removes our objects from this machine: pins, filters, and the rules and routes of a mesh.

mod item;
mod routes;

use std::{
    fs, io,
    os::fd::AsFd,
    path::{Path, PathBuf},
};

pub use item::CleanupItem;

use super::{
    boot_guard,
    error::{Doing, Error},
    layouts::layouts,
    netfilter::{guard, keep_nat},
    pins::{Pins, remove_link},
    sys::{self, ObjectKind},
    tables::Tables,
    tc,
};

/// Removes everything of ours below `bpffs`, on interfaces and in workloads' network namespaces, and nothing else.
/// Links go first, which detaches the programs. With `dry_run`, only lists the items.
///
/// # Errors
/// [`Error::Busy`] while an agent runs; otherwise if a pin cannot be looked at or removed.
pub fn cleanup(bpffs: &Path, dry_run: bool) -> Result<Vec<CleanupItem>, Error> {
    let pins = Pins::new(bpffs);
    if !bpffs.exists() {
        return remove_tables(dry_run);
    }
    if !pins.is_on_bpffs()? {
        return Err(Error::NotBpffs { path: bpffs.into() });
    }
    // Looking is allowed while an agent runs.
    let _lock = if dry_run { None } else { Some(pins.lock()?) };
    let mut items = remove_tables(dry_run)?;
    // First of the pins: the tables tell where there may be something.
    items.extend(routes::remove(&pins, dry_run)?);
    for layout in layouts(bpffs) {
        items.extend(remove_layout(&layout, dry_run)?);
    }
    items.extend(tc::remove_filters(bpffs, dry_run)?);
    remove_directory(&boot_guard::sign(bpffs), dry_run, &mut items)?;
    remove_directory(bpffs, dry_run, &mut items)?;
    Ok(items)
}

/// Leaves services to another implementation, such as kube-proxy's rules: new flows are no longer translated, and
/// existing flows continue. [`cleanup`] comes next.
///
/// # Errors
/// [`Error::Busy`] while an agent runs; otherwise if tables cannot be read or changed.
pub fn retire(bpffs: &Path) -> Result<(), Error> {
    if !bpffs.exists() || !Tables::exist(bpffs)? {
        return Ok(());
    }
    let pins = Pins::new(bpffs);
    let _lock = pins.lock()?;
    Tables::open_pins(&pins, true)?.retire()
}

/// Removes the tables of `dataplane keep-nat` and of the guard.
fn remove_tables(dry_run: bool) -> Result<Vec<CleanupItem>, Error> {
    type Act = fn() -> io::Result<bool>;
    let tables: [(&str, &str, [Act; 2]); 2] = [
        (
            keep_nat::TABLE,
            "table of `dataplane keep-nat`",
            [keep_nat::is_there, keep_nat::remove],
        ),
        (
            guard::TABLE,
            "table that drops packets while rules are changed",
            [guard::is_there, guard::down],
        ),
    ];
    let mut items = Vec::new();
    for (table, what, [is_there, remove]) in tables {
        let name = format!("inet {table}");
        let result = if dry_run { is_there() } else { remove() };
        if result.doing(|| format!("cannot remove nftables table {name}"))? {
            items.push(CleanupItem {
                path: format!("nft:{name}").into(),
                what: what.to_owned(),
                ours: true,
            });
        }
    }
    Ok(items)
}

/// Removes our objects in one layout's directory.
pub(crate) fn remove_layout(layout: &Path, dry_run: bool) -> Result<Vec<CleanupItem>, Error> {
    let mut items = Vec::new();
    items.extend(tc::remove_links(layout, dry_run)?);
    for (sub, wanted) in [("links", ObjectKind::Link), ("maps", ObjectKind::Map)] {
        let directory = layout.join(sub);
        let Ok(entries) = fs::read_dir(&directory) else {
            continue;
        };
        let mut paths: Vec<PathBuf> = entries.filter_map(Result::ok).map(|e| e.path()).collect();
        paths.sort();
        for path in paths {
            // A link of an interface is already listed, with the interface.
            if items.iter().any(|item: &CleanupItem| item.path == path) {
                continue;
            }
            let (what, ours) = classify(&path, wanted);
            if ours && !dry_run {
                if wanted == ObjectKind::Link {
                    let link =
                        sys::obj_get(&path).doing(|| format!("cannot open {}", path.display()))?;
                    remove_link(&link, &path)?;
                } else {
                    fs::remove_file(&path).doing(|| format!("cannot remove {}", path.display()))?;
                }
            }
            items.push(CleanupItem { path, what, ours });
        }
        remove_directory(&directory, dry_run, &mut items)?;
    }
    remove_directory(layout, dry_run, &mut items)?;
    Ok(items)
}

fn remove_directory(
    directory: &Path,
    dry_run: bool,
    items: &mut Vec<CleanupItem>,
) -> Result<(), Error> {
    if !directory.exists() {
        return Ok(());
    }
    if dry_run {
        let kept = items
            .iter()
            .any(|item| !item.ours && item.path.starts_with(directory));
        items.push(CleanupItem {
            path: directory.into(),
            what: "directory".into(),
            ours: !kept,
        });
        return Ok(());
    }
    let ours = match fs::remove_dir(directory) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => false,
        // The directory is a separate mount, as in the DaemonSet, so it stays. In a container, the file system with its
        // mount point is read-only, which the kernel reports first.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::ResourceBusy | io::ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            return Ok(());
        }
        Err(error) => {
            return Err(error).doing(|| format!("cannot remove {}", directory.display()));
        }
    };
    items.push(CleanupItem {
        path: directory.into(),
        what: "directory".into(),
        ours,
    });
    Ok(())
}

/// Describes a pin, and returns whether it is ours: of the right kind, and the map or the program in it has the name of
/// the pin. (Other layouts' shapes are not known here.)
fn classify(path: &Path, wanted: ObjectKind) -> (String, bool) {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // Links that replace another, or are of one namespace of several, have more after a hyphen.
    let name = name.split('-').next().unwrap_or(&name);
    let fd = match sys::obj_get(path) {
        Ok(fd) => fd,
        Err(error) => return (format!("not a BPF object ({error})"), false),
    };
    let found = match sys::object_kind(fd.as_fd()) {
        Ok(ObjectKind::Map) => sys::map_info(fd.as_fd()).map(|map| {
            (
                ObjectKind::Map,
                map.name.clone(),
                format!("map {}", map.name),
            )
        }),
        Ok(ObjectKind::Link) => sys::link_info(fd.as_fd()).and_then(|link| {
            let program =
                sys::prog_by_id(link.program).and_then(|fd| sys::prog_info(fd.as_fd()))?;
            let what = format!("link {} of program {}", link.id, program.name);
            Ok((ObjectKind::Link, program.name, what))
        }),
        Ok(kind) => return (format!("a {kind:?}").to_lowercase(), false),
        Err(error) => Err(error),
    };
    match found {
        Ok((kind, inner, what)) => (what, kind == wanted && inner == name),
        Err(error) => (format!("unknown ({error})"), false),
    }
}
