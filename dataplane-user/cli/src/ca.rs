//! `dataplane ca`.

use std::{
    io::Write as _,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, SystemTime},
};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use identity::Authority;
use model::Identity;
use terminal::output;

use crate::proxy::duration;

/// A certificate authority for workloads, for practice nodes, tests, and machines without a control plane.
///
/// Its root is a directory with two files: `ca.crt`, which nodes may have, and `ca.key`, which signs for every workload of the
/// trust domain, so protect it like root's password. It has no revocation and no audit. In production, use cert-manager, SPIRE, Vault
/// or Istio.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane ca init /etc/dataplane/ca --trust-domain cluster.local
  dataplane ca issue shop web --ca /etc/dataplane/ca --out /etc/dataplane/certificates
  dataplane ca show /etc/dataplane/ca

The names are the NAMESPACE and the service ACCOUNT of the workload: the example's certificate is for
spiffe://cluster.local/ns/shop/sa/web. An agent on the machine of the authority needs no `issue`: it takes certificates from
the directory of the authority itself. See docs/identities.md.")]
pub struct CaArgs {
    #[command(subcommand)]
    command: CaCommand,
}

#[derive(Debug, Subcommand)]
enum CaCommand {
    /// Make a root that is valid for ten years
    ///
    /// Changes nothing if the directory has a root already.
    Init {
        /// Directory of the authority. It is made if it does not exist
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        /// The trust domain whose identities the authority signs
        #[arg(long, value_name = "NAME", default_value = "cluster.local")]
        trust_domain: String,
    },
    /// Write a new key and certificate of a service account: DIR/NAMESPACE/ACCOUNT/{tls.crt,tls.key,ca.crt}
    ///
    /// Replaces the files if they exist. A running agent that reads the directory notices the change.
    Issue {
        /// Namespace of the workload
        namespace: String,
        /// Service account of the workload
        account: String,
        /// Directory of the authority
        #[arg(long, value_name = "DIR")]
        ca: PathBuf,
        /// Directory of the certificates
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// How long the certificate is valid, such as 90m, 24h or 720h. Only the next `issue` renews it
        #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration)]
        lifetime: Duration,
    },
    /// Show the trust domain and the validity of the root
    Show {
        /// Directory of the authority
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

impl CaArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let now = SystemTime::now();
        match self.command {
            CaCommand::Init {
                directory,
                trust_domain,
            } => {
                let authority = Authority::create(&directory, &trust_domain, now)?;
                print(&authority)?;
            }
            CaCommand::Issue {
                namespace,
                account,
                ca,
                out,
                lifetime,
            } => {
                let authority = Authority::open(&ca)?;
                let identity = Identity::new(authority.trust_domain(), &namespace, &account)?;
                let issued = authority.issue(&identity, lifetime, now)?;
                issued
                    .write(&out, &identity)
                    .with_context(|| format!("cannot write to {}", out.display()))?;
                let directory = out.join(namespace).join(account);
                writeln!(output::stdout(), "{identity}: {}", directory.display())?;
            }
            CaCommand::Show { directory } => print(&Authority::open(&directory)?)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn print(authority: &Authority) -> anyhow::Result<()> {
    let (from, to) = authority.validity();
    let (from, to) = (
        jiff::Timestamp::try_from(from)?,
        jiff::Timestamp::try_from(to)?,
    );
    let mut out = output::stdout();
    writeln!(out, "trust domain: {}", authority.trust_domain())?;
    writeln!(out, "root valid from {from:.0} to {to:.0}")?;
    Ok(())
}
