//! Shows a user the progress of a long step: a spinner on a terminal, lines elsewhere.

use std::{
    collections::VecDeque,
    io::{BufRead, BufReader, IsTerminal},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use crate::command::shown;

/// Number of lines of a failed command's output that are shown.
const LAST_WORDS: usize = 30;

/// Prints one line on standard error.
pub fn note(text: &str) {
    anstream::eprintln!("{text}");
}

/// Runs a command that takes long. The spinner shows the last line of the command's output. If the
/// command fails, the last lines of its output are printed.
///
/// # Errors
/// Fails if the command cannot be started or fails.
pub fn run(title: &str, command: &mut Command) -> Result<()> {
    let started = Instant::now();
    let spinner = std::io::stderr().is_terminal().then(|| {
        let style = ProgressStyle::with_template("{spinner} {prefix} {elapsed} {wide_msg:.dim}")
            .expect("a valid template");
        let spinner = ProgressBar::new_spinner()
            .with_style(style)
            .with_prefix(title.to_owned());
        spinner.enable_steady_tick(Duration::from_millis(100));
        spinner
    });
    if spinner.is_none() {
        note(&format!("{title} ..."));
    }

    // Both streams go into one pipe, in the order in which they are written.
    let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
    command
        .stdin(Stdio::null())
        .stderr(writer.try_clone()?)
        .stdout(writer);
    let child = command.spawn();
    // Close our copies of the pipe's writing end; otherwise the pipe never ends.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = child.with_context(|| format!("cannot start {}", shown(command)))?;

    let mut last_words = VecDeque::with_capacity(LAST_WORDS);
    for line in BufReader::new(reader).split(b'\n') {
        let line = String::from_utf8_lossy(&line.context("cannot read from a pipe")?).into_owned();
        if let Some(spinner) = &spinner {
            spinner.set_message(line.trim().to_owned());
        }
        if last_words.len() == LAST_WORDS {
            last_words.pop_front();
        }
        last_words.push_back(line);
    }
    let status = child
        .wait()
        .with_context(|| format!("lost {}", shown(command)))?;
    if let Some(spinner) = spinner {
        spinner.finish_and_clear();
    }
    if !status.success() {
        let last_words = last_words.make_contiguous().join("\n    ");
        bail!(
            "{title}: {} failed: {status}\n    {last_words}",
            shown(command)
        );
    }
    note(&format!(
        "{title}: done in {:.0} s",
        started.elapsed().as_secs_f64()
    ));
    Ok(())
}
