//! `dataplane certs`.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use admin::api;
use clap::Args;
use terminal::{
    SocketArgs,
    output::{BAD, Cell, DIM, Format, Table, WARN, styled},
};

/// Show the certificates of this node's captured workloads.
///
/// The agent keeps one key and one certificate for each service account that has a captured workload on the node. It renews
/// the certificate at about half of its lifetime. A certificate with less than a third of its lifetime left should have been
/// renewed: a line below the table has the reason. Keys are never shown.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane certs
  dataplane certs -o json

Exit codes: 0 all certificates are there and were renewed in time; 1 one is missing or overdue, or a file of roots or of
revoked certificates has a problem.

Certificates come from the source that mesh.identity.source names. See docs/identities.md.")]
pub struct CertsArgs {
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,

    #[command(flatten)]
    pub(super) socket: SocketArgs,
}

impl CertsArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let found: api::Certificates = self.socket.client().get("/certs")?;
        self.output.print(&found, text)?;
        let is_bad = found.certificates.iter().any(|of| of.overdue) || !found.problems.is_empty();
        Ok(if is_bad {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        })
    }
}

fn text(out: &mut dyn Write, found: &api::Certificates) -> io::Result<()> {
    if found.certificates.is_empty() {
        writeln!(
            out,
            "no captured workload of this node has a service account"
        )?;
    } else {
        let mut table = Table::new(&["IDENTITY", "SERIAL", "FROM", "TO", "STATE", "SOURCE"]);
        let given = |text: &Option<String>| Cell::from(text.as_deref().unwrap_or("-"));
        for of in &found.certificates {
            let state = match (&of.serial, of.overdue) {
                (None, _) => Cell::new("missing", BAD),
                (Some(_), true) => Cell::new("overdue", WARN),
                (Some(_), false) => Cell::from("valid"),
            };
            table.row(vec![
                Cell::from(of.identity.as_str()),
                given(&of.serial),
                given(&of.from),
                given(&of.to),
                state,
                Cell::new(of.source.as_str(), DIM),
            ]);
        }
        table.write(out)?;
    }
    for of in &found.certificates {
        if let Some(failed) = &of.failed {
            let why = format!(
                "{}: at {}: {}; next attempt at {}",
                of.identity, failed.at, failed.cause, failed.next
            );
            writeln!(out, "{}", styled(WARN, why))?;
        }
    }
    for problem in &found.problems {
        writeln!(out, "{}", styled(BAD, problem))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_and_overdue_certificates_have_their_cause() {
        let of = |name: &str, serial: Option<&str>, overdue: bool| {
            serde_json::json!({
                "identity": format!("spiffe://cluster.local/ns/shop/sa/{name}"),
                "serial": serial, "from": null, "to": null, "overdue": overdue,
                "source": "directory /certs",
                "failed": overdue.then(|| serde_json::json!({
                    "cause": "no file", "at": "1", "next": "2",
                })),
            })
        };
        let found = serde_json::from_value(serde_json::json!({
            "certificates": [
                of("web", Some("0a"), false), of("db", Some("0b"), true), of("new", None, true),
            ],
            "problems": ["roots.pem: unreadable"],
        }));
        let mut out = Vec::new();
        text(&mut out, &found.unwrap()).unwrap();
        let lines = anstream::adapter::strip_bytes(&out).into_vec();
        let lines = String::from_utf8(lines).unwrap();
        for (line, wanted) in lines.lines().zip([
            &["IDENTITY", "SOURCE"][..],
            &["sa/web", "0a", "valid", "directory /certs"],
            &["sa/db", "0b", "overdue"],
            &["sa/new", "missing"],
            &["sa/db: at 1: no file; next attempt at 2"],
            &["sa/new: at 1: no file"],
            &["roots.pem: unreadable"],
        ]) {
            assert!(wanted.iter().all(|part| line.contains(part)), "{lines}");
        }
        assert_eq!(lines.lines().count(), 7);
    }
}
