//! `dataplane keep-nat`.

use std::{io, process::ExitCode};

use anyhow::{Context as _, anyhow};
use clap::Args;
use kernel::{netfilter::keep_nat, nf_conntrack};

/// Keep the kernel's own NAT and connection tracking on while kube-proxy's rules are removed.
///
/// Adds the nftables table `inet dataplane-keep-nat`, which changes no packet. Run the command on
/// the node before `kube-proxy --cleanup`. Without the table, on a node with no other NAT rules,
/// connections that kube-proxy translated end, and new connections may hang. `--release` removes
/// the table when no translated connection is left. `dataplane cleanup` removes the table at once.
#[derive(Debug, Args)]
pub struct KeepNatArgs {
    /// Remove the table if no translated connection is left; otherwise exit with 1
    #[arg(long)]
    release: bool,

    /// With --release: remove the table even if translated connections are left, which may end them
    #[arg(long, requires = "release")]
    now: bool,
}

impl KeepNatArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let translated = nf_conntrack::translated()
            .context("cannot ask the kernel's conntrack which connections are translated");
        if self.release {
            release(translated, self.now)
        } else {
            keep(translated?)
        }
    }
}

fn keep(translated: usize) -> anyhow::Result<ExitCode> {
    let added = keep_nat::add().map_err(|error| explain(&error))?;
    println!(
        "nftables table inet {}: {}; {translated} translated connections",
        keep_nat::TABLE,
        if added { "added" } else { "is there" },
    );
    println!(
        "Now kube-proxy's rules can go. `dataplane keep-nat --release` removes the table when no \
         translated connection is left."
    );
    Ok(ExitCode::SUCCESS)
}

fn release(translated: anyhow::Result<usize>, now: bool) -> anyhow::Result<ExitCode> {
    match translated {
        Ok(0) => {}
        Ok(_) | Err(_) if now => {}
        Ok(left) => {
            eprintln!(
                "dataplane: kept nftables table inet {}: the kernel still translates {left} \
                 connections (kube-proxy's, or those of other NAT rules); try again later, or add \
                 --now, which may end them",
                keep_nat::TABLE
            );
            return Ok(ExitCode::FAILURE);
        }
        Err(error) => {
            return Err(error.context("kept the table; --now removes it without this check"));
        }
    }
    let removed = keep_nat::remove()
        .with_context(|| format!("cannot remove nftables table inet {}", keep_nat::TABLE))?;
    println!(
        "nftables table inet {}: {}",
        keep_nat::TABLE,
        if removed { "removed" } else { "is not there" }
    );
    Ok(ExitCode::SUCCESS)
}

fn explain(error: &io::Error) -> anyhow::Error {
    let why = match error.raw_os_error() {
        Some(libc::EPERM) => "; run as root or add CAP_NET_ADMIN",
        // The kernel's errors for a missing subsystem, chain type or expression.
        Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOENT | libc::EPROTONOSUPPORT) => {
            "; the kernel needs nf_tables with NAT (CONFIG_NF_TABLES_INET, CONFIG_NFT_NAT, CONFIG_NFT_CT)"
        }
        _ => "",
    };
    anyhow!(
        "cannot add nftables table inet {}: {error}{why}",
        keep_nat::TABLE
    )
}
