//! Questions about the entries of captured workloads, which decide about programs and flags.

use dataplane_common::capture::Enrolled;
use plan::Captured;

/// Whether a program that is attached to a workload's network namespace stays, also while it has nothing to do: attaching takes long,
/// and policies come and go.
pub(crate) fn keeps_program(entry: &Enrolled) -> bool {
    entry.flags & Enrolled::CAPTURED != 0
}

/// Whether any workload's connections go to a proxy.
pub(super) fn has_proxy(captured: &Captured) -> bool {
    let enrolled = captured
        .namespaces
        .values()
        .chain(captured.cgroups.values());
    let flags = enrolled.map(|enrolled| enrolled.flags);
    let of_addresses = captured.locals.values().map(|local| local.flags);
    flags
        .chain(of_addresses)
        .any(|flags| flags & (Enrolled::PROXY | Enrolled::INBOUND | Enrolled::PACKETS) != 0)
}

/// Whether any workload's egress policy is deny.
pub(super) fn denies(captured: &Captured) -> bool {
    let enrolled = captured
        .namespaces
        .values()
        .chain(captured.cgroups.values());
    let mut flags = enrolled.map(|enrolled| enrolled.flags);
    flags.any(|flags| flags & Enrolled::EGRESS_DENY != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_stays_as_long_as_the_workload_is_captured() {
        for (flags, workload, wanted) in [
            (Enrolled::CAPTURED | Enrolled::JUDGES_INBOUND, 1, true),
            (Enrolled::CAPTURED, 1, true),
            // Only its queries are captured; or the guard lets it go.
            (0, 1, false),
            (0, 0, false),
        ] {
            let entry = Enrolled {
                policy: 1,
                flags,
                workload,
                resolvers: 1,
            };
            assert_eq!(keeps_program(&entry), wanted, "{entry:?}");
        }
    }
}
