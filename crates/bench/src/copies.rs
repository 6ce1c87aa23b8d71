//! The experiment `copies`: what two copies, one copy and no copy of a file's bytes cost the
//! sending host.
//!
//! `sendfile` lends pages of the page cache to the socket. If the kernel copied the pages instead,
//! `sendfile` would make one copy, which `read` and `write` make twice. The rows with one copy show
//! how much of `sendfile`'s gain would remain: `sendfile-copied` as the kernel copies today, and
//! `mapped+write` as a copy without further work could be. The copies of each row are proved in the
//! same run by overwriting the file after it was sent.
//!
//! The experiment `send` measures the rows. This module asks the question and evaluates the answer.

use crate::error::BenchError;
use crate::matrix::SendSelection;
use crate::regime::Reading;
use crate::report::Report;
use crate::rounds::{Pace, Progress};
use crate::send::{self, SendParameters, SendReport};
use haul::SendMethod;
use haul_units::Size;
use haul_workers::one_copy::OneCopyMethod;
use haul_workers::page_cache::Folios;
use haul_workers::tested_method::TestedMethod;
use haul_workers::workload::Workload;
use std::sync::atomic::AtomicBool;

mod row;
mod verdict;

pub use row::CopiesRow;

/// The report of the experiment `copies`.
pub type CopiesReport = Report<CopiesRow>;

/// The configuration of the experiment.
#[derive(Debug, Clone)]
pub struct CopiesParameters {
    /// Sizes of the files.
    pub files: Vec<Size>,
    /// Sizes of the folios of the files.
    pub folios: Vec<Folios>,
    /// The most bytes that one call sends. Larger calls than the file are left out.
    pub chunks: Vec<Size>,
    /// Sizes of the sockets' buffers, which limit the bytes in flight; `None` for the size that the
    /// reading takes.
    pub buffers: Vec<Option<Size>>,
    /// The number of rounds and the length of a window.
    pub pace: Pace,
    /// How the receiving program reads.
    pub reading: Reading,
    /// The lab's MTU in bytes.
    pub mtu: u32,
    /// The sockets' congestion control; `None` for the first of cubic and reno that can be set.
    pub congestion: Option<String>,
}

impl CopiesParameters {
    /// The default: files within and beyond the caches, in small and large calls.
    pub fn new(pace: Pace) -> Self {
        let basis = SendParameters::new(Vec::new());
        Self {
            files: [64 << 10, 4 << 20, 256 << 20].map(Size).into(),
            folios: vec![Folios::Small],
            chunks: [64 << 10, 1 << 20].map(Size).into(),
            buffers: vec![None],
            pace,
            reading: basis.reading,
            mtu: basis.mtu,
            congestion: None,
        }
    }

    /// A short measurement: one file beyond the caches, in calls of one size.
    pub fn quick(pace: Pace) -> Self {
        let file = vec![Size(256 << 20)];
        Self { files: file, chunks: vec![Size(64 << 10)], ..Self::new(pace) }
    }

    /// The rows of `send`: the ladder for each condition.
    fn selections(&self) -> Vec<SendSelection> {
        let files: Vec<TestedMethod> = [
            SendMethod::ReadWrite.into(),
            TestedMethod::OneCopy(OneCopyMethod::MappedWrite),
            TestedMethod::OneCopy(OneCopyMethod::SendfileCopied),
            SendMethod::Sendfile.into(),
            SendMethod::Splice.into(),
            SendMethod::Floor.into(),
        ]
        .into();
        let selection = |paths: Vec<TestedMethod>, workload, chunk| SendSelection {
            paths,
            chunks: vec![chunk],
            workloads: vec![workload],
            buffers: self.buffers.clone(),
            ..SendSelection::plain()
        };
        let mut selections = Vec::new();
        for &size in &self.files {
            for &chunk in self.chunks.iter().filter(|&&chunk| chunk <= size) {
                for &folios in &self.folios {
                    let workload = Workload::PageCache { size, folios };
                    selections.push(selection(files.clone(), workload, chunk));
                }
                let send = vec![SendMethod::ReadSend.into()];
                selections.push(selection(send, Workload::Memory(size), chunk));
            }
        }
        selections
    }
}

/// Runs the experiment. If `is_stopped` becomes true, it ends after the current row and reports the
/// rounds measured so far.
pub fn run(
    parameters: &CopiesParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<CopiesReport, BenchError> {
    let selections = parameters.selections();
    if selections.is_empty() {
        let reason = "no call fits into a file: choose a larger --file or a smaller --chunk";
        return Err(BenchError::BadInput(reason.into()));
    }
    let sent = send::run(
        &SendParameters {
            pace: parameters.pace,
            reading: parameters.reading,
            mtu: parameters.mtu,
            congestion: parameters.congestion.clone(),
            proves_all: true,
            // No row of this experiment names a method for programs to use.
            observer_pairs: 0,
            ..SendParameters::new(selections)
        },
        is_stopped,
        progress,
    )?;
    Ok(evaluate(sent))
}

/// The report of the rows that `send` measured.
fn evaluate(sent: SendReport) -> CopiesReport {
    let SendReport { rows, warnings, lab, noise, host, started, .. } = sent;
    let rows = row::of_all(&rows);
    let mut report = CopiesReport { rows, noise, ..Report::new("copies", started, host, lab) };
    report.warnings = warnings;
    let verdicts = verdict::of(&report.rows, report.noise.as_ref());
    report.add_verdicts(verdicts);
    report.answers = verdict::sentences(&report.rows);
    report
}
