//! The output of a take-over: text after each step, or JSON at the end.

use std::{net::SocketAddr, path::Path};

use serde::Serialize;
use serde_json::Value;
use terminal::output::{self, BAD, BOLD, DIM, Format, Table, WARN};

use super::captured::Difference;
use crate::{
    commands::compare::{self, Comparison},
    rules::cleanup::Step,
    text::printable,
};

/// The outcome of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The owner has no rules, and no take-over was made.
    Nothing,
    /// The rules are removed.
    TakenOver,
    /// The dataplane and the rules differ. No rule was changed.
    Differs,
    /// With `--dry-run`: nothing differs.
    WouldTakeOver,
    /// The rules are restored, and the dataplane is removed.
    GivenBack,
    /// The rules are restored, and an agent still serves beside them.
    AgentRuns,
    /// With `--dry-run --revert`.
    WouldGiveBack,
}

/// A step.
#[derive(Serialize)]
struct StepLine {
    step: &'static str,
    text: String,
    /// The input of the command that makes the change.
    #[serde(skip_serializing_if = "Option::is_none")]
    input: Option<String>,
}

/// Describes a change of rules.
fn said(step: &Step) -> String {
    format!(
        "{}: {} chains, and {} rules in chains of others",
        step.command, step.chains, step.jumps
    )
}

/// Reports the steps of a command.
pub struct Tell<'a> {
    format: Format,
    out: &'a mut dyn std::io::Write,
    told: Vec<StepLine>,
    comparison: Option<Value>,
    file: Option<String>,
    sha256: Option<String>,
}

impl<'a> Tell<'a> {
    /// Creates a reporter that writes to `out`.
    pub fn new(format: Format, out: &'a mut dyn std::io::Write) -> Self {
        Self {
            format,
            out,
            told: Vec::new(),
            comparison: None,
            file: None,
            sha256: None,
        }
    }

    fn is_text(&self) -> bool {
        self.format != Format::Json
    }

    /// Prints a line in text format. The steps continue even if the reader has closed the pipe.
    fn line(&mut self, text: &str) {
        if self.is_text() {
            let _ = writeln!(self.out, "{text}");
            let _ = self.out.flush();
        }
    }

    /// Reports a step that was done.
    pub fn step(&mut self, step: &'static str, text: impl Into<String>) {
        let text = text.into();
        self.line(&format!("{BOLD}{step:<10}{BOLD:#}{text}"));
        self.told.push(StepLine {
            step,
            text,
            input: None,
        });
    }

    /// Reports a change of rules that was made, or, in a dry run, would be made.
    pub fn change(&mut self, name: &'static str, step: &Step, dry_run: bool) {
        let text = said(step);
        self.step(
            name,
            if dry_run {
                format!("would run {text}")
            } else {
                text
            },
        );
        if dry_run {
            for line in step.input.lines() {
                let words: Vec<String> = line.split('\t').map(printable).collect();
                let line = words.join("\t");
                self.line(&format!("  {}", output::styled(DIM, line)));
            }
            if let Some(told) = self.told.last_mut() {
                told.input = Some(step.input.clone());
            }
        }
    }

    /// Reports a rule of the owner that stays.
    pub fn stays(&mut self, text: &str) {
        let text = printable(text);
        self.line(&format!("{}: {text}", output::styled(WARN, "stays")));
        self.told.push(StepLine {
            step: "stays",
            text,
            input: None,
        });
    }

    /// Notes the file with the saved rules.
    pub fn saved(&mut self, file: &Path, sha256: &str) {
        self.file = Some(file.display().to_string());
        self.sha256 = Some(sha256.to_owned()).filter(|sum| !sum.is_empty());
    }

    /// Reports that the dataplane and the rules serve different services.
    pub fn differs(&mut self, found: &Comparison) {
        if self.is_text() {
            // The reader may have closed the pipe: the steps go on.
            let _ = compare::text(self.out, found);
        }
        self.comparison = serde_json::to_value(found).ok();
    }

    /// Reports that the dataplane captures other connections than the rules.
    pub fn differs_in_capture(&mut self, found: &[Difference]) {
        let mut table = Table::new(&["ABOUT", "WHICH", "RULES", "DATAPLANE"]);
        let word = |says: &Option<String>| says.clone().unwrap_or_else(|| "-".to_owned());
        for difference in found {
            let Difference {
                about,
                of,
                rules,
                dataplane,
            } = difference;
            let of = if of.is_empty() {
                "-".to_owned()
            } else {
                of.clone()
            };
            table.row([
                about.clone().into(),
                of.into(),
                word(rules).into(),
                word(dataplane).into(),
            ]);
        }
        if self.is_text() {
            // The reader may have closed the pipe: the steps go on.
            let _ = table.write(self.out);
        }
        self.step(
            "compare",
            "the dataplane captures other connections than the rules",
        );
        self.comparison = serde_json::to_value(found).ok();
    }

    /// Reports the addresses that do not answer through the dataplane.
    pub fn failed(&mut self, failed: &[(SocketAddr, String)]) {
        for (address, why) in failed {
            let text = format!("{address}: {why}");
            self.line(&format!("{}: {text}", output::styled(BAD, "not served")));
            self.told.push(StepLine {
                step: "connect",
                text,
                input: None,
            });
        }
    }

    /// Ends the report. In JSON format, prints it.
    pub fn end(self, outcome: &anyhow::Result<Outcome>) -> anyhow::Result<()> {
        #[derive(Serialize)]
        struct Answer {
            outcome: Option<Outcome>,
            #[serde(skip_serializing_if = "Option::is_none")]
            error: Option<String>,
            file: Option<String>,
            sha256: Option<String>,
            steps: Vec<StepLine>,
            #[serde(skip_serializing_if = "Option::is_none")]
            comparison: Option<Value>,
        }
        if self.format == Format::Json {
            let answer = Answer {
                outcome: outcome.as_ref().ok().copied(),
                error: outcome.as_ref().err().map(|why| format!("{why:#}")),
                file: self.file,
                sha256: self.sha256,
                steps: self.told,
                comparison: self.comparison,
            };
            output::json(self.out, &answer)?;
        }
        Ok(())
    }
}
