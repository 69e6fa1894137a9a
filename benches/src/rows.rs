//! Results: rows for programs, tables for people.

use anstyle::{AnsiColor, Style};
use serde::Serialize;

use crate::stats::{median, spread};

/// The measured values of each round.
pub type Rounds = Vec<Vec<f64>>;

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The benchmark: `socket`.
    pub bench: &'static str,
    /// The path: the worker that carries the traffic.
    pub path: &'static str,
    /// The case: the client's job.
    pub case: &'static str,
    /// Number of services; 0 on a node without any.
    pub services: u32,
    /// The metric.
    pub metric: &'static str,
    /// The metric's unit.
    pub unit: &'static str,
    /// The median over the rounds.
    pub value: f64,
    /// The path in the same run that `ratio` compares with.
    pub baseline: Option<&'static str>,
    /// `value` divided by the value of `baseline`.
    pub ratio: Option<f64>,
    /// Number of failed turns in all rounds.
    pub failed: usize,
    /// The values of each round. A round has several values if it measured equal lanes or several parts, and none if it
    /// failed.
    #[serde(skip)]
    pub rounds: Rounds,
}

impl Row {
    /// Makes a row of a node without services, from the values of each round.
    pub fn new(
        bench: &'static str,
        path: &'static str,
        case: &'static str,
        (metric, unit): (&'static str, &'static str),
        rounds: Rounds,
    ) -> Self {
        Self {
            bench,
            path,
            case,
            services: 0,
            metric,
            unit,
            value: median(&mut rounds.concat()),
            baseline: None,
            ratio: None,
            failed: rounds.iter().filter(|round| round.is_empty()).count(),
            rounds,
        }
    }

    /// All values, of all rounds.
    fn values(&self) -> Vec<f64> {
        self.rounds.concat()
    }

    /// Returns the median of each round; `None` for a round that failed.
    pub fn by_round(&self) -> impl Iterator<Item = Option<f64>> {
        let medians = |values: &Vec<f64>| (!values.is_empty()).then(|| median(&mut values.clone()));
        self.rounds.iter().map(medians)
    }

    /// Returns how much the rounds differ: half the distance between the quartiles, divided by the median.
    pub fn spread(&self) -> f64 {
        spread(&mut self.values())
    }

    /// Returns the uncertainty of `value`: how far, as a share, the true median may be from it.
    pub fn uncertainty(&self) -> f64 {
        uncertainty(&mut self.values())
    }

    /// Divides this figure by another, round by round: a disturbance of the machine slows both figures of a round.
    /// Returns the median of the ratios, and its uncertainty as a share.
    pub fn over(&self, other: &Self) -> (f64, f64) {
        let rounds = self.by_round().zip(other.by_round());
        let mut ratios: Vec<f64> = rounds.filter_map(|(a, b)| Some(a? / b?)).collect();
        if ratios.is_empty() {
            return (self.value / other.value, 0.0);
        }
        let uncertainty = uncertainty(&mut ratios);
        (median(&mut ratios), uncertainty)
    }
}

/// Returns the standard error of a median, as a share. Assumes that the values have a normal distribution.
#[expect(clippy::cast_precision_loss, reason = "rounds are few")]
pub fn uncertainty(values: &mut [f64]) -> f64 {
    // Half the distance between quartiles is 0.67 standard deviations, and the error of a
    // median is 1.25 times that of a mean.
    1.25 * spread(values) / 0.67 / (values.len().max(1) as f64).sqrt()
}

/// Looks up a figure.
pub fn find<'a>(
    rows: &'a [Row],
    path: &str,
    services: u32,
    case: &str,
    metric: &str,
) -> Option<&'a Row> {
    rows.iter().find(|row| {
        row.path == path && row.services == services && row.case == case && row.metric == metric
    })
}

/// Returns the largest number of services with which our agent was measured.
pub fn most_services(rows: &[Row]) -> u32 {
    let ours = rows.iter().filter(|row| row.path == "dataplane");
    ours.map(|row| row.services).max().unwrap_or_default()
}

