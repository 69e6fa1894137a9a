//! The headers of a request and of its answer that describe the connection for metrics and logs, as Istio's ztunnel has them:
//! `baggage`, `forwarded` and `traceparent`. Nothing verifies them.

use std::{fmt, net::SocketAddr, sync::Arc};

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{FORWARDED, GetAll},
};
use relay::Baggage;

/// The header in which each side describes its workload.
const BAGGAGE: HeaderName = HeaderName::from_static("baggage");
/// The header with the connection's number.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// The maximum length of a name in DNS.
const HOST: usize = 253;

/// The number of a connection, by which the logs of both sides can be compared.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Trace(u128);

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Trace {
    /// Returns a new number.
    pub fn new() -> Self {
        Self(rand::random())
    }

    /// Returns the number in a request.
    fn read(headers: &HeaderMap) -> Option<Self> {
        let text = headers.get(TRACEPARENT)?.to_str().ok()?;
        let mut parts = text.split('-');
        let mut digits = |length| {
            let part = parts.next().filter(|part| part.len() == length)?;
            let is_number = part.bytes().all(|byte| byte.is_ascii_hexdigit());
            is_number.then_some(part)
        };
        let (_version, trace) = (digits(2)?, digits(32)?);
        let (_parent, _flags) = (digits(16)?, digits(2)?);
        u128::from_str_radix(trace, 16).ok().map(Self)
    }
}

/// Returns the headers of a request. `host`: the name in DNS of the service that the client addressed; `baggage`: the client.
pub fn request(client: SocketAddr, host: Option<&str>, trace: Trace, baggage: &str) -> HeaderMap {
    let host = host.map(|host| format!(";host={host}")).unwrap_or_default();
    let forwarded = format!("for=\"{client}\"{host}");
    let parent: u64 = rand::random();
    let traceparent = format!("00-{trace}-{parent:016x}-00");
    let mut headers = HeaderMap::with_capacity(3);
    // Values that no later request has would displace others in the tunnel's table of headers.
    for (name, value, is_unique) in [
        (BAGGAGE, baggage, false),
        (FORWARDED, &forwarded, true),
        (TRACEPARENT, &traceparent, true),
    ] {
        if let Ok(mut value) = HeaderValue::try_from(value) {
            value.set_sensitive(is_unique);
            headers.insert(name, value);
        }
    }
    headers
}

/// Returns the headers of an answer. `baggage`: the workload.
pub fn answer(baggage: &str) -> HeaderMap {
    let baggage = HeaderValue::try_from(baggage).ok();
    baggage.map(|value| (BAGGAGE, value)).into_iter().collect()
}

/// The statements of a peer in a request.
#[derive(Clone, Debug, Default)]
pub struct Statements {
    /// The description of its workload.
    pub baggage: Option<Arc<Baggage>>,
    /// The name in DNS of the service that the client addressed.
    pub host: Option<Box<str>>,
    /// The number of the connection.
    pub trace: Option<Trace>,
}

impl Statements {
    /// Reads the headers of a request. `baggage`: that of the tunnel's first stream.
    pub fn read(headers: &HeaderMap, baggage: Option<Arc<Baggage>>) -> Self {
        Self {
            baggage,
            host: host(headers),
            trace: Trace::read(headers),
        }
    }
}

/// Returns the service's name in a request, in lower case: the `host` of the first `forwarded`.
fn host(headers: &HeaderMap) -> Option<Box<str>> {
    let text = headers.get(FORWARDED)?.to_str().ok()?;
    let parameters = text.split([';', ',']).filter_map(|of| of.split_once('='));
    let mut hosts = parameters.filter(|(name, _)| name.trim().eq_ignore_ascii_case("host"));
    let host = hosts.next()?.1.trim().trim_matches('"');
    (host.len() <= HOST).then(|| host.to_ascii_lowercase().into())
}

/// Returns the peer's description of its workload.
pub fn baggage(headers: &HeaderMap) -> Option<Arc<Baggage>> {
    let lines = |all: GetAll<'_, HeaderValue>| -> Option<Vec<String>> {
        let texts = all.iter().map(|value| value.to_str().ok());
        texts.map(|text| text.map(str::to_owned)).collect()
    };
    let text = lines(headers.get_all(BAGGAGE))?.join(",");
    Baggage::read(&text).map(Arc::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: HeaderName, value: &str) -> HeaderMap {
        let value = HeaderValue::from_str(value).unwrap();
        HeaderMap::from_iter([(name, value)])
    }

    #[test]
    fn a_request_is_read_as_it_was_written() {
        let client = "[fd00::1]:4000".parse().unwrap();
        let (trace, host_name) = (Trace::new(), "web.shop.svc.cluster.local");
        let headers = request(client, Some(host_name), trace, "service.name=app");
        let forwarded = "for=\"[fd00::1]:4000\";host=web.shop.svc.cluster.local";
        assert_eq!(headers[FORWARDED], forwarded);
        assert_eq!(headers[BAGGAGE], "service.name=app");
        assert_eq!(host(&headers).as_deref(), Some(host_name));
        assert_eq!(Trace::read(&headers), Some(trace));
        assert_eq!(&*baggage(&headers).unwrap().service, "app");
        let headers = request(client, None, trace, "");
        assert_eq!(host(&headers), None);
        assert_eq!(baggage(&headers), None);
    }

    #[test]
    fn malformed_headers_are_ignored() {
        let long = format!("host={}", "a".repeat(HOST + 1));
        for (value, wanted) in [
            ("for=10.0.0.1;host=Web.Shop", Some("web.shop")),
            ("for=10.0.0.1; Host=\"web\", host=api", Some("web")),
            ("for=\"10.0.0.1:80\"", None),
            ("hosts=web", None),
            ("", None),
            (&long, None),
        ] {
            assert_eq!(host(&with(FORWARDED, value)).as_deref(), wanted, "{value}");
        }
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        for (value, is_number) in [
            (format!("00-{trace}-00f067aa0ba902b7-01"), true),
            (format!("00-{trace}-00f067aa0ba902b7"), false),
            (format!("00-+{}-00f067aa0ba902b7-01", &trace[1..]), false),
            (format!("00-{trace}0-0f067aa0ba902b7-01"), false),
            (trace.to_owned(), false),
            (String::new(), false),
        ] {
            let read = Trace::read(&with(TRACEPARENT, &value));
            let wanted = is_number.then(|| trace.to_owned());
            assert_eq!(read.map(|of| of.to_string()), wanted, "{value}");
        }
        let mut headers = with(BAGGAGE, "service.name=a,cloud.zone=b");
        headers.append(BAGGAGE, HeaderValue::from_static("cloud.region=r"));
        let read = baggage(&headers).unwrap();
        assert_eq!((&*read.service, &*read.region), ("a", "r"));
    }
}
