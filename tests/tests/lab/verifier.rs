//! What the running kernel's verifier makes of the programs.

use anyhow::{Context as _, Result, ensure};
use dataplane::kernel::verifier;

scenarios! {
    Dataplane:
    every_program_is_taken,
}

/// Every program loads; what that costs is printed, one line for each, for `cargo xtask verifier`.
fn every_program_is_taken() -> Result<()> {
    let release = nix::sys::utsname::uname()?;
    let release = release.release().to_str().context("a kernel's name")?;
    let mut refused = Vec::new();
    for verified in verifier::verify()? {
        let verifier::Verified {
            program,
            time,
            outcome,
        } = verified;
        match outcome {
            Ok(cost) => println!(
                "verified {program} on {release}: processed {} stack {} jited {} microseconds {}",
                cost.processed,
                cost.stack,
                cost.jited,
                time.as_micros()
            ),
            Err(log) => refused.push(format!("{program}: {log}")),
        }
    }
    ensure!(
        refused.is_empty(),
        "{release} refuses {}",
        refused.join("\n")
    );
    Ok(())
}
