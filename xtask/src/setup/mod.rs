//! `cargo xtask setup`, and the set-up that each chore starts.

mod found;
mod linker;
mod plan;
mod program;
mod rustc;

use std::{
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::{Result, bail};

use self::{
    found::Found,
    plan::{Missing, Step},
};
use crate::{
    command::shown,
    progress,
    style::{BOLD, RESET},
};

pub use self::{linker::cache, program::Purpose};

/// Find and install the tools that the other chores need
///
/// Looks for the source of Rust's `core`, a bpf-linker for rustc's own LLVM, iproute2, the DNS clients and resolver of
/// the tests, and the iptables, nftables, HAProxy and nginx that tests and benchmarks compare with. Prints which tools
/// are missing and why they are needed, and installs them. Installs packages of the distribution only as root. The
/// tools that it builds go to $XDG_CACHE_HOME/dataplane (~/.cache/dataplane), one copy for each user, which all clones
/// share.
///
/// Every other chore calls set-up for the tools that it needs, so you need not start with this one.
#[derive(Debug, clap::Args)]
pub struct Arguments {}

/// The tools that cargo does not find by itself.
#[derive(Debug)]
pub struct Tools {
    /// The linker for the kernel's instruction set.
    pub bpf_linker: PathBuf,
}

pub fn main(no_install: bool) -> Result<ExitCode> {
    let (found, work) = prepare(Purpose::Bench, no_install)?;
    let state = if work {
        "Everything is in place"
    } else {
        "Nothing to do"
    };
    anstream::eprintln!(
        "{state}: rustc {} with LLVM {}, rust-src, bpf-linker {} in {}, iproute2, iptables, \
         nftables, haproxy, nginx, dig, unbound, musl-gcc, hey.",
        found.rustc.release,
        found.rustc.llvm,
        linker::VERSION,
        tools(&found)
            .bpf_linker
            .parent()
            .unwrap_or(&PathBuf::new())
            .display(),
    );
    Ok(ExitCode::SUCCESS)
}

/// Makes sure that the tools for a purpose are installed.
///
/// # Errors
/// Fails if tools are missing that cannot be installed, or that must not be (`no_install`). Prints how to install them.
pub fn ensure(purpose: Purpose, no_install: bool) -> Result<Tools> {
    Ok(tools(&prepare(purpose, no_install)?.0))
}

fn tools(found: &Found) -> Tools {
    let llvm = found.rustc.llvm;
    let foreign = found
        .foreign
        .as_ref()
        .filter(|f| !found.linker_works && f.fits(llvm));
    let bpf_linker = foreign.map_or_else(|| found.linker.program(), |f| f.program.clone());
    Tools { bpf_linker }
}

/// Installs missing tools. Returns the tools, and whether something was installed.
fn prepare(purpose: Purpose, no_install: bool) -> Result<(Found, bool)> {
    let found = Found::look()?;
    let missing = plan::missing(&found, purpose);
    if missing.is_empty() {
        return Ok((found, false));
    }
    anstream::eprintln!("{BOLD}Missing:{RESET}");
    for Missing { what, why, .. } in &missing {
        anstream::eprintln!("  {BOLD}{what}{RESET}: {why}");
    }
    let packages: Vec<&str> = missing.iter().filter_map(package).collect();
    let by_hand = missing
        .iter()
        .any(|missing| matches!(missing.step, Step::ByHand(_)));
    if no_install || by_hand {
        tell(
            package_commands(&found, &packages)
                .into_iter()
                .chain(commands(&found, &missing)),
        );
        bail!(if no_install {
            "some tools are missing: the commands above install them"
        } else {
            "some tools are missing that this program does not install: see above"
        });
    }
    if !found.root && !packages.is_empty() {
        tell(package_commands(&found, &packages));
        bail!("installing packages takes root: type the commands above, then this one again");
    }
    install(&found, &missing, &packages)?;

    let found = Found::look()?;
    if let Some(Missing { what, why, .. }) = plan::missing(&found, purpose).first() {
        bail!("{what} was installed and is still not found ({why})");
    }
    Ok((found, true))
}

fn package(missing: &Missing) -> Option<&str> {
    match &missing.step {
        Step::Package(package) => Some(package),
        _ => None,
    }
}

/// Prints commands on standard output, for a user or a shell.
fn tell(lines: impl IntoIterator<Item = String>) {
    anstream::eprintln!();
    for line in lines {
        println!("{line}");
    }
    anstream::eprintln!();
}

/// Returns the commands that install the packages, line by line.
fn package_commands(found: &Found, packages: &[&str]) -> Vec<String> {
    if packages.is_empty() {
        return Vec::new();
    }
    let sudo = if found.root { "" } else { "sudo " };
    vec![
        format!("{sudo}apt-get update"),
        format!("{sudo}{}", shown(&apt_install(packages))),
    ]
}

/// Returns the commands that install the other tools, line by line.
fn commands(found: &Found, missing: &[Missing]) -> Vec<String> {
    let mut lines = Vec::new();
    for Missing { what, step, .. } in missing {
        match step {
            Step::Package(_) => {}
            Step::RustSrc(toolchain) => lines.push(shown(&add_rust_src(toolchain))),
            Step::BpfLinker => lines.extend(found.linker.commands()),
            Step::ByHand(how) => lines.push(format!("# {what}: {how}")),
        }
    }
    lines
}

fn install(found: &Found, missing: &[Missing], packages: &[&str]) -> Result<()> {
    if !packages.is_empty() {
        apt(packages)?;
    }
    for Missing { step, .. } in missing {
        match step {
            Step::RustSrc(toolchain) => {
                progress::run("adding rust-src", &mut add_rust_src(toolchain))?;
            }
            Step::BpfLinker => found.linker.build()?,
            Step::Package(_) | Step::ByHand(_) => {}
        }
    }
    Ok(())
}

fn add_rust_src(toolchain: &str) -> Command {
    let mut rustup = Command::new("rustup");
    rustup.args(["component", "add", "rust-src", "--toolchain", toolchain]);
    rustup
}

fn apt_install(packages: &[&str]) -> Command {
    let mut apt = apt_get();
    apt.args(["install", "--yes", "--no-install-recommends"])
        .args(packages);
    apt
}

fn apt_get() -> Command {
    let mut apt = Command::new("apt-get");
    apt.env("DEBIAN_FRONTEND", "noninteractive");
    // In this runlevel, Debian does not start the services of packages that it installs, such as nginx.
    apt.env("RUNLEVEL", "1");
    apt
}

fn apt(packages: &[&str]) -> Result<()> {
    let title = format!("installing {}", packages.join(", "));
    // Try without an update first: only a fresh machine has no package lists, and only an old one has stale lists.
    if progress::run(&title, &mut apt_install(packages)).is_ok() {
        return Ok(());
    }
    progress::run("renewing the package lists", apt_get().arg("update"))?;
    progress::run(&title, &mut apt_install(packages)).map_err(|error| {
        if packages.iter().any(|package| package.starts_with("llvm-")) {
            error.context(
                "older releases of Debian and Ubuntu lack recent versions of LLVM: \
                 https://apt.llvm.org has them",
            )
        } else {
            error
        }
    })
}
