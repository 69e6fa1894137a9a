//! Converts Gateway API's routes that are attached to Services, and ReferenceGrants.

use std::collections::BTreeSet;

use model::{BackendRef, BackendTo, Grant, Parent, Route, RouteKind, RouteName, ServiceName};

use super::{
    Findings, address, check_name, object_name,
    wire::{self as api, RouteSpec},
};

const GROUP: &str = "gateway.networking.k8s.io";
/// Gateway API's maximum weight.
const WEIGHT_MAX: i64 = 1_000_000;
const NEEDS_PROXY: &str = "needs a proxy that reads requests; expected none";
const PARENTS_MAX: usize = 32;
const BACKENDS_MAX: usize = 16;
/// Maximum number of elements of `from`, and of `to`, of a ReferenceGrant.
const GRANTED_MAX: usize = 16;

/// Converts a route. `None` if it is not attached to a Service, and so is left to others. The result is valid only if
/// `findings` has no faults.
pub fn route(kind: RouteKind, object: api::Route, findings: &mut Findings) -> Option<Route> {
    check_name(&object.metadata, findings);
    let own = object_name(&object.metadata);
    let spec = object.spec.unwrap_or_default();
    let mut abroad = None;
    let mut parents = smallvec::SmallVec::new();
    let given = spec.parent_refs.as_deref();
    for (index, parent) in bounded(given, PARENTS_MAX, "spec.parentRefs", findings) {
        let group = parent.group.as_deref().unwrap_or(GROUP);
        let kind = parent.kind.as_deref().unwrap_or("Gateway");
        let path = |field: &str| format!("spec.parentRefs[{index}].{field}");
        if (group, kind) == (GROUP, "Service") {
            findings.note(
                path("group"),
                format!(
                    "the parent is a Service of {GROUP}, which does not exist, so the route is not attached to it; \
                     expected group: \"\" for a Service of the cluster"
                ),
            );
        }
        if (group, kind) != ("", "Service") {
            continue;
        }
        let namespace = parent.namespace.as_deref().filter(|of| !of.is_empty());
        let namespace = namespace.unwrap_or(own.namespace());
        if namespace != own.namespace() {
            let text = format!(
                "{}: the route would be for clients in namespace {} only, and the node's tables are the same for all \
                 clients; attach a route of namespace {} to Service {}",
                path("namespace"),
                own.namespace(),
                word(namespace),
                word(&parent.name)
            );
            abroad.get_or_insert(text.into_boxed_str());
            continue;
        }
        let port = parent.port.map(super::port).transpose();
        let port = port.unwrap_or_else(|wrong| {
            findings.fault(path("port"), wrong);
            None
        });
        let section = parent.section_name.as_deref().filter(|of| !of.is_empty());
        parents.push(Parent {
            service: ServiceName::new(own.namespace(), &word(&parent.name)),
            port,
            section: section.map(Box::from),
        });
    }
    if parents.is_empty() && abroad.is_none() {
        return None;
    }
    let unsupported = needs_layer_7(kind, &spec);
    let rules = spec.rules.unwrap_or_default();
    let refs = rules.into_iter().next().and_then(|rule| rule.backend_refs);
    let mut backends = Vec::new();
    let path = "spec.rules[0].backendRefs";
    for (index, given) in bounded(refs.as_deref(), BACKENDS_MAX, path, findings) {
        let path = format!("{path}[{index}]");
        backends.push(backend(given, own.namespace(), &path, findings));
    }
    let created = object.metadata.creation_timestamp.as_ref();
    Some(Route {
        name: RouteName {
            namespace: own.namespace().into(),
            name: own.name().into(),
            kind,
        },
        created: created.map(|time| time.0.as_second()),
        parents,
        abroad,
        unsupported: unsupported.map(String::into_boxed_str),
        backends,
    })
}

/// Returns an author's word in a form for messages. Valid names stay as they are, because they have no characters to
/// escape.
fn word(given: &str) -> String {
    given.escape_debug().to_string()
}

