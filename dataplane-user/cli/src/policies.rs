//! `dataplane policies`.

use std::{io::Write, net::IpAddr, process::ExitCode};

use admin::{api::WorkloadPolicies, client};
use clap::Args;
use form_urlencoded::Serializer;
use model::{Identity, WorkloadName};
use terminal::{
    SocketArgs,
    output::{self, BOLD, DIM, Format, WARN},
};

/// Show Istio's policies of captured workloads, and how they decide about a connection.
///
/// Lists the AuthorizationPolicies and PeerAuthentications that select each captured workload of this node, with their rules as
/// the agent has read them, and the parts that it cannot read or does not evaluate. With --from and --port, shows the decision about a
/// connection rule by rule, by the evaluator that the proxy uses. Sends nothing.
///
/// The agent's proxy enforces the policies of workloads in the mode `proxy`, and the kernel those of workloads in the mode `kernel`. The
/// mode `auto` is as `proxy` with mesh.identity, and as `kernel` without it.
/// Nothing enforces the policies of workloads whose inbound connections are not captured at their sockets.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane policies
  dataplane policies --workload shop/web
  dataplane policies --workload shop/web --from 10.244.2.8 --port 8080
  dataplane policies --workload shop/web --from 10.244.2.8 --port 8080 --peer spiffe://cluster.local/ns/shop/sa/cart

Without --peer, the client has no identity (plaintext). The port is that of the workload, not of a Service.

Exits with 0, also if the policies refuse the connection, and with 1 after an error.")]
pub struct PoliciesArgs {
    /// Only this workload
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = workload)]
    workload: Option<WorkloadName>,

    /// Decide about a connection from this address
    #[arg(long, value_name = "ADDR", requires = "port")]
    from: Option<IpAddr>,

    /// The identity that the client proves, as spiffe://TRUSTDOMAIN/ns/NAMESPACE/sa/ACCOUNT [default: none]
    #[arg(long, value_name = "SPIFFE", requires = "from")]
    peer: Option<Identity>,

    /// The workload's port to which the client connects
    #[arg(long, value_name = "N", requires = "from", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,

    #[command(flatten)]
    pub(super) socket: SocketArgs,
}

fn workload(text: &str) -> Result<WorkloadName, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => {
            Ok(WorkloadName::new(namespace, name))
        }
        _ => Err("expected NAMESPACE/NAME, such as shop/web".to_owned()),
    }
}

/// Asks the agent for policies: of one workload, and for a connection to it.
pub fn ask(
    client: &client::Client,
    workload: Option<&str>,
    connection: Option<(IpAddr, u16)>,
    peer: Option<&Identity>,
) -> Result<Vec<WorkloadPolicies>, client::Error> {
    let mut query = Serializer::new(String::new());
    if let Some(workload) = workload {
        query.append_pair("workload", workload);
    }
    if let Some((from, port)) = connection {
        query.append_pair("from", &from.to_string());
        query.append_pair("port", &port.to_string());
    }
    if let Some(peer) = peer {
        query.append_pair("peer", &peer.to_string());
    }
    client.list(&format!("/policies?{}", query.finish()))
}

impl PoliciesArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let workload = self.workload.as_ref().map(ToString::to_string);
        let told = ask(
            &self.socket.client(),
            workload.as_deref(),
            self.from.zip(self.port),
            self.peer.as_ref(),
        )?;
        self.output.print(&told, |out, told| text(out, told))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn text(out: &mut dyn Write, told: &[WorkloadPolicies]) -> std::io::Result<()> {
    if told.is_empty() {
        writeln!(out, "No workload is captured.")?;
    }
    for (number, of) in told.iter().enumerate() {
        if number > 0 {
            writeln!(out)?;
        }
        writeln!(out, "{BOLD}{}{BOLD:#}", of.workload)?;
        let warn =
            |out: &mut dyn Write, text: &str| writeln!(out, "  {}", output::styled(WARN, text));
        if of.unread {
            warn(
                out,
                "Istio's policies cannot be read: each new connection is refused",
            )?;
        }
        if let Some(why) = &of.closed {
            warn(out, why)?;
        }
        match &of.enforced_by {
            Some(by) => writeln!(out, "  {DIM}enforced by the {by}{DIM:#}")?,
            None => warn(
                out,
                "nothing on this node enforces these policies: the workload's inbound connections are not captured at its sockets, or it has a problem in dataplane status",
            )?,
        }
        if of.policies.is_empty() {
            writeln!(out, "  no policy selects it")?;
        }
        for policy in &of.policies {
            let dry_run = if policy.dry_run { " (dry run)" } else { "" };
            writeln!(out, "  {}: {}{dry_run}", policy.name, policy.action)?;
            for rule in &policy.rules {
                writeln!(out, "    {DIM}{rule}{DIM:#}")?;
            }
            for warning in &policy.warnings {
                writeln!(out, "    {}", output::styled(WARN, warning))?;
            }
        }
        if let Some(decision) = &of.decision {
            writeln!(out, "  decision:")?;
            for step in &decision.steps {
                writeln!(out, "    {step}")?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use admin::api::{Decision, Policy};

    use super::*;

    #[test]
    fn a_workload_with_its_policies_and_the_decision() {
        let told = WorkloadPolicies {
            workload: "shop/web".to_owned(),
            enforced_by: None,
            unread: true,
            closed: Some("too many ranges".to_owned()),
            policies: vec![Policy {
                name: "AuthorizationPolicy shop/web".to_owned(),
                action: "DENY".to_owned(),
                dry_run: true,
                rules: vec!["(port 80)".to_owned()],
                warnings: vec!["spec.rules: not read".to_owned()],
            }],
            decision: Some(Decision {
                allowed: false,
                steps: vec!["denied: why".to_owned()],
            }),
        };
        let mut out = anstream::StripStream::new(Vec::new());
        text(&mut out, &[told]).unwrap();
        let out = String::from_utf8(out.into_inner()).unwrap();
        assert_eq!(
            out,
            "shop/web
  Istio's policies cannot be read: each new connection is refused
  too many ranges
  nothing on this node enforces these policies: the workload's inbound connections are not captured at its sockets, or it has a problem in dataplane status
  AuthorizationPolicy shop/web: DENY (dry run)
    (port 80)
    spec.rules: not read
  decision:
    denied: why
"
        );
    }
}
