//! How many ICMP errors this network namespace sends: the kernel's sysctls (`Documentation/networking/ip-sysctl.rst`),
//! for the programs, which send errors of their own.

use std::{fs, str::FromStr};

use dataplane_common::packet::ErrorLimits;

/// The kernel's limits. A limit that cannot be read has the kernel's default.
pub fn error_limits() -> ErrorLimits {
    // Types of ICMP and of ICMPv6 (RFC 792, RFC 4443): destination unreachable and time exceeded.
    let v4: u32 = number("ipv4/icmp_ratemask").unwrap_or(0x1818);
    let v6 = text("ipv6/icmp/ratemask").unwrap_or_else(|| "0-1,3-127".to_owned());
    let limited = [
        (ErrorLimits::UNREACHABLE_V4, v4 & 1 << 3 != 0),
        (ErrorLimits::EXCEEDED_V4, v4 & 1 << 11 != 0),
        (ErrorLimits::UNREACHABLE_V6, lists(&v6, 1)),
        (ErrorLimits::EXCEEDED_V6, lists(&v6, 3)),
    ];
    let kinds = limited.iter().filter(|(_, limited)| *limited);
    ErrorLimits {
        kinds: kinds.fold(0, |kinds, (kind, _)| kinds | kind),
        v4_ms: number("ipv4/icmp_ratelimit").unwrap_or(1000),
        v6_ms: number("ipv6/icmp/ratelimit").unwrap_or(1000),
        // The machine's own namespace alone has these two before Linux 6.11.
        per_second: number("ipv4/icmp_msgs_per_sec").unwrap_or(1000),
        burst: number("ipv4/icmp_msgs_burst").unwrap_or(50),
        ..ErrorLimits::default()
    }
}

fn text(key: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/sys/net/{key}")).ok()?;
    Some(text.trim().to_owned())
}

pub(super) fn number<T: FromStr>(key: &str) -> Option<T> {
    text(key)?.parse().ok()
}

/// Whether a list of numbers and ranges, as the kernel writes sets of bits, has a number: `0-1,3-127`.
fn lists(ranges: &str, wanted: u32) -> bool {
    ranges.split(',').any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let bounds = (first.parse::<u32>(), last.parse::<u32>());
        matches!(bounds, (Ok(first), Ok(last)) if (first..=last).contains(&wanted))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_bits_are_lists_of_ranges() {
        let usual = "0-1,3-127";
        let found: Vec<u32> = (0..130).filter(|number| lists(usual, *number)).collect();
        assert_eq!(found.len(), 127);
        assert!(!lists(usual, 2), "packet too big");
        assert!(lists("3", 3) && !lists("", 0) && !lists("3", 1));
    }

    #[test]
    fn the_kernel_tells_its_limits() {
        let limits = error_limits();
        assert!(limits.burst > 0 && limits.per_second > 0, "{limits:?}");
    }
}
