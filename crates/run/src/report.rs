//! The report of a run, as JSON. Text is made from the report.

use crate::advice::{self, Advice};
use crate::counts::{Counts, Moved};
use crate::descendants::NotLoaded;
use crate::expectation::{Expectation, ExpectationResult};
use crate::share::{method_name, percent, reason_name};
use haul::plan::Plan;
use haul_tally::{DescriptorKind, NotElided, SendMethod, SizeClass};
use haul_units::size_text;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// Name and version of the format.
pub const SCHEMA: &str = "haul.run/1";

/// How a command sent its bytes, and what would cost less.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct RunReport {
    /// Name and version of the format.
    #[schemars(extend("const" = SCHEMA))]
    pub schema: String,
    /// Time of the start, RFC 3339.
    pub started: String,
    /// The command and its arguments.
    pub command: Vec<String>,
    /// Exit code of the command: its own, or 128 plus the number of the signal that ended it.
    /// Absent while the command runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<u8>,
    /// Duration.
    pub seconds: f64,
    /// CPU time that the kernel charged to the processes that ended (`getrusage`). It leaves out
    /// most interrupts.
    pub rusage_cpu_seconds: f64,
    /// The bytes that went to TCP.
    pub tcp: TcpBytes,
    /// How the bytes went to TCP, all methods that were used. The bytes add up to `seen_bytes`.
    pub sent: Vec<SentRow>,
    /// Bytes of mapped files that were copied although copies are elided, by reason.
    pub not_elided: Vec<NotElidedRow>,
    /// Leases of files that were granted.
    pub leases: u64,
    /// What was read, by the kind of descriptor.
    pub received: Vec<TransferRow>,
    /// What was written to descriptors that are not TCP, by kind.
    pub written: Vec<TransferRow>,
    /// Bytes that were sent on TCP connections, by congestion control. Only connections whose bytes
    /// were compared with the kernel's count are included.
    pub congestion_bytes: BTreeMap<String, u64>,
    /// Pieces sent from memory that a file was read into, and compared with the file.
    pub samples: u64,
    /// Samples that equalled the file.
    pub samples_equal: u64,
    /// The programs whose processes were counted.
    pub programs: Vec<ProgramRow>,
    /// The processes that were not counted.
    pub not_loaded: Vec<NotLoaded>,
    /// The measured saving, with `--prove`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proof: Option<Proof>,
    /// What would make the command cheaper, the largest saving first.
    pub advice: Vec<Advice>,
    /// The results of `--expect`.
    pub expectations: Vec<ExpectationResult>,
    /// What limits the trust in the report.
    pub warnings: Vec<RunWarning>,
}

/// The bytes that went to TCP. `bytes` = `seen_bytes` + `unseen_bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TcpBytes {
    /// All bytes.
    pub bytes: u64,
    /// Bytes by calls that were counted.
    pub seen_bytes: u64,
    /// Bytes that the kernel counted on closed connections, and no call accounts for: calls by
    /// io_uring, by a program that makes system calls itself, or inside of the C library.
    pub unseen_bytes: u64,
    /// Bytes of `seen_bytes` on connections whose kernel count was not read, because the process
    /// was killed with the connection open.
    pub uncompared_bytes: u64,
    /// Connections whose kernel count was read. A connection of several processes counts for each.
    pub connections: u64,
}

/// What the machine's CPUs did for each byte with and without the copies, measured in turn.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, JsonSchema)]
pub struct Proof {
    /// Number of pairs of windows.
    pub pairs: usize,
    /// Median CPU time of the machine for a MiB to TCP while copies were elided, in µs.
    pub elided_us_per_mib: f64,
    /// Median CPU time of the machine for a MiB to TCP while everything was copied, in µs.
    pub copied_us_per_mib: f64,
    /// Median of the pairs' ratios, elided to copied.
    pub ratio: f64,
    /// Lower end of the ratio's interval. Absent if the pairs are too few for an interval.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio_low: Option<f64>,
    /// Upper end of the ratio's interval.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio_high: Option<f64>,
}

/// Bytes that went to TCP by a method.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct SentRow {
    /// The method: `sendfile`, `splice`, `zerocopy`, `elided` (from a mapped file, by `sendfile`
    /// instead of a copy), or `copied-from-` and the source of the memory.
    pub method: String,
    /// Number of calls. A call that copies from several sources counts for the largest.
    pub calls: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Share of all bytes that went to TCP, in percent.
    pub percent: f64,
    /// Calls and bytes by the number of bytes that a call moved.
    pub sizes: Vec<SizeRow>,
}

