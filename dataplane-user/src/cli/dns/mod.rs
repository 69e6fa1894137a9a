//! `dataplane dns`.

mod query;
mod serve;

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
};

use anyhow::Context as _;
use clap::{ArgMatches, Args, Subcommand};

use super::{settled, source::SourceArgs};
use crate::{
    dns::{Client, LowerName, ResolvConf, Zone},
    model::{Cluster, Names, ServiceName, Snapshot, Workload},
    settings::{Node, Settings},
};

/// Where Kubernetes' distributions have the cluster's DNS.
const CLUSTER_DNS: (&str, &str) = ("kube-system", "kube-dns");

/// Answer DNS queries for the names of services, and ask resolvers for all others.
#[derive(Debug, Args)]
pub struct DnsArgs {
    #[command(subcommand)]
    command: DnsCommand,
}

#[derive(Debug, Subcommand)]
enum DnsCommand {
    Query(query::QueryArgs),
    Serve(serve::ServeArgs),
}

impl DnsArgs {
    /// Adds what the file says and the command line does not.
    pub(super) fn settle(
        &mut self,
        file: &Settings,
        given: &ArgMatches,
    ) -> Result<(), clap::Error> {
        let given = given.subcommand().map_or(given, |(_, given)| given);
        let common = match &mut self.command {
            DnsCommand::Query(args) => &mut args.common,
            DnsCommand::Serve(args) => {
                args.settle(file);
                &mut args.common
            }
        };
        common.source.settle(file);
        settled::node(&mut common.node, file, given)
    }

    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
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
    #[arg(long, value_name = "NAME", default_value = "cluster.local", value_parser = domain)]
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
}

fn domain(text: &str) -> Result<LowerName, String> {
    LowerName::parse(text)
        .ok()
        .filter(|name| name.count() > 0)
        .ok_or_else(|| "expected a domain such as cluster.local".to_owned())
}

impl CommonArgs {
    /// The zone of a snapshot.
    fn zone(&self, snapshot: &Snapshot) -> Zone {
        let domain = self.cluster_domain.to_string();
        let snapshot = Snapshot {
            cluster: Arc::new(Cluster {
                domain: domain.trim_end_matches('.').into(),
                ..(*snapshot.cluster).clone()
            }),
            ..snapshot.clone()
        };
        Zone::new(Names::of(&snapshot))
    }

    /// What the node's file says.
    fn resolv_conf(&self) -> anyhow::Result<ResolvConf> {
        let path = &self.resolv_conf;
        let text = fs::read_to_string(path).with_context(|| {
            format!(
                "cannot read {}; name the file with the node's resolvers with --resolv-conf",
                path.display()
            )
        })?;
        Ok(ResolvConf::parse(&text))
    }

    /// Where the cluster's DNS is.
    fn cluster_dns(&self, snapshot: &Snapshot) -> Vec<SocketAddr> {
        let found = || {
            let name = ServiceName::new(CLUSTER_DNS.0, CLUSTER_DNS.1);
            let service = snapshot.services.get(&name);
            service.map(|service| service.cluster_ips.to_vec())
        };
        let addrs = if self.cluster_dns.is_empty() {
            found().unwrap_or_default()
        } else {
            self.cluster_dns.clone()
        };
        let addrs = addrs.into_iter();
        addrs.map(|addr| SocketAddr::new(addr, 53)).collect()
    }

    /// A workload's `resolv.conf`; without workload, the node's.
    fn client(
        &self,
        workload: Option<&Workload>,
        zone: &Zone,
        snapshot: &Snapshot,
    ) -> anyhow::Result<Client> {
        let node = self.resolv_conf()?;
        Ok(match workload {
            Some(workload) => {
                let cluster = self.cluster_dns(snapshot);
                Client::of_workload(workload, &zone.domain, &cluster, &node)
            }
            None => Client {
                search: node.search,
                ndots: node.ndots,
                resolvers: node.resolvers,
            },
        })
    }
}
