//! Checks values that the types allow and that cannot work.

use super::{Dns, Mesh, Settings};

/// Returns keys with their faults.
pub fn faults(settings: &Settings) -> Vec<(String, String)> {
    let mut faults: Vec<(String, String)> = Vec::new();
    let sources = settings.source.given();
    if sources.len() > 1 {
        let text = format!("both {}; expected one of them", sources.join(" and "));
        faults.push(("source".into(), text));
    }
    if settings.packets.pods_by_interface && !settings.packets.pod_cidrs.is_empty() {
        faults.push((
            "packets".into(),
            "both podCidrs and podsByInterface; expected one of them".into(),
        ));
    }
    faults.extend(settings.mesh.iter().flat_map(Mesh::faults));
    let socket = settings.listen.socket();
    faults.extend(settings.cni.iter().flat_map(|cni| cni.faults(socket)));
    faults.extend(settings.dns.iter().flat_map(Dns::faults));
    if let (Some(mesh), Some(dns)) = (&settings.mesh, &settings.dns)
        && [mesh.outbound(), mesh.inbound()].contains(&dns.port())
    {
        let text = format!(
            "{} is also a port of mesh.proxy; expected another port",
            dns.port()
        );
        faults.push(("dns.port".to_owned(), text));
    }
    if let Some(flows) = settings.packets.conntrack_flows
        && !(1024..=1 << 23).contains(&flows)
    {
        faults.push((
            "packets.conntrackFlows".into(),
            format!("{flows}; expected a number from 1024 to 8388608"),
        ));
    }
    faults.extend(settings.packets.timeouts.faults());
    if let Some(clients) = settings.limits.affinity_clients
        && !(1024..=1 << 24).contains(&clients)
    {
        faults.push((
            "limits.affinityClients".into(),
            format!("{clients}; expected a number from 1024 to 16777216"),
        ));
    }
    for (key, limit) in [
        ("limits.frontends", settings.limits.frontends),
        ("limits.endpoints", settings.limits.endpoints),
    ] {
        if limit == Some(0) {
            faults.push((key.into(), "0; expected a number from 1".into()));
        }
    }
    let listen = &settings.listen;
    let mut taken = Vec::new();
    for (key, listen) in [
        ("listen.metrics", listen.metrics),
        ("listen.health", listen.health),
        ("listen.healthz", listen.healthz),
        ("listen.admin", listen.admin),
    ] {
        let Some(addr) = listen.and_then(|listen| listen.0) else {
            continue;
        };
        match taken.iter().find(|(_, other)| *other == addr) {
            Some((other, _)) => faults.push((
                key.into(),
                format!("{addr} is also the value of {other}; expected different addresses"),
            )),
            None => taken.push((key, addr)),
        }
    }
    faults
}
