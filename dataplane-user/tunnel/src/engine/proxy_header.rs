//! The header of the PROXY protocol, version 2, with which a connection to a Pod of a Gateway begins.
//!
//! See <https://www.haproxy.org/download/2.9/doc/proxy-protocol.txt>.

use std::net::{IpAddr, SocketAddr};

use model::Identity;

const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Version 2, and the command PROXY.
const PROXY: u8 = 0x21;
/// TCP over IPv4, and over IPv6.
const TCP: [u8; 2] = [0x11, 0x21];
/// The type of the field (TLV) that has the client's identity.
const IDENTITY: u8 = 0xd0;

/// Returns the header of a connection: the client's address and identity, and the destination that the client asked for. `None`:
/// the identity is too long for the header, whose length has 16 bits.
///
/// If only one address is IPv4, both are written as IPv6: the header has one family.
pub fn header(client: SocketAddr, to: SocketAddr, identity: &Identity) -> Option<Vec<u8>> {
    let (family, mut rest) = match (client.ip(), to.ip()) {
        (IpAddr::V4(client), IpAddr::V4(to)) => (TCP[0], [client.octets(), to.octets()].concat()),
        addresses => {
            let v6 = |ip: IpAddr| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                IpAddr::V6(ip) => ip.octets(),
            };
            (TCP[1], [v6(addresses.0), v6(addresses.1)].concat())
        }
    };
    rest.extend([client.port().to_be_bytes(), to.port().to_be_bytes()].concat());
    let identity = identity.to_string();
    rest.push(IDENTITY);
    rest.extend(u16::try_from(identity.len()).ok()?.to_be_bytes());
    rest.extend(identity.as_bytes());
    let length = u16::try_from(rest.len()).ok()?.to_be_bytes();
    Some([&SIGNATURE[..], &[PROXY, family], &length, &rest].concat())
}

#[cfg(test)]
mod tests {
    use ppp::v2::{Addresses, Command, Header, Protocol, Version};

    use super::*;

    /// Read by the parser of another implementation.
    #[test]
    fn the_header_has_the_addresses_and_the_identity() {
        let identity = Identity::new("cluster.local", "shop", "client").unwrap();
        for (client, to, wanted) in [
            (
                "10.0.0.8:40000",
                "10.96.0.10:80",
                "10.0.0.8 10.96.0.10 40000 80",
            ),
            (
                "[fd00::8]:40000",
                "[fd00:96::10]:80",
                "fd00::8 fd00:96::10 40000 80",
            ),
            (
                "10.0.0.8:40000",
                "[fd00:96::10]:80",
                "::ffff:10.0.0.8 fd00:96::10 40000 80",
            ),
            (
                "[fd00::8]:1",
                "10.96.0.10:65535",
                "fd00::8 ::ffff:10.96.0.10 1 65535",
            ),
        ] {
            let bytes = header(client.parse().unwrap(), to.parse().unwrap(), &identity).unwrap();
            let read = Header::try_from(&bytes[..]).unwrap();
            let addresses = match read.addresses {
                Addresses::IPv4(of) => format!(
                    "{} {} {} {}",
                    of.source_address, of.destination_address, of.source_port, of.destination_port
                ),
                Addresses::IPv6(of) => format!(
                    "{} {} {} {}",
                    of.source_address, of.destination_address, of.source_port, of.destination_port
                ),
                other => panic!("{other:?}"),
            };
            assert_eq!(addresses, wanted);
            let fields = (read.version, read.command, read.protocol);
            assert_eq!(fields, (Version::Two, Command::Proxy, Protocol::Stream));
            assert_eq!(read.len(), bytes.len(), "{wanted}: the whole header");
            let all: Vec<_> = read.tlvs().map(Result::unwrap).collect();
            assert_eq!(all.len(), 1, "{wanted}: {all:?}");
            assert_eq!(
                (all[0].kind, &*all[0].value),
                (0xd0, identity.to_string().as_bytes())
            );
        }
    }

    #[test]
    fn an_identity_that_is_too_long_has_no_header() {
        let at = |port: u16| SocketAddr::from(([10, 0, 0, 8], port));
        // Of the 65535 bytes, 12 are for the addresses, 3 for the head of the field, and 26 for the rest of the identity.
        for (length, is_header) in [(65_494, true), (65_495, false), (65_600, false)] {
            let identity = Identity::new("local", "shop", &"a".repeat(length)).unwrap();
            let found = header(at(1), at(2), &identity);
            assert_eq!(found.is_some(), is_header, "{length}");
        }
    }
}
