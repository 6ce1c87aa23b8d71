//! The text of a run's report.

use crate::output;
use haul_run::{ExpectationResult, Proof, RunReport, TransferRow};
use haul_units::size_text;
use std::fmt::Write;

/// The report as text, which begins with the answer.
pub fn report(report: &RunReport) -> String {
    let mut text = String::new();
    let width = usize::from(output::terminal_width());
    let mut paragraph = |indent: usize, line: &str| {
        let spaces = " ".repeat(indent);
        let options = textwrap::Options::new(width).subsequent_indent(&spaces);
        let _ = writeln!(text, "{}", textwrap::fill(line, &options));
    };
    paragraph(2, &headline(report));
    if report.tcp.bytes > 0 {
        paragraph(0, &table(report));
    }
    if !report.not_elided.is_empty() {
        paragraph(0, "Why bytes of mapped files were copied:");
        for row in &report.not_elided {
            let (bytes, reason) = (size_text(row.bytes), reason_text(&row.reason));
            paragraph(14, &format!("{bytes:>12}  {reason}"));
        }
    }
    for (title, rows) in [("read from", &report.received), ("written to", &report.written)] {
        if !rows.is_empty() {
            paragraph(2, &format!("{title}: {}", rows_text(rows)));
        }
    }
    if let Some(proof) = &report.proof {
        paragraph(2, &proof_text(proof));
    }
    if !report.advice.is_empty() {
        paragraph(0, "\nWhat would cost less:");
    }
    let has_builtin_plan = report.warnings.iter().any(|one| one.kind == "built-in-plan");
    for (index, advice) in report.advice.iter().enumerate() {
        let saved = advice.saved_cpu_seconds.map_or(String::new(), |seconds| {
            let by = if has_builtin_plan { " (by the costs of another machine)" } else { "" };
            match report.exit_code {
                Some(_) => format!(
                    " Estimate: sendfile saves {} of the {} of CPU time that the command used{by}.",
                    seconds_text(seconds.min(report.rusage_cpu_seconds)),
                    seconds_text(report.rusage_cpu_seconds),
                ),
                None => {
                    format!(" Estimate: sendfile saves {} of CPU time{by}.", seconds_text(seconds))
                }
            }
        });
        paragraph(4, &format!("{:>2}. {}{saved}", index + 1, capitalized(&advice.text)));
    }
    if !report.not_loaded.is_empty() {
        paragraph(0, "\nNot counted (haul soak -- COMMAND measures what they cost):");
    }
    for program in &report.not_loaded {
        let number = if program.processes == 1 {
            String::new()
        } else {
            format!(" ({} processes)", program.processes)
        };
        paragraph(4, &format!("  {}{number}: {}", program.name, program.reason));
    }
    for warning in &report.warnings {
        paragraph(2, &format!("warning: {}", warning.detail));
    }
    for result in &report.expectations {
        paragraph(2, &expectation(result));
    }
    text
}

/// What was sent, by which programs, and at which CPU time.
fn headline(report: &RunReport) -> String {
    let calls: u64 = report.sent.iter().map(|row| row.calls).sum();
    let programs: Vec<String> = report
        .programs
        .iter()
        .filter(|program| program.sent_bytes > 0 || report.tcp.bytes == 0)
        .take(4)
        .map(|program| match program.processes {
            1 => program.name.clone(),
            processes => format!("{} ({processes} processes)", program.name),
        })
        .collect();
    let programs = if programs.is_empty() { "no process".to_owned() } else { programs.join(", ") };
    // The kernel counts the CPU time of processes that ended.
    let time = match report.exit_code {
        Some(_) => format!(
            "ran for {}, and used {} of CPU time (getrusage)",
            seconds_text(report.seconds),
            seconds_text(report.rusage_cpu_seconds)
        ),
        None => format!("runs for {}", seconds_text(report.seconds)),
    };
    if report.tcp.bytes == 0 {
        return format!("haul run: {programs} sent nothing to TCP, {time}");
    }
    if calls == 0 {
        let bytes = size_text(report.tcp.bytes);
        return format!(
            "haul run: {bytes} were sent to TCP by calls that haul did not see, {time}"
        );
    }
    format!(
        "haul run: {programs} sent {} to TCP in {calls} calls, {time}",
        size_text(report.tcp.bytes)
    )
}

