//! Reads the chains of a service's port: the allowed clients, the traffic policies, and the endpoints.

use std::{net::IpAddr, time::Duration};

use model::TrafficPolicy;

use super::{
    super::{
        Masquerade,
        draft::{Affinity, Draft, PortName, agree},
        endpoints::{Share, of_lists},
        rows::Line,
    },
    port::Chains,
    rule::{Rule, has},
    tables::Table,
};

/// A rule that was not understood, and the reason.
type Fault<'a> = (Line<'a>, String);

fn fault<T>(line: Line<'_>, why: impl Into<String>) -> Result<T, Fault<'_>> {
    Err((line, why.into()))
}

fn read_rule(line: Line<'_>) -> Result<Rule<'_>, Fault<'_>> {
    Rule::read(line.text).map_err(|why| (line, why))
}

/// Reads the chains of a port.
pub fn read<'a>(nat: &Table<'a>, name: &PortName<'_>, of_port: &Chains<'a>, draft: &mut Draft) {
    if let Err((Line { at, text }, why)) = port(nat, name, of_port, draft) {
        draft.leave_out(&name.service(), at, text, &why);
    }
}

fn port<'a>(
    nat: &Table<'a>,
    name: &PortName<'_>,
    of_port: &Chains<'a>,
    draft: &mut Draft,
) -> Result<(), Fault<'a>> {
    let Some((chain, policy, first)) = of_port.internal else {
        let Some((_, line)) = of_port.external else {
            return Ok(());
        };
        // A port may have no rule for its cluster IP in table `nat`: with policy Local and no local endpoint,
        // kube-proxy refuses connections there. All other addresses have a rule.
        let is_local = draft.service(&name.service()).internal_policy;
        if is_local == Some(TrafficPolicy::Cluster) {
            return fault(line, "no rule serves its cluster IP");
        }
        return outside(nat, name, of_port, None, line, draft);
    };
    let internal = choice(nat, chain, first, name)?;
    if !draft
        .facts
        .masquerades(draft.v4, internal.masquerade.clone())
    {
        let line = internal.masquerade_at.unwrap_or(first);
        return fault(line, "other services masquerade other clients");
    }
    outside(
        nat,
        name,
        of_port,
        Some((chain, policy, internal)),
        first,
        draft,
    )
}

/// Reads the chain for traffic from outside, and combines the endpoints.
fn outside<'a>(
    nat: &Table<'a>,
    name: &PortName<'_>,
    of_port: &Chains<'a>,
    internal: Option<(&'a str, TrafficPolicy, Choice<'a>)>,
    first: Line<'a>,
    draft: &mut Draft,
) -> Result<(), Fault<'a>> {
    let (mut cluster, mut local): (Option<&str>, Option<&str>) = (None, None);
    let mut affinity = None;
    let mut lists: [Vec<Share>; 2] = Default::default();
    let mut is_local = false;
    if let Some((chain, policy, choice)) = internal {
        is_local |= policy == TrafficPolicy::Local;
        let place = if policy == TrafficPolicy::Local {
            &mut local
        } else {
            &mut cluster
        };
        *place = Some(chain);
        affinity = Some((first, choice.affinity));
        lists[usize::from(policy == TrafficPolicy::Local)] = choice.endpoints;
    }
    if let Some((chain, line)) = of_port.external {
        let external = external(nat, chain, line)?;
        is_local |= external.policy == TrafficPolicy::Local;
        if !agree(
            &mut draft.service(&name.service()).external_policy,
            external.policy,
        ) {
            return fault(line, "its ports have different external traffic policies");
        }
        for (index, known, wanted) in [(0, cluster, external.cluster), (1, local, external.local)] {
            let Some(wanted) = wanted else { continue };
            match known {
                Some(known) if known == wanted => {}
                Some(_) => return fault(line, "its chains lead to different endpoints"),
                None => {
                    let choice = choice(nat, wanted, line, name)?;
                    if affinity.is_some_and(|(_, known)| known != choice.affinity) {
                        return fault(line, "its chains differ in session affinity");
                    }
                    affinity = Some((line, choice.affinity));
                    lists[index] = choice.endpoints;
                }
            }
        }
    }
    let [cluster, local] = lists;
    let Some(endpoints) = of_lists(&cluster, &local, is_local) else {
        return fault(first, "its chains lead to an endpoint twice");
    };
    let (line, affinity) = affinity.unzip();
    if !draft.serve(name, endpoints, affinity) {
        return fault(
            line.unwrap_or(first),
            "its ports differ in session affinity",
        );
    }
    Ok(())
}

