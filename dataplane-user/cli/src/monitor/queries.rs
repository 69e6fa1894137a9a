//! `dataplane monitor --hook dns`: the DNS queries that the agent answers.

use std::io::{self, Write};

use dns::Answered;
use terminal::output::{self, BAD, DIM, GOOD};

use super::{begin, pages::Kind};

pub const KIND: Kind<Answered> = Kind {
    hook: "dns",
    path: "/dns/queries",
    text,
};

/// Writes a query.
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
