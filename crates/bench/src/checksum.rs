//! The experiment `checksum`: the cost of reading bytes, of copying them, and of both, from the
//! first-level cache to memory. It answers whether avoiding a copy still gains if every byte must
//! be read anyway.
//!
//! The first seven rows are the orderings of checksum and copy in the original question, with its
//! numbers.

use crate::error::BenchError;
use crate::host::HostFacts;
use crate::rounds::Pace;
use crate::rounds::{Progress, Series, Steps, few_rounds_warning, unsteady_warning};
use crate::warning::{Kind, Warning};
use haul_units::Size;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

mod answer;
mod row;

use haul_workers::checksum_operation::{self as work, Operation};
pub use row::ChecksumRow;

/// The report of the experiment `checksum`.
pub type ChecksumReport = crate::report::Report<ChecksumRow>;

/// The largest accepted size.
const SIZE_MAX: Size = Size(4 << 30);

/// The configuration of the experiment.
#[derive(Debug, Clone)]
pub struct ChecksumParameters {
    /// The bytes that a call works on, repeatedly: data that fits a cache stays in it.
    pub sizes: Vec<Size>,
    /// The number of rounds.
    pub pace: Pace,
}

impl ChecksumParameters {
    /// The default: sizes from 64 bytes, through each level of cache, to memory.
    pub fn new(pace: Pace) -> Self {
        let sizes = [64, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 128 << 20].map(Size);
        Self { sizes: sizes.into(), pace }
    }

    /// A short measurement: 1 KiB, the second-level cache, and memory.
    pub fn quick(pace: Pace) -> Self {
        Self { sizes: [1 << 10, 256 << 10, 128 << 20].map(Size).into(), pace }
    }
}

/// Runs the experiment. If `is_stopped` becomes true, it ends after the current row and reports the
/// rounds measured so far.
pub fn run(
    parameters: &ChecksumParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<ChecksumReport, BenchError> {
    /// The time that a row is measured in each round, at least one call.
    const ROW_TIME: Duration = Duration::from_millis(4);
    parameters.pace.check()?;
    let largest = parameters.sizes.iter().max().copied().unwrap_or(Size(0));
    if parameters.sizes.iter().any(|size| size.0 == 0) || largest > SIZE_MAX {
        return Err(BenchError::BadInput(format!("sizes must be 1B to {SIZE_MAX}")));
    }
    let started = crate::report::now();
    let mut report = ChecksumReport::new("checksum", started, HostFacts::here(), None);
    let mut buffers = work::Buffers::new(largest.0 as usize).map_err(|error| {
        BenchError::BadInput(format!("two buffers of {largest} do not fit in memory: {error}"))
    })?;
    let operations = Operation::all();
    let mut steps = Steps::new(
        parameters.pace.rounds * operations.len() * parameters.sizes.len(),
        is_stopped,
        progress,
    )
    .with_limit(parameters.pace.limit);
    let mut sizes = parameters.sizes.clone();
    sizes.sort();
    sizes.dedup();
    let mut is_complete = true;
    for (index, &size) in sizes.iter().enumerate() {
        let share = 1.0 / (sizes.len() - index) as f64;
        let limit = parameters.pace.limit;
        let end = limit.map(|limit| (limit.end_of_share(share), limit.within_percent / 100.0));
        let mut rows: Vec<Series<Operation, f64>> =
            operations.iter().map(|&operation| Series::new(operation)).collect();
        'rounds: for round in 0.. {
            let is_enough = round >= parameters.pace.rounds && is_over(end, &rows);
            if is_enough {
                break;
            }
            // Every other round runs backwards, so that drift affects no row twice.
            let mut order: Vec<usize> = (0..rows.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let row = &mut rows[index];
                if !steps.go_on(row.case.name()) {
                    is_complete = false;
                    break 'rounds;
                }
                let bytes = size.0 as usize;
                row.rounds.push((round, seconds_per_call(row.case, &mut buffers, bytes, ROW_TIME)));
            }
        }
        report.rows.extend(rows.iter().map(|row| row::of(row, size, &rows)));
        let name = |operation: &Operation| format!("{} {size}", operation.name());
        report.warnings.extend(unsteady_warning(&rows, name, |seconds| *seconds));
    }
    report.warnings.extend(few_rounds_warning(parameters.pace.rounds, None));
    if !is_complete {
        let detail = "stopped before it was complete: some rows have fewer rounds";
        report.warnings.push(Warning::new(Kind::Interrupted, detail));
    }
    let verdict = answer::verdict(&report);
    report.add_verdicts(verdict);
    report.answers = answer::of(&report);
    Ok(report)
}

/// Whether the time of a size is over, or its rows are known precisely enough. `end` is its end and
/// the precision; `None` without a time limit.
fn is_over(end: Option<(Instant, f64)>, rows: &[Series<Operation, f64>]) -> bool {
    end.is_none_or(|(end, precision)| Instant::now() >= end || is_precise(rows, precision))
}

/// Whether every row's ratio to `memcpy` is known precisely enough.
fn is_precise(rows: &[Series<Operation, f64>], precision: f64) -> bool {
    let Some(copy) = rows.iter().find(|row| row.case == Operation::Memcpy) else { return true };
    rows.iter()
        .filter_map(|row| row.ratio_to(copy, |seconds| *seconds))
        .all(|ratio| ratio.spread() <= precision)
}

/// The mean time of a call in seconds, from calls for `duration`.
fn seconds_per_call(
    operation: Operation,
    buffers: &mut work::Buffers,
    bytes: usize,
    duration: Duration,
) -> f64 {
    // The first call loads the caches.
    operation.run(buffers, bytes, 1);
    // A small call takes less time than reading the clock.
    let batch = (64 << 10) / bytes + 1;
    let start = Instant::now();
    let mut calls = 0;
    loop {
        operation.run(buffers, bytes, batch);
        calls += batch;
        let elapsed = start.elapsed();
        if elapsed >= duration {
            return elapsed.as_secs_f64() / calls as f64;
        }
    }
}
