//! `dataplane dns cache`.

use std::process::ExitCode;

use admin::api;
use clap::Args;
use dns::LowerName;
use form_urlencoded::byte_serialize;
use terminal::{
    SocketArgs,
    output::{self, Cell, Format, Table},
};

/// Show the size of the agent's DNS cache, or remove answers from it.
///
/// The cache has answers of resolvers. An answer belongs to the namespace of the pod whose query
/// brought it; `-` stands for clients that are not pods.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane dns cache
  dataplane dns cache --flush
  dataplane dns cache --flush www.example.com")]
pub struct CacheArgs {
    /// Remove the answers for this name, of all types; without NAME, all answers
    #[arg(long, value_name = "NAME", num_args = 0..=1, value_parser = LowerName::parse)]
    #[expect(clippy::option_option, reason = "clap's type for an optional value")]
    flush: Option<Option<LowerName>>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,

    #[command(flatten)]
    pub(super) socket: SocketArgs,
}

impl CacheArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let client = self.socket.client();
        let Some(name) = self.flush else {
            let cache: api::DnsCache = client.get("/dns/cache")?;
            self.output.print(&cache, text)?;
            return Ok(ExitCode::SUCCESS);
        };
        let path = match name {
            None => "/dns/cache/flush".to_owned(),
            Some(name) => {
                let name = name.to_string();
                let name: String = byte_serialize(name.as_bytes()).collect();
                format!("/dns/cache/flush?name={name}")
            }
        };
        let done: api::DnsFlushed = client.post(&path)?;
        self.output.print(&done, |out, done| {
            writeln!(out, "{} answers forgotten", done.flushed)
        })?;
        Ok(ExitCode::SUCCESS)
    }
}

fn text(out: &mut dyn std::io::Write, cache: &api::DnsCache) -> std::io::Result<()> {
    writeln!(
        out,
        "{} answers, {} of {}",
        cache.entries,
        output::bytes(cache.bytes as u64),
        output::bytes(cache.max_bytes as u64)
    )?;
    if cache.namespaces.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(&["NAMESPACE", "ANSWERS", "BYTES"]);
    for share in &cache.namespaces {
        let name = match share.namespace.as_str() {
            "" => "-",
            name => name,
        };
        table.row(vec![
            Cell::from(name),
            share.entries.to_string().into(),
            output::bytes(share.bytes as u64).into(),
        ]);
    }
    table.write(out)
}
