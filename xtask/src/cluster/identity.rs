//! Identities in the cluster: certificates of the cluster's own authority, kubeconfigs, and tokens of service accounts.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result};
use data_encoding::BASE64URL_NOPAD;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, SanType, SigningKey as _,
};
use serde_json::json;

use super::place::{self, CONTROL_V4, CONTROL_V6, FIRST_SERVICE, Node};

/// The issuer of service accounts' tokens.
pub const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

/// Returns the path of a file of the control plane.
pub fn file(name: &str) -> PathBuf {
    place::control_directory().join(name)
}

/// Makes all certificates and kubeconfigs.
pub fn make(nodes: &[Node]) -> Result<()> {
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![
        KeyUsagePurpose::KeyCertSign,
        KeyUsagePurpose::CrlSign,
        KeyUsagePurpose::DigitalSignature,
    ];
    authority.distinguished_name = distinguished(None, "kubernetes-ca");
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    write(&file("ca.crt"), &authority.pem())?;
    let accounts = KeyPair::generate()?;
    write(&file("sa.key"), &accounts.serialize_pem())?;
    write(&file("sa.pub"), &accounts.public_key_pem())?;

    let certify = |name: &str, group: Option<&str>, user: &str, names: &[SanType]| -> Result<()> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name = distinguished(group, user);
        params.subject_alt_names = names.to_vec();
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &authority)?;
        write(&file(&format!("{name}.crt")), &certificate.pem())?;
        write(&file(&format!("{name}.key")), &key.serialize_pem())
    };
    let address = |address: IpAddr| SanType::IpAddress(address);
    let mut api = vec![
        address(CONTROL_V4.into()),
        address(CONTROL_V6.into()),
        address(FIRST_SERVICE.parse()?),
        address("127.0.0.1".parse()?),
    ];
    for name in ["kubernetes", "kubernetes.default", "kubernetes.default.svc"] {
        api.push(SanType::DnsName(name.try_into()?));
    }
    certify("api", None, "kube-apiserver", &api)?;
    certify(
        "kubelet-client",
        Some("system:masters"),
        "kubelet-client",
        &[],
    )?;
    certify("front-proxy", None, "front-proxy", &[])?;
    for (name, group, user) in [
        ("admin", Some("system:masters"), "admin"),
        ("controllers", None, "system:kube-controller-manager"),
        ("scheduler", None, "system:kube-scheduler"),
        ("proxy", None, "system:kube-proxy"),
        ("dataplane", None, "dataplane"),
    ] {
        certify(name, group, user, &[])?;
        write_config(&file(&format!("{name}.conf")), &certificate_of(name))?;
    }
    for node in nodes {
        let (name, user) = (node.name(), format!("system:node:{}", node.name()));
        certify(
            &name,
            Some("system:nodes"),
            &user,
            &node.addresses().map(SanType::IpAddress),
        )?;
        write_config(&file(&format!("{name}.conf")), &certificate_of(&name))?;
    }
    Ok(())
}

fn distinguished(group: Option<&str>, user: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    if let Some(group) = group {
        name.push(DnType::OrganizationName, group);
    }
    name.push(DnType::CommonName, user);
    name
}

fn certificate_of(name: &str) -> serde_json::Value {
    json!({
        "client-certificate": file(&format!("{name}.crt")),
        "client-key": file(&format!("{name}.key")),
    })
}

/// Writes a kubeconfig for a user with these credentials.
pub fn write_config(path: &Path, user: &serde_json::Value) -> Result<()> {
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "here", "cluster": {
            "server": place::api_server(),
            "certificate-authority": file("ca.crt"),
        } }],
        "users": [{ "name": "user", "user": user }],
        "contexts": [{ "name": "here", "context": { "cluster": "here", "user": "user" } }],
        "current-context": "here",
    });
    // JSON is YAML.
    write(path, &serde_json::to_string_pretty(&config)?)
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Returns a token of a service account that expires after `life`. The API server makes only tokens that last at least
/// ten minutes, which is too long for a scenario to wait.
pub fn token(namespace: &str, account: &str, uid: &str, life: Duration) -> Result<String> {
    let path = file("sa.key");
    let key =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let key = KeyPair::from_pem(&key)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let head = json!({ "alg": "ES256", "typ": "JWT" });
    let claims = json!({
        "iss": ISSUER,
        "aud": [ISSUER],
        "sub": format!("system:serviceaccount:{namespace}:{account}"),
        "iat": now,
        "nbf": now,
        "exp": now + life.as_secs(),
        "kubernetes.io": { "namespace": namespace, "serviceaccount": { "name": account, "uid": uid } },
    });
    let encode = |value: &serde_json::Value| BASE64URL_NOPAD.encode(value.to_string().as_bytes());
    let signed = format!("{}.{}", encode(&head), encode(&claims));
    let signature = fixed(&key.sign(signed.as_bytes())?).context("an ECDSA signature of P-256")?;
    Ok(format!("{signed}.{}", BASE64URL_NOPAD.encode(&signature)))
}

/// Converts a signature from DER, which TLS uses, to the two numbers of 32 bytes each that JWT uses (RFC 7518, 3.4).
fn fixed(der: &[u8]) -> Option<Vec<u8>> {
    let [0x30, _, numbers @ ..] = der else {
        return None;
    };
    let (r, rest) = number(numbers)?;
    let (s, rest) = number(rest)?;
    rest.is_empty().then(|| [r, s].concat())
}

/// Reads an INTEGER of at most 32 bytes. Returns it and the bytes after it.
fn number(der: &[u8]) -> Option<([u8; 32], &[u8])> {
    let [0x02, length, rest @ ..] = der else {
        return None;
    };
    let (digits, rest) = rest.split_at_checked((*length).into())?;
    // A leading zero only shows that the number is positive.
    let start = digits.iter().position(|digit| *digit != 0)?;
    let digits = &digits[start..];
    let mut whole = [0; 32];
    whole
        .get_mut(32_usize.checked_sub(digits.len())?..)?
        .copy_from_slice(digits);
    Some((whole, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_becomes_two_numbers_of_32_bytes() {
        let mut der = vec![0x30, 0, 0x02, 33, 0];
        der.extend([0xff; 32]);
        der.extend([0x02, 2, 0x12, 0x34]);
        der[1] = u8::try_from(der.len() - 2).unwrap();
        let fixed = fixed(&der).unwrap();
        assert_eq!(fixed.len(), 64);
        assert_eq!(fixed[..32], [0xff; 32]);
        assert_eq!(fixed[32..62], [0; 30]);
        assert_eq!(fixed[62..], [0x12, 0x34]);
        assert_eq!(super::fixed(&der[..der.len() - 1]), None);
        assert_eq!(super::fixed(b""), None);
    }
}
