//! The identity of a workload: a SPIFFE ID in Istio's form.

use std::{fmt, str::FromStr, sync::Arc};

/// The identity of a workload, which its certificate proves: `spiffe://TRUSTDOMAIN/ns/NAMESPACE/sa/ACCOUNT`.
///
/// Parts have no `/`, no white space and no control characters, and are not empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    trust_domain: Arc<str>,
    namespace: Arc<str>,
    account: Arc<str>,
}

/// An error because a text is not an identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an identity; expected spiffe://TRUSTDOMAIN/ns/NAMESPACE/sa/ACCOUNT")]
pub struct NoIdentity(String);

impl Identity {
    /// Returns the identity of a service account.
    ///
    /// # Errors
    /// If a part is empty, or has a character that an identity cannot have.
    pub fn new(trust_domain: &str, namespace: &str, account: &str) -> Result<Self, NoIdentity> {
        let is_part = |part: &str| {
            let is_wrong = |c: char| c == '/' || c.is_whitespace() || c.is_control();
            !part.is_empty() && !part.contains(is_wrong)
        };
        if ![trust_domain, namespace, account].into_iter().all(is_part) {
            let text = format!("spiffe://{trust_domain}/ns/{namespace}/sa/{account}");
            return Err(NoIdentity(text));
        }
        Ok(Self {
            trust_domain: trust_domain.into(),
            namespace: namespace.into(),
            account: account.into(),
        })
    }

    /// Returns the trust domain. The trust domain's authorities may sign the identity.
    pub fn trust_domain(&self) -> &str {
        &self.trust_domain
    }

    /// Returns the namespace of the workload.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the service account of the workload.
    pub fn account(&self) -> &str {
        &self.account
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (domain, namespace) = (&self.trust_domain, &self.namespace);
        write!(f, "spiffe://{domain}/ns/{namespace}/sa/{}", self.account)
    }
}

impl FromStr for Identity {
    type Err = NoIdentity;

    fn from_str(text: &str) -> Result<Self, NoIdentity> {
        let no_identity = || NoIdentity(text.to_owned());
        let rest = text.strip_prefix("spiffe://").ok_or_else(no_identity)?;
        let parts: Vec<&str> = rest.split('/').collect();
        let [domain, "ns", namespace, "sa", account] = parts[..] else {
            return Err(no_identity());
        };
        Self::new(domain, namespace, account).map_err(|_| no_identity())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_read_as_they_are_written() {
        let text = "spiffe://cluster.local/ns/shop/sa/web";
        let identity: Identity = text.parse().unwrap();
        assert_eq!(
            identity,
            Identity::new("cluster.local", "shop", "web").unwrap()
        );
        assert_eq!(identity.to_string(), text);
    }

    #[test]
    fn what_is_no_identity_is_refused() {
        for text in [
            "",
            "spiffe://cluster.local",
            "spiffe://cluster.local/ns/shop",
            "spiffe://cluster.local/ns//sa/web",
            "spiffe:///ns/shop/sa/web",
            "spiffe://cluster.local/ns/shop/sa/web/",
            "spiffe://cluster.local/ns/shop/sa/web/more",
            "spiffe://cluster.local/sa/web/ns/shop",
            "https://cluster.local/ns/shop/sa/web",
            "spiffe://cluster.local/ns/shop/sa/web\n",
        ] {
            assert!(text.parse::<Identity>().is_err(), "{text:?}");
        }
        assert!(Identity::new("a/ns/b/sa/c", "shop", "web").is_err());
    }
}
