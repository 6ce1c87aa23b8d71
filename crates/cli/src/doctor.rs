//! `haul doctor`: prints what the kernel, the network device and the limits allow.

use crate::arguments::DoctorArguments;
use crate::output::{self, Destination, Failure};
use haul_bench::doctor::{self, Diagnosis, Verdict};
use haul_bench::export;
use haul_bench::verdict::Safety;
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
    let mut text = format!("Linux {}, {towards} {}{driver}\n", diagnosis.kernel, device.name);
    if !device.has_route {
        text.push_str(
            "There is no default route, so the findings are about loopback: --peer HOST\n",
        );
    }
    let _ = writeln!(text, "{}\n", textwrap::fill(&conclusion(diagnosis), width));
    for path in &diagnosis.paths {
        let state = match (path.available, path.avoids_copy) {
            (false, _) => "missing ",
            (true, true) => "no copy ",
            (true, false) => "copies  ",
        };
        let entry = format!("{state} {:<15} {}", path.path, path.why);
        push_entry(&mut text, width, &entry, path.fix.as_deref(), None);
    }
    text.push('\n');
    for finding in &diagnosis.settings {
        let state = match finding.verdict {
            Verdict::Good => "good    ",
            Verdict::Note => "note    ",
            Verdict::Costly => "costly  ",
            Verdict::Missing => "missing ",
        };
        let entry = format!("{state} {}: {}. {}", finding.name, finding.value, finding.why);
        push_entry(&mut text, width, &entry, finding.fix.as_deref(), finding.safety);
    }
    text
}

/// The methods that avoid the copy through this device, in two sentences.
fn conclusion(diagnosis: &Diagnosis) -> String {
    let avoids = |name: &str| {
        diagnosis.paths.iter().any(|path| path.path == name && path.available && path.avoids_copy)
    };
    let files = if avoids("sendfile") {
        "sendfile(2) copies nothing"
    } else if avoids("splice") {
        "splice(2) copies nothing"
    } else {
        "every method copies"
    };
    let memory = if avoids("zerocopy") {
        "MSG_ZEROCOPY can avoid the copy (haul bench send --to HOST measures whether that pays)"
    } else {
        "send(2), because MSG_ZEROCOPY copies"
    };
    format!("Files: {files} here. Memory: {memory}.")
}

/// Appends an entry, indented after its state, and the fix for it on a separate line.
fn push_entry(
    text: &mut String,
    width: usize,
    entry: &str,
    fix: Option<&str>,
    safety: Option<Safety>,
) {
    let mut push_filled = |content: &str, first: &'static str, rest: &'static str| {
        let options = textwrap::Options::new(width).initial_indent(first).subsequent_indent(rest);
        let _ = writeln!(text, "{}", textwrap::fill(content, options));
    };
    push_filled(entry, "", "         ");
    if let Some(fix) = fix {
        let class = safety.filter(|safety| *safety != Safety::SafeAnywhere);
        let class = class.map_or(String::new(), |safety| format!("({}) ", safety.name()));
        push_filled(&format!("{class}{fix}"), "         fix: ", "              ");
    }
}