fn table(report: &RunReport) -> String {
    let mut text = format!(
        "{:<34} {:>10} {:>7} {:>10} {:>12}\n",
        "sent to TCP", "bytes", "share", "calls", "bytes a call"
    );
    for row in &report.sent {
        let mean = size_text(row.bytes / row.calls.max(1));
        // Parts of calls that count for the method of most of their bytes.
        let (calls, mean) = match row.calls {
            0 => ("-".to_owned(), "-".to_owned()),
            calls => (calls.to_string(), mean),
        };
        let _ = writeln!(
            text,
            "{:<34} {:>10} {:>5.1} % {:>10} {:>12}",
            method_text(&row.method),
            size_text(row.bytes),
            row.percent,
            calls,
            mean,
        );
    }
    let unseen = report.tcp.unseen_bytes;
    if unseen > 0 {
        let percent = unseen as f64 / report.tcp.bytes as f64 * 100.0;
        let _ = writeln!(
            text,
            "{:<34} {:>10} {percent:>5.1} % {:>10} {:>12}",
            "by calls that haul did not see",
            size_text(unseen),
            "?",
            "?"
        );
    }
    text.trim_end().to_owned()
}

fn method_text(method: &str) -> &str {
    match method {
        "sendfile" => "sendfile by the program",
        "splice" => "splice by the program",
        "zerocopy" => "send with MSG_ZEROCOPY",
        "elided" => "mapped files, sendfile by haul",
        "copied-from-mapped-file" => "copied from mapped files",
        "copied-from-file-read" => "copied from memory read from files",
        "copied-from-socket-read" => "copied from memory read from TCP",
        "copied-from-memory" => "copied from other memory",
        other => other,
    }
}

fn reason_text(reason: &str) -> &str {
    match reason {
        "small" => "the call has less than 64 KiB of the mapped file",
        "call" => "the call has flags, an address or control data that sendfile does not have",
        "no-file" => "the program closed the file after mapping it",
        "mapping" => "the mapping is writable, or the kernel does not confirm it",
        "private-pages" => "the program changed pages of its private mapping",
        "writer" => "the file is open for writing",
        "permission" => "the file belongs to another user (start haul run as root)",
        "no-leases" => "haul does not rely on leases of the file system",
        "broken" => "a program opened the file for writing in the last 30 s",
        "draining" => "haul returns its lease of the file, and waits for the peers",
        "busy" => "a table of haul was full or in use",
        "no-broker" => "the broker of haul run did not answer",
        "dearer" => "copying used less CPU time",
        "compared" => "haul copied to compare the costs",
        "switched-off" => "haul run was switched off (--prove, --stop)",
        "local-peer" => "the peer is on this host (--strict)",
        "other-namespace" => "the socket and haul run are in different network namespaces",
        "remainder" => "sendfile sent only a part of the call",
        "old-kernel" => "the kernel is older than Linux 6.11",
        other => other,
    }
}

fn rows_text(rows: &[TransferRow]) -> String {
    let row_text = |row: &TransferRow| {
        let kind = match row.kind.as_str() {
            "tcp" => "TCP",
            "file" => "files",
            "unix-socket" => "Unix sockets",
            "pipe" => "pipes",
            _ => "others",
        };
        format!("{kind} {} in {} calls", size_text(row.bytes), row.calls)
    };
    rows.iter().map(row_text).collect::<Vec<_>>().join(", ")
}

fn proof_text(proof: &Proof) -> String {
    let (interval, verdict) = match (proof.ratio_low, proof.ratio_high) {
        (Some(low), Some(high)) => (
            format!("{low:.2} to {high:.2}"),
            match (low, high) {
                (_, high) if high < 1.0 => ": haul run saves CPU time",
                (low, _) if low > 1.0 => ": haul run costs CPU time",
                _ => ": no difference is shown (measure longer, and without other load)",
            },
        ),
        _ => ("too few windows for an interval".to_owned(), ""),
    };
    format!(
        "CPU time of the machine for each MiB sent: {:.0} µs with haul run, {:.0} µs with copies, \
         ratio {:.2} ({interval}), from {} pairs of windows of a second{verdict}",
        proof.elided_us_per_mib, proof.copied_us_per_mib, proof.ratio, proof.pairs,
    )
}

fn expectation(result: &ExpectationResult) -> String {
    let ExpectationResult { method, percent_min, .. } = result;
    match result.percent {
        None => format!("expected {method}={percent_min}%: nothing was sent to TCP"),
        Some(percent) if result.is_met => {
            format!("expected {method}={percent_min}%: met, {percent:.1} %")
        }
        Some(percent) => format!("expected {method}={percent_min}%: FAILED, {percent:.1} %"),
    }
}

fn seconds_text(seconds: f64) -> String {
    if seconds < 0.1 {
        format!("{:.1} ms", seconds * 1e3)
    } else if seconds < 10.0 {
        format!("{seconds:.2} s")
    } else {
        format!("{seconds:.1} s")
    }
}

fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}
