//! Takes programs off interfaces: where they are not to be any more, and all of them at clean-up.

use std::path::Path;

use super::{Direction, Filters, clsact::Clsact, detach, is_used, links, name, ours};
use crate::{cleanup::CleanupItem, error::Error, pins::Pins, sys::LinkTarget};

/// Removes the packet path's programs from every interface, as [`PacketPrograms::attach`] with none.
pub(crate) fn keep_none(pins: &Pins) -> Result<Vec<String>, Error> {
    keep_none_of(pins, &Direction::ALL)
}

/// Removes mesh capture's program from every interface.
pub(crate) fn keep_no_capture(pins: &Pins) -> Result<Vec<String>, Error> {
    keep_none_of(pins, &Direction::CAPTURE)
}

fn keep_none_of(pins: &Pins, directions: &[Direction]) -> Result<Vec<String>, Error> {
    let mut clsact = Clsact::open(pins.root())?;
    let filters = clsact.ours()?;
    elsewhere(pins, &mut clsact, &filters, directions, |_| false)
}

/// Removes some of our programs from where they are not to be.
pub(super) fn elsewhere(
    pins: &Pins,
    clsact: &mut Clsact,
    filters: &Filters,
    directions: &[Direction],
    kept: impl Fn(u32) -> bool,
) -> Result<Vec<String>, Error> {
    let mut failed = Vec::new();
    for (path, direction, ifindex) in links(&pins.layout()) {
        if directions.contains(&direction)
            && !kept(ifindex)
            && ours(&path, direction)?.is_some()
            && let Err(error) = detach(&path)
        {
            failed.push(error.to_string());
        }
    }
    for filter in filters.values() {
        if directions.contains(&filter.direction)
            && !kept(filter.ifindex)
            && let Err(error) = clsact.remove(filter)
        {
            failed.push(error.to_string());
        }
    }
    let others: Vec<Direction> = Direction::EVERY
        .into_iter()
        .filter(|direction| !directions.contains(direction))
        .collect();
    clsact.remove_qdiscs(|ifindex| !kept(ifindex) && !is_used(filters, &others, ifindex))?;
    Ok(failed)
}

/// Removes the TCX links of one layout. With `dry_run`, only lists them.
pub(crate) fn remove_links(layout: &Path, dry_run: bool) -> Result<Vec<CleanupItem>, Error> {
    let mut items = Vec::new();
    for (path, direction, ifindex) in links(layout) {
        // The code that lists the other pins names foreign objects.
        if let Ok(Some((_, info))) = ours(&path, direction) {
            let place = match info.target {
                LinkTarget::Tcx(0) => "no interface any more".to_owned(),
                _ => name(ifindex),
            };
            let what = format!(
                "link {} of program {} on {place}",
                info.id,
                direction.program()
            );
            if !dry_run {
                detach(&path)?;
            }
            items.push(CleanupItem {
                path,
                what,
                ours: true,
            });
        }
    }
    Ok(items)
}

/// Removes our filters, and the qdiscs that were made for them and have no other filters. With `dry_run`, only lists
/// them.
pub(crate) fn remove_filters(root: &Path, dry_run: bool) -> Result<Vec<CleanupItem>, Error> {
    let mut items = Vec::new();
    let mut clsact = Clsact::open(root)?;
    for filter in clsact.ours()?.values() {
        if !dry_run {
            clsact.remove(filter)?;
        }
        items.push(CleanupItem {
            path: format!("tc:{}", name(filter.ifindex)).into(),
            what: filter.to_string(),
            ours: true,
        });
    }
    for (ifindex, goes) in clsact.made()? {
        items.push(CleanupItem {
            path: format!("tc:{}", name(ifindex)).into(),
            what: if goes {
                "clsact qdisc"
            } else {
                "clsact qdisc, with filters of others"
            }
            .to_owned(),
            ours: goes,
        });
    }
    let notes = root.join("qdiscs");
    if notes.exists() {
        items.push(CleanupItem {
            path: notes,
            what: "directory".to_owned(),
            ours: true,
        });
    }
    if !dry_run {
        clsact.remove_qdiscs(|_| true)?;
    }
    Ok(items)
}
