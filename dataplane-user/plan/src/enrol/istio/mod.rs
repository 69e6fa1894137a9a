//! Istio's objects that limit connections of captured workloads, and that nothing on the node enforces: the agent names the
//! objects, and refuses the connections if the operator asks for it. The agent's proxy enforces the policies of workloads whose
//! inbound connections it carries.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use model::{
    CapturedBy, Inbound, Istio, Place, Policy, RefusedInbound, Snapshot, UseWaypoint, Workload,
    authorization::{Authorization, Extent, Policies, PolicyName},
};

use super::{
    Member,
    named::{NAMED, named},
};

/// Returns whether the agent's programs or its proxy carry the connections of a captured workload. Another proxy may
/// enforce the objects.
pub(super) fn is_carried(workload: &Workload, policy: &Policy, foreign: bool) -> bool {
    let is_foreign = foreign && policy.mode.is_proxied(foreign);
    !policy.only_queries && !is_foreign && !matches!(workload.place, Place::Exempt(_))
}

/// Returns whether the agent's proxy carries the inbound connections of a workload that [`is_carried`], and so enforces its
/// policies.
pub(super) fn is_judged_by_proxy(workload: &Workload, policy: &Policy) -> bool {
    policy.mode.is_proxied(false)
        && policy.captured_by == CapturedBy::Sockets
        && policy.inbound != Inbound::None
        && workload.place == Place::Address
}

/// The namespace of an object, and its kind and name.
type Object = (Arc<str>, Arc<str>);

/// Returns the policies that limit inbound connections of a workload and that nothing enforces, not all if they are many, and
/// the connections. `is_enforced`: the proxy or the kernel enforces all but those that no program on the node evaluates.
pub(super) fn limits(
    istio: &Istio,
    workload: &Workload,
    is_enforced: bool,
) -> (Vec<Object>, RefusedInbound) {
    let mut of = istio.policies_of(workload.name.namespace(), &workload.labels);
    if is_enforced {
        of = Policies {
            custom: of.custom,
            ..Policies::default()
        };
    }
    let object = |name: &PolicyName| (Arc::clone(&name.namespace), Arc::clone(&name.object));
    let (mut limiting, mut allowing, mut allows_all) = (Vec::new(), Vec::new(), false);
    limiting.extend(of.custom.iter().take(NAMED[0] + 1).map(object));
    for (name, of) in &of.authorizations {
        let extent = (of.as_deref()).map_or(Extent::Denies, Authorization::extent);
        match extent {
            Extent::AllowsAll => allows_all = true,
            Extent::AllowsSome if allowing.len() <= NAMED[0] => allowing.push(object(name)),
            Extent::Denies if limiting.len() <= NAMED[0] => limiting.push(object(name)),
            Extent::AllowsSome | Extent::Denies | Extent::Nothing => {}
        }
    }
    if !allows_all {
        limiting.append(&mut allowing);
    }
    let mut refused = RefusedInbound {
        others: !limiting.is_empty() || istio.denies && of.unread,
        ports: BTreeMap::new(),
    };
    if let Some((name, ports)) = of.plaintext.ports() {
        limiting.extend(ports.values().any(|is| *is).then(|| object(name)));
        if !refused.others {
            refused.ports.clone_from(ports);
        }
    }
    if let Some(name) = of.plaintext.refused() {
        refused.others = true;
        limiting.push(object(name));
    }
    (limiting, refused)
}

/// Returns whether policies of a workload may refuse plain connections or report a dry run, or whether policies cannot be read.
pub fn may_be_refused(istio: &Istio, workload: &Workload) -> bool {
    let of = istio.policies_of(workload.name.namespace(), &workload.labels);
    let mut ports = of.plaintext.ports().into_iter();
    let has_strict_port = ports.any(|(_, ports)| ports.values().any(|is_strict| *is_strict));
    let is_strict = has_strict_port || of.plaintext.refused().is_some();
    of.unread || !of.authorizations.is_empty() || is_strict
}

