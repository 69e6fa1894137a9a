//! The capabilities of this process (`capabilities(7)`), and giving them up.

use rustix::{
    io::{Errno, Result},
    thread::{
        CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
        remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
    },
};

/// The agent's capabilities beside the opener's: to make tables and load programs, to read the kernel's structures in
/// them, and for interfaces, routes and sockets.
const AGENT: CapabilitySet = CapabilitySet::BPF
    .union(CapabilitySet::PERFMON)
    .union(CapabilitySet::NET_ADMIN);
/// The capabilities that find and take the sockets of other users' processes, if the operator grants them.
const OTHER_PROCESSES: CapabilitySet =
    CapabilitySet::SYS_PTRACE.union(CapabilitySet::DAC_READ_SEARCH);
/// For sockets at port 53 of the resolvers of workloads that are captured by their packets, if the operator grants it.
const LOW_PORTS: CapabilitySet = CapabilitySet::NET_BIND_SERVICE;
/// The opener's capabilities: to enter network namespaces and open objects by their ids; and for sockets at which the
/// kernel checks who has opened them.
const OPENER: CapabilitySet = CapabilitySet::SYS_ADMIN.union(CapabilitySet::NET_ADMIN);

/// Whether an agent that was started with these can leave CAP_SYS_ADMIN to an opener. Without CAP_BPF and CAP_PERFMON the
/// agent needs CAP_SYS_ADMIN itself, which includes them.
pub fn are_enough_for_two(permitted: CapabilitySet) -> bool {
    permitted.contains(AGENT | CapabilitySet::SYS_ADMIN)
}

/// The agent's capabilities that it uses of those that it was started with.
pub fn of_the_agent(permitted: CapabilitySet) -> CapabilitySet {
    let used = AGENT | OTHER_PROCESSES | LOW_PORTS;
    if are_enough_for_two(permitted) {
        permitted & used
    } else {
        permitted & (used | CapabilitySet::SYS_ADMIN)
    }
}

/// Whether these include CAP_SYS_ADMIN.
pub fn include_sys_admin(permitted: CapabilitySet) -> bool {
    permitted.contains(CapabilitySet::SYS_ADMIN)
}

/// The opener's capabilities, of those that it was started with.
pub fn of_the_opener(permitted: CapabilitySet) -> CapabilitySet {
    permitted & OPENER
}

/// Gives up all capabilities of this thread, and of programs that it starts, but those for network rules: CAP_NET_ADMIN and
/// CAP_NET_RAW. For good.
///
/// # Errors
/// If the kernel refuses.
pub fn keep_network_only() -> std::io::Result<()> {
    const NETWORK: CapabilitySet = CapabilitySet::NET_ADMIN.union(CapabilitySet::NET_RAW);
    Ok(keep_only(permitted()? & NETWORK)?)
}

/// Returns the permitted capabilities of this thread.
///
/// # Errors
/// If the kernel refuses.
pub fn permitted() -> Result<CapabilitySet> {
    Ok(capabilities(None)?.permitted)
}

/// Gives up all capabilities of this thread but these, for good: of this thread, of threads that it starts, and of
/// programs that they become (`no_new_privs`). Other threads keep theirs.
///
/// # Errors
/// If the kernel refuses.
pub fn keep_only(kept: CapabilitySet) -> Result<()> {
    set_no_new_privs(true)?;
    match clear_ambient_capability_set() {
        // A kernel without that.
        Ok(()) | Err(Errno::INVAL) => {}
        Err(error) => return Err(error),
    }
    // While this thread may.
    for capability in CapabilitySet::all().difference(kept).iter() {
        match remove_capability_from_bounding_set(capability) {
            // Without CAP_SETPCAP it stays there, and `no_new_privs` keeps programs from having it. A kernel that does
            // not know a capability grants it to no process.
            Ok(()) | Err(Errno::PERM | Errno::INVAL) => {}
            Err(error) => return Err(error),
        }
    }
    set_capabilities(
        None,
        CapabilitySets {
            effective: kept,
            permitted: kept,
            inheritable: CapabilitySet::empty(),
        },
    )
}

#[cfg(test)]
mod tests {
    use std::thread;

    use rustix::thread::no_new_privs;

    use super::*;

    #[test]
    fn the_agent_keeps_what_it_uses_and_is_granted() {
        let in_the_daemon_set = AGENT | CapabilitySet::SYS_ADMIN;
        assert_eq!(of_the_agent(in_the_daemon_set), AGENT);
        let all = CapabilitySet::all();
        assert_eq!(of_the_agent(all), AGENT | OTHER_PROCESSES | LOW_PORTS);
        // An earlier version's DaemonSet has the same capabilities as the opener.
        assert_eq!(of_the_agent(OPENER), OPENER);
        assert!(are_enough_for_two(in_the_daemon_set) && !are_enough_for_two(OPENER));
        assert!(of_the_agent(CapabilitySet::empty()).is_empty());
        assert_eq!(of_the_opener(CapabilitySet::all()), OPENER);
    }

    #[test]
    fn what_is_given_up_is_gone() {
        // On a separate thread, because the other threads must keep their capabilities.
        let given_up = thread::spawn(|| {
            let before = permitted().unwrap();
            let kept = before & CapabilitySet::NET_ADMIN;
            keep_only(kept).unwrap();
            let after = capabilities(None).unwrap();
            assert_eq!((after.effective, after.permitted), (kept, kept));
            assert!(after.inheritable.is_empty());
            assert!(no_new_privs().unwrap());
            let again = CapabilitySets {
                effective: before,
                permitted: before,
                inheritable: CapabilitySet::empty(),
            };
            assert_eq!(set_capabilities(None, again).is_ok(), before == kept);
        });
        given_up.join().unwrap();
    }
}
