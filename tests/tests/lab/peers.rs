//! Places in the table of connected sockets that no program frees: of the kernel's own sockets.

use anyhow::{Result, ensure};
use dataplane_tests::report::Report;
use kernel::sockets::Sweeper;

use crate::{
    cluster::{Cluster, TCP, ask, eventually, peer_is, reaches},
    manifest::Service,
};

scenarios! {
    Dataplane:
    places_of_the_kernels_own_sockets_are_freed,
}

/// A socket of MPTCP has one of TCP, which is the kernel's own and which the programs see connect.
fn places_of_the_kernels_own_sockets_are_freed() -> Result<()> {
    let cluster = Cluster::start(|lab| {
        vec![
            Service::new("web", &["10.96.0.10"])
                .port("tcp", 80, TCP)
                .endpoints(&[lab.pod("near")]),
        ]
    })?;
    let (client, to) = (cluster.client(), "10.96.0.10:80");
    let Some(mut sweeper) = Sweeper::open(cluster.agent.bpffs(), cluster.agent.cgroup())? else {
        println!(
            "skipped peers::places_of_the_kernels_own_sockets_are_freed: this is not the machine's PID namespace"
        );
        return Ok(());
    };
    let mut held = client
        .probe("hold")
        .args(["--to", to])
        .stdin_piped()
        .stdout_piped()
        .spawn()?;
    held.wait_for_line()?;
    eventually(|| {
        ensure!(sweeper.taken() == 1, "{} places are taken", sweeper.taken());
        Ok(())
    })?;
    // Places of processes' sockets are freed when the sockets are closed.
    reaches(client, to, "connect --count 5", &["near"])?;
    ensure!(sweeper.taken() == 1, "{} places are left", sweeper.taken());
    let tried = ask(client, to, "connect --count 5 --mptcp")?;
    if tried.answered == 0 {
        println!(
            "skipped peers::places_of_the_kernels_own_sockets_are_freed: no MPTCP here: {:?}",
            tried.errors
        );
        return Ok(());
    }
    ensure!(tried.answered == 5, "{tried:?}");
    let left = sweeper.taken() - 1;
    ensure!(left == 5, "{left} places are left of 5 sockets");
    // Not at once: a socket that connects has its place a little earlier.
    ensure!(
        sweeper.sweep()? == 0 && sweeper.taken() == 6,
        "freed at once"
    );
    let freed = sweeper.sweep()?;
    ensure!(
        freed == 5 && sweeper.taken() == 1,
        "{freed} places were freed of 5"
    );
    // The live connection still has its own.
    held.close_stdin();
    let report: Report = held.wait_json()?;
    peer_is(&report, to)?;
    ensure!(
        sweeper.sweep()? == 0 && sweeper.taken() == 0,
        "{}",
        sweeper.taken()
    );
    Ok(())
}
