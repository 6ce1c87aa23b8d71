//! The experiment `checksum`: what it costs to look at bytes, to copy them, and to do both, from the first-level cache to
//! memory. If every byte must be looked at anyway, is it still a gain not to copy it?
//!
//! The first seven rows are the original question's ways of ordering checksum and copy.

use crate::quantity::Size;
use crate::rounds::{Progress, Series, Steps, too_few_rounds, unsteady};
use crate::warning::{Kind, Warning};
use crate::{BenchError, HostFacts, Pace};
use haul_checksum::Kernel;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

mod answer;
mod row;
mod work;

pub use row::ChecksumRow;
use work::Work;

/// The result of `checksum`.
pub type ChecksumReport = crate::report::Report<ChecksumRow>;

/// The largest stretch that can be asked for.
const SIZE_MAX: Size = Size(4 << 30);

/// What to run.
#[derive(Debug, Clone)]
pub struct ChecksumPlan {
    /// How many bytes a call works on, over and over: what fits a cache stays there.
    pub sizes: Vec<Size>,
    /// How often.
    pub pace: Pace,
}

impl ChecksumPlan {
    /// From 64 bytes over each level of cache to memory.
    pub fn new(pace: Pace) -> Self {
        let sizes = [64, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 128 << 20].map(Size);
        Self { sizes: sizes.into(), pace }
    }

    /// A quick look: 1 KiB, a second-level cache, memory.
    pub fn quick(pace: Pace) -> Self {
        Self { sizes: [1 << 10, 256 << 10, 128 << 20].map(Size).into(), pace }
    }
}

/// Runs the experiment. `is_stopped` ends it after the row in progress; what was measured so far is then reported.
pub fn run(
    plan: &ChecksumPlan,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<ChecksumReport, BenchError> {
    /// How long a row is measured in each round, at least one call.
    const TURN: Duration = Duration::from_millis(4);
    plan.pace.check()?;
    let largest = plan.sizes.iter().max().copied().unwrap_or(Size(0));
    if plan.sizes.iter().any(|size| size.0 == 0) || largest > SIZE_MAX {
        return Err(BenchError::BadInput(format!("sizes must be 1B to {SIZE_MAX}")));
    }
    let started = crate::now();
    let mut report = ChecksumReport::new("checksum", started, HostFacts::here(), None);
    let mut memory = work::Memory::new(largest.0 as usize).map_err(|error| {
        BenchError::BadInput(format!("{largest} twice is more memory than there is: {error}"))
    })?;
    let works = Work::all();
    let mut steps =
        Steps::new(plan.pace.rounds * works.len() * plan.sizes.len(), is_stopped, progress);
    let mut sizes = plan.sizes.clone();
    sizes.sort();
    sizes.dedup();
    let mut is_complete = true;
    for size in sizes {
        let mut rows: Vec<Series<Work, f64>> =
            works.iter().map(|&work| Series::new(work)).collect();
        'rounds: for round in 0..plan.pace.rounds {
            // Every other round backwards, so that a drift weighs on no row twice.
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
                row.rounds
                    .push((round, seconds_per_call(row.case, &mut memory, size.0 as usize, TURN)));
            }
        }
        report.rows.extend(rows.iter().map(|row| row::of(row, size, &rows)));
        let name = |work: &Work| format!("{} {size}", work.name());
        report.warnings.extend(unsteady(&rows, name, |seconds| *seconds));
    }
    report.warnings.extend(too_few_rounds(plan.pace.rounds));
    if !is_complete {
        let words = "stopped before it was complete: some rows have fewer rounds";
        report.warnings.push(Warning::new(Kind::Interrupted, words));
    }
    report.answers = answer::of(&report);
    Ok(report)
}

/// Calls it until the turn is over; the mean, in seconds.
fn seconds_per_call(work: Work, memory: &mut work::Memory, bytes: usize, turn: Duration) -> f64 {
    // The first call brings everything into the caches that it fits in.
    work.run(memory, bytes, 1);
    // Small calls are over sooner than a look at the clock.
    let batch = (64 << 10) / bytes + 1;
    let start = Instant::now();
    let mut calls = 0;
    loop {
        work.run(memory, bytes, batch);
        calls += batch;
        let elapsed = start.elapsed();
        if elapsed >= turn {
            return elapsed.as_secs_f64() / calls as f64;
        }
    }
}

/// The kernel that [`haul::checksum`] takes here.
fn fastest() -> Kernel {
    haul_checksum::kernel()
}
