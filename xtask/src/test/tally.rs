//! Counts the results in the output of test programs.

use std::{collections::BTreeMap, time::Duration};

/// Results of one suite, or of several.
#[derive(Debug, Default, PartialEq)]
pub struct Tally {
    passed: u32,
    failed: u32,
    ignored: u32,
    /// Tests that found out while running that they cannot run. The harness counts them as passed.
    given_up: u32,
    failures: Vec<String>,
    /// Tests that failed together with others, and passed alone.
    alone: Vec<String>,
    /// Names of tests that did not run, by reason.
    skipped: BTreeMap<String, Vec<String>>,
    /// Reasons why tests cannot run, by name. Their results are not read yet.
    reasons: BTreeMap<String, String>,
    /// Suites that ran at least one test.
    suites: Vec<String>,
    /// Durations of tests in seconds, for tests that print them.
    took: Vec<(f64, String)>,
    /// Whether the next lines are the lab's list of its slowest scenarios.
    listing_slowest: bool,
}

/// Number of tests that are listed as the slowest.
const SLOWEST: usize = 10;

/// Reads `  12.3 s  life::x`, as the lab prints it.
fn slow_scenario(line: &str) -> Option<(f64, String)> {
    let (seconds, name) = line.split_once(" s  ")?;
    Some((seconds.trim().parse().ok()?, name.to_owned()))
}

/// Returns whether a line announces tests: `running 3 tests`.
pub fn announces_tests(line: &str) -> bool {
    line.strip_prefix("running ").is_some_and(|rest| !rest.starts_with("0 ")) ||
        // A suite prints this before its tests, for tests that it skips.
        line.starts_with("skipped ")
}

impl Tally {
    /// Reads a line that a test program printed.
    pub fn read(&mut self, line: &str) {
        // The harness prints a test's name first and its outcome later. Another test's message may come in between.
        if let Some((_, said)) = line.split_once(" ... skipped ") {
            return self.read(&format!("skipped {said}"));
        }
        if line.ends_with("The slowest:") {
            self.listing_slowest = true;
        } else if self.listing_slowest {
            let scenario = slow_scenario(line);
            self.listing_slowest = scenario.is_some();
            self.took.extend(scenario);
        }
        if let Some(result) = line.strip_prefix("test result: ") {
            let count = |what: &str| -> u32 {
                let number = result
                    .split([';', '.'])
                    .find_map(|part| part.strip_suffix(what));
                number
                    .and_then(|number| number.trim().parse().ok())
                    .unwrap_or(0)
            };
            self.passed += count(" passed");
            self.failed += count(" failed");
            self.ignored += count(" ignored");
        } else if let Some((name, reason)) = line
            .strip_prefix("skipped ")
            .and_then(|rest| rest.split_once(": "))
        {
            self.reasons.insert(name.to_owned(), reason.to_owned());
        } else if let Some((name, outcome)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.split_once(" ... "))
        {
            self.outcome(name.trim_end(), outcome.trim_end());
        }
    }

    fn outcome(&mut self, name: &str, outcome: &str) {
        // `ok <0.123s>`
        let timed = outcome
            .strip_suffix("s>")
            .and_then(|rest| rest.rsplit_once(" <"));
        let timed = timed.and_then(|(outcome, time)| Some((outcome, time.parse::<f64>().ok()?)));
        let outcome = timed.map_or(outcome, |(outcome, time)| {
            self.took.push((time, name.to_owned()));
            outcome
        });
        let mut reason = self.reasons.remove(name);
        if outcome == "FAILED" {
            self.failures.push(name.to_owned());
            return;
        }
        if let Some(stated) = outcome.strip_prefix("ignored") {
            // `#[ignore = "reason"]` is printed as `ignored, reason`.
            let stated = stated.strip_prefix(", ").unwrap_or("ignored in the source");
            reason.get_or_insert_with(|| stated.to_owned());
        } else if reason.is_some() {
            self.given_up += 1;
        }
        if let Some(reason) = reason {
            self.skipped
                .entry(reason)
                .or_default()
                .push(name.to_owned());
        }
    }

    /// Counts a failure that no test reported.
    pub fn fail(&mut self, name: String) {
        self.failed += 1;
        self.failures.push(name);
    }

    /// Returns the names of the tests that failed.
    pub fn failures(&self) -> &[String] {
        &self.failures
    }

