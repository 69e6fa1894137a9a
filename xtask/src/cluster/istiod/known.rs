//! Intended differences. docs/service-entries.md has a row for each.

/// An intended difference.
pub struct Known {
    /// `NAMESPACE/HOST`, or the name of the service in the plan.
    pub of: &'static str,
    /// The end of the address and port, or `name`.
    pub at: &'static str,
    pub reason: &'static str,
}

const fn known(of: &'static str, at: &'static str, reason: &'static str) -> Known {
    Known { of, at, reason }
}

pub const KNOWN: &[Known] = &[
    known(
        "shop/other-proxy.shop.svc.cluster.local",
        ":80",
        "another proxy serves this Service, as for kube-proxy",
    ),
    known(
        "bank/by-hand-published.bank.svc.cluster.local",
        ":80",
        "an endpoint that is not ready is none, as for kube-proxy: the controller of EndpointSlices makes those of \
         publishNotReadyAddresses ready",
    ),
    known(
        "bank/by-hand-pod.bank.svc.cluster.local",
        ":80",
        "istiod leaves out an endpoint that names a Pod without the Pod's UID",
    ),
    known(
        "bank/by-hand-overlap.bank.svc.cluster.local",
        ":80",
        "an endpoint in two slices is one endpoint, as for kube-proxy",
    ),
    known(
        "bank/own-namespace-address.example.com",
        ":443",
        "a node would translate the addresses for all namespaces",
    ),
    known(
        "bank/own-namespace-address.example.com",
        "name",
        "the entry's addresses are not served",
    ),
    known(
        "bank/checked.example.com",
        ":443",
        "WorkloadEntries whose health checks fail are no endpoints; istiod tells sidecars so, and not ztunnels",
    ),
    known(
        "plain/serviceentry:twice-younger",
        ":444",
        "entries that name one host have each their ports; istiod leaves out the younger entry",
    ),
    known(
        "shop/alias.example.com",
        ":80",
        "the agent knows the endpoints behind a name of the cluster; a ztunnel looks the name up",
    ),
    known(
        "shop/alias.example.com",
        "name",
        "the endpoints that the agent knows are of one family",
    ),
    known(
        "shop/static-same-address.example.com",
        ":443",
        "endpoints with one address and two ports are two; for istiod the last one counts",
    ),
    known(
        "bank/machines-headless.bank.svc.cluster.local",
        "name",
        "the cluster's DNS does not know WorkloadEntries",
    ),
];