/// Returns a text for each namespace whose objects limit connections of these workloads. `foreign`: whether the proxy is
/// not the agent's.
pub fn limited(istio: &Istio, members: &[Member], foreign: bool) -> BTreeMap<Arc<str>, String> {
    let mut found: BTreeMap<Arc<str>, BTreeSet<String>> = BTreeMap::new();
    let (mut own, mut is_past) = (BTreeSet::new(), false);
    let carried = members.iter();
    for member in carried.filter(|of| is_carried(&of.workload, &of.policy, foreign)) {
        own.insert(member.workload.name.namespace());
        is_past |= !(istio.waypoints && member.is_sent_to_waypoints());
        for (namespace, name) in &member.limited_by {
            own.insert(namespace);
            let found = found.entry(Arc::clone(namespace)).or_default();
            found.insert(name.to_string());
        }
    }
    if own.is_empty() {
        return BTreeMap::new();
    }
    for (namespace, of) in istio.namespaces.iter().filter(|_| is_past) {
        let own = of.waypoint.as_ref().and_then(UseWaypoint::gateway);
        let label = own.map(|_| format!("Namespace {namespace}"));
        let services = of.labels.iter().filter(|(_, of)| of.gateway().is_some());
        let services = services.map(|(name, _)| name.to_string());
        let labelled = label.into_iter().chain(services).take(NAMED[0] + 1);
        for name in labelled {
            let found = found.entry(Arc::clone(namespace)).or_default();
            found.insert(name);
        }
    }
    let texts = named(found, &own, ", ").map(|(namespace, names)| {
        let text = format!(
            "Istio's objects of namespace {namespace} limit connections, and nothing on this node enforces them: {names}"
        );
        (namespace, text)
    });
    texts.collect()
}

/// Returns a warning if the cluster has policies, lacks the root namespace, and workloads of this node are captured: Istio may
/// have another root namespace. `foreign`: see [`limited`].
pub fn missing_root(snapshot: &Snapshot, members: &[Member], foreign: bool) -> Option<String> {
    let mut carried = members.iter();
    let is_any = carried.any(|of| is_carried(&of.workload, &of.policy, foreign));
    is_any.then(|| without_root(snapshot))?
}

fn without_root(snapshot: &Snapshot) -> Option<String> {
    let istio = &snapshot.istio;
    // Manifests need no Namespaces.
    let all = snapshot.namespaces.as_ref().filter(|all| !all.is_empty())?;
    let is_known = all.contains(&istio.root) || istio.namespaces.contains_key(&istio.root);
    let mut namespaces = istio.namespaces.values();
    let is_missing = !is_known && namespaces.any(|of| !of.policies.is_empty());
    is_missing.then(|| {
        format!(
            "the cluster has no namespace {} (mesh.rootNamespace), so no policy of Istio's holds in all namespaces; if Istio's \
             root namespace has another name, set mesh.rootNamespace to this name",
            istio.root
        )
    })
}

/// Returns the consequence for workloads whose policies the proxy or the kernel enforces, if Istio's policies cannot be read.
/// `foreign`: see [`limited`].
pub fn unread(istio: &Istio, members: &[Member], foreign: bool) -> Option<String> {
    let mut members = members.iter();
    let is_any = istio.unread
        && members.any(|of| {
            let is_carried = is_carried(&of.workload, &of.policy, foreign);
            of.by_kernel || is_carried && is_judged_by_proxy(&of.workload, &of.policy)
        });
    is_any.then(|| {
        "Istio's policies cannot be read, so the proxy and the kernel refuse new connections to captured Pods: ALL plain connections \
         and tunnels to the Pods whose policies they enforce are refused until the agent has read the policies"
            .to_owned()
    })
}

/// Returns the consequence of what [`limited`] names.
pub const fn consequence(istio: &Istio) -> &'static str {
    if istio.denies {
        "mesh.unsupported: deny refuses connections that these objects limit"
    } else {
        "connections that these objects limit pass as if the objects did not exist; to refuse the connections, set \
         mesh.unsupported: deny"
    }
}

#[cfg(test)]
mod tests;
