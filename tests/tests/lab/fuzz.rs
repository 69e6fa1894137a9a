//! Packets of all kinds through the packet path's programs, compared with a model of the expected results: some seconds
//! of the work that `cargo xtask fuzz packet` does for any time.

use std::time::Duration;

use anyhow::{Result, ensure};
use dataplane_proof::campaign::Scene;
use dataplane_tests::patience;

scenarios! {
    Dataplane:
    the_packet_programs_do_what_the_model_does,
}

fn the_packet_programs_do_what_the_model_does() -> Result<()> {
    // A machine whose other limits are longer does less here.
    let slowness = patience(Duration::from_secs(1)).as_secs();
    let packets = 100_000 / slowness;
    let seed = 20_261_121;
    let tally = Scene::new()?.run(seed, packets, &|_| {})?;
    ensure!(
        tally.packets >= packets && tally.right > packets / 10,
        "{tally:?}"
    );
    ensure!(
        tally.gave_way > 0,
        "no flow that was over gave way to another"
    );
    Ok(())
}
