//! Reads the chains of a service's port: the allowed clients, the traffic policies, and the endpoints.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use ipnet::IpNet;
use model::TrafficPolicy;

use super::{
    super::{
        draft::{Affinity, Draft, PortName, agree},
        endpoints::{Share, of_lists},
        facts::Masquerade,
    },
    fixed::{MARKS, added_mark, clients},
    port::{Chains, Hairpins},
    tables::{Rule, Table},
};
use crate::text::tree;

/// A rule that was not understood: its line, its text, and the reason.
type Fault = (usize, String, String);

fn fault<T>(rule: &Rule<'_>, why: &str) -> Result<T, Fault> {
    Err((rule.at, rule.text.to_owned(), why.to_owned()))
}

/// Reads the chains of a port.
pub fn read(
    table: &Table<'_>,
    name: &PortName<'_>,
    of_port: &Chains<'_>,
    hairpins: &Hairpins,
    draft: &mut Draft,
) {
    if let Err((at, text, why)) = port(table, name, of_port, hairpins, draft) {
        draft.leave_out(&name.service(), at, &text, &why);
    }
}

fn port(
    table: &Table<'_>,
    name: &PortName<'_>,
    of_port: &Chains<'_>,
    hairpins: &Hairpins,
    draft: &mut Draft,
) -> Result<(), Fault> {
    let whole = |why: &str| (of_port.at, of_port.name.to_owned(), why.to_owned());
    let [service, local, external] =
        ["service", "local", "external"].map(|prefix| format!("{prefix}-{}", of_port.name));
    let mut wanted = [false, false];
    let mut is_local = of_port.internal == Some(TrafficPolicy::Local);
    if let Some(policy) = of_port.internal {
        wanted[usize::from(policy == TrafficPolicy::Local)] = true;
    }
    if of_port.external {
        let (policy, to_local) = self::external(table, &external, &service, &local)?;
        let Some(policy) = policy else {
            return Err(whole("chain external- leads to no endpoint"));
        };
        wanted[0] = true;
        wanted[1] |= to_local;
        is_local |= policy == TrafficPolicy::Local;
        if !agree(&mut draft.service(&name.service()).external_policy, policy) {
            return Err(whole("its ports have different external traffic policies"));
        }
    }
    let mut affinity = None;
    let mut lists: [Vec<Share>; 2] = Default::default();
    let chains = [
        (&service, TrafficPolicy::Cluster),
        (&local, TrafficPolicy::Local),
    ];
    for (list, (wanted, (chain, policy))) in lists.iter_mut().zip(wanted.into_iter().zip(chains)) {
        if !wanted {
            continue;
        }
        let vip = of_port.vip.filter(|_| of_port.internal == Some(policy));
        let (endpoints, remembers, masquerade) = choice(table, chain, name, vip, hairpins)?;
        if masquerade.is_some_and(|found| !draft.facts.masquerades(table.v4, found)) {
            return Err(whole("it masquerades other clients than other services do"));
        }
        if endpoints.is_empty() {
            return Err(whole("a chain of it leads to no endpoint"));
        }
        if !agree(&mut affinity, remembers) {
            return Err(whole("its chains differ in session affinity"));
        }
        *list = endpoints;
    }
    let [cluster, local] = lists;
    let endpoints = of_lists(&cluster, &local, is_local);
    let endpoints = endpoints.ok_or_else(|| whole("its chains lead to an endpoint twice"))?;
    if !draft.serve(name, endpoints, affinity) {
        return Err(whole("its ports differ in session affinity"));
    }
    Ok(())
}

/// Returns the traffic policy of a chain for traffic from outside, and whether the chain jumps to the endpoints on this
/// node.
fn external(
    table: &Table<'_>,
    chain: &str,
    service: &str,
    local: &str,
) -> Result<(Option<TrafficPolicy>, bool), Fault> {
    let (mut masquerades, mut to_service, mut to_local) = (false, false, false);
    for rule in table.rules(chain) {
        let words = &rule.words[..];
        if to_local || to_service && masquerades {
            return fault(&rule, "no packet comes to this rule");
        }
        match words {
            ["goto", to] if *to == service && masquerades => to_service = true,
            ["goto", to] if *to == local && !masquerades => to_local = true,
            [ip, "saddr", net, "goto", to]
                if *ip == table.ip() && *to == service && tree::net(net).is_some() =>
            {
                to_service = true;
            }
            ["iifname", _, "goto", to] | ["fib", "saddr", "type", "local", "goto", to]
                if *to == service =>
            {
                to_service = true;
            }
            ["fib", "saddr", "type", "local", mark @ ..] if marks(mark) => {}
            mark if marks(mark) && !to_service => masquerades = true,
            _ => return fault(&rule, "kube-proxy writes no such rule here"),
        }
    }
    let policy = if masquerades {
        TrafficPolicy::Cluster
    } else {
        TrafficPolicy::Local
    };
    Ok((to_service.then_some(policy), to_local))
}