/// Bytes of mapped files that were copied for a reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct NotElidedRow {
    /// The reason: `small`, `call`, `no-file`, `mapping`, `private-pages`, `writer`, `permission`,
    /// `no-leases`, `broken`, `busy`, `no-broker`, `dearer`, `local-peer`, `other-namespace`,
    /// `old-kernel` or `remainder`.
    pub reason: String,
    /// Number of calls.
    pub calls: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// Calls that moved about as many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct SizeRow {
    /// The lowest number of bytes of a call in this row.
    pub bytes_min: u64,
    /// Number of calls.
    pub calls: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// Bytes that were read from, or written to, descriptors of a kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TransferRow {
    /// The kind of descriptor: `tcp`, `file`, `unix-socket`, `pipe` or `other`.
    pub kind: String,
    /// Number of calls.
    pub calls: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// The processes of one program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ProgramRow {
    /// Name of the program.
    pub name: String,
    /// Number of processes.
    pub processes: u64,
    /// Bytes that the processes sent to TCP by calls that were counted.
    pub sent_bytes: u64,
}

/// What limits the trust in the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct RunWarning {
    /// Kind: `built-in-plan`, `unseen`, `uncompared`, `excess`, `quiet`, or `too-many-processes`.
    pub kind: String,
    /// One sentence.
    pub detail: String,
}

/// What a report is made from, in addition to the counts.
#[derive(Debug, Clone)]
pub struct ReportParts<'a> {
    /// Time of the start, RFC 3339.
    pub started: String,
    /// The command and its arguments.
    pub command: Vec<String>,
    /// Exit code of the command, if it ended.
    pub exit_code: Option<u8>,
    /// Duration.
    pub seconds: f64,
    /// CPU time of the processes that ended.
    pub rusage_cpu_seconds: f64,
    /// The processes that were not counted.
    pub not_loaded: Vec<NotLoaded>,
    /// The expectations of `--expect`.
    pub expectations: &'a [Expectation],
    /// Whether copies are elided.
    pub is_eliding: bool,
    /// Whether the saving was to be measured.
    pub is_proving: bool,
    /// The measured saving.
    pub proof: Option<Proof>,
    /// The plan; `None` for the built-in one.
    pub plan: Option<&'a Plan>,
}

impl RunReport {
    /// Makes the report.
    pub fn new(counts: &Counts, parts: ReportParts) -> Self {
        let (samples, samples_equal) = counts.samples();
        let tcp = TcpBytes::new(counts);
        let plan = parts.plan.unwrap_or_else(|| Plan::builtin());
        let advice = advice::advice(counts, plan, parts.is_eliding);
        let mut warnings = warnings(counts, parts.plan, &advice);
        if parts.is_proving && parts.proof.is_none() {
            warnings.push(RunWarning {
                kind: "no-proof".into(),
                detail: "--prove has no result: the command did not send 16 MiB in each of two \
                         seconds in turn, or the load of the machine could not be read"
                    .into(),
            });
        }
        Self {
            schema: SCHEMA.into(),
            started: parts.started,
            command: parts.command,
            exit_code: parts.exit_code,
            seconds: parts.seconds,
            rusage_cpu_seconds: parts.rusage_cpu_seconds,
            tcp,
            sent: sent_rows(counts, tcp.bytes),
            not_elided: not_elided_rows(counts, parts.is_eliding),
            leases: counts.leases(),
            received: transfer_rows(|kind| counts.received(kind)),
            written: transfer_rows(|kind| counts.written(kind)),
            congestion_bytes: counts
                .congestion_controls()
                .map(|(name, bytes)| (name.to_owned(), bytes))
                .collect(),
            samples,
            samples_equal,
            programs: programs(counts),
            not_loaded: parts.not_loaded,
            proof: parts.proof,
            advice,
            expectations: parts
                .expectations
                .iter()
                .map(|expected| expected.check(counts))
                .collect(),
            warnings,
        }
    }

    /// Whether every expectation is met.
    pub fn meets_expectations(&self) -> bool {
        self.expectations.iter().all(|result| result.is_met)
    }
}

impl TcpBytes {
    fn new(counts: &Counts) -> Self {
        let seen_bytes = counts.sent_by_all().bytes;
        let unseen_bytes = counts.unseen_bytes();
        Self {
            bytes: seen_bytes.saturating_add(unseen_bytes),
            seen_bytes,
            unseen_bytes,
            uncompared_bytes: counts.uncompared_bytes(),
            connections: counts.connections(),
        }
    }
}

fn kind_name(kind: DescriptorKind) -> &'static str {
    match kind {
        DescriptorKind::Tcp => "tcp",
        DescriptorKind::File => "file",
        DescriptorKind::UnixSocket => "unix-socket",
        DescriptorKind::Pipe => "pipe",
        DescriptorKind::Other => "other",
    }
}

fn sent_rows(counts: &Counts, all_bytes: u64) -> Vec<SentRow> {
    let mut rows: Vec<SentRow> = SendMethod::ALL
        .into_iter()
        .map(|method| {
            let Moved { calls, bytes } = counts.sent(method);
            let sizes = SizeClass::all().map(|class| {
                let Moved { calls, bytes } = counts.sent_in(method, class);
                SizeRow { bytes_min: class.bytes_min(), calls, bytes }
            });
            SentRow {
                method: method_name(method).into(),
                calls,
                bytes,
                percent: percent(bytes, all_bytes).unwrap_or(0.0),
                sizes: sizes.filter(|row| row.bytes > 0).collect(),
            }
        })
        .filter(|row| row.bytes > 0)
        .collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    rows
}

