//! How many flows there is room for, unless the operator says.

use nix::unistd::{SysconfVar, sysconf};

/// Flows for each core, and at least: kube-proxy's `conntrack.maxPerCore` and `conntrack.min`.
const FOR_EACH_CORE: u64 = 32_768;
const AT_LEAST: u64 = 131_072;
/// Flows whatever the machine: the least that `--conntrack-flows` takes, and the most.
const LEAST: u64 = 1024;
const MOST: u64 = 1 << 23;
/// Kernel memory for each flow, in bytes: two cells with their sequences, four slots.
const BYTES: u64 = 176;
/// The share of the machine's memory that flows may take: one part in so many.
const SHARE: u64 = 64;

/// Returns how many flows there is room for on this machine.
pub fn of_this_machine() -> u32 {
    let asked = |what| {
        sysconf(what)
            .ok()
            .flatten()
            .and_then(|n| u64::try_from(n).ok())
    };
    let cores = asked(SysconfVar::_NPROCESSORS_ONLN).unwrap_or(1);
    let memory = asked(SysconfVar::_PHYS_PAGES)
        .zip(asked(SysconfVar::PAGE_SIZE))
        .map_or(u64::MAX, |(pages, size)| pages.saturating_mul(size));
    of(cores, memory)
}

/// Returns how many flows there is room for with so many cores and so many bytes of memory: a power of two.
fn of(cores: u64, memory: u64) -> u32 {
    let wanted = cores
        .saturating_mul(FOR_EACH_CORE)
        .clamp(AT_LEAST, MOST)
        .next_power_of_two();
    let affordable = (memory / SHARE / BYTES).max(LEAST);
    let affordable = 1 << affordable.ilog2();
    u32::try_from(wanted.min(affordable)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_by_cores_and_memory() {
        const GIB: u64 = 1 << 30;
        for (cores, memory, flows) in [
            (1, 8 * GIB, 131_072),
            (4, 16 * GIB, 131_072),
            (6, 16 * GIB, 262_144),
            (64, 256 * GIB, 2_097_152),
            (512, 4096 * GIB, 8_388_608),
            // 22 MiB are more than a 64th of a gibibyte.
            (4, GIB, 65_536),
            (64, 4 * GIB, 262_144),
            (1, 1 << 20, 1024),
        ] {
            assert_eq!(of(cores, memory), flows, "{cores} cores, {memory} bytes");
        }
    }
}
