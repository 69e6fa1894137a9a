//! Reports room that becomes scarce before anything is refused.

use kernel::tables::Usage;

use super::{super::api::Flows, Finding};

/// Reports endpoints whose masqueraded flows have four fifths of the node's ports.
pub fn of_ports(flows: &Flows) -> Option<Finding> {
    let mut tight = flows
        .ports
        .iter()
        .filter(|ports| u64::from(ports.used) * 5 >= u64::from(ports.limit) * 4);
    let most = tight.next()?;
    let others = match tight.count() {
        0 => String::new(),
        others => format!(" (and {others} other endpoints likewise)"),
    };
    let text = format!(
        "masqueraded flows to {}/{} have {} of the node's {} ports{others}: without a port, a new flow is refused \
         (`ports-exhausted`); add endpoints or nodes, or keep clients' addresses with externalTrafficPolicy: Local",
        most.endpoint, most.protocol, most.used, most.limit
    );
    Some(Finding::warning(text))
}

/// Reports a table of clients with session affinity that is full to four fifths.
pub fn of_clients(usage: &Usage) -> Option<Finding> {
    let (used, room) = (u64::from(usage.used), u64::from(usage.capacity));
    if usage.table != "AFFINITY" || used * 5 < room * 4 {
        return None;
    }
    let text = format!(
        "session affinity: {used} clients are remembered, and there is room for {room}: without room, a new client \
         may reach another endpoint with each connection (`affinity-full`); raise limits.affinityClients"
    );
    Some(Finding::warning(text))
}

#[cfg(test)]
mod tests {
    use super::{super::Severity, *};
    use crate::api::Ports;

    #[test]
    fn few_ports_are_said() {
        let flows = |used: &[u32]| Flows {
            at: 0,
            total: 0,
            ports: used
                .iter()
                .map(|used| Ports {
                    protocol: "udp".to_owned(),
                    endpoint: "10.244.1.5:53".to_owned(),
                    used: *used,
                    limit: 64_512,
                })
                .collect(),
        };
        assert!(of_ports(&flows(&[51_609, 3])).is_none());
        let told = of_ports(&flows(&[60_000, 51_610, 3])).expect("a finding");
        assert_eq!(told.severity, Severity::Warning);
        let says = |words| told.text.contains(words);
        assert!(says(
            "to 10.244.1.5:53/udp have 60000 of the node's 64512 ports (and 1 other"
        ));
    }

    #[test]
    fn four_fifths_are_said() {
        let usage = |table, used| Usage {
            table,
            used,
            capacity: 1000,
            limit: 2000,
            bytes: 0,
        };
        assert!(of_clients(&usage("AFFINITY", 799)).is_none());
        let told = of_clients(&usage("AFFINITY", 800)).expect("a finding");
        assert_eq!(told.severity, Severity::Warning);
        assert!(told.text.contains("800 clients") && told.text.contains("room for 1000"));
        assert!(of_clients(&usage("FRONTENDS", 1000)).is_none());
    }
}