fn not_elided_rows(counts: &Counts, is_eliding: bool) -> Vec<NotElidedRow> {
    let mut rows: Vec<NotElidedRow> = NotElided::ALL
        .into_iter()
        .map(|reason| {
            let Moved { calls, bytes } = counts.not_elided(reason);
            NotElidedRow { reason: reason_name(reason).into(), calls, bytes }
        })
        .filter(|row| row.bytes > 0)
        .collect();
    // Calls that a reason was not counted for, because eliding was switched off.
    let copied = counts.sent(SendMethod::MappedFile);
    let sum =
        |number: fn(&NotElidedRow) -> u64| rows.iter().map(number).fold(0, u64::saturating_add);
    let bytes = copied.bytes.saturating_sub(sum(|row| row.bytes));
    if is_eliding && bytes > 0 {
        let calls = copied.calls.saturating_sub(sum(|row| row.calls));
        rows.push(NotElidedRow { reason: "switched-off".into(), calls, bytes });
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    rows
}

fn transfer_rows(moved: impl Fn(DescriptorKind) -> Moved) -> Vec<TransferRow> {
    let rows = DescriptorKind::ALL.into_iter().map(|kind| {
        let Moved { calls, bytes } = moved(kind);
        TransferRow { kind: kind_name(kind).into(), calls, bytes }
    });
    rows.filter(|row| row.calls > 0).collect()
}

fn programs(counts: &Counts) -> Vec<ProgramRow> {
    let mut by_name: BTreeMap<&str, ProgramRow> = BTreeMap::new();
    for process in &counts.processes {
        let row = by_name.entry(&process.name).or_insert_with(|| ProgramRow {
            name: process.name.clone(),
            processes: 0,
            sent_bytes: 0,
        });
        row.processes += 1;
        row.sent_bytes = row.sent_bytes.saturating_add(process.sent_bytes);
    }
    let mut rows: Vec<ProgramRow> = by_name.into_values().collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.sent_bytes));
    rows
}

fn warnings(counts: &Counts, plan: Option<&Plan>, advice: &[Advice]) -> Vec<RunWarning> {
    let mut warnings = Vec::new();
    let mut warn = |kind: &str, detail: String| {
        warnings.push(RunWarning { kind: kind.into(), detail });
    };
    let uses_plan = advice.iter().any(|advice| advice.saved_cpu_seconds.is_some());
    if plan.is_none() && uses_plan {
        let detail = "the savings use costs of another machine (the built-in plan): measure this \
                      machine with haul plan, and use --plan haul-plan.json";
        warn("built-in-plan", detail.into());
    }
    if counts.unseen_bytes() > 0 {
        let detail = "calls that haul cannot see sent to TCP: by io_uring, by a program that makes \
                      system calls itself, or by a function of the C library such as fwrite";
        warn("unseen", detail.into());
    }
    if counts.uncompared_bytes() > 0 {
        let detail = format!(
            "{} were sent on connections that a process had open when it was killed: bytes that \
             haul did not see on these connections are not known",
            size_text(counts.uncompared_bytes())
        );
        warn("uncompared", detail);
    }
    if counts.excess_bytes() > 0 {
        let detail = format!(
            "{} were counted as TCP, but did not go to TCP: a descriptor was closed by a call that \
             was not counted, and used again",
            size_text(counts.excess_bytes())
        );
        warn("excess", detail);
    }
    if let Some(quiet) = counts.processes.iter().find(|process| process.is_quiet) {
        let detail = format!(
            "{} (process {}) installed a seccomp filter: haul makes no system calls in the \
             process, so files and sockets that are opened later are not distinguished",
            quiet.name, quiet.process
        );
        warn("quiet", detail);
    }
    if counts.processes_without_slot > 0 {
        let detail = format!(
            "{} processes share the counters of another process: only the totals are exact",
            counts.processes_without_slot
        );
        warn("too-many-processes", detail);
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_run_has_an_empty_report() {
        let expected = ["sendfile=1%".parse().unwrap()];
        let parts = ReportParts {
            started: String::new(),
            command: vec!["true".into()],
            exit_code: Some(0),
            seconds: 0.0,
            rusage_cpu_seconds: 0.0,
            not_loaded: Vec::new(),
            expectations: &expected,
            is_eliding: false,
            is_proving: false,
            proof: None,
            plan: None,
        };
        let report = RunReport::new(&Counts::default(), parts);
        assert!(report.sent.is_empty() && report.advice.is_empty() && report.warnings.is_empty());
        assert!(!report.meets_expectations());
    }
}
