//! The identities of workloads.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use model::Identity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Timeout, is_default};

/// Default lifetime of certificates: a day.
const LIFETIME: Duration = Duration::from_hours(24);

/// The certificates of captured workloads: their source, and the roots of peers. Connections between workloads that have certificates and speak
/// HBONE are encrypted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MeshIdentity {
    /// The trust domain of the workloads' identities. Default: cluster.local.
    #[serde(skip_serializing_if = "is_default")]
    pub trust_domain: Option<String>,
    /// The source of the certificates: exactly one of `directory`, `istio`, `spire` and `ca`.
    #[serde(skip_serializing_if = "is_default")]
    pub source: IdentitySource,
    /// Files of roots, by trust domain. They replace the roots from the source of the trust domain.
    #[serde(skip_serializing_if = "is_default")]
    pub roots: Vec<TrustedRoots>,
    /// PEM files of lists of revoked certificates (X509 CRL).
    #[serde(skip_serializing_if = "is_default")]
    pub revoked: Vec<PathBuf>,
}

/// The source of the certificates of workloads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct IdentitySource {
    /// A directory in which another program keeps `NAMESPACE/ACCOUNT/tls.crt`, `tls.key` and `ca.crt`.
    #[serde(skip_serializing_if = "is_default")]
    pub directory: Option<PathBuf>,
    /// Istio's CA.
    #[serde(skip_serializing_if = "is_default")]
    pub istio: Option<IstioCa>,
    /// The administration socket of SPIRE's agent.
    #[serde(skip_serializing_if = "is_default")]
    pub spire: Option<PathBuf>,
    /// An authority of `dataplane ca` on this node.
    #[serde(skip_serializing_if = "is_default")]
    pub ca: Option<LocalCa>,
}

/// Istio's CA.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct IstioCa {
    /// HOST:PORT of the CA. Default: istiod.istio-system.svc:15012.
    #[serde(skip_serializing_if = "is_default")]
    pub address: Option<String>,
    /// The name in the CA's own certificate. Default: the host.
    #[serde(skip_serializing_if = "is_default")]
    pub server_name: Option<String>,
    /// PEM file of the roots of the CA's own certificate. Default: /var/run/secrets/istio/root-cert.pem.
    #[serde(skip_serializing_if = "is_default")]
    pub roots: Option<PathBuf>,
    /// File of the agent's token, with audience istio-ca. Default: /var/run/secrets/tokens/istio-token.
    #[serde(skip_serializing_if = "is_default")]
    pub token: Option<PathBuf>,
    /// The cluster's name in the mesh. Default: Kubernetes.
    #[serde(skip_serializing_if = "is_default")]
    pub cluster: Option<String>,
    /// Requested lifetime of certificates, such as `24h`. The CA may shorten it. Default: 24h.
    #[serde(skip_serializing_if = "is_default")]
    pub lifetime: Option<Timeout>,
}

/// An authority of `dataplane ca`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct LocalCa {
    /// The directory that `dataplane ca init` made.
    pub directory: PathBuf,
    /// Lifetime of certificates. Default: 24h.
    #[serde(skip_serializing_if = "is_default")]
    pub lifetime: Option<Timeout>,
}

/// The roots of a trust domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct TrustedRoots {
    /// The trust domain.
    pub trust_domain: String,
    /// PEM files.
    pub files: Vec<PathBuf>,
}

/// The proxy's treatment of connections whose waypoint cannot be used: the Gateway does not exist, has no address, or does not allow
/// the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WithoutWaypoint {
    /// They are refused.
    Refuse,
    /// They go past the waypoint, to the endpoints, so the rules of the waypoint do not hold.
    Pass,
}

/// Returns the faults of keys of the mesh that have no effect without identities. `attests`, `passes`: whether the keys have these
/// values.
pub fn faults_without_identity(attests: bool, passes: bool) -> Vec<(String, String)> {
    let keys = [
        (
            "sameNode",
            "attest",
            attests,
            "workloads have no identities",
        ),
        (
            "withoutWaypoint",
            "pass",
            passes,
            "no connection goes to a waypoint",
        ),
    ];
    let wrong = keys.into_iter().filter(|(.., is_set, _)| *is_set);
    let faults = wrong.map(|(key, value, _, why)| {
        let text = format!(
            "{value} has no effect without mesh.identity: {why}; set mesh.identity, or remove the key"
        );
        (format!("mesh.{key}"), text)
    });
    faults.collect()
}

fn lifetime(given: Option<Timeout>) -> Duration {
    given.map_or(LIFETIME, |time| Duration::from_secs(time.seconds().into()))
}

impl LocalCa {
    /// Returns the lifetime of certificates.
    pub fn lifetime(&self) -> Duration {
        lifetime(self.lifetime)
    }
}

