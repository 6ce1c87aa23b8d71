//! `haul doctor`: prints what the kernel, the network device and the limits allow.

use crate::arguments::DoctorArguments;
use crate::output::{self, Destination, Failure};
use haul_bench::doctor::{self, Diagnosis, Verdict};
use haul_bench::export;
use std::fmt::Write;
use std::process::ExitCode;

pub fn run(arguments: &DoctorArguments) -> Result<ExitCode, Failure> {
    if let Some(json) = &arguments.json {
        json.check()?;
    }
    let diagnosis = doctor::examine(arguments.peer.as_deref()).map_err(Failure::bad_input)?;
    if arguments.json != Some(Destination::StandardOutput) {
        output::print(&diagnosis_text(&diagnosis, usize::from(output::terminal_width())))?;
    }
    if let Some(json) = &arguments.json {
        json.write(&export::json(&diagnosis))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn diagnosis_text(diagnosis: &Diagnosis, width: usize) -> String {
    let device = &diagnosis.device;
    let towards = match (&device.peer, &device.address) {
        (Some(peer), Some(address)) if peer != address => {
            format!("towards {peer} ({address}) through")
        }
        (Some(peer), _) => format!("towards {peer} through"),
        _ => "through".into(),
    };
    let driver = device.driver.as_deref().map_or(String::new(), |driver| format!(" ({driver})"));
    let mut text = format!("Linux {}, {towards} {}{driver}\n\n", diagnosis.kernel, device.name);
    for path in &diagnosis.paths {
        let state = match (path.available, path.avoids_copy) {
            (false, _) => "missing ",
            (true, true) => "no copy ",
            (true, false) => "copies  ",
        };
        let entry = format!("{state} {:<15} {}", path.path, path.why);
        push_entry(&mut text, width, &entry, path.fix.as_deref());
    }
    text.push('\n');
    for finding in &diagnosis.settings {
        let state = match finding.verdict {
            Verdict::Good => "good    ",
            Verdict::Costly => "costly  ",
            Verdict::Missing => "missing ",
        };
        let entry = format!("{state} {}: {}. {}", finding.name, finding.value, finding.why);
        push_entry(&mut text, width, &entry, finding.fix.as_deref());
    }
    text
}

/// Appends an entry, indented after its state, and the fix for it on a line of its own.
fn push_entry(text: &mut String, width: usize, entry: &str, fix: Option<&str>) {
    let mut push_filled = |content: &str, first: &'static str, rest: &'static str| {
        let options = textwrap::Options::new(width).initial_indent(first).subsequent_indent(rest);
        let _ = writeln!(text, "{}", textwrap::fill(content, options));
    };
    push_filled(entry, "", "         ");
    if let Some(fix) = fix {
        push_filled(fix, "         fix: ", "              ");
    }
}
