//! `haul plan`.

use crate::arguments::PlanArguments;
use crate::output::{self, Destination, Failure};
use haul_bench::report::Report;
use haul_bench::{export, plan};
use std::fs::File;
use std::io::{BufReader, Read};
use std::process::ExitCode;

/// The largest report that is read.
const REPORT_BYTES_MAX: u64 = 64 << 20;

pub fn run(arguments: &PlanArguments) -> Result<ExitCode, Failure> {
    if let Some(json) = &arguments.json {
        json.check()?;
    }
    let name = arguments.from.display();
    let file = File::open(&arguments.from).map_err(|error| {
        Failure::bad_input(format!(
            "cannot open {name}: {error} (run `haul bench` first, or name a report with --from)"
        ))
    })?;
    let report: Report = serde_json::from_reader(BufReader::new(file.take(REPORT_BYTES_MAX)))
        .map_err(|error| Failure::bad_input(format!("{name} is no report of `haul bench send`: {error}")))?;
    let plan = plan::of(&report)
        .ok_or_else(|| Failure::bad_input(format!("{name} has no measured row to make a plan from")))?;
    if arguments.json != Some(Destination::StandardOutput) {
        output::print(&plan::describe(&plan))?;
    }
    if let Some(json) = &arguments.json {
        json.write(&export::json(&plan))?;
    }
    Ok(ExitCode::SUCCESS)
}
