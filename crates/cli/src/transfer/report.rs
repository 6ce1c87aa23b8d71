//! The result of a transfer.

use super::bottleneck::Wait;
use super::console::Console;
use super::line::{Encryption, SummaryLine, TransferLine, WaitLine};
use super::{DELETE_CODE, PARTIAL_CODE, VANISHED_CODE};
use haul_transfer::{DirectReport, FileError, Summary};
use haul_units::size_text;
use std::io::{self, Write};

/// The CPU time is reported for transfers of at least this many bytes.
const CPU_BYTES_MIN: u64 = 64 << 20;

/// The result of a transfer.
#[derive(Debug)]
pub struct TransferResult {
    pub summary: Summary,
    pub direct: Option<DirectReport>,
    /// The other host, as the user named it.
    pub host: String,
    /// Whether the other host is the destination.
    pub is_destination_there: bool,
    pub is_dry_run: bool,
    /// Whether the user wants the names of files.
    pub lists_files: bool,
    /// The time, login included.
    pub seconds: f64,
    /// The CPU time of haul and ssh on this host, and of haul and sshd on the other host.
    pub cpu: [f64; 2],
    pub wait: Option<Wait>,
}

impl TransferResult {
    fn errors(&self) -> u64 {
        self.summary.errors_left_out.saturating_add(self.summary.errors.len() as u64)
    }

    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        let errors = self.errors();
        if errors == 0 && self.summary.deletions_refused > 0 {
            DELETE_CODE
        } else if errors == 0 {
            0
        } else if errors == self.summary.files_vanished {
            VANISHED_CODE
        } else {
            PARTIAL_CODE
        }
    }

    /// Prints the errors of single files and the result.
    pub fn print(&self, console: &Console) {
        for FileError { path, problem, is_at_destination, .. } in &self.summary.errors {
            // A path of the other host names the host.
            let is_there = *is_at_destination == self.is_destination_there;
            let host = if is_there { format!("{}:", self.host) } else { String::new() };
            console.file_error(&format!("{host}{path}"), problem);
        }
        for path in self.summary.deleted_paths.iter().filter(|_| self.lists_files) {
            console.deleted(path, self.is_dry_run || self.summary.deletions_refused > 0);
        }
        for notice in &self.summary.notices {
            console.notice(notice);
        }
        if console.is_json() {
            if let Some(problem) = &self.summary.deletion_problem {
                console.notice(problem);
            }
            return console.json(&TransferLine::Summary(Box::new(self.line())));
        }
        // The problem is printed even with --quiet, because the exit code depends on it.
        if let Some(problem) = &self.summary.deletion_problem {
            console.error_text(problem);
        }
        if self.summary.errors_left_out > 0 {
            console.error_text(&format!("{} more errors", self.summary.errors_left_out));
        }
        if !console.is_quiet() {
            // If standard output is closed, the exit code still tells the result.
            let _ = writeln!(io::stdout(), "{}", self.text());
            if let Some(text) = self.cpu_text() {
                let _ = writeln!(io::stdout(), "{text}");
            }
        }
    }

    fn text(&self) -> String {
        let summary = &self.summary;
        let plural = |count: u64| if count == 1 { "" } else { "s" };
        let deleted = match (summary.entries_deleted, self.is_dry_run) {
            (0, _) => String::new(),
            (count, false) => format!(", {count} deleted"),
            (count, true) => format!(", {count} would be deleted"),
        };
        let held = match summary.bytes_held {
            0 => String::new(),
            bytes => format!(", {} were there from an interrupted transfer", size_text(bytes)),
        };
        let equal = match summary.bytes_equal {
            0 => String::new(),
            bytes => format!(", {} were equal there", size_text(bytes)),
        };
        let saved = match summary.bytes_saved.saturating_mul(100).checked_div(summary.bytes_sent) {
            None | Some(0) => String::new(),
            Some(percent) => format!(", {percent} % less by compression"),
        };
        let kept = match summary.files_kept {
            0 => String::new(),
            count => format!(", {count} kept"),
        };
        let linked = match summary.files_linked {
            0 => String::new(),
            count => format!(", {count} linked to an earlier copy"),
        };
        format!(
            "{} file{} ({}{saved}) {}{equal}{held}{linked}{kept}{deleted}, {} up to date, \
             {} entr{} in all, in {:.2} s{}",
            summary.files_sent,
            plural(summary.files_sent),
            size_text(summary.bytes_sent),
            if self.is_dry_run { "would be sent" } else { "sent" },
            summary.files_up_to_date,
            summary.entries,
            if summary.entries == 1 { "y" } else { "ies" },
            self.seconds,
            self.way(),
        )
    }

    /// The way that the content took.
    fn way(&self) -> String {
        let Some(DirectReport { streams, bytes, .. }) = self.direct else { return String::new() };
        let sent = self.summary.bytes_sent;
        if sent == 0 {
            return String::new();
        }
        let cipher = match self.encryption() {
            None => return " through ssh".into(),
            Some(Encryption::None) => "not encrypted",
            Some(Encryption::Tls) => "TLS 1.3",
            Some(Encryption::TlsInKernel) => "TLS 1.3 in the kernel",
        };
        let plural = if streams == 1 { "" } else { "s" };
        let percent = bytes.saturating_mul(100).div_ceil(sent).min(100);
        format!(" through {streams} direct stream{plural} ({percent} % of the bytes, {cipher})")
    }

    fn encryption(&self) -> Option<Encryption> {
        let direct = self.direct.filter(|direct| direct.bytes > 0)?;
        Some(match (direct.is_plain, direct.is_in_kernel) {
            (true, _) => Encryption::None,
            (false, true) => Encryption::TlsInKernel,
            (false, false) => Encryption::Tls,
        })
    }

    /// The CPU time of both hosts, and what the transfer waited for; `None` for few bytes.
    fn cpu_text(&self) -> Option<String> {
        let bytes = self.summary.bytes_sent.saturating_add(self.summary.bytes_equal);
        if self.is_dry_run || bytes < CPU_BYTES_MIN {
            return None;
        }
        let gib = bytes as f64 / f64::from(1 << 30);
        let [here, there] = self.cpu.map(|seconds| seconds / gib);
        let waited = self.wait.map_or_else(String::new, |Wait { bottleneck, share }| {
            let what = bottleneck.text(&self.host);
            format!("; waited for {what} ({:.0} % of the time)", 100.0 * share)
        });
        let host = &self.host;
        Some(format!("CPU per GiB: {here:.2} s here, {there:.2} s on {host}{waited}"))
    }

    fn line(&self) -> SummaryLine {
        let summary = &self.summary;
        SummaryLine {
            seconds: self.seconds,
            exit_code: self.exit_code(),
            is_dry_run: self.is_dry_run,
            entries: summary.entries,
            files_sent: summary.files_sent,
            bytes_sent: summary.bytes_sent,
            bytes_saved: summary.bytes_saved,
            bytes_held: summary.bytes_held,
            bytes_equal: summary.bytes_equal,
            files_up_to_date: summary.files_up_to_date,
            files_linked: summary.files_linked,
            files_kept: summary.files_kept,
            entries_deleted: summary.entries_deleted,
            deletions_refused: summary.deletions_refused,
            errors: self.errors(),
            streams: self.direct.map_or(0, |direct| direct.streams),
            bytes_direct: self.direct.map_or(0, |direct| direct.bytes),
            encryption: self.encryption(),
            cpu_s_here: self.cpu[0],
            cpu_s_there: self.cpu[1],
            waited_for: self.wait.map(|Wait { bottleneck, share }| WaitLine {
                cause: bottleneck.word().into(),
                percent: 100.0 * share,
            }),
        }
    }
}
