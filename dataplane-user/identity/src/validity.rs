//! What a certificate says of itself, besides its names.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::CertificateDer;
use x509_parser::{certificate::X509Certificate, prelude::FromDer as _, time::ASN1Time};

/// Returns from when and until when a certificate is valid.
pub(crate) fn validity(der: &CertificateDer<'_>) -> Result<(SystemTime, SystemTime), String> {
    let (_, certificate) =
        X509Certificate::from_der(der).map_err(|error| format!("no certificate: {error}"))?;
    let at = |time: ASN1Time| {
        let seconds = u64::try_from(time.timestamp()).unwrap_or(0);
        UNIX_EPOCH + Duration::from_secs(seconds)
    };
    let validity = certificate.validity();
    Ok((at(validity.not_before), at(validity.not_after)))
}
