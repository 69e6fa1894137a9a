//! The ports that a node's kernel gives to sockets that ask for none.

use std::ops::RangeInclusive;

/// Ephemeral ports: `net.ipv4.ip_local_port_range` without `net.ipv4.ip_local_reserved_ports`. Both families have them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ephemeral {
    range: Option<RangeInclusive<u16>>,
    reserved: Vec<RangeInclusive<u16>>,
}

impl Ephemeral {
    /// From the texts of the two sysctls. None if the first has no range.
    pub fn read(range: &str, reserved: &str) -> Option<Self> {
        let mut ports = range.split_ascii_whitespace().map(str::parse);
        let (Some(Ok(first)), Some(Ok(last))) = (ports.next(), ports.next()) else {
            return None;
        };
        let reserved = reserved.trim().split(',').filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(first.parse().ok()?..=last.parse().ok()?)
        });
        Some(Self {
            range: Some(first..=last),
            reserved: reserved.collect(),
        })
    }

    /// The first port and the last.
    pub fn range(&self) -> Option<(u16, u16)> {
        let range = self.range.as_ref()?;
        Some((*range.start(), *range.end()))
    }

    /// Whether the kernel may give a port to a socket.
    pub fn has(&self, port: u16) -> bool {
        let mut all = self.range.iter();
        all.any(|range| range.contains(&port)) && !self.reserved.iter().any(|r| r.contains(&port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_ports_are_not_ephemeral() {
        let ports = Ephemeral::read("32768\t60999\n", "8080,40000-40010,51820\n").unwrap();
        for (port, is) in [
            (32_767, false),
            (32_768, true),
            (60_999, true),
            (61_000, false),
            (40_000, false),
            (40_010, false),
            (40_011, true),
            (51_820, false),
            (8080, false),
        ] {
            assert_eq!(ports.has(port), is, "{port}");
        }
        assert_eq!(ports.range(), Some((32_768, 60_999)));
        assert_eq!(Ephemeral::read("1 2", "\n").unwrap().range(), Some((1, 2)));
        assert_eq!(Ephemeral::read("many", ""), None);
        assert!(!Ephemeral::default().has(40_000));
    }
}
