//! Parses Kubernetes' addresses and ranges.

use std::net::IpAddr;

use ipnet::IpNet;
use model::can_be_endpoint;

/// Maximum length of a DNS name.
const NAME_MAX: usize = 253;

/// Parses an address. Leading zeros in IPv4 octets are decimal (`010.0.0.1` is 10.0.0.1), as for kube-proxy: objects
/// from before Kubernetes refused such addresses may still have them. An IPv4-mapped IPv6 address becomes the IPv4
/// address.
pub fn address(text: &str) -> Result<IpAddr, String> {
    let stripped;
    let plain = if text.contains(':') {
        text
    } else {
        stripped = without_leading_zeros(text);
        &stripped
    };
    plain
        .parse::<IpAddr>()
        .map(|address| address.to_canonical())
        .map_err(|_| {
            format!("{text:?} is not an IP address; expected one like 10.0.0.1 or fd00::1")
        })
}

/// Parses a range `ADDRESS/LENGTH`, and clears the bits after the length. White space around it is allowed, as
/// Kubernetes allows it in `loadBalancerSourceRanges`.
pub fn range(text: &str) -> Result<IpNet, String> {
    let wrong =
        || format!("{text:?} is not an address range; expected one like 10.0.0.0/8 or fd00::/64");
    let (base, length) = text.trim().split_once('/').ok_or_else(wrong)?;
    let base = address(base).map_err(|_| wrong())?;
    if length.is_empty() || !length.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong());
    }
    let length = length.parse().map_err(|_| wrong())?;
    Ok(IpNet::new(base, length).map_err(|_| wrong())?.trunc())
}

/// Parses an address that can be virtual. A loopback address cannot, because the node's own programs use it.
pub fn virtual_address(text: &str) -> Result<IpAddr, String> {
    let address = reachable_address(text)?;
    if address.is_loopback() {
        return Err(format!(
            "{address} is a loopback address, which cannot be a service's"
        ));
    }
    Ok(address)
}

/// Parses the address of an endpoint.
pub fn endpoint_address(text: &str) -> Result<IpAddr, String> {
    let address = reachable_address(text)?;
    can_be_endpoint(address)
        .map(|()| address)
        .map_err(|kind| format!("{address} is {kind}, which cannot be an endpoint's"))
}

/// Returns whether an address is valid on one link only.
pub fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// Parses an address that a host can have.
pub fn reachable_address(text: &str) -> Result<IpAddr, String> {
    let address = address(text)?;
    let kind = match address {
        _ if address.is_unspecified() => "the unspecified address",
        _ if address.is_multicast() => "a multicast address",
        IpAddr::V4(v4) if v4.is_broadcast() => "the broadcast address",
        _ => return Ok(address),
    };
    Err(format!("{address} is {kind}, to which nothing can connect"))
}

/// Returns whether a text is a DNS name of a host: labels of letters, digits, `-` and `_`.
pub fn is_dns_name(name: &str) -> bool {
    name.len() <= NAME_MAX
        && name.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && label
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
                && !label.starts_with('-')
                && !label.ends_with('-')
        })
}

/// Returns `IPv4` or `IPv6`, the names that Kubernetes uses.
pub fn family(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "IPv4" } else { "IPv6" }
}

fn without_leading_zeros(text: &str) -> String {
    text.split('.')
        .map(|octet| match octet.trim_start_matches('0') {
            "" if !octet.is_empty() => "0",
            significant => significant,
        })
        .collect::<Vec<_>>()
        .join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_zeros_are_decimal_as_for_kube_proxy() {
        // The addresses of kube-proxy's TestBadIPs.
        for (written, meant) in [
            ("172.030.000.041", "172.30.0.41"),
            ("192.168.099.022", "192.168.99.22"),
            ("1.2.3.004", "1.2.3.4"),
            ("10.180.00.1", "10.180.0.1"),
            ("000.0.0.0", "0.0.0.0"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
            ("FD00::1", "fd00::1"),
        ] {
            assert_eq!(address(written), Ok(meant.parse().unwrap()), "{written}");
        }
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in [
            "",
            ".",
            "10.0.0",
            "10.0.0.256",
            "10.0.0.1.2",
            "10..0.1",
            "fd00::g",
            "a.b.c.d",
        ] {
            assert!(address(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn what_a_node_keeps_to_itself_is_no_endpoint() {
        for text in [
            "127.0.0.1",
            "127.255.0.1",
            "::1",
            "::ffff:127.0.0.1",
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "fe80::1",
            "0.0.0.0",
            "::",
            "224.0.0.1",
            "ff02::1",
            "255.255.255.255",
            "240.240.1.2",
            "::ffff:240.240.1.2",
            "2001:2::f0f0:102",
        ] {
            assert!(endpoint_address(text).is_err(), "{text}");
        }
        for text in [
            "10.0.0.1",
            "192.0.2.1",
            "128.0.0.1",
            "169.253.0.1",
            "240.241.0.1",
            "2001:2:1::1",
            "fd00::1",
        ] {
            assert!(endpoint_address(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn ranges() {
        for (written, meant) in [
            (" 203.0.113.0/25", "203.0.113.0/25"),
            ("203.0.113.000/025\t", "203.0.113.0/25"),
            ("10.1.2.3/8", "10.0.0.0/8"),
            ("fd00::1/64", "fd00::/64"),
            ("0.0.0.0/0", "0.0.0.0/0"),
        ] {
            assert_eq!(range(written), Ok(meant.parse().unwrap()), "{written}");
        }
        for text in [
            "",
            "10.0.0.0",
            "10.0.0.0/33",
            "10.0.0.0/",
            "10.0.0.0/+8",
            "/8",
            "x/8",
        ] {
            assert!(range(text).is_err(), "{text:?}");
        }
    }
}