/// Returns true if the words mark packets for masquerading.
fn marks(words: &[&str]) -> bool {
    added_mark(words).is_some() || *words == ["jump", MARKS]
}

/// Reads a rule for masquerading the clients of a cluster IP, as versions before 1.36 write it. Only versions up to
/// 1.33 name the port in this rule.
fn masquerade(
    table: &Table<'_>,
    rule: &Rule<'_>,
    name: &PortName<'_>,
    vip: (IpAddr, u16),
) -> Option<Masquerade> {
    let [of, "daddr", ip, rest @ ..] = &rule.words[..] else {
        return None;
    };
    let rest = match rest {
        [word, "dport", port, rest @ ..]
            if *word == name.protocol.word() && port.parse() == Ok(vip.1) =>
        {
            rest
        }
        rest => rest,
    };
    let (found, mark) = clients(table, rest)?;
    let good = *of == table.ip() && ip.parse() == Ok(vip.0) && mark == ["jump", MARKS];
    good.then_some(found)
}

/// Reads a chain that chooses an endpoint. Returns the endpoints, the session affinity, and, if a rule masquerades
/// clients of the cluster IP `vip`, these clients.
fn choice(
    table: &Table<'_>,
    chain: &str,
    name: &PortName<'_>,
    vip: Option<(IpAddr, u16)>,
    hairpins: &Hairpins,
) -> Result<(Vec<Share>, Affinity, Option<Masquerade>), Fault> {
    let (mut endpoints, mut affinity, mut remembered) = (Vec::new(), None, Vec::new());
    let (mut first, mut done) = (true, false);
    let mut masqueraded = None;
    let share = |ip: IpAddr, port: u16| Share {
        addr: SocketAddr::new(ip, port),
        local: hairpins.contains(&(ip, name.protocol, port)),
    };
    for rule in table.rules(chain) {
        if done {
            return fault(&rule, "no packet comes to this rule");
        }
        if std::mem::take(&mut first) {
            masqueraded = vip.and_then(|vip| masquerade(table, &rule, name, vip));
            if masqueraded.is_some() {
                continue;
            }
        }
        // A single endpoint: 1.37 and later write no map for it.
        if let Some(to) = translated(table, &rule, name) {
            let addr = to.parse::<SocketAddr>();
            let Some(addr) = addr.ok().filter(|_| remembered.is_empty()) else {
                return fault(&rule, "it translates to no address with a port");
            };
            endpoints.push(share(addr.ip(), addr.port()));
            done = true;
            continue;
        }
        match &rule.words[..] {
            [ip, "saddr", set, "goto", to] if *ip == table.ip() => {
                let endpoint = to.strip_prefix("endpoint-");
                let set = set.strip_prefix('@').unwrap_or_default();
                let timeout = table.set(set).and_then(|set| set.timeout);
                let named = endpoint.is_some() && set.strip_prefix("affinity-") == endpoint;
                let Some(timeout) = timeout.filter(|_| named) else {
                    return fault(
                        &rule,
                        "kube-proxy remembers clients in a set with a timeout",
                    );
                };
                if !agree(&mut affinity, Duration::from_secs(timeout)) {
                    return fault(&rule, "its endpoints differ in session affinity");
                }
                remembered.push((*to).to_owned());
            }
            ["meta", "l4proto", of, "dnat", ip, "to", slots @ ..]
                if *of == name.protocol.word() && *ip == table.ip() && is_choice(slots, "map") =>
            {
                let found = numbered(slots, 3, |slot| match slot {
                    [ip, ".", port] => Some(share(ip.parse().ok()?, port.parse().ok()?)),
                    _ => None,
                });
                let Some(found) = found.filter(|_| remembered.is_empty()) else {
                    return fault(&rule, UNNUMBERED);
                };
                endpoints = found;
                done = true;
            }
            slots if is_choice(slots, "vmap") => {
                let chains = numbered(slots, 2, |slot| match slot {
                    ["goto", chain] => Some(*chain),
                    _ => None,
                });
                let Some(chains) = chains else {
                    return fault(&rule, UNNUMBERED);
                };
                let mut wanted: Vec<&str> = chains.clone();
                wanted.sort_unstable();
                wanted.dedup();
                remembered.sort_unstable();
                let differ = || fault(&rule, "not every endpoint's clients are remembered");
                if !remembered.is_empty() && wanted != remembered {
                    return differ();
                }
                for chain in chains {
                    let (addr, remembers) = endpoint(table, chain, &rule, name)?;
                    if remembers == remembered.is_empty() {
                        return differ();
                    }
                    endpoints.push(share(addr.ip(), addr.port()));
                }
                done = true;
            }
            _ => return fault(&rule, "kube-proxy writes no such rule here"),
        }
    }
    Ok((endpoints, Affinity(affinity), masqueraded))
}

