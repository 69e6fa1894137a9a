//! `dataplane dns`.

mod cache;
mod query;
mod serve;

use std::{fs, net::IpAddr, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::{ArgMatches, Args, Subcommand, parser::ValueSource};
use dns::{Basis, LowerName, ResolvConf, Ttls};
use settings::{Node, Settings};

use super::{settled, source::SourceArgs};

/// Answer DNS queries for the names of services, and ask resolvers for all others.
#[derive(Debug, Args)]
pub struct DnsArgs {
    #[command(subcommand)]
    command: DnsCommand,
}

#[derive(Debug, Subcommand)]
enum DnsCommand {
    Cache(cache::CacheArgs),
    Query(query::QueryArgs),
    Serve(serve::ServeArgs),
}

impl DnsArgs {
    /// Completes the options from the configuration file.
    pub(super) fn fill_from(
        &mut self,
        file: &Settings,
        given: &ArgMatches,
    ) -> Result<(), clap::Error> {
        let given = given.subcommand().map_or(given, |(_, given)| given);
        let common = match &mut self.command {
            DnsCommand::Cache(args) => {
                args.socket.fill_from(file);
                return Ok(());
            }
            DnsCommand::Query(args) => &mut args.common,
            DnsCommand::Serve(args) => {
                args.fill_from(file);
                &mut args.common
            }
        };
        common.source.fill_from(file);
        common.fill_from(file, given);
        settled::node(&mut common.node, file, given)
    }

    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            DnsCommand::Cache(args) => args.run(),
            DnsCommand::Query(args) => args.run(),
            DnsCommand::Serve(args) => args.run(),
        }
    }
}

/// What decides answers.
#[derive(Clone, Debug, Args)]
struct CommonArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// Domain of the cluster (the kubelet's clusterDomain)
    #[arg(long, value_name = "NAME", default_value = "cluster.local", value_parser = domain_of)]
    cluster_domain: LowerName,

    /// Addresses of the cluster's DNS (the kubelet's clusterDNS), which pods have as resolvers
    /// [default: the cluster IPs of the Service kube-system/kube-dns]
    #[arg(long, value_name = "ADDR", num_args = 1.., value_delimiter = ',')]
    cluster_dns: Vec<IpAddr>,

    /// File with the node's own resolvers and search list (the kubelet's resolvConf)
    #[arg(long, value_name = "FILE", default_value = "/etc/resolv.conf")]
    resolv_conf: PathBuf,

    #[command(flatten)]
    node: Node,

    /// The file's settings of DNS.
    #[arg(skip)]
    dns: settings::Dns,
}

fn domain_of(text: &str) -> Result<LowerName, String> {
    LowerName::parse(text)
        .ok()
        .filter(|name| name.count() > 0)
        .ok_or_else(|| "expected a domain such as cluster.local".to_owned())
}

impl CommonArgs {
    /// Completes the options from the file's DNS section.
    fn fill_from(&mut self, file: &Settings, given: &ArgMatches) {
        let Some(file) = &file.dns else { return };
        self.dns.clone_from(file);
        let is_given = |id| given.value_source(id) == Some(ValueSource::CommandLine);
        let domain = file.cluster_domain.as_deref();
        let domain = domain.and_then(|text| domain_of(text).ok());
        if let Some(domain) = domain.filter(|_| !is_given("cluster_domain")) {
            self.cluster_domain = domain;
        }
        if self.cluster_dns.is_empty() {
            self.cluster_dns.clone_from(&file.cluster_dns);
        }
        let path = file.resolv_conf.as_ref();
        if let Some(path) = path.filter(|_| !is_given("resolv_conf")) {
            self.resolv_conf.clone_from(path);
        }
    }

    /// Returns the settings that decide answers, besides the source.
    fn basis(&self) -> anyhow::Result<Basis> {
        let path = &self.resolv_conf;
        let text = fs::read_to_string(path).with_context(|| {
            format!(
                "cannot read {}; name the file with the node's resolvers with --resolv-conf",
                path.display()
            )
        })?;
        Ok(Basis {
            domain: self.cluster_domain.clone(),
            cluster_dns: self.cluster_dns.clone(),
            node: ResolvConf::parse(&text),
            ttls: Ttls {
                services: self.dns.ttl(),
                entries: self.dns.service_entry_ttl(),
            },
        })
    }
}