/// A chain that chooses an endpoint.
struct Choice<'a> {
    masquerade: Masquerade,
    masquerade_at: Option<Line<'a>>,
    affinity: Affinity,
    endpoints: Vec<Share>,
}

/// Reads a chain that chooses an endpoint. `from`: a rule that jumps to the chain.
fn choice<'a>(
    nat: &Table<'a>,
    chain: &str,
    from: Line<'a>,
    name: &PortName<'_>,
) -> Result<Choice<'a>, Fault<'a>> {
    const VIP: u32 = has::DESTINATION | has::PROTOCOL | has::COMMENT | has::PORT | has::JUMP;
    const ENDPOINT: u32 = has::COMMENT | has::JUMP;
    let mut found = Choice {
        masquerade: Masquerade::Nobody,
        masquerade_at: None,
        affinity: Affinity(None),
        endpoints: Vec::new(),
    };
    // The chains of endpoints: those for remembered clients, and those chosen at random.
    let (mut remembered, mut drawn, mut probabilities) = (Vec::new(), Vec::new(), Vec::new());
    for line in nat.rules(chain) {
        let rule = read_rule(line)?;
        if rule.target == "KUBE-MARK-MASQ" {
            let masquerade = match (rule.source, rule.interface.strip_suffix('+')) {
                _ if rule.is(VIP) => Masquerade::All,
                (Some(net), _) if rule.is(VIP | has::not(has::SOURCE)) => {
                    Masquerade::OutsideOf(net)
                }
                (_, Some(prefix)) if rule.is(VIP | has::not(has::INTERFACE)) => {
                    Masquerade::NotFromPrefix(prefix.to_owned())
                }
                (_, None) if rule.is(VIP | has::not(has::INTERFACE)) => {
                    Masquerade::NotFromInterface(rule.interface.to_owned())
                }
                _ => return fault(line, "kube-proxy masquerades no such clients"),
            };
            if found.masquerade != Masquerade::Nobody || !drawn.is_empty() {
                return fault(
                    line,
                    "kube-proxy has one rule to masquerade, at the chain's start",
                );
            }
            (found.masquerade, found.masquerade_at) = (masquerade, Some(line));
        } else if !rule.target.starts_with("KUBE-SEP-") {
            return fault(line, "the chain of a service leads to endpoints only");
        } else if rule.is(ENDPOINT | has::REMEMBERED) {
            let timeout = Duration::from_secs(rule.seconds);
            if rule.list != rule.target || !agree(&mut found.affinity.0, timeout) {
                return fault(
                    line,
                    "kube-proxy remembers clients for one time, by endpoint",
                );
            }
            remembered.push(rule.target);
        } else if rule.is(ENDPOINT) || rule.is(ENDPOINT | has::PROBABILITY) {
            if probabilities.len() < drawn.len() {
                return fault(line, "no packet comes to this rule");
            }
            drawn.push((rule.target, line));
            probabilities.extend((!rule.is(ENDPOINT)).then_some(rule.probability));
        } else {
            return fault(line, "kube-proxy writes no such rule here");
        }
    }
    let last = drawn.last().map_or(from, |(_, line)| *line);
    if probabilities.len() + 1 != drawn.len() || !are_equal(&probabilities) {
        return fault(
            last,
            "the probabilities do not give each endpoint the same share",
        );
    }
    if found.affinity.0.is_some() {
        let mut wanted: Vec<&str> = drawn.iter().map(|(chain, _)| *chain).collect();
        wanted.sort_unstable();
        remembered.sort_unstable();
        if wanted != remembered {
            return fault(last, "not every endpoint's clients are remembered");
        }
    }
    for (chain, line) in &drawn {
        let remembers = found.affinity.0.is_some();
        let addr = endpoint(nat, chain, *line, name, remembers)?;
        found.endpoints.push(Share { addr, local: false });
    }
    Ok(found)
}

/// The precision with which the kernel stores a probability.
const GRAIN: f64 = 1.0 / 2_147_483_648.0;

/// Returns true if endpoints whose rules are evaluated in this order get equal shares. The rule of the last endpoint has
/// no probability, because this endpoint gets the rest.
fn are_equal(probabilities: &[f64]) -> bool {
    let mut left = 1.0;
    probabilities.iter().rev().all(|probability| {
        left += 1.0;
        (probability - 1.0 / left).abs() <= GRAIN
    })
}

