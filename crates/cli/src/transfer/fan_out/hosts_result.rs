//! The result of a transfer to several hosts.

use crate::transfer::console::Console;
use crate::transfer::line::{HostLine, HostsLine, TransferLine};
use crate::transfer::text::printable;
use crate::transfer::{DELETE_CODE, PARTIAL_CODE, SOME_HOSTS_CODE, STREAM_CODE, VANISHED_CODE};
use haul_transfer::{FileError, HostEnd, HostResult, Summary};
use haul_units::size_text;
use std::io::{self, Write};

/// The most names of hosts in the result. Each host that does not have the copy has a line before.
const NAMES_MAX: usize = 5;

/// The most errors of single files that are printed for a host.
const ERRORS_SHOWN_MAX: usize = 20;

/// The result of a transfer to several hosts.
#[derive(Debug)]
pub struct HostsResult {
    pub results: Vec<HostResult>,
    pub is_dry_run: bool,
    pub is_plain: bool,
    /// The time, logins included.
    pub seconds: f64,
}

impl HostsResult {
    /// The hosts that have the copy, with what they counted.
    fn complete(&self) -> impl Iterator<Item = (&str, &Summary)> {
        self.results.iter().filter_map(|HostResult { name, end }| match end {
            HostEnd::Complete(summary) if has_copy(summary) => Some((&name[..], &**summary)),
            _ => None,
        })
    }

    /// The hosts that do not have the copy.
    fn lacking(&self) -> impl Iterator<Item = &str> {
        let lacks = |result: &&HostResult| match &result.end {
            HostEnd::Complete(summary) => !has_copy(summary),
            HostEnd::Failed(_) | HostEnd::Slow(_) => true,
        };
        self.results.iter().filter(lacks).map(|result| &result.name[..])
    }

