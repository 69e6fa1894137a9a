//! Validity and serial number of certificates.

use std::{
    fmt::Write as _,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustls::pki_types::CertificateDer;
use x509_parser::{certificate::X509Certificate, prelude::FromDer as _, time::ASN1Time};

/// Validity and serial number of a certificate.
#[derive(Debug)]
pub(crate) struct Validity {
    pub not_before: SystemTime,
    pub not_after: SystemTime,
    /// As hexadecimal digits.
    pub serial: Box<str>,
}

impl Validity {
    /// Reads a certificate.
    pub(crate) fn of(der: &CertificateDer<'_>) -> Result<Self, String> {
        let (_, certificate) = X509Certificate::from_der(der)
            .map_err(|error| format!("a certificate cannot be read: {error}"))?;
        let validity = certificate.validity();
        let mut serial = String::new();
        for byte in certificate.raw_serial() {
            _ = write!(serial, "{byte:02x}");
        }
        Ok(Self {
            not_before: at(validity.not_before),
            not_after: at(validity.not_after),
            serial: serial.into(),
        })
    }

    /// Returns whether the certificate is valid at a time.
    pub(crate) fn includes(&self, time: SystemTime) -> bool {
        (self.not_before..self.not_after).contains(&time)
    }
}

/// Converts a time of X.509. A time before 1970 becomes 1970.
pub(crate) fn at(time: ASN1Time) -> SystemTime {
    let seconds = u64::try_from(time.timestamp()).unwrap_or(0);
    UNIX_EPOCH + Duration::from_secs(seconds)
}