/// Returns true if the words choose at random: `numgen random mod 2 map { … }`.
fn is_choice(words: &[&str], map: &str) -> bool {
    matches!(words, ["numgen", "random", "mod", _, of, "{", .., "}"] if *of == map)
}

/// The fault of a choice whose slots are misnumbered.
const UNNUMBERED: &str = "its slots are not numbered from 0 to the last";

/// Reads the slots of a choice, which are numbered from 0. `length` is the number of words in a slot.
fn numbered<'t, T>(
    words: &[&'t str],
    length: usize,
    read: impl Fn(&[&'t str]) -> Option<T>,
) -> Option<Vec<T>> {
    let [_, _, _, count, _, "{", slots @ .., "}"] = words else {
        return None;
    };
    let slots = slots.chunks(length + 2).enumerate();
    let slots = slots.map(|(index, slot)| match slot {
        [number, ":", slot @ ..] if number.parse() == Ok(index) => read(slot),
        _ => None,
    });
    let found: Option<Vec<T>> = slots.collect();
    found.filter(|found| count.parse() == Ok(found.len()))
}

/// Reads the chain of an endpoint. Returns the endpoint, and whether the chain remembers its clients. Before 1.36, each
/// endpoint has such a chain, which starts with a rule for the endpoint's connections to itself. Since 1.36, only
/// endpoints that remember clients have such a chain.
fn endpoint(
    table: &Table<'_>,
    chain: &str,
    from: &Rule<'_>,
    name: &PortName<'_>,
) -> Result<(SocketAddr, bool), Fault> {
    let rules: Vec<Rule<'_>> = table.rules(chain).collect();
    let Some((dnat, mut before)) = rules.split_last() else {
        return fault(from, "an endpoint's chain has rules");
    };
    let Some(to) = translated(table, dnat, name) else {
        return fault(dnat, "an endpoint's chain translates the port's packets");
    };
    let Ok(addr) = to.parse::<SocketAddr>() else {
        return fault(dnat, "it translates to no address with a port");
    };
    let mut reaches_itself = false;
    if let [first, rest @ ..] = before
        && let [ip, "saddr", client, mark @ ..] = &first.words[..]
        && *ip == table.ip()
        && client.parse() == Ok(addr.ip())
        && marks(mark)
    {
        (reaches_itself, before) = (true, rest);
    }
    let own = chain.strip_prefix("endpoint-").unwrap_or_default();
    match before {
        [] if reaches_itself => Ok((addr, false)),
        [update] => match update.words[..] {
            ["update", set, "{", ip, "saddr", "}"]
                if ip == table.ip() && set.strip_prefix("@affinity-") == Some(own) =>
            {
                Ok((addr, true))
            }
            _ => fault(update, "an endpoint's chain remembers the client"),
        },
        _ => fault(from, "an endpoint's chain has other rules"),
    }
}

/// Returns the destination to which a rule translates all packets of a port.
fn translated<'t>(table: &Table<'_>, rule: &Rule<'t>, name: &PortName<'_>) -> Option<&'t str> {
    let (of, to) = match rule.words[..] {
        ["meta", "l4proto", of, "dnat", "to", to] => (of, to),
        ["meta", "l4proto", of, "dnat", ip, "to", to] if ip == table.ip() => (of, to),
        _ => return None,
    };
    (of == name.protocol.word()).then_some(to)
}

/// Returns the clients that may use a load balancer's addresses. The chain drops the packets of all other clients.
///
/// # Errors
///
/// If a rule is not kube-proxy's, returns its line and text. If the chain has no rule, returns `None`.
pub fn ranges(table: &Table<'_>, chain: &str) -> Result<Vec<IpNet>, Option<(usize, String)>> {
    let mut rules = table.rules(chain);
    let rule = rules.next().ok_or(None)?;
    let other = |rule: &Rule<'_>| Err(Some((rule.at, rule.text.to_owned())));
    if let Some(second) = rules.next() {
        return other(&second);
    }
    let nets = match &rule.words[..] {
        [ip, "saddr", "!=", "{", nets @ .., "}", "drop"] if *ip == table.ip() => nets,
        [ip, "saddr", "!=", net, "drop"] if *ip == table.ip() => std::slice::from_ref(net),
        _ => return other(&rule),
    };
    let nets: Option<Vec<IpNet>> = nets.iter().map(|net| tree::net(net)).collect();
    nets.map_or_else(|| other(&rule), Ok)
}
