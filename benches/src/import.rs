//! The import of kube-proxy's rules: time and memory for each form of their text.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context as _, ensure};
use clap::Args;
use dataplane_peers::{Mode, rules};
use dataplane_tests::Lab;
use migrate::kube_proxy::{Imported, Text, import};
use serde::{Deserialize, Serialize};

use crate::{
    fleet::Fleet,
    rows::{Row, Target, find},
    say,
    stats::median,
};

/// The names of the forms in the rows.
pub const CASE_NAMES: [&str; 2] = [FORMS[0].0, FORMS[1].0];
/// Number of services. `iptables-save` prints about 100 000 rules for them.
const SERVICES: u32 = 10_000;
/// Number of services in the small file.
const FIRST: u32 = 10;
const ROUNDS: usize = 7;

/// The forms of text: case in the rows, kube-proxy's mode, and the command that prints the form.
const FORMS: [(&str, Mode, &[&str]); 2] = [
    (
        "iptables-save",
        Mode::IptablesLegacy,
        &["iptables-legacy-save"],
    ),
    ("nft", Mode::Nftables, &["nft", "list", "ruleset"]),
];

/// A process that imports a file once.
#[derive(Debug, Args)]
pub struct Import {
    /// A small file of the same form, imported before the measurement so that one-time costs do not count
    first: PathBuf,
    /// The file to measure
    file: PathBuf,
}

/// Cost of an import.
#[derive(Debug, Serialize, Deserialize)]
struct Cost {
    /// Time in ms, including the time to read the file.
    ms: f64,
    /// How much larger the process became, at most, in bytes. This includes the text.
    peak: f64,
    /// Number of imported services.
    services: usize,
}

impl Import {
    /// Imports the small file, then measures the import of the other file.
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be read or imported.
    pub fn run(&self) -> anyhow::Result<()> {
        import_file(&self.first)?;
        let before = peak()?;
        let start = Instant::now();
        let imported = import_file(&self.file)?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        ensure!(
            imported.leftovers.is_empty(),
            "not understood: {:?}",
            imported.leftovers.first()
        );
        let services = imported.services.len();
        let peak = peak()? - before;
        anstream::println!("{}", serde_json::to_string(&Cost { ms, peak, services })?);
        Ok(())
    }
}

fn import_file(file: &Path) -> anyhow::Result<Imported> {
    let text = fs::read_to_string(file)?;
    let origin = file.display().to_string();
    Ok(import(&[Text { origin, text }])?)
}

/// Returns the largest size of this process so far, in bytes.
fn peak() -> anyhow::Result<f64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let kib: f64 = kib
        .context("no VmHWM in /proc/self/status")?
        .trim()
        .parse()?;
    Ok(kib * 1024.0)
}

/// Measures the import.
///
/// # Errors
///
/// Fails if the rules cannot be loaded or printed, or if the number of imported services is wrong.
pub fn run(quick: bool) -> anyhow::Result<Vec<Row>> {
    let services = if quick { SERVICES / 10 } else { SERVICES };
    let lab = Lab::builder().node("first").node("rules").build()?;
    let directory = tempfile::tempdir()?;
    let first = print(&lab, "first", FIRST, directory.path())?;
    let files = print(&lab, "rules", services, directory.path())?;

    let mut costs: Vec<Vec<Cost>> = FORMS.iter().map(|_| vec![]).collect();
    for _ in 0..if quick { 2 } else { ROUNDS } {
        for ((first, file), costs) in first.iter().zip(&files).zip(&mut costs) {
            let cost = imported(first, file)?;
            ensure!(
                cost.services == services as usize,
                "{} services of {services} came out of {}",
                cost.services,
                file.display()
            );
            costs.push(cost);
        }
    }
    let mut rows = vec![];
    for (((case, ..), file), costs) in FORMS.iter().zip(&files).zip(&costs) {
        let size = text_size(file)?;
        let figures: [(_, _, Vec<f64>); 4] = [
            ("size_mb", "MB", vec![size / 1e6]),
            (
                "import_ms",
                "ms",
                costs.iter().map(|cost| cost.ms).collect(),
            ),
            (
                "memory_mb",
                "MB",
                costs.iter().map(|cost| cost.peak / 1e6).collect(),
            ),
            (
                "memory_ratio",
                "× size",
                costs.iter().map(|cost| cost.peak / size).collect(),
            ),
        ];
        for (metric, unit, mut values) in figures {
            rows.push(Row {
                bench: "import",
                path: "dataplane",
                case,
                services,
                metric,
                unit,
                value: median(&mut values),
                baseline: None,
                ratio: None,
                failed: 0,
                rounds: values.into_iter().map(|value| vec![value]).collect(),
            });
        }
    }
    Ok(rows)
}

/// Loads the rules of services on a node, and prints them in each form to a file.
fn print(lab: &Lab, node: &str, services: u32, to: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let fleet = Fleet {
        services,
        target: [20, 21].map(|last| IpAddr::from([10, 244, 1, last])).into(),
        remote: vec![],
        node: vec![],
    };
    let command = |program: &str| {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", lab.node(node).netns(), program]);
        command
    };
    let mut files = vec![];
    for (case, mode, print) in FORMS {
        say!("import: {services} services as {case}");
        for load in rules(mode, &fleet.snapshot(), &Fleet::cluster()) {
            load.run(command)?;
        }
        let output = command(print[0]).args(&print[1..]).output()?;
        ensure!(output.status.success(), "{case}: {}", output.status);
        let file = to.join(format!("{node}-{case}"));
        fs::write(&file, &output.stdout)?;
        files.push(file);
    }
    Ok(files)
}

#[expect(clippy::cast_precision_loss, reason = "texts are far smaller")]
fn text_size(file: &Path) -> anyhow::Result<f64> {
    Ok(fs::metadata(file)?.len() as f64)
}

/// Imports a file in a separate process.
fn imported(first: &Path, file: &Path) -> anyhow::Result<Cost> {
    let worker = std::env::current_exe()?;
    let mut command = Command::new(worker);
    let output = command
        .args(["worker", "import"])
        .args([first, file])
        .output()?;
    ensure!(
        output.status.success(),
        "{}: {}",
        file.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Returns the targets, each with the measured value.
pub fn targets(rows: &[Row]) -> Vec<Target> {
    let services = crate::rows::most_services(rows);
    let wanted = |(case, ..): &(&str, Mode, &[&str])| {
        [("import_ms", 1000.0), ("memory_ratio", 3.0)].map(|(metric, at_most)| {
            let row = find(rows, "dataplane", services, case, metric)?;
            Some(Target {
                what: format!("{case}, {metric}"),
                value: row.value,
                at_most,
                uncertainty: row.uncertainty(),
            })
        })
    };
    FORMS.iter().flat_map(wanted).flatten().collect()
}
