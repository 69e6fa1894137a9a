//! Output of commands: tables and JSON on stdout, with colour only on a terminal.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use serde::Serialize;

/// A heading.
pub const BOLD: Style = Style::new().bold();
/// A good value.
pub const GOOD: Style = AnsiColor::Green.on_default();
/// A value that deserves attention.
pub const WARN: Style = AnsiColor::Yellow.on_default();
/// A bad value.
pub const BAD: Style = AnsiColor::Red.on_default().bold();
/// A less important value.
pub const DIM: Style = Style::new().dimmed();

/// How to print an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// For programs.
    Json,
}

impl Format {
    /// Prints an answer to standard output, as JSON or with `text`.
    ///
    /// # Errors
    ///
    /// If standard output cannot be written.
    pub fn print<T: Serialize>(
        self,
        answer: &T,
        text: impl FnOnce(&mut dyn Write, &T) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut out = stdout();
        match self {
            Self::Json => json(&mut out, answer),
            Self::Text => text(&mut out, answer),
        }
    }
}

/// Returns standard output, without escape sequences if it is not a terminal, or if `NO_COLOR` is set.
pub fn stdout() -> anstream::AutoStream<io::StdoutLock<'static>> {
    anstream::AutoStream::auto(io::stdout().lock())
}

/// Writes `value` as one indented JSON document.
///
/// # Errors
///
/// If it takes no more.
pub fn json(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)
}

/// Returns `text` in `style`.
pub fn styled(style: Style, text: impl std::fmt::Display) -> String {
    format!("{style}{text}{style:#}")
}

/// A cell of a table.
#[derive(Clone, Debug)]
pub struct Cell {
    text: String,
    style: Style,
}

impl Cell {
    /// Returns a cell in a style.
    pub fn new(text: impl Into<String>, style: Style) -> Self {
        Self {
            text: text.into(),
            style,
        }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::new(text, Style::new())
    }
}

/// A table. Its columns are as wide as their widest cell, and two spaces apart.
#[derive(Debug)]
pub struct Table {
    header: Vec<Cell>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// Returns a table with these headings.
    pub fn new(header: &[&str]) -> Self {
        Self {
            header: header.iter().map(|&text| Cell::new(text, BOLD)).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row with as many cells as headings.
    pub fn row(&mut self, cells: impl Into<Vec<Cell>>) {
        let cells = cells.into();
        debug_assert_eq!(cells.len(), self.header.len());
        self.rows.push(cells);
    }

    /// Returns whether the table has no row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Prints the table.
    ///
    /// # Errors
    ///
    /// If it takes no more.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let lines = || std::iter::once(&self.header).chain(&self.rows);
        let widths: Vec<usize> = (0..self.header.len())
            .map(|column| {
                lines()
                    .map(|line| line[column].text.chars().count())
                    .max()
                    .unwrap_or_default()
            })
            .collect();
        for line in lines() {
            for (column, (Cell { text, style }, width)) in line.iter().zip(&widths).enumerate() {
                write!(out, "{style}{text}{style:#}")?;
                // The last column is as wide as its text, so there are no trailing spaces.
                if column + 1 < line.len() {
                    let padding = width - text.chars().count() + 2;
                    write!(out, "{:padding$}", "")?;
                }
            }
            writeln!(out)?;
        }
        Ok(())
    }
}

/// Formats a duration with its two largest units.
pub fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// Formats a number of bytes in binary units.
#[expect(clippy::cast_precision_loss, reason = "one decimal place is printed")]
pub fn bytes(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_without_trailing_spaces() {
        let mut table = Table::new(&["NAME", "PORT"]);
        table.row(["a-long-name".into(), "80".into()]);
        table.row([Cell::new("b", BAD), "8080".into()]);
        let mut out = anstream::StripStream::new(Vec::new());
        table.write(&mut out).unwrap();
        let text = String::from_utf8(out.into_inner()).unwrap();
        assert_eq!(
            text,
            "NAME         PORT\na-long-name  80\nb            8080\n"
        );
    }

    #[test]
    fn durations_have_two_units() {
        let cases = [
            (0, "0s"),
            (59, "59s"),
            (61, "1m1s"),
            (3 * 3600 + 120, "3h2m"),
            (90_000, "1d1h"),
        ];
        for (seconds, text) in cases {
            assert_eq!(duration(seconds), text);
        }
    }

    #[test]
    fn bytes_are_rounded() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(3 * 1024 * 1024), "3.0 MiB");
    }
}