impl IstioCa {
    /// Returns `HOST:PORT` of the CA.
    pub fn address(&self) -> &str {
        let default = "istiod.istio-system.svc:15012";
        self.address.as_deref().unwrap_or(default)
    }

    /// Returns the file of the roots of the CA's own certificate.
    pub fn roots(&self) -> &Path {
        let default = Path::new("/var/run/secrets/istio/root-cert.pem");
        self.roots.as_deref().unwrap_or(default)
    }

    /// Returns the file of the agent's token.
    pub fn token(&self) -> &Path {
        let default = Path::new("/var/run/secrets/tokens/istio-token");
        self.token.as_deref().unwrap_or(default)
    }

    /// Returns the cluster's name in the mesh.
    pub fn cluster(&self) -> &str {
        self.cluster.as_deref().unwrap_or("Kubernetes")
    }

    /// Returns the requested lifetime of certificates.
    pub fn lifetime(&self) -> Duration {
        lifetime(self.lifetime)
    }
}

impl IdentitySource {
    /// Returns the keys of the configured sources.
    fn given(&self) -> Vec<&'static str> {
        let sources = [
            ("directory", self.directory.is_some()),
            ("istio", self.istio.is_some()),
            ("spire", self.spire.is_some()),
            ("ca", self.ca.is_some()),
        ];
        let given = sources.into_iter().filter(|(_, given)| *given);
        given.map(|(key, _)| key).collect()
    }

    /// Returns the paths that must be absolute, by their keys.
    fn paths(&self) -> Vec<(&'static str, &Path)> {
        let istio = self.istio.as_ref();
        let paths = [
            ("directory", self.directory.as_deref()),
            ("spire", self.spire.as_deref()),
            ("ca.directory", self.ca.as_ref().map(|ca| &*ca.directory)),
            ("istio.roots", istio.map(IstioCa::roots)),
            ("istio.token", istio.map(IstioCa::token)),
        ];
        let given = paths.into_iter();
        given.filter_map(|(key, path)| Some((key, path?))).collect()
    }
}

impl MeshIdentity {
    /// Returns the trust domain of the workloads' identities.
    pub fn trust_domain(&self) -> &str {
        self.trust_domain.as_deref().unwrap_or("cluster.local")
    }

    /// Adds keys with their faults: values that the types allow and that cannot work. `is_foreign`: whether the proxy is not
    /// the agent's.
    pub(super) fn faults(&self, is_foreign: bool, faults: &mut Vec<(String, String)>) {
        let mut fault = |key: &str, text: String| {
            faults.push((format!("mesh.identity{key}"), text));
        };
        if is_foreign {
            let text =
                "has no effect: mesh.proxy.uid names another proxy; remove one of the two keys";
            fault("", text.into());
        }
        let is_domain = |domain: &str| Identity::new(domain, "a", "b").is_ok();
        if !is_domain(self.trust_domain()) {
            let text = "expected a trust domain, such as cluster.local";
            fault(".trustDomain", format!("{:?}; {text}", self.trust_domain()));
        }
        match self.source.given()[..] {
            [_] => {}
            [] => fault(
                "",
                "without a source; expected one of source.directory, source.istio, source.spire and source.ca".into(),
            ),
            ref several => {
                let text = format!("both {}; expected one of them", several.join(" and "));
                fault(".source", text);
            }
        }
        let relative = |path: &Path| {
            (!path.is_absolute()).then(|| match path.to_str() {
                Some("") => "empty; expected an absolute path".to_owned(),
                _ => format!("{} is relative; expected an absolute path", path.display()),
            })
        };
        for (key, path) in self.source.paths() {
            if let Some(text) = relative(path) {
                fault(&format!(".source.{key}"), text);
            }
        }
        if let Some(istio) = &self.source.istio {
            let port = istio.address().rsplit_once(':');
            let port = port.and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
            if port.is_none_or(|(host, port)| host.is_empty() || port == 0) {
                let text = "expected HOST:PORT, such as istiod.istio-system.svc:15012";
                fault(
                    ".source.istio.address",
                    format!("{:?}; {text}", istio.address()),
                );
            }
        }
        for (index, roots) in self.roots.iter().enumerate() {
            if !is_domain(&roots.trust_domain) {
                let text = "expected a trust domain, such as cluster.local";
                fault(
                    &format!(".roots[{index}].trustDomain"),
                    format!("{:?}; {text}", roots.trust_domain),
                );
            }
            if roots.files.is_empty() {
                let text = "without files; expected at least one PEM file of roots";
                fault(&format!(".roots[{index}]"), text.into());
            }
            for (number, path) in roots.files.iter().enumerate() {
                if let Some(text) = relative(path) {
                    fault(&format!(".roots[{index}].files[{number}]"), text);
                }
            }
        }
        for (index, path) in self.revoked.iter().enumerate() {
            if let Some(text) = relative(path) {
                fault(&format!(".revoked[{index}]"), text);
            }
        }
    }
}
