//! Reports captured DNS queries that go to their resolvers, because the agent's DNS server does not answer.

use std::time::Duration;

use super::Finding;

/// Returns the finding, if the threads of the server have been silent for so long.
pub fn finding(silent: Duration) -> Finding {
    let since = if silent == Duration::MAX {
        "has not begun to answer".to_owned()
    } else {
        format!("has been silent for {} s", silent.as_secs())
    };
    Finding::warning(format!(
        "the agent's DNS server {since}, so queries of captured workloads go to their resolvers \
         (reason dns-bypassed), and clients do not find names that only the agent knows; if this lasts, restart \
         the agent"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_never_began_has_no_age() {
        let text = |silent| finding(silent).text;
        assert!(text(Duration::from_millis(3900)).contains("silent for 3 s"));
        assert!(text(Duration::MAX).contains("has not begun"));
    }
}
