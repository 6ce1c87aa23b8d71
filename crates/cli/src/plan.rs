//! `haul plan`.

use crate::arguments::PlanArguments;
use crate::output::{self, Destination, Failure};
use haul_bench::report::SCHEMA;
use haul_bench::send::Report;
use haul_bench::{export, plan};
use std::collections::BTreeSet;
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
    if report.schema != SCHEMA {
        let found = &report.schema;
        return Err(Failure::bad_input(format!(
            "{name} is of schema {found:?}, and this version reads {SCHEMA:?}"
        )));
    }
    let plan = plan::of(&report)
        .ok_or_else(|| Failure::bad_input(format!("{name} has no measured row to make a plan from")))?;
    let kinds: BTreeSet<String> =
        report.warnings.iter().map(|warning| format!("{:?}", warning.kind).to_lowercase()).collect();
    if !kinds.is_empty() {
        let kinds = kinds.into_iter().collect::<Vec<_>>().join(", ");
        eprintln!("haul: the report carries warnings ({kinds}): a plan is as good as its report");
    }
    if arguments.json != Some(Destination::StandardOutput) {
        output::print(&plan::describe(&plan))?;
    }
    if let Some(json) = &arguments.json {
        json.write(&export::json(&plan))?;
    }
    Ok(ExitCode::SUCCESS)
}