/// Returns the endpoint of an endpoint's chain.
fn endpoint<'a>(
    nat: &Table<'a>,
    chain: &str,
    from: Line<'a>,
    name: &PortName<'_>,
    remembers: bool,
) -> Result<std::net::SocketAddr, Fault<'a>> {
    const DNAT: u32 = has::PROTOCOL | has::COMMENT | has::JUMP;
    let wanted = if remembers {
        DNAT | has::REMEMBERS
    } else {
        DNAT
    };
    let mut rules = nat.rules(chain);
    let (Some(own), Some(dnat), None) = (rules.next(), rules.next(), rules.next()) else {
        return fault(
            from,
            format!("chain {chain} has not two rules, as an endpoint's has"),
        );
    };
    let hairpin = read_rule(own)?;
    let rule = read_rule(dnat)?;
    let good = rule.is(wanted)
        && rule.target == "DNAT"
        && rule.protocol == name.protocol.word()
        && (!remembers || rule.list == chain);
    let Some(to) = rule.to.filter(|_| good) else {
        return fault(
            dnat,
            "an endpoint's chain translates packets of the port's protocol",
        );
    };
    let of_endpoint = hairpin.source == Some(to.ip().into());
    if !hairpin.is(has::SOURCE | has::COMMENT | has::JUMP)
        || hairpin.target != "KUBE-MARK-MASQ"
        || !of_endpoint
    {
        return fault(own, "an endpoint's chain masquerades the endpoint itself");
    }
    Ok(to)
}

/// A chain for traffic from outside.
struct External<'a> {
    policy: TrafficPolicy,
    /// The chain with all endpoints.
    cluster: Option<&'a str>,
    /// The chain with the endpoints on this node.
    local: Option<&'a str>,
}

fn external<'a>(nat: &Table<'a>, chain: &str, from: Line<'a>) -> Result<External<'a>, Fault<'a>> {
    const LOCAL: u32 = has::COMMENT | has::FROM_LOCAL | has::JUMP;
    let mut found = External {
        policy: TrafficPolicy::Local,
        cluster: None,
        local: None,
    };
    let mut last = from;
    for line in nat.rules(chain) {
        let rule = read_rule(line)?;
        last = line;
        let target = rule.target;
        let is_pod = rule.is(has::SOURCE | has::COMMENT | has::JUMP)
            || rule.is(has::INTERFACE | has::COMMENT | has::JUMP);
        let is_cluster = found.policy == TrafficPolicy::Cluster;
        if found.local.is_some() {
            return fault(line, "no packet comes to this rule");
        }
        if target == "KUBE-MARK-MASQ" && rule.is(has::COMMENT | has::JUMP) {
            found.policy = TrafficPolicy::Cluster;
        } else if target == "KUBE-MARK-MASQ" && rule.is(LOCAL) {
        } else if target.starts_with("KUBE-SVC-")
            && (rule.is(LOCAL) || is_pod || is_cluster && rule.is(has::JUMP))
        {
            if !agree(&mut found.cluster, target) {
                return fault(line, "the chain leads to two services");
            }
        } else if target.starts_with("KUBE-SVL-") && rule.is(has::JUMP) && !is_cluster {
            found.local = Some(target);
        } else {
            return fault(line, "kube-proxy writes no such rule here");
        }
    }
    if found.cluster.is_none() {
        return fault(last, format!("chain {chain} leads to no service"));
    }
    Ok(found)
}

/// Reads the chain of a load balancer's address with restricted clients. Returns the chain for the allowed clients, and
/// their ranges.
pub fn firewall<'a>(
    nat: &Table<'a>,
    chain: &str,
    from: Line<'a>,
    name: &PortName<'_>,
    ip: IpAddr,
    draft: &mut Draft,
) -> Result<&'a str, Fault<'a>> {
    let (target, ranges) = ranges(nat, chain, from)?;
    let known =
        &mut draft.service(&name.service()).outside().source_ranges[usize::from(!ip.is_ipv4())];
    if agree(known, ranges) {
        Ok(target)
    } else {
        fault(from, "its ports differ in the clients that may use them")
    }
}

fn ranges<'a>(
    nat: &Table<'a>,
    chain: &str,
    from: Line<'a>,
) -> Result<(&'a str, Vec<ipnet::IpNet>), Fault<'a>> {
    let (mut target, mut ranges) = (None, Vec::new());
    for line in nat.rules(chain) {
        let rule = read_rule(line)?;
        match rule.source {
            Some(net) if rule.is(has::SOURCE | has::COMMENT | has::JUMP) => {
                if !rule.target.starts_with("KUBE-EXT-") || !agree(&mut target, rule.target) {
                    return fault(line, "the chain leads to two services");
                }
                ranges.push(net);
            }
            // This rule is only a comment. Another chain drops all other packets.
            None if rule.is(has::COMMENT) => {}
            _ => return fault(line, "kube-proxy writes no such rule here"),
        }
    }
    match target {
        Some(target) => Ok((target, ranges)),
        None => fault(from, format!("chain {chain} leads to no service")),
    }
}
