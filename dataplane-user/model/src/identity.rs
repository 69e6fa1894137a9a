//! Identities, by which workloads know each other in an encrypted mesh.

use std::{fmt, str::FromStr, sync::Arc};

/// The beginning of every identity.
const SCHEME: &str = "spiffe://";
/// The longest trust domain that SPIFFE allows, in bytes.
const LONGEST_TRUST_DOMAIN: usize = 255;
/// The longest identity that SPIFFE allows, in bytes.
const LONGEST: usize = 2048;

/// A workload's identity: the SPIFFE ID of its service account, as Istio forms it
/// (`spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/SERVICE-ACCOUNT`).
///
/// All pods of a service account have one identity. The displayed text parses to an equal identity.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    trust_domain: Arc<str>,
    namespace: Arc<str>,
    service_account: Arc<str>,
}

/// Why a text is not an [`Identity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// It is not of Istio's form.
    #[error("expected spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/SERVICE-ACCOUNT")]
    Form,
    /// Its trust domain has characters that SPIFFE does not allow, or more than 255.
    #[error("expected a trust domain of at most 255 lower case letters, digits, `.`, `-` and `_`")]
    TrustDomain,
    /// Its namespace or service account has characters that SPIFFE does not allow.
    #[error("expected a namespace and a service account of letters, digits, `.`, `-` and `_`")]
    Segment,
    /// It is longer than SPIFFE allows.
    #[error("expected at most 2048 bytes")]
    Length,
}

impl Identity {
    /// The identity of a service account.
    ///
    /// # Errors
    ///
    /// If SPIFFE does not allow one of the parts.
    pub fn new(
        trust_domain: Arc<str>,
        namespace: Arc<str>,
        service_account: Arc<str>,
    ) -> Result<Self, IdentityError> {
        let in_segments = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        let in_domain = |byte: u8| in_segments(byte) && !byte.is_ascii_uppercase();
        if trust_domain.is_empty()
            || trust_domain.len() > LONGEST_TRUST_DOMAIN
            || !trust_domain.bytes().all(in_domain)
        {
            return Err(IdentityError::TrustDomain);
        }
        for segment in [&namespace, &service_account] {
            if ["", ".", ".."].contains(&&**segment) || !segment.bytes().all(in_segments) {
                return Err(IdentityError::Segment);
            }
        }
        let identity = Self {
            trust_domain,
            namespace,
            service_account,
        };
        if identity.to_string().len() > LONGEST {
            return Err(IdentityError::Length);
        }
        Ok(identity)
    }

    /// The trust domain: whose certificates prove the identity.
    pub fn trust_domain(&self) -> &str {
        &self.trust_domain
    }

    /// The service account's namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The service account's name.
    pub fn service_account(&self) -> &str {
        &self.service_account
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            trust_domain,
            namespace,
            service_account,
        } = self;
        write!(
            f,
            "{SCHEME}{trust_domain}/ns/{namespace}/sa/{service_account}"
        )
    }
}

impl FromStr for Identity {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let scheme = text.get(..SCHEME.len());
        if !scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case(SCHEME)) {
            return Err(IdentityError::Form);
        }
        let mut parts = text[SCHEME.len()..].split('/');
        let mut part = || parts.next().ok_or(IdentityError::Form);
        let (trust_domain, ns, namespace, sa, service_account) =
            (part()?, part()?, part()?, part()?, part()?);
        if ns != "ns" || sa != "sa" || part().is_ok() {
            return Err(IdentityError::Form);
        }
        Self::new(
            // Trust domains are compared without regard to case, and written in lower case.
            trust_domain.to_ascii_lowercase().into(),
            namespace.into(),
            service_account.into(),
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parts_are_those_of_the_text() {
        let identity: Identity = "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap();
        assert_eq!(identity.trust_domain(), "cluster.local");
        assert_eq!(identity.namespace(), "shop");
        assert_eq!(identity.service_account(), "web");
        let shouted = "SPIFFE://Cluster.Local/ns/shop/sa/web".parse();
        assert_eq!(shouted, Ok(identity));
    }

    #[test]
    fn what_is_no_identity_is_refused_for_what_is_wrong() {
        let long = "a".repeat(2000);
        let domain = "a".repeat(256);
        for (text, error) in [
            ("", IdentityError::Form),
            ("spiffe:/", IdentityError::Form),
            ("https://cluster.local/ns/shop/sa/web", IdentityError::Form),
            ("spiffe://cluster.local", IdentityError::Form),
            ("spiffe://cluster.local/sa/web/ns/shop", IdentityError::Form),
            (
                "spiffe://cluster.local/ns/shop/sa/web/",
                IdentityError::Form,
            ),
            (
                "spiffe://cluster.local/ns/shop/sa/web/x",
                IdentityError::Form,
            ),
            ("spiffe://cluster.local/NS/shop/sa/web", IdentityError::Form),
            ("spiffe:///ns/shop/sa/web", IdentityError::TrustDomain),
            ("spiffe://a:443/ns/shop/sa/web", IdentityError::TrustDomain),
            ("spiffe://a@b/ns/shop/sa/web", IdentityError::TrustDomain),
            ("spiffe://ä/ns/shop/sa/web", IdentityError::TrustDomain),
            (
                &format!("spiffe://{domain}/ns/shop/sa/web"),
                IdentityError::TrustDomain,
            ),
            ("spiffe://a/ns//sa/web", IdentityError::Segment),
            ("spiffe://a/ns/../sa/web", IdentityError::Segment),
            ("spiffe://a/ns/shop/sa/.", IdentityError::Segment),
            ("spiffe://a/ns/shop/sa/w%65b", IdentityError::Segment),
            ("spiffe://a/ns/shop/sa/web?x", IdentityError::Segment),
            ("spiffe://a/ns/shop/sa/we b", IdentityError::Segment),
            (
                &format!("spiffe://a/ns/shop/sa/{long}{long}"),
                IdentityError::Length,
            ),
        ] {
            assert_eq!(text.parse::<Identity>(), Err(error), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_displayed_is_parsed_to_the_same(
            domain in "[a-z0-9._-]{1,255}",
            namespace in "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
            account in "[a-z0-9]([a-z0-9.-]{0,200}[a-z0-9])?",
        ) {
            let identity = Identity::new(domain.into(), namespace.into(), account.into());
            let identity = identity.unwrap();
            prop_assert_eq!(identity.to_string().parse(), Ok(identity));
        }

        #[test]
        fn any_text_is_refused_or_parsed_to_one_form(text in "(spiffe://)?[a-zA-Z./:]{0,40}(/ns/)?[a-z.%]{0,9}(/sa/)?.{0,9}") {
            if let Ok(identity) = text.parse::<Identity>() {
                prop_assert_eq!(identity.to_string().parse(), Ok(identity));
            }
        }
    }
}
