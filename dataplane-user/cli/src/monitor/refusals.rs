//! `dataplane monitor --hook proxy`: the connections that the agent's proxy refuses, as in its access log.

use std::io::{self, Write};

use serde_json::Value;
use terminal::output::{self, BAD, DIM};

use super::pages::Kind;

pub const KIND: Kind<Value> = Kind {
    hook: "proxy",
    path: "/refusals",
    text,
};

/// Writes a connection.
fn text(out: &mut dyn Write, line: &Value) -> io::Result<()> {
    let field = |name: &str| line[name].as_str().unwrap_or_default();
    // Of a time such as 2026-11-30T17:12:03.114Z.
    let time = field("time").get(11..23).unwrap_or_default();
    write!(
        out,
        "{DIM}{time}{DIM:#} proxy   {} -> {}/tcp {} {} {}",
        field("src"),
        field("dst"),
        output::styled(BAD, field("response_flags")),
        field("direction"),
        field("workload"),
    )?;
    if let Some(peer) = line["peer"].as_str() {
        write!(out, " {DIM}{peer}{DIM:#}")?;
    }
    if let Some(error) = line["error"].as_str() {
        write!(out, " {error}")?;
    }
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_refusals_line() {
        let line = json!({
            "time": "2026-11-30T17:12:03.114Z",
            "workload": "shop/web",
            "direction": "inbound",
            "src": "10.244.2.5:40112",
            "dst": "10.244.1.8:80",
            "peer": "spiffe://cluster.local/ns/shop/sa/far",
            "response_flags": "DENY",
            "error": "denied by AuthorizationPolicy shop/limit, rule 1",
        });
        let mut out = anstream::StripStream::new(Vec::new());
        text(&mut out, &line).unwrap();
        assert_eq!(
            String::from_utf8(out.into_inner()).unwrap(),
            "17:12:03.114 proxy   10.244.2.5:40112 -> 10.244.1.8:80/tcp DENY inbound shop/web \
             spiffe://cluster.local/ns/shop/sa/far denied by AuthorizationPolicy shop/limit, rule 1\n"
        );
    }
}
