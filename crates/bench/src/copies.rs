//! The experiment `copies`: what two copies, one copy and no copy of a file's bytes cost the
//! sending host.
//!
//! `sendfile` lends pages of the page cache to the socket. If the kernel copied the pages instead,
//! `sendfile` would make one copy, which `read` and `write` make twice. The rows with one copy show
//! how much of `sendfile`'s gain would remain: `sendfile-copied` as the kernel copies today, and
//! `mapped+write` as a copy without further work could be. The copies of each row are proved in the
//! same run by overwriting the file after it was sent.
//!
//! There are two meters. With the spinner the experiment `send` measures the rows between two
//! hosts, and this module evaluates them. The other meter, `cycles`, survives a machine on which
//! other programs run.

use crate::error::BenchError;
use crate::matrix::SendSelection;
use crate::regime::Reading;
use crate::report::Report;
use crate::rounds::{Pace, Progress};
use crate::send::{self, SendParameters, SendReport};
use crate::warning::{Kind, Warning};
use haul::SendMethod;
use haul_units::Size;
use haul_workers::one_copy::OneCopyMethod;
use haul_workers::page_cache::Folios;
use haul_workers::tested_method::TestedMethod;
use haul_workers::workload::Workload;
use std::sync::atomic::{AtomicBool, Ordering};

mod cycles;
mod ladder;
mod others;
mod row;
mod verdict;

pub use row::{CopiesMeter, CopiesRow};

/// The report of the experiment `copies`.
pub type CopiesReport = Report<CopiesRow>;

/// The configuration of the experiment.
#[derive(Debug, Clone)]
pub struct CopiesParameters {
    /// The meters, each of which measures all rows.
    pub meters: Vec<CopiesMeter>,
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
            meters: vec![CopiesMeter::Spinner],
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

    /// The size of the calls, and the files that such calls read.
    fn conditions(&self) -> impl Iterator<Item = (Size, Vec<Workload>)> + '_ {
        self.chunks.iter().filter_map(|&chunk| {
            let files = self.files.iter().filter(|&&size| size >= chunk);
            let files: Vec<Workload> = files
                .flat_map(|&size| {
                    self.folios.iter().map(move |&folios| Workload::PageCache { size, folios })
                })
                .collect();
            (!files.is_empty()).then_some((chunk, files))
        })
    }

    /// The rows of `send`: the ladder for each condition.
    fn selections(&self) -> Vec<SendSelection> {
        let selection = |paths, workloads, chunk| SendSelection {
            paths,
            chunks: vec![chunk],
            workloads,
            buffers: self.buffers.clone(),
            ..SendSelection::plain()
        };
        self.conditions()
            .flat_map(|(chunk, files)| {
                let memory = vec![Workload::Memory(chunk)];
                let send = vec![SEND_METHOD.into()];
                [selection(file_methods(), files, chunk), selection(send, memory, chunk)]
            })
            .collect()
    }
}

/// The method that sends from memory.
const SEND_METHOD: SendMethod = SendMethod::ReadSend;

/// The methods that send a file.
fn file_methods() -> Vec<TestedMethod> {
    vec![
        SendMethod::ReadWrite.into(),
        TestedMethod::OneCopy(OneCopyMethod::MappedWrite),
        TestedMethod::OneCopy(OneCopyMethod::SendfileCopied),
        SendMethod::Sendfile.into(),
        SendMethod::Splice.into(),
        SendMethod::Floor.into(),
    ]
}

/// Runs the experiment. If `is_stopped` becomes true, it ends after the current row and reports the
/// rounds measured so far.
pub fn run(
    parameters: &CopiesParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<CopiesReport, BenchError> {
    parameters.pace.check()?;
    if parameters.conditions().next().is_none() {
        let reason = "no call fits into a file: choose a larger --file or a smaller --chunk";
        return Err(BenchError::BadInput(reason.into()));
    }
    let has = |meter| parameters.meters.contains(&meter);
    let has_both = has(CopiesMeter::Cycles) && has(CopiesMeter::Spinner);
    // The spinner needs most of the time, because its verdict counts if there are both.
    let pace = if has_both { Pace { limit: None, ..parameters.pace } } else { parameters.pace };
    let mut cycles = has(CopiesMeter::Cycles)
        .then(|| {
            let parameters = CopiesParameters { pace, ..parameters.clone() };
            cycles::run(&parameters, is_stopped, progress)
        })
        .transpose()?;
    let is_over = cycles.is_some() && is_stopped.load(Ordering::Relaxed);
    let spinner = (has(CopiesMeter::Spinner) && !is_over)
        .then(|| by_spinner(parameters, is_stopped, progress));
    let spinner = match (spinner, &mut cycles) {
        (Some(Err(error)), Some(cycles)) => {
            let detail = format!("the spinner did not measure: {error}");
            cycles.warnings.push(Warning::new(Kind::Lab, detail));
            None
        }
        (spinner, _) => spinner.transpose()?,
    };
    let mut report = match (spinner, cycles) {
        (Some(mut spinner), Some(cycles)) => {
            spinner.rows.extend(cycles.rows);
            spinner.warnings.extend(cycles.warnings);
            spinner
        }
        (Some(report), None) | (None, Some(report)) => report,
        (None, None) => return Err(BenchError::BadInput("choose a meter: --meter".into())),
    };
    let verdicts = verdict::of(&report.rows, report.noise.as_ref());
    report.add_verdicts(verdicts);
    report.answers = verdict::sentences(&report.rows);
    Ok(report)
}

/// The report of the rows that `send` measured, without a verdict.
fn by_spinner(
    parameters: &CopiesParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<CopiesReport, BenchError> {
    let sent = send::run(
        &SendParameters {
            pace: parameters.pace,
            reading: parameters.reading,
            mtu: parameters.mtu,
            congestion: parameters.congestion.clone(),
            proves_all: true,
            // No row of this experiment names a method for programs to use.
            observer_pairs: 0,
            ..SendParameters::new(parameters.selections())
        },
        is_stopped,
        progress,
    )?;
    let rows = ladder::of_sent(&sent.rows, &parameters.files);
    let SendReport { warnings, lab, noise, host, started, .. } = sent;
    Ok(CopiesReport { rows, noise, warnings, ..Report::new("copies", started, host, lab) })
}
