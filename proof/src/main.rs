//! Sends packets through the kernel programs and compares the results with a model: `cargo xtask fuzz`.

use std::{process::ExitCode, time::Instant};

use anyhow::Result;
use clap::Parser;
use dataplane_common::packet::DEFAULT_FLOWS;
use dataplane_proof::{Tally, campaign::Scene, cost};
use indicatif::{ProgressBar, ProgressStyle};

/// Send packets through the packet path's programs, as this kernel has loaded them, and compare verdict, packet, tables
/// and counters with a reference model
///
/// The programs run in a network namespace of their own. They are attached to no interface and see no real traffic. The
/// run ends at the first difference, with exit code 1, and prints the shortest sequence of packets that shows the
/// difference.
#[derive(Debug, Parser)]
#[command(name = "fuzz")]
struct Arguments {
    /// Number of packets
    #[arg(long, default_value_t = 1_000_000)]
    packets: u64,
    /// Seed of the random generator; the same seed sends the same packets, but the programs choose endpoints and ports
    /// anew in each run
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Instead of comparing, measure the cost of this many new flows in the programs
    #[arg(long, value_name = "FLOWS", conflicts_with_all = ["packets", "seed"])]
    costs: Option<u32>,
    /// With `--costs`: the number of flows that the flow table has room for
    #[arg(long, value_name = "FLOWS", default_value_t = DEFAULT_FLOWS, requires = "costs")]
    room: u32,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match arguments.costs {
        Some(flows) => costs(flows, arguments.room),
        None => fuzz(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            anstream::eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn costs(flows: u32, room: u32) -> Result<()> {
    let mut scene = Scene::with_flows(room)?;
    println!("ns, medians: {flows} flows, room for {room}");
    println!(
        "{:<18} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "", "new", "(mean)", "answer", "again", "known"
    );
    for case in cost::CASES {
        let cost::Costs {
            new,
            new_mean,
            answer,
            again,
            known,
        } = cost::measure(&mut scene, case, flows)?;
        println!(
            "{:<18} {new:>8} {new_mean:>8.0} {answer:>8} {again:>8} {known:>8}",
            case.name
        );
    }
    Ok(())
}

fn fuzz(arguments: &Arguments) -> Result<()> {
    let mut scene = Scene::new()?.with_stack()?;
    let bar = ProgressBar::new(arguments.packets);
    bar.set_style(ProgressStyle::with_template(
        "{wide_bar} {human_pos} of {human_len} packets, {per_sec}",
    )?);
    let started = Instant::now();
    let outcome = scene.run(arguments.seed, arguments.packets, &|done| {
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let tally = outcome?;
    let seconds = started.elapsed().as_secs_f64();
    print(&tally);
    println!(
        "Seed {}: {} packets in {seconds:.0} s; none was treated otherwise than by the model.",
        arguments.seed, tally.packets
    );
    Ok(())
}

fn print(tally: &Tally) {
    println!(
        "{:<26} {:<8} {:<26} {:>10}",
        "packets", "", "became of them", ""
    );
    for ((sort, outcome), count) in &tally.outcomes {
        let mutated = if sort.mutated { "mutated" } else { "" };
        let (kind, outcome) = (sort.kind.word(), outcome.word());
        println!("{kind:<26} {mutated:<8} {outcome:<26} {count:>10}");
    }
    println!("\n{:<20} {:>10}", "reason", "");
    for reason in dataplane_common::Reason::ALL {
        let count = tally.reasons[*reason as usize];
        if count > 0 {
            println!("{:<20} {count:>10}", reason.word());
        }
    }
    let [cells, slots] = tally.elsewhere;
    println!(
        "\nflows in other cells than their homes: {cells}, led to by other slots: {slots}; that were over and gave way: {}",
        tally.gave_way
    );
    println!(
        "changed packets: checksums right {}, wrong by as much as before {}\nother events: {}; \
         packets too short to be run: {}",
        tally.right, tally.wrong_before, tally.events, tally.too_short
    );
    println!(
        "packets with the same bytes through the stack: {}",
        tally.through
    );
}
