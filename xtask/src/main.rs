//! The project's chores. Each is a subcommand: `cargo xtask --help`.

mod bench;
mod build;
mod clean;
mod cluster;
mod command;
mod fuzz;
mod judges;
mod kernels;
mod lab;
mod lines;
mod links;
mod lint;
mod practice;
mod progress;
mod run;
mod setup;
mod test;
mod verifier;
mod vm;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The project's chores. Each chore first checks and installs the tools that it needs.
#[derive(Debug, Parser)]
#[command(
    bin_name = "cargo xtask",
    version,
    after_help = "\
A first look, on any Linux machine, as root:
    cargo xtask run                                        # a practice node in a lab
    cargo xtask run -- --manifests examples/httpbin.yaml   # this node itself"
)]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,

    /// Print the commands that would install missing tools, instead of installing them
    #[arg(long, global = true)]
    no_install: bool,
}

#[derive(Debug, Subcommand)]
enum Chore {
    Setup(setup::Arguments),
    Build(build::Arguments),
    Run(run::Arguments),
    Test(test::Arguments),
    Bench(bench::Arguments),
    Fuzz(fuzz::Arguments),
    Verifier(verifier::Arguments),
    Kernels(kernels::Arguments),
    Lint(lint::Arguments),
    Lines(lines::Arguments),
    Lab(lab::Arguments),
    Cluster(cluster::Arguments),
    Judges(judges::Arguments),
    Clean(clean::Arguments),
}

fn main() -> ExitCode {
    let Arguments { chore, no_install } = Arguments::parse();
    let outcome = match chore {
        Chore::Setup(setup::Arguments {}) => setup::main(no_install),
        Chore::Build(arguments) => build::main(&arguments, no_install),
        Chore::Run(arguments) => run::main(&arguments, no_install),
        Chore::Test(arguments) => test::main(&arguments, no_install),
        Chore::Bench(arguments) => bench::main(&arguments, no_install),
        Chore::Fuzz(arguments) => fuzz::main(&arguments, no_install),
        Chore::Verifier(arguments) => verifier::main(&arguments, no_install),
        Chore::Kernels(arguments) => kernels::main(&arguments, no_install),
        Chore::Lint(lint::Arguments {}) => lint::main(no_install),
        Chore::Lines(lines::Arguments {}) => lines::main(),
        Chore::Lab(arguments) => lab::main(&arguments),
        Chore::Cluster(arguments) => cluster::main(&arguments, no_install),
        Chore::Judges(arguments) => judges::main(&arguments),
        Chore::Clean(arguments) => clean::main(&arguments),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            anstream::eprintln!("{}error:{} {error:#}", style::ERROR, style::RESET);
            ExitCode::FAILURE
        }
    }
}

/// Styles of messages. `anstream` removes them if the output is no terminal.
mod style {
    use anstyle::{AnsiColor, Color, Reset, Style};

    pub const ERROR: Style = Style::new()
        .bold()
        .fg_color(Some(Color::Ansi(AnsiColor::Red)));
    pub const BOLD: Style = Style::new().bold();
    pub const RESET: Reset = Reset;
}