/// Returns the elements of a list with their indices, up to Gateway API's limit.
fn bounded<'a, T>(
    list: Option<&'a [T]>,
    most: usize,
    path: &str,
    findings: &mut Findings,
) -> impl Iterator<Item = (usize, &'a T)> + use<'a, T> {
    let list = list.unwrap_or_default();
    if list.len() > most {
        let text = format!(
            "has {} elements; expected at most {most}, as Gateway API has it",
            list.len()
        );
        findings.fault(path, text);
    }
    list.iter().take(most).enumerate()
}

/// Returns the feature of a route that needs a proxy which reads requests.
fn needs_layer_7(kind: RouteKind, spec: &RouteSpec) -> Option<String> {
    // Hostnames of HTTPRoutes and GRPCRoutes have no effect on a route that is attached to a Service.
    let hostnames = spec.hostnames.as_deref().unwrap_or_default();
    if kind == RouteKind::Tls && !hostnames.is_empty() {
        return Some("spec.hostnames: the server's name is in what the client sends, which the kernel does not read".to_owned());
    }
    let rules = spec.rules.as_deref().unwrap_or_default();
    if rules.len() != 1 {
        return Some(format!(
            "spec.rules: there are {}, and the kernel cannot tell which is for a connection; expected one rule",
            rules.len()
        ));
    }
    let rule = &rules[0];
    for (index, of) in rule.matches.iter().flatten().enumerate() {
        if !of.matches_all() {
            return Some(format!(
                "spec.rules[0].matches[{index}]: needs a proxy that reads requests; expected no matches"
            ));
        }
    }
    if let Some(field) = rule.other_field() {
        return Some(format!("spec.rules[0].{}: {NEEDS_PROXY}", word(field)));
    }
    let mut refs = rule.backend_refs.iter().flatten().enumerate();
    let (index, field) = refs.find_map(|(index, of)| Some((index, of.other_field()?)))?;
    Some(format!(
        "spec.rules[0].backendRefs[{index}].{}: {NEEDS_PROXY}",
        word(field)
    ))
}

fn backend(given: &api::BackendRef, own: &str, path: &str, findings: &mut Findings) -> BackendRef {
    let port = given.port.map(super::port).transpose();
    let port = port.unwrap_or_else(|wrong| {
        findings.fault(format!("{path}.port"), wrong);
        None
    });
    let weight = given.weight.unwrap_or(1);
    if !(0..=WEIGHT_MAX).contains(&weight) {
        findings.fault(
            format!("{path}.weight"),
            format!("{weight} is out of range; expected a number from 0 to {WEIGHT_MAX}"),
        );
    }
    let group = given.group.as_deref().unwrap_or_default();
    let kind = given.kind.as_deref().unwrap_or("Service");
    let namespace = given.namespace.as_deref().filter(|of| !of.is_empty());
    let to = match (group, kind) {
        ("", "Service") => {
            let namespace = namespace.map_or_else(|| own.to_owned(), word);
            BackendTo::Service(ServiceName::new(&namespace, &word(&given.name)))
        }
        ("networking.istio.io", "Hostname") => {
            let host = given
                .name
                .strip_suffix('.')
                .unwrap_or(&given.name)
                .to_ascii_lowercase();
            if namespace.is_some() {
                let text = "namespace: a Hostname is in no namespace; expected none";
                BackendTo::Invalid("InvalidKind", text.into())
            } else if address::is_dns_name(&host) {
                BackendTo::Host(host.into())
            } else {
                let text = format!("{:?} is not a host; expected a DNS name", given.name);
                BackendTo::Invalid("BackendNotFound", text.into())
            }
        }
        _ => {
            let of = if group.is_empty() {
                "the core group".to_owned()
            } else {
                word(group)
            };
            let text = format!(
                "{} of {of} cannot be a backend; expected Service, or Hostname of networking.istio.io",
                word(kind)
            );
            BackendTo::Invalid("InvalidKind", text.into())
        }
    };
    BackendRef {
        to,
        port,
        weight: u32::try_from(weight).unwrap_or_default(),
    }
}

/// Converts a ReferenceGrant, as far as it concerns routes that lead to Services.
pub fn grant(object: &api::ReferenceGrant, findings: &mut Findings) -> Grant {
    check_name(&object.metadata, findings);
    let spec = object.spec.as_ref();
    let from = spec.and_then(|spec| spec.from.as_deref());
    let from = bounded(from, GRANTED_MAX, "spec.from", findings);
    let from = from.filter(|(_, from)| from.group == GROUP);
    let from =
        from.filter_map(|(_, from)| Some((kind(&from.kind)?, from.namespace.as_str().into())));
    let to = spec.and_then(|spec| spec.to.as_deref());
    let to = bounded(to, GRANTED_MAX, "spec.to", findings);
    let mut to = to
        .map(|(_, to)| to)
        .filter(|to| to.group.is_empty() && to.kind == "Service")
        .peekable();
    let none = to.peek().is_none();
    let mut names = Some(BTreeSet::new());
    for to in to {
        match (&to.name, &mut names) {
            (Some(name), Some(names)) if !name.is_empty() => _ = names.insert(name.as_str().into()),
            (Some(_), None) => {}
            _ => names = None,
        }
    }
    Grant {
        name: object_name(&object.metadata),
        from: if none {
            BTreeSet::new()
        } else {
            from.collect()
        },
        to: names,
    }
}

/// Returns the kind of a route by its name.
pub fn kind(word: &str) -> Option<RouteKind> {
    let kinds = [
        RouteKind::Tcp,
        RouteKind::Tls,
        RouteKind::Http,
        RouteKind::Grpc,
    ];
    kinds.into_iter().find(|kind| kind.word() == word)
}
