//! `dataplane monitor --hook dns`: the DNS queries that the agent answers.

use std::{
    io::{self, BufWriter, Write},
    process::ExitCode,
    thread,
    time::Duration,
};

use admin::client::{self, Client};
use dns::{Answered, Queries};
use terminal::output::{self, BAD, DIM, Format, GOOD};

use super::{MonitorArgs, begin};

/// Pause after an answer of the agent without a query.
const POLL: Duration = Duration::from_millis(100);
/// Pause between two attempts to reach an agent.
const RETRY: Duration = Duration::from_secs(1);

/// Shows queries until the user stops the command, or the requested number is reached.
pub fn show(args: &MonitorArgs) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(
        args.reason.is_empty() && args.iface.is_none() && args.service.is_none(),
        "a DNS query has no reason, interface or service; give --hook dns without --reason, --iface and --service"
    );
    let client = args.socket.client();
    let mut out = BufWriter::new(output::stdout());
    let mut left = args.count.unwrap_or(u64::MAX);
    let mut page: Queries = client.get("/dns/queries")?;
    loop {
        if page.lost > 0 {
            eprintln!(
                "note: {} queries were answered faster than they could be shown",
                page.lost
            );
        }
        let many = usize::try_from(left).unwrap_or(usize::MAX);
        for query in page.queries.iter().take(many) {
            match args.output {
                Format::Text => text(&mut out, query)?,
                Format::Json => {
                    serde_json::to_writer(&mut out, query)?;
                    writeln!(out)?;
                }
            }
            left -= 1;
        }
        out.flush()?;
        if left == 0 {
            return Ok(ExitCode::SUCCESS);
        }
        if page.queries.is_empty() {
            thread::sleep(POLL);
        }
        let next = format!("/dns/queries?from={}", page.next);
        page = match client.get(&next) {
            // Another agent may start, for example after an upgrade. Its numbers begin again.
            Err(client::Error::NotRunning { .. }) => {
                eprintln!("note: no agent runs; waiting for one");
                wait_for_agent(&client)
            }
            page => page?,
        };
    }
}

/// Waits for an agent, and returns its first answer. An agent that starts has no earlier queries.
fn wait_for_agent(client: &Client) -> Queries {
    loop {
        thread::sleep(RETRY);
        if let Ok(page) = client.get("/dns/queries") {
            return page;
        }
    }
}

fn text(out: &mut dyn Write, query: &Answered) -> io::Result<()> {
    begin(out, query.time, "dns")?;
    let style = match &*query.code {
        "No Error" => GOOD,
        _ => BAD,
    };
    write!(out, "{} {} {}", query.client, query.of_type, query.name)?;
    let addresses: Vec<String> = query.addresses.iter().map(ToString::to_string).collect();
    if !addresses.is_empty() {
        write!(out, " -> {}", addresses.join(" "))?;
    }
    writeln!(
        out,
        " {} {} {DIM}{} {} µs{DIM:#}",
        output::styled(style, &query.code),
        query.by,
        query.protocol,
        query.took_ns / 1000
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_querys_line() {
        let query = Answered {
            time: 3661.25,
            took_ns: 31_400,
            client: "shop/web".to_owned(),
            protocol: "udp".to_owned(),
            name: "api.other.svc.cluster.local.".to_owned(),
            of_type: "A".to_owned(),
            by: "service".to_owned(),
            code: "No Error".to_owned(),
            addresses: vec!["10.96.0.11".parse().unwrap()],
        };
        let mut out = anstream::StripStream::new(Vec::new());
        text(&mut out, &query).unwrap();
        assert_eq!(
            String::from_utf8(out.into_inner()).unwrap(),
            "01:01:01.250 dns     shop/web A api.other.svc.cluster.local. -> 10.96.0.11 No Error service udp 31 µs\n"
        );
    }
}
