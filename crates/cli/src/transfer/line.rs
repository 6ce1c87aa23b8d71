//! The JSON documents that `haul push --json` and `haul pull --json` print, one in a line.

use schemars::JsonSchema;
use serde::Serialize;

/// One line of `haul push --json` or `haul pull --json`, of one of these kinds. The field `event`
/// names the kind: `progress`, `file`, `deleted`, `notice`, `error`, `summary`, `host`, `hosts` or
/// `failed`. The last line is `summary`, `hosts` (several hosts) or `failed`, unless the command
/// line is wrong.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum TransferLine {
    /// The progress of the transfer, once a second.
    Progress(ProgressLine),
    /// A file is sent (`--verbose`).
    File(FileLine),
    /// An entry was deleted, or would be (`--verbose`). Of many entries, the first are listed.
    Deleted(DeletedLine),
    /// Something that the user should know.
    Notice(NoticeLine),
    /// The error of one file, which did not stop the transfer.
    Error(ErrorLine),
    /// The result.
    Summary(Box<SummaryLine>),
    /// The result of one of several hosts.
    Host(HostLine),
    /// The result of all of several hosts.
    Hosts(HostsLine),
    /// The transfer ended early.
    Failed(FailedLine),
}

/// A file that is sent.
#[derive(Debug, Serialize, JsonSchema)]
pub struct FileLine {
    /// The path below the root of the transfer; bytes that are not UTF-8 are replaced.
    pub path: String,
}

/// An entry that was deleted, or would be.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DeletedLine {
    /// The path below the destination.
    pub path: String,
    /// Whether the entry stays, because of `--dry-run` or because nothing was deleted.
    pub is_left: bool,
}

/// Something that the user should know.
#[derive(Debug, Serialize, JsonSchema)]
pub struct NoticeLine {
    /// The text.
    pub message: String,
}

/// The error of one file.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ErrorLine {
    /// The path; on the other host with the host and a colon.
    pub path: String,
    /// What failed.
    pub problem: String,
}

/// The end of a transfer that failed.
#[derive(Debug, Serialize, JsonSchema)]
pub struct FailedLine {
    /// The reason.
    pub message: String,
    /// The exit code.
    pub exit_code: u8,
}

/// The progress of a transfer.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ProgressLine {
    /// The time since the start, login included.
    pub seconds: f64,
    /// The entries that were found so far.
    pub entries: u64,
    /// The files whose content was sent.
    pub files_done: u64,
    /// The files whose content is sent in all, as far as they are known.
    pub files: u64,
    /// The bytes that were sent.
    pub bytes_done: u64,
    /// The bytes that are sent in all, as far as they are known.
    pub bytes: u64,
    /// Whether `files` and `bytes` are final.
    pub is_total: bool,
    /// The bytes per second of the last seconds.
    pub bytes_per_s: f64,
    /// The time that is left, as far as it is known.
    pub seconds_left: Option<f64>,
    /// The direct streams that carried content; 0: ssh carries the content, or there are several
    /// hosts.
    pub streams: usize,
    /// The hosts that receive.
    pub hosts: usize,
}

/// The result of a transfer.
#[derive(Debug, Serialize, JsonSchema)]
pub struct SummaryLine {
    /// The time, login included.
    pub seconds: f64,
    /// The exit code.
    pub exit_code: u8,
    /// Whether nothing was changed (`--dry-run`), so that the numbers are of what would be sent.
    pub is_dry_run: bool,
    /// The entries of the sources.
    pub entries: u64,
    /// The files whose content was sent.
    pub files_sent: u64,
    /// The bytes of their content, without holes.
    pub bytes_sent: u64,
    /// The bytes that compression saved on the way.
    pub bytes_saved: u64,
    /// The bytes that were there from an interrupted transfer.
    pub bytes_held: u64,
    /// The bytes of blocks that were equal there (`--delta`).
    pub bytes_equal: u64,
    /// The files that were up to date.
    pub files_up_to_date: u64,
    /// The files that became hard links to an earlier copy (`--link-dest`).
    pub files_linked: u64,
    /// The files that differ and stay, as the options ask.
    pub files_kept: u64,
    /// The entries that were deleted.
    pub entries_deleted: u64,
    /// The entries that were not deleted (exit code 25).
    pub deletions_refused: u64,
    /// The errors of single files.
    pub errors: u64,
    /// The direct streams that carried content; 0: ssh carried everything.
    pub streams: usize,
    /// The bytes of content in direct streams.
    pub bytes_direct: u64,
    /// How direct streams were encrypted; null: ssh carried everything.
    pub encryption: Option<Encryption>,
    /// The CPU time of haul and ssh on this host, in seconds.
    pub cpu_s_here: f64,
    /// The CPU time of haul and sshd on the other host, in seconds.
    pub cpu_s_there: f64,
    /// What the transfer waited for; null for a short transfer.
    pub waited_for: Option<WaitLine>,
}

/// The result of one of several hosts.
#[derive(Debug, Serialize, JsonSchema)]
pub struct HostLine {
    /// The host.
    pub host: String,
    /// Why the host does not have the copy; null: it has the copy.
    pub problem: Option<String>,
    /// The files whose content the host received.
    pub files_sent: u64,
    /// The bytes of their content, without holes.
    pub bytes_sent: u64,
    /// The bytes that the host had from an interrupted transfer.
    pub bytes_held: u64,
    /// The bytes of blocks that were equal on the host (`--delta`).
    pub bytes_equal: u64,
    /// The files that were up to date.
    pub files_up_to_date: u64,
    /// The errors of single files.
    pub errors: u64,
}

/// The result of all of several hosts.
#[derive(Debug, Serialize, JsonSchema)]
pub struct HostsLine {
    /// The time, logins included.
    pub seconds: f64,
    /// The exit code.
    pub exit_code: u8,
    /// Whether nothing was changed (`--dry-run`).
    pub is_dry_run: bool,
    /// The number of hosts.
    pub hosts: u64,
    /// The number of hosts that have the copy.
    pub complete: u64,
}

/// How direct streams are encrypted.
#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Encryption {
    /// Not encrypted (`--plain`).
    None,
    /// TLS 1.3, by haul.
    Tls,
    /// TLS 1.3, by the kernel.
    TlsInKernel,
}

/// What a transfer waits for.
#[derive(Debug, Serialize, JsonSchema)]
pub struct WaitLine {
    /// `network`, `lists`, `limit`, or `disk`, `cpu` or `ssh` with the host, such as `disk_here` or
    /// `cpu_there`.
    pub cause: String,
    /// The share of the time.
    pub percent: f64,
}
