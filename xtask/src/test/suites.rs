//! The programs that hold the tests.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::command::{cargo, shown};

/// A program that runs tests, and prints like Rust's test harness.
#[derive(Debug)]
pub struct Suite {
    /// Title for the user: the package, and the kind of tests.
    pub title: String,
    pub command: Command,
    pub kind: Kind,
}

/// The program that runs a suite's tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Rust's own test harness.
    Harness,
    /// rustdoc, which compiles them first.
    Documentation,
    /// The lab, with a harness of its own. It tests kernel programs in network namespaces.
    Scenarios,
}

impl Suite {
    /// Returns a copy of the suite, to run it in another place too.
    pub fn again(&self) -> Self {
        Self {
            title: self.title.clone(),
            command: Command::new(self.command.get_program()),
            kind: self.kind,
        }
    }
}

/// One of cargo's messages. We use only `compiler-artifact`.
#[derive(Debug, Deserialize)]
struct Message {
    reason: String,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<TargetProfile>,
    executable: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct TargetProfile {
    test: bool,
}

/// Compiles the tests and the binaries that they run, without the benchmarks' binary, in one build so that they share
/// dependencies. Returns the test suites; the scenarios are last.
pub fn compile() -> Result<Vec<Suite>> {
    let mut build = cargo();
    build
        .args([
            "build",
            "--bin=dataplane",
            "--bin=dataplane-migrate",
            "--bin=probe",
            "--tests",
            "--message-format=json-render-diagnostics",
        ])
        .stdout(Stdio::piped());
    let build_name = shown(&build);
    let output = build
        .spawn()
        .and_then(std::process::Child::wait_with_output)
        .with_context(|| format!("cannot run {build_name}"))?;
    if !output.status.success() {
        bail!("{build_name} failed: {}", output.status);
    }
    let messages = String::from_utf8(output.stdout).context("cargo wrote no text")?;
    let mut programs = Vec::new();
    for line in messages.lines() {
        let message: Message = serde_json::from_str(line)
            .with_context(|| format!("cargo wrote a message that is none: {line}"))?;
        programs.extend(message.into_test());
    }
    programs.sort_by(|a, b| a.order.cmp(&b.order));
    let mut suites: Vec<Suite> = programs.into_iter().map(|program| program.suite).collect();
    for suite in &mut suites {
        if suite.kind == Kind::Harness {
            // A stable harness prints a test's duration only with this variable.
            suite
                .command
                .env("RUSTC_BOOTSTRAP", "1")
                .args(["-Zunstable-options", "--report-time"]);
        }
    }

    let mut documentation = cargo();
    documentation.args(["test", "--quiet", "--doc", "--"]);
    // First, because cargo has rustdoc read one crate after the other: at the end it would run alone.
    suites.insert(
        0,
        Suite {
            title: "examples in the documentation".into(),
            command: documentation,
            kind: Kind::Documentation,
        },
    );
    Ok(suites)
}

/// The title of the lab's suite.
const SCENARIOS: &str = "tests: lab";

struct TestProgram {
    /// Sort key: whether it is the lab, which comes last; whether it is an integration test; its title.
    order: (bool, bool, String),
    suite: Suite,
}

impl Message {
    /// Returns the test program that this message announces, if any.
    fn into_test(self) -> Option<TestProgram> {
        let (target, executable) = (self.target?, self.executable?);
        if self.reason != "compiler-artifact" || !self.profile?.test {
            return None;
        }
        let directory = self.manifest_path?.parent()?.to_owned();
        let package = directory.file_name()?.to_string_lossy().into_owned();
        let integration = target.kind.iter().any(|kind| kind == "test");
        let title = match target.kind.first().map(String::as_str) {
            Some("test") => format!("{package}: {}", target.name),
            Some("bin") => format!("{package}: program {}", target.name),
            _ => format!("{package}: library"),
        };
        let kind = if title == SCENARIOS {
            Kind::Scenarios
        } else {
            Kind::Harness
        };
        let mut command = Command::new(executable);
        // As `cargo test` does.
        command
            .current_dir(&directory)
            .env("CARGO_MANIFEST_DIR", &directory);
        Some(TestProgram {
            order: (kind == Kind::Scenarios, integration, title.clone()),
            suite: Suite {
                title,
                command,
                kind,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_tests_among_the_messages() {
        let title = |line: &str| {
            let message: Message = serde_json::from_str(line).unwrap();
            message.into_test().map(|program| program.suite.title)
        };
        let artifact = |kind: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","package_id":"x","manifest_path":"/w/tests/Cargo.toml",
                "target":{{"kind":["{kind}"],"name":"lab","src_path":"/w/tests/lab.rs"}},
                "profile":{{"opt_level":"0","test":{test}}},"executable":{executable},"fresh":true}}"#
            )
        };
        let path = r#""/w/target/debug/deps/lab-0f""#;
        assert_eq!(
            title(&artifact("test", true, path)).as_deref(),
            Some("tests: lab")
        );
        assert_eq!(
            title(&artifact("lib", true, path)).as_deref(),
            Some("tests: library")
        );
        assert_eq!(title(&artifact("bin", false, path)), None);
        assert_eq!(title(&artifact("lib", false, "null")), None);
        assert_eq!(title(r#"{"reason":"build-finished","success":true}"#), None);
    }
}
