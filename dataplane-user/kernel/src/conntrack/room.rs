//! How many flows there is room for, unless the operator says.

use std::{fs, path::Path};

use nix::unistd::{SysconfVar, sysconf};

use crate::cgroup::cgroup2_root;

/// Flows for each core, and at least: kube-proxy's `conntrack.maxPerCore` and `conntrack.min`.
const FOR_EACH_CORE: u64 = 32_768;
const AT_LEAST: u64 = 131_072;
/// Limits on every machine: the minimum and maximum of `packets.conntrackFlows`.
const LEAST: u64 = 1024;
const MOST: u64 = 1 << 23;
/// Kernel memory for each flow, in bytes: two cells with their sequences, four slots.
const BYTES: u64 = 176;
/// The share of the machine's memory that flows may take: one part in so many.
const SHARE: u64 = 64;
/// The share of the memory limit (`memory.max`) of the agent's cgroup that flows may take: one part in so many. The
/// kernel charges the tables to this cgroup. The rest is for the agent and the other tables.
const SHARE_OF_LIMIT: u64 = 4;

/// Returns how many cores this machine has.
pub fn cores() -> u32 {
    let cores = asked(SysconfVar::_NPROCESSORS_ONLN);
    cores.and_then(|n| u32::try_from(n).ok()).unwrap_or(1)
}

fn asked(what: SysconfVar) -> Option<u64> {
    let answer = sysconf(what).ok().flatten();
    answer.and_then(|n| u64::try_from(n).ok())
}

/// Returns how many flows there is room for on this machine.
pub fn of_this_machine() -> u32 {
    let memory = asked(SysconfVar::_PHYS_PAGES)
        .zip(asked(SysconfVar::PAGE_SIZE))
        .map_or(u64::MAX, |(pages, size)| pages.saturating_mul(size));
    let limit = fs::read_to_string("/proc/self/cgroup")
        .ok()
        .zip(cgroup2_root().ok())
        .and_then(|(own, root)| limit_of(&own, &root));
    of(cores().into(), memory, limit.unwrap_or(u64::MAX))
}

/// Returns the least limit of memory, in bytes, of a process's cgroup and those that it is in; `own`: its
/// `/proc/PID/cgroup`, `root`: where the hierarchy is mounted. `None` if there is no limit, or none that can be seen.
fn limit_of(own: &str, root: &Path) -> Option<u64> {
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let within = Path::new(own).ancestors();
    let limits = within.filter_map(|cgroup| {
        let limit = fs::read_to_string(root.join(cgroup).join("memory.max")).ok()?;
        limit.trim().parse().ok()
    });
    limits.min()
}

/// Returns the number of flows to make room for, a power of two. `limit`: the memory limit of the agent's cgroup.
fn of(cores: u64, memory: u64, limit: u64) -> u32 {
    let wanted = cores
        .saturating_mul(FOR_EACH_CORE)
        .clamp(AT_LEAST, MOST)
        .next_power_of_two();
    let affordable = (memory / SHARE).min(limit / SHARE_OF_LIMIT) / BYTES;
    let affordable = affordable.max(LEAST);
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
            assert_eq!(
                of(cores, memory, u64::MAX),
                flows,
                "{cores} cores, {memory} bytes"
            );
        }
        for (limit, flows) in [(GIB, 1_048_576), (256 << 20, 262_144), (8 << 20, 8192)] {
            assert_eq!(of(64, 256 * GIB, limit), flows, "a limit of {limit} bytes");
        }
    }

    #[test]
    fn the_least_limit_of_all_counts() {
        let root = tempfile::tempdir().unwrap();
        let agent = root.path().join("kubepods/pod1/agent");
        fs::create_dir_all(&agent).unwrap();
        let limit = |cgroup: &str, limit: &str| {
            let file = root.path().join(cgroup).join("memory.max");
            fs::write(file, limit).unwrap();
        };
        let found = || limit_of("1:name=systemd:/x\n0::/kubepods/pod1/agent\n", root.path());
        assert_eq!(found(), None);
        limit("kubepods/pod1/agent", "max\n");
        assert_eq!(found(), None);
        limit("kubepods/pod1", "536870912\n");
        assert_eq!(found(), Some(536_870_912));
        limit("kubepods/pod1/agent", "1048576\n");
        assert_eq!(found(), Some(1_048_576));
        assert_eq!(limit_of("0::/\n", root.path()), None);
        assert_eq!(limit_of("4:memory:/x\n", root.path()), None);
    }
}
