//! The tables of services and flows: how full they are, the verdicts, and their problems.

use std::collections::BTreeMap;

use dataplane_common::Reason;
use kernel::{conntrack::Conntrack, tables::Usage};

use super::{super::api::Flows, Finding, Table, listeners, queries, room};

/// The facts that the tables hold.
#[derive(Default)]
pub struct Contents {
    pub tables: Vec<Table>,
    /// The number of each verdict, by its word.
    pub verdicts: BTreeMap<String, u64>,
}

/// Reads the tables, and adds their problems. `counted`: the flows that the agent has counted; without them, this
/// function counts the flows.
pub fn read(
    paths: &kernel::Paths,
    limits: kernel::tables::Limits,
    counted: Option<&Flows>,
    findings: &mut Vec<Finding>,
) -> Contents {
    let mut contents = Contents::default();
    let open = match kernel::tables::Tables::open(&paths.bpffs) {
        Ok(open) => open,
        Err(e) => {
            findings.push(Finding::error(format!("cannot open the tables: {e}")));
            return contents;
        }
    };
    findings.extend(listeners::findings(&open));
    findings.extend(open.queries_are_bypassed().map(queries::finding));
    match usage(&open, paths, limits, counted) {
        Ok(usage) => {
            findings.extend(usage.iter().filter_map(room::of_clients));
            contents.tables.extend(usage.into_iter().map(row));
        }
        Err(e) => findings.push(Finding::error(format!(
            "cannot read how full the tables are: {e}"
        ))),
    }
    findings.extend(filtered_frontends(&open, paths));
    findings.extend(filtered_flows(&open, paths));
    match open.reasons() {
        Ok(counts) => {
            let words = Reason::ALL.iter();
            let words = words.map(|&reason| (reason.word().to_owned(), counts[reason as usize]));
            contents.verdicts.extend(words);
            if counts[Reason::Dangling as usize] > 0 {
                findings.push(Finding::warning(Reason::Dangling.text().to_owned()));
            }
        }
        Err(e) => findings.push(Finding::error(format!("cannot read the verdicts: {e}"))),
    }
    contents
}

fn usage(
    open: &kernel::tables::Tables,
    paths: &kernel::Paths,
    limits: kernel::tables::Limits,
    counted: Option<&Flows>,
) -> Result<Vec<Usage>, kernel::Error> {
    let mut usage = open.usage(limits)?;
    usage.extend(Conntrack::open(&paths.bpffs)?.map(|conntrack| {
        let flows = counted.map_or_else(|| conntrack.count(), |flows| flows.total);
        conntrack.usage(flows)
    }));
    Ok(usage)
}

fn row(usage: Usage) -> Table {
    Table {
        name: usage.table.to_owned(),
        used: usage.used.into(),
        capacity: usage.capacity.into(),
        limit: usage.limit.into(),
        bytes: usage.bytes,
    }
}

/// Reports frontends that the filter keeps from being looked up.
fn filtered_frontends(open: &kernel::tables::Tables, paths: &kernel::Paths) -> Option<Finding> {
    let cannot = |e| Some(Finding::error(format!("cannot check the filter: {e}")));
    let mut missed = match open.filtered_out() {
        Ok(missed) => missed,
        Err(e) => return cannot(e),
    };
    if !missed.is_empty() {
        // A copy of FRONTENDS may be in its place since `open`, and the keys gone.
        missed =
            match kernel::tables::Tables::open(&paths.bpffs).and_then(|open| open.filtered_out()) {
                Ok(missed) => missed,
                Err(e) => return cannot(e),
            };
    }
    let first = missed.first()?;
    Some(Finding::error(format!(
        "the filter VIPS does not let {} of the frontends through, for example {}: \
         connections to them are left alone; restart the agent, which computes the filter \
         anew, and please report this",
        missed.len(),
        plan::key_text(first),
    )))
}

/// Reports addresses of flows that the filter keeps from being looked up.
fn filtered_flows(open: &kernel::tables::Tables, paths: &kernel::Paths) -> Option<Finding> {
    let conntrack = Conntrack::open(&paths.bpffs).ok()??;
    let missed = open.filtered_flows(&conntrack.vips());
    let vip = missed.first()?;
    Some(Finding::error(format!(
        "the filter VIPS does not let {} of the addresses through that flows go to, for \
         example {vip}: requests of these flows are left alone; restart the agent, \
         which computes the filter anew, and please report this",
        missed.len(),
    )))
}