    /// Counts a failed test as passed, because it has passed alone.
    pub fn passed_alone(&mut self, name: &str) {
        self.failures.retain(|failure| failure != name);
        self.alone.push(name.to_owned());
        self.failed -= 1;
        self.passed += 1;
    }

    /// Adds the results of a suite with this title and duration.
    pub fn add(&mut self, title: &str, other: Self, took: Duration) {
        if other.counted() > 0 {
            let seconds = took.as_secs_f64();
            self.suites
                .push(format!("{title} ({} in {seconds:.0} s)", other.counted()));
        }
        let name = |(time, name)| (time, format!("{title}: {name}"));
        self.took.extend(other.took.into_iter().map(name));
        let alone = other.alone.into_iter();
        self.alone
            .extend(alone.map(|name| format!("{title}: {name}")));
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
        self.given_up += other.given_up;
        self.failures.extend(
            other
                .failures
                .into_iter()
                .map(|name| format!("{title}: {name}")),
        );
        for (reason, names) in other.skipped {
            self.skipped.entry(reason).or_default().extend(names);
        }
    }

    /// Returns the number of all tests that were to run.
    pub fn counted(&self) -> u32 {
        self.passed + self.failed + self.ignored
    }

    /// Returns the number of tests that ran and passed.
    pub fn passed(&self) -> u32 {
        self.passed.saturating_sub(self.given_up)
    }

    /// Returns the names of tests that did not run, by reason.
    pub fn skipped(&self) -> &BTreeMap<String, Vec<String>> {
        &self.skipped
    }

    /// Returns the number of tests that failed.
    pub fn failed(&self) -> u32 {
        self.failed
    }

    /// Prints the suites that ran, skipped tests with reasons, and failures last: a truncated log still contains its
    /// end.
    pub fn print(&self) {
        println!(
            "Ran: {}.",
            if self.suites.is_empty() {
                "nothing".into()
            } else {
                self.suites.join(", ")
            }
        );
        for (reason, names) in &self.skipped {
            println!("Skipped {}: {reason}: {}", names.len(), names.join(", "));
        }
        let slowest = self.slowest();
        if !slowest.is_empty() {
            println!("The slowest:");
        }
        for (seconds, name) in slowest {
            println!("{seconds:6.1} s  {name}");
        }
        for name in &self.failures {
            println!("Failed: {name}");
        }
        for name in &self.alone {
            println!("Failed among others, passed alone: {name}");
        }
    }

    /// Returns the slowest tests. Returns none if there are only a few tests, because then all durations are easy to
    /// see.
    fn slowest(&self) -> Vec<&(f64, String)> {
        if self.counted() <= 2 * u32::try_from(SLOWEST).expect("a few") {
            return Vec::new();
        }
        let mut all: Vec<_> = self.took.iter().collect();
        all.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        all.truncate(SLOWEST);
        all
    }