/// Prints the comparison of paths: a table for each metric, with a row for each path and a column for each case.
pub fn print_paths(rows: &[Row], cases: &[&str]) {
    let (bold, dim) = (Style::new().bold(), Style::new().dimmed());
    let mut metrics: Vec<_> = rows.iter().map(|row| (row.metric, row.unit)).collect();
    metrics.dedup();
    metrics.sort_unstable();
    metrics.dedup();
    for (metric, unit) in metrics {
        let of_metric: Vec<_> = rows.iter().filter(|row| row.metric == metric).collect();
        let mut lanes: Vec<_> = of_metric
            .iter()
            .map(|row| (row.path, row.services))
            .collect();
        let mut seen = std::collections::HashSet::new();
        lanes.retain(|lane| seen.insert(*lane));
        anstream::println!(
            "\n{bold}{metric}{bold:#}, {unit} {dim}(± between rounds, !N: N turns failed, × plain){dim:#}"
        );
        anstream::print!("{:<19} {:>8}", "", "services");
        for case in cases {
            anstream::print!(" {case:>22}");
        }
        anstream::println!();
        for (path, services) in lanes {
            let ours = if path == "dataplane" {
                bold
            } else {
                Style::new()
            };
            let number = if services == 0 {
                "-".into()
            } else {
                thousands(services)
            };
            anstream::print!("{ours}{path:<19}{ours:#} {number:>8}");
            for case in cases {
                match find(rows, path, services, case, metric) {
                    Some(row) => {
                        let ratio = row
                            .ratio
                            .map_or(String::new(), |ratio| format!("{ratio:.2}×"));
                        let spread = match row.failed {
                            0 => format!("±{:.0}%", row.spread() * 100.0),
                            failed => format!("!{failed}"),
                        };
                        let value = figure(row.value);
                        anstream::print!(
                            " {value:>9} {dim}{spread:>5}{dim:#} {ours}{ratio:>6}{ours:#}"
                        );
                    }
                    None => anstream::print!(" {:>22}", "-"),
                }
            }
            anstream::println!();
        }
    }
}

/// Prints the figures of the tables: services, metric, value.
pub fn print_tables(title: &str, rows: &[Row]) {
    let bold = Style::new().bold();
    anstream::println!("\n{bold}{title}{bold:#}");
    for row in rows {
        let (services, value) = (thousands(row.services), figure(row.value));
        anstream::println!("{:<16} {services:>8} {value:>9} {}", row.metric, row.unit);
    }
}

/// A target, and the measured value.
pub struct Target {
    /// The target as text.
    pub what: String,
    /// The measured value.
    pub value: f64,
    /// Maximum allowed value.
    pub at_most: f64,
    /// How far, as a share, the true value may be from `value`.
    pub uncertainty: f64,
}

/// Prints which targets were met, and which are too close to decide with this number of rounds. Returns the number of
/// missed targets.
pub fn print_targets(targets: &[Target]) -> usize {
    let bold = Style::new().bold();
    anstream::println!("\n{bold}targets{bold:#}");
    let mut missed = 0;
    for target in targets {
        let Target {
            what,
            value,
            at_most,
            uncertainty,
        } = target;
        let (word, color) = if (value / at_most - 1.0).abs() < *uncertainty {
            ("unclear", AnsiColor::Yellow)
        } else if value <= at_most {
            ("met", AnsiColor::Green)
        } else {
            missed += 1;
            ("missed", AnsiColor::Red)
        };
        let style = color.on_default();
        anstream::println!(
            "{style}{word:<7}{style:#} {what:<52} {:>8} ±{:.1}%  (at most {})",
            figure(*value),
            uncertainty * 100.0,
            figure(*at_most),
        );
    }
    missed
}

/// Formats a value with three to five significant digits.
pub fn figure(value: f64) -> String {
    match value.abs() {
        v if v >= 1000.0 => format!("{value:.0}"),
        v if v >= 100.0 => format!("{value:.1}"),
        v if v >= 10.0 => format!("{value:.2}"),
        v if v >= 0.1 => format!("{value:.3}"),
        _ => format!("{value:.5}"),
    }
}

/// Formats a number with a space between thousands.
pub fn thousands(number: u32) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(rounds: &[&[f64]]) -> Row {
        let rounds: Vec<_> = rounds.iter().map(|values| values.to_vec()).collect();
        Row {
            bench: "test",
            path: "dataplane",
            case: "tcp4",
            services: 1,
            metric: "rtt_p50",
            unit: "µs",
            value: median(&mut rounds.concat()),
            baseline: None,
            ratio: None,
            failed: 0,
            rounds,
        }
    }

    #[test]
    fn rows_are_compared_round_by_round() {
        // Both are twice as slow in every second round, and one round failed.
        let (ours, theirs) = (
            row(&[&[8.0, 12.0], &[20.0], &[11.0], &[18.0, 22.0]]),
            row(&[&[10.0], &[20.0], &[], &[20.0, 20.0]]),
        );
        let (ratio, uncertainty) = ours.over(&theirs);
        assert!((ratio - 1.0).abs() < 1e-9);
        assert!(
            uncertainty < 0.01 && ours.uncertainty() > 0.1,
            "{uncertainty}"
        );
        let once = row(&[]);
        assert!(once.over(&theirs).1.abs() < 1e-9);
    }

    #[test]
    fn figures() {
        assert_eq!(figure(18_234.6), "18235");
        assert_eq!(figure(123.46), "123.5");
        assert_eq!(figure(20.226), "20.23");
        assert_eq!(figure(1.0273), "1.027");
        assert_eq!(figure(0.0123), "0.01230");
        assert_eq!(thousands(100_000), "100\u{202f}000");
        assert_eq!(thousands(10), "10");
    }
}
