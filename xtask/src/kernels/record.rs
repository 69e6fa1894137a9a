//! docs/kernels.json: the results of the last run on each kernel.

use std::{collections::BTreeMap, fs, path::PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::{verifier, workspace};

/// Results by kernel series (`6.1`).
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Record {
    pub reports: BTreeMap<String, Report>,
}

/// Results of one kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// `uname -r`.
    pub release: String,
    /// The machine or guest that runs the kernel, as text.
    pub runs_on: String,
    /// `dataplane doctor`'s rows.
    pub features: Vec<Feature>,
    /// Cost of each program, by name.
    pub programs: BTreeMap<String, Program>,
    /// Results of the scenarios. If they did not run, the results of an earlier run stay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scenarios: Option<Scenarios>,
}

/// A row of `dataplane doctor -o json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Feature {
    #[serde(rename = "feature")]
    pub name: String,
    pub needed_for: String,
    pub required: bool,
    pub present: bool,
    /// The fallback without the feature, and its cost.
    pub without: String,
}

/// Cost of a program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    pub processed: u32,
    pub stack: u32,
    pub jited: u32,
    pub milliseconds: u64,
}

/// How the lab's scenarios ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scenarios {
    pub passed: u32,
    pub failed: u32,
    /// Names of skipped scenarios, by reason.
    pub skipped: BTreeMap<String, Vec<String>>,
    pub seconds: u64,
}

impl Report {
    /// Returns whether all required features are present and no scenario failed.
    pub fn is_good(&self) -> bool {
        self.features.iter().all(|f| f.present || !f.required)
            && self.scenarios.as_ref().is_none_or(|s| s.failed == 0)
    }
}

impl Record {
    fn file() -> PathBuf {
        workspace::root().join("docs/kernels.json")
    }

    pub fn read() -> Result<Self> {
        let file = Self::file();
        let text =
            fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        serde_json::from_str(&text).with_context(|| format!("in {}", file.display()))
    }

    pub fn write(&self) -> Result<()> {
        let file = Self::file();
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
    }

    /// Adds a report. If its scenarios did not run, the earlier results of the scenarios stay.
    pub fn add(&mut self, mut report: Report) {
        let series = verifier::series(&report.release);
        if report.scenarios.is_none() {
            report.scenarios = self
                .reports
                .get(&series)
                .and_then(|before| before.scenarios.clone());
        }
        self.reports.insert(series, report);
    }

    /// Returns the reports, oldest kernel first.
    pub fn kernels(&self) -> Vec<(&str, &Report)> {
        let mut kernels: Vec<(&str, &Report)> = self
            .reports
            .iter()
            .map(|(series, report)| (series.as_str(), report))
            .collect();
        kernels.sort_by_key(|(series, _)| {
            series
                .split('.')
                .map(|number| number.parse::<u32>().unwrap_or(u32::MAX))
                .collect::<Vec<_>>()
        });
        kernels
    }
}
