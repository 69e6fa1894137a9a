//! The scenarios: real clients and servers in labs.
//!
//! A scenario is a function that builds the lab it needs and returns an error when what it saw is
//! not what it should see. Scenarios run in parallel and do not touch each other. On a machine that
//! cannot run them they are skipped, and why is printed; with `DATAPLANE_REQUIRE_PRIVILEGES=1`, as
//! in CI, that is a failure.

mod kernel;
mod smoke;

use std::process::ExitCode;

use anyhow::Result;
use dataplane_tests::{Requirement, missing};
use libtest_mimic::{Arguments, Failed, Trial};

/// A scenario, and what it needs.
struct Scenario {
    name: &'static str,
    needs: Requirement,
    run: fn() -> Result<()>,
}

/// Names a scenario after its function: `scenario!(Lab, smoke::direct)`.
macro_rules! scenario {
    ($needs:ident, $module:ident :: $function:ident) => {
        Scenario {
            name: concat!(stringify!($module), "::", stringify!($function)),
            needs: Requirement::$needs,
            run: $module::$function,
        }
    };
}

fn main() -> ExitCode {
    if std::env::var_os(smoke::ABANDON).is_some() {
        if let Err(error) = smoke::abandon() {
            eprintln!("{error:#}");
        }
        return ExitCode::FAILURE;
    }
    let scenarios = [
        scenario!(Lab, smoke::pods_reach_pods_directly),
        scenario!(Lab, smoke::nothing_leads_out),
        scenario!(Lab, smoke::programs_end_with_their_handle),
        scenario!(Lab, smoke::a_lab_leaves_nothing_behind),
        scenario!(Lab, smoke::a_dead_creators_lab_is_swept),
        scenario!(Lab, smoke::errors_are_reported_by_name),
        scenario!(
            Dataplane,
            kernel::a_second_agent_adopts_what_the_first_wrote
        ),
        scenario!(Dataplane, kernel::two_agents_do_not_write_at_once),
        scenario!(Dataplane, kernel::a_foreign_pin_is_named_and_left_alone),
        scenario!(Dataplane, kernel::a_pin_of_another_kind_is_named),
        scenario!(Dataplane, kernel::damaged_pins_are_refused_and_cleaned_up),
        scenario!(Dataplane, kernel::half_made_pins_are_made_anew),
        scenario!(Dataplane, kernel::another_cgroup_is_attached_to_anew),
        scenario!(Dataplane, kernel::tables_grow_and_keep_what_they_hold),
        scenario!(Dataplane, kernel::a_full_table_names_its_knob),
        scenario!(Dataplane, kernel::an_older_layout_is_retired),
        scenario!(Dataplane, kernel::a_directory_on_no_bpffs_is_refused),
    ];
    let arguments = Arguments::from_args();
    let required = std::env::var_os("DATAPLANE_REQUIRE_PRIVILEGES").is_some_and(|v| v == "1");
    let (lab, dataplane) = (missing(Requirement::Lab), missing(Requirement::Dataplane));
    let trials = scenarios.map(|scenario| {
        let missing = match scenario.needs {
            Requirement::Lab => lab.clone(),
            Requirement::Dataplane => dataplane.clone(),
        };
        trial(&scenario, missing, required, arguments.list)
    });
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}

fn trial(scenario: &Scenario, missing: Option<String>, required: bool, listing: bool) -> Trial {
    let run = scenario.run;
    match missing {
        None => Trial::test(scenario.name, move || {
            run().map_err(|error| format!("{error:#}").into())
        }),
        Some(reason) if required => Trial::test(scenario.name, move || {
            Err(Failed::from(format!(
                "this machine cannot run it: {reason}"
            )))
        }),
        Some(reason) => {
            if !listing {
                println!("skipped {}: {reason}", scenario.name);
            }
            Trial::test(scenario.name, || Ok(())).with_ignored_flag(true)
        }
    }
}