    /// Returns the line that programs read.
    pub fn last_line(&self) -> String {
        format!(
            "{} passed, {} failed, {} skipped",
            self.passed(),
            self.failed,
            self.ignored + self.given_up
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(output: &str) -> Tally {
        let mut tally = Tally::default();
        output.lines().for_each(|line| tally.read(line));
        tally
    }

    #[test]
    fn counts_what_the_harness_counts() {
        let output = "\nrunning 4 tests\ntest a ... ok\ntest b ... FAILED\n\
                      test c ... ignored\ntest d ... ok\n\nfailures:\n\n---- b stdout ----\n\
                      assertion failed\n\nfailures:\n    b\n\n\
                      test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 7 filtered \
                      out; finished in 0.00s\n";
        let tally = tally(output);
        assert_eq!(tally.last_line(), "2 passed, 1 failed, 1 skipped");
        assert_eq!(tally.failures, ["b"]);
        assert_eq!(tally.counted(), 4);
    }

    #[test]
    fn a_skip_is_counted_once_and_has_a_reason() {
        let tally = tally(
            "skipped lab::churn: needs root: try sudo\nskipped lab::adopt: needs root: try sudo\n\
             skipped lab::other: of a test that the filter leaves out\n\
             test lab::churn ... ignored\ntest lab::adopt   ... ignored\ntest a ... ok\n\
             test slow ... ignored, takes an hour\ntest odd ... ignored\n\
             test result: ok. 1 passed; 0 failed; 4 ignored; 0 measured; 1 filtered out",
        );
        assert_eq!(tally.last_line(), "1 passed, 0 failed, 4 skipped");
        let skipped: Vec<_> = tally
            .skipped
            .iter()
            .map(|(r, n)| (r.as_str(), n.join(" ")))
            .collect();
        assert_eq!(
            skipped,
            [
                ("ignored in the source", "odd".to_owned()),
                ("needs root: try sudo", "lab::churn lab::adopt".to_owned()),
                ("takes an hour", "slow".to_owned()),
            ]
        );
    }

    #[test]
    fn a_test_that_gave_up_did_not_pass() {
        let tally = tally(
            "test b ... ok\nskipped churn: no IPv6\ntest churn ... ok\n\
             test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out",
        );
        assert_eq!(tally.last_line(), "1 passed, 0 failed, 1 skipped");
        assert_eq!(tally.skipped["no IPv6"], ["churn"]);
    }

    #[test]
    fn a_reason_is_found_between_a_name_and_its_outcome() {
        let tally = tally(
            "test a ... skipped churn: no IPv6\nok\ntest churn ... ok\n\
             test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out",
        );
        assert_eq!(tally.last_line(), "1 passed, 0 failed, 1 skipped");
    }

    #[test]
    fn suites_add_up_and_failures_say_whose() {
        let mut total = Tally::default();
        total.add(
            "one",
            tally("test result: ok. 3 passed; 0 failed; 0 ignored"),
            Duration::from_millis(1600),
        );
        total.add(
            "none",
            tally("test result: ok. 0 passed; 0 failed; 0 ignored"),
            Duration::ZERO,
        );
        total.add(
            "two",
            tally("test x   ... FAILED\ntest result: FAILED. 0 passed; 1 failed"),
            Duration::from_secs(12),
        );
        assert_eq!(total.last_line(), "3 passed, 1 failed, 0 skipped");
        assert_eq!(total.failures, ["two: x"]);
        assert_eq!(total.suites, ["one (3 in 2 s)", "two (1 in 12 s)"]);
    }

    #[test]
    fn the_slowest_of_all_suites_are_named() {
        let mut total = Tally::default();
        let harness = "test quick ... ok <0.001s>\ntest slow ... ok <7.500s>\n\
                       test wrong ... FAILED <9.000s>\ntest none ... ignored\n\
                       test result: FAILED. 2 passed; 1 failed; 1 ignored";
        total.add("pure", tally(harness), Duration::from_secs(9));
        assert_eq!(total.failures, ["pure: wrong"]);
        assert_eq!(total.last_line(), "2 passed, 1 failed, 1 skipped");
        assert!(total.slowest().is_empty(), "of so few anybody sees it");
        let lab = "test a ... ok\ntest result: ok. 30 passed; 0 failed; 0 ignored\n\n\
                   30 scenarios took 100 s in all. The slowest:\n  61.3 s  life::a\n   8.0 s  life::b\n\
                   \n 99.9 s  no scenario's";
        total.add("lab", tally(lab), Duration::from_mins(1));
        let slowest: Vec<_> = total.slowest().into_iter().cloned().collect();
        let expected = [
            (61.3, "lab: life::a"),
            (9.0, "pure: wrong"),
            (8.0, "lab: life::b"),
            (7.5, "pure: slow"),
            (0.001, "pure: quick"),
        ];
        assert_eq!(
            slowest,
            expected.map(|(time, name)| (time, name.to_owned()))
        );
    }

    #[test]
    fn a_test_that_passes_alone_has_passed() {
        let mut lab = tally(
            "test a ... FAILED\ntest b ... FAILED\ntest result: FAILED. 3 passed; 2 failed; 0 ignored",
        );
        assert_eq!(lab.failures(), ["a", "b"]);
        lab.passed_alone("a");
        let mut total = Tally::default();
        total.add("lab", lab, Duration::from_mins(1));
        assert_eq!(total.last_line(), "4 passed, 1 failed, 0 skipped");
        assert_eq!(total.failures, ["lab: b"]);
        assert_eq!(total.alone, ["lab: a"]);
    }

    #[test]
    fn a_suite_that_died_has_failed() {
        let mut died = tally("running 3 tests\ntest a ... ok\n");
        died.fail("the whole suite: signal: 11".into());
        assert_eq!(died.failed(), 1);
    }

    #[test]
    fn only_suites_with_tests_announce_them() {
        assert!(announces_tests("running 1 test"));
        assert!(announces_tests("running 10 tests"));
        assert!(!announces_tests("running 0 tests"));
        assert!(!announces_tests(""));
    }
}