    /// The hosts that have the copy, but for some files.
    fn with_errors(&self) -> impl Iterator<Item = &str> {
        self.complete().filter(|(_, summary)| has_own_errors(summary)).map(|(name, _)| name)
    }

    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        let complete = self.complete().count();
        if complete == 0 {
            return STREAM_CODE;
        }
        if complete < self.results.len() {
            return SOME_HOSTS_CODE;
        }
        let codes = self.complete().map(|(_, summary)| {
            let errors = errors(summary);
            if errors > summary.files_vanished {
                PARTIAL_CODE
            } else if errors > 0 {
                VANISHED_CODE
            } else if summary.deletions_refused > 0 {
                DELETE_CODE
            } else {
                0
            }
        });
        // The code of partial copies counts before the code of files that vanished.
        codes.min_by_key(|&code| if code == 0 { u8::MAX } else { code }).unwrap_or(0)
    }

    /// Prints the errors and the result.
    pub fn print(&self, console: &Console) {
        let mut is_first = true;
        for HostResult { name: host, end } in &self.results {
            let HostEnd::Complete(summary) = end else { continue };
            // One host with many errors must not hide the others.
            let shown = if console.is_json() { usize::MAX } else { ERRORS_SHOWN_MAX };
            for FileError { path, problem, is_at_destination, .. } in
                summary.errors.iter().take(shown)
            {
                if *is_at_destination {
                    console.file_error(&format!("{host}:{path}"), problem);
                } else if is_first {
                    // Every host counts the errors of the source.
                    console.file_error(path, problem);
                }
            }
            let more = errors(summary).saturating_sub(shown as u64);
            if more > 0 {
                console.error_text(&format!("{host}: {more} more errors"));
            }
            for notice in &summary.notices {
                console.notice(&format!("{host}: {notice}"));
            }
            if let Some(problem) = &summary.deletion_problem {
                console.error_text(&format!("{host}: {problem}"));
            }
            is_first = false;
        }
        if console.is_json() {
            return self.print_json(console);
        }
        for HostResult { name, end } in &self.results {
            // Of a host without any file, the errors are printed above.
            if let HostEnd::Failed(reason) | HostEnd::Slow(reason) = end {
                console.error_text(&format!("{name}: {}", printable(reason)));
            }
        }
        if !console.is_quiet() {
            // If standard output is closed, the exit code still tells the result.
            let _ = writeln!(io::stdout(), "{}", self.text());
        }
    }

    fn print_json(&self, console: &Console) {
        for HostResult { name, end } in &self.results {
            let (summary, problem) = match end {
                HostEnd::Complete(summary) if has_copy(summary) => (Some(&**summary), None),
                HostEnd::Complete(summary) => {
                    let first = summary.errors.first();
                    (Some(&**summary), first.map(|error| error.problem.clone()))
                }
                HostEnd::Failed(reason) | HostEnd::Slow(reason) => (None, Some(reason.clone())),
            };
            console.json(&TransferLine::Host(HostLine {
                host: name.clone(),
                problem,
                files_sent: summary.map_or(0, |summary| summary.files_sent),
                bytes_sent: summary.map_or(0, |summary| summary.bytes_sent),
                bytes_held: summary.map_or(0, |summary| summary.bytes_held),
                bytes_equal: summary.map_or(0, |summary| summary.bytes_equal),
                files_up_to_date: summary.map_or(0, |summary| summary.files_up_to_date),
                errors: summary.map_or(0, errors),
            }));
        }
        console.json(&TransferLine::Hosts(HostsLine {
            seconds: self.seconds,
            exit_code: self.exit_code(),
            is_dry_run: self.is_dry_run,
            hosts: self.results.len() as u64,
            complete: self.complete().count() as u64,
        }));
    }

    fn text(&self) -> String {
        let (hosts, complete) = (self.results.len(), self.complete().count());
        // The hosts may have had different parts before.
        let bytes = self.complete().map(|(_, summary)| summary.bytes_sent).max().unwrap_or(0);
        let files = self.complete().map(|(_, summary)| summary.files_sent).max().unwrap_or(0);
        let (plural, verb) = (
            if files == 1 { "" } else { "s" },
            if self.is_dry_run { "would be sent" } else { "sent" },
        );
        let rate = bytes as f64 / self.seconds.max(1e-3);
        let cipher = if self.is_plain { "not encrypted" } else { "TLS 1.3" };
        let of = if complete == hosts { "all".to_owned() } else { format!("{complete} of") };
        let lacking: Vec<_> = self.lacking().take(NAMES_MAX + 1).collect();
        let lacking = match lacking.len() {
            0 => String::new(),
            1..=NAMES_MAX => format!(", not to {}", lacking.join(", ")),
            _ => format!(", not to {} and others", lacking[..NAMES_MAX].join(", ")),
        };
        let with_errors: Vec<_> = self.with_errors().take(NAMES_MAX).collect();
        let with_errors = match with_errors.len() {
            0 => String::new(),
            _ => format!(", with errors at {}", with_errors.join(", ")),
        };
        let way = if bytes == 0 || self.is_dry_run {
            String::new()
        } else {
            format!(" ({}/s to each host, {cipher})", size_text(rate as u64))
        };
        let hosts = format!("{of} {hosts} hosts{lacking}{with_errors}");
        if complete > 0 && files == 0 {
            let least = |count: fn(&Summary) -> u64| {
                self.complete().map(|(_, summary)| count(summary)).min().unwrap_or(0)
            };
            let up_to_date = least(|summary| summary.files_up_to_date);
            let others = least(|summary| summary.files_linked + summary.files_kept);
            let others = match others {
                0 => String::new(),
                count => format!(", {count} linked or kept"),
            };
            let plural = if up_to_date == 1 { "" } else { "s" };
            let verb = if self.is_dry_run { "would be sent" } else { "was sent" };
            return format!(
                "nothing {verb}: {up_to_date} file{plural} up to date{others} at {hosts}, \
                 in {:.2} s",
                self.seconds
            );
        }
        let equal = self.complete().map(|(_, summary)| summary.bytes_equal).max().unwrap_or(0);
        let equal = match equal {
            0 => String::new(),
            bytes => format!(", up to {} were equal there", size_text(bytes)),
        };
        format!(
            "{files} file{plural} ({}) {verb} to {hosts}{equal}, in {:.2} s{way}",
            size_text(bytes),
            self.seconds
        )
    }
}

/// Whether a host has files of the copy. A host whose destination cannot be written has errors and
/// nothing else.
fn has_copy(summary: &Summary) -> bool {
    let files = summary.files_sent + summary.files_up_to_date + summary.files_linked;
    files + summary.files_kept > 0 || !has_own_errors(summary)
}

/// Whether the host could not make an entry.
fn has_own_errors(summary: &Summary) -> bool {
    summary.errors.iter().any(|error| error.is_at_destination)
}

fn errors(summary: &Summary) -> u64 {
    summary.errors_left_out.saturating_add(summary.errors.len() as u64)
}
