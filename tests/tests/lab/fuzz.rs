//! Packets of all kinds through the packet path's programs, compared with a model of the expected results: some seconds
//! of the work that `cargo xtask fuzz packet` does for any time.

use anyhow::{Result, ensure};
use dataplane_proof::campaign::Scene;
use dataplane_tests::emulated;

scenarios! {
    Dataplane:
    the_packet_programs_do_what_the_model_does,
    the_path_through_the_stack_sends_what_the_fast_path_sends,
}

fn the_packet_programs_do_what_the_model_does() -> Result<()> {
    // An emulated machine takes a minute for these few, which need not contain everything.
    let few = emulated();
    let packets = if few { 10_000 } else { 100_000 };
    let seed = 20_261_121;
    let tally = Scene::new()?.run(seed, packets, &|_| {})?;
    ensure!(
        tally.packets >= packets && tally.right > packets / 10,
        "{tally:?}"
    );
    ensure!(
        few || tally.gave_way > 0,
        "no flow that was over gave way to another"
    );
    // By chance, one run of some twenty of the few has none.
    ensure!(
        few || tally.elsewhere.iter().all(|flows| *flows > 0),
        "no flow found its cell taken, or its slot: {:?}",
        tally.elsewhere
    );
    Ok(())
}

fn the_path_through_the_stack_sends_what_the_fast_path_sends() -> Result<()> {
    let packets = if emulated() { 5_000 } else { 50_000 };
    let seed = 20_261_130;
    let tally = Scene::new()?.with_stack()?.run(seed, packets, &|_| {})?;
    ensure!(tally.through > packets / 50, "{tally:?}");
    Ok(())
}
