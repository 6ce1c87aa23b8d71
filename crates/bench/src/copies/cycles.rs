//! The meter `cycles`: lock step on one CPU, which other programs may use at the same time.
//!
//! One thread sends a batch over loopback and then receives the batch, and the sending is timed. A
//! batch takes some ten microseconds, so most batches run without an interruption even if the
//! thread has to share its CPU. Of the batches of a round the lower quartile counts, and a round
//! counts if the CPU was fast. What other programs do to the caches remains, so ratios are withheld
//! if few rounds count, or if the file is in a cache that other programs use.

use super::ladder;
use super::others::{Caches, Others};
use super::row::{CopiesMeter, CopiesRow, SEND};
use super::{CopiesParameters, CopiesReport, SEND_METHOD, file_methods};
use crate::congestion;
use crate::error::BenchError;
use crate::host::HostFacts;
use crate::report::{self, LabFacts, Report};
use crate::rounds::{Pace, Progress, RoundCost, Steps, short_list};
use crate::stats::{Estimate, VERDICT_ROUNDS_MIN};
use crate::warning::{Kind, Warning};
use haul_soak::exclusive;
use haul_units::Size;
use haul_workers::lock_step::{
    self, BATCH_BYTES_MIN, BatchSender, LockStepConnection, LockStepError,
};
use haul_workers::tested_method::TestedMethod;
use haul_workers::workload::{Opened, Workload};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The fewest batches of a round, of which the lower quartile counts.
const BATCHES_MIN: usize = 40;
/// The longest window, for a machine so busy that the batches take long.
const WINDOW_MAX: Duration = Duration::from_secs(2);
/// The widest interval of a ratio that is stated: half its width, as a share of the ratio.
const SPREAD_MAX: f64 = 0.15;
/// A round counts if its cost is at most this multiple of the row's lower quartile of all rounds. A
/// CPU whose sibling is busy, or whose frequency is low, is slower by more than that.
const SLOWER_MAX: f64 = 1.08;
/// The share of windows that may be slow without a warning.
const SLOW_SHARE_MAX: f64 = 0.25;
/// The most rounds, as a multiple of the rounds that must count.
const ROUNDS_FACTOR_MAX: usize = 4;
/// The CPU time of other programs, in percent of one CPU, above which files in the shared cache are
/// not compared.
const OTHERS_PERCENT_MAX: f64 = 20.0;

/// Measures all rows, on one CPU.
pub(super) fn run(
    parameters: &CopiesParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<CopiesReport, BenchError> {
    let started = report::now();
    let congestion = congestion::choose_here(parameters.congestion.as_deref())?;
    let mut ladder = Ladder::open(parameters, &congestion)?;
    let on_one_cpu = OnOneCpu::new().map_err(|errno| {
        BenchError::Failed(format!("keeping the measuring thread on one CPU: {errno}"))
    })?;
    let steps = parameters.pace.rounds * ladder.rows.len();
    let mut steps = Steps::new(steps, is_stopped, progress).with_limit(parameters.pace.limit);
    ladder.prepare(&congestion);
    // Waits for another haul that measures.
    exclusive::begin()?;
    let others = Others::watch();
    ladder.measure(parameters.pace, &mut steps);
    let others_percent = others.and_then(|others| others.percent()).unwrap_or(0.0);
    let cpu = on_one_cpu.cpu;
    drop(on_one_cpu);
    let lab = LabFacts::of_loopback(cpu, &congestion);
    let slow_rounds = ladder.slow_rounds_warning();
    let mut rows: Vec<CopiesRow> = ladder.rows.iter().map(LadderRow::counted).collect();
    if rows.iter().all(|row| row.rounds == 0) {
        let reason = rows.into_iter().find_map(|row| row.refused);
        return Err(reason.map_or(BenchError::Stopped, BenchError::Unmeasured));
    }
    ladder::set_ratios(&mut rows);
    let mut warnings = Vec::new();
    if is_stopped.load(Ordering::Relaxed) {
        let detail = "the run was stopped: the rows have fewer rounds".to_owned();
        warnings.push(Warning::new(Kind::Interrupted, detail));
    }
    warnings.extend(slow_rounds);
    if others_percent > OTHERS_PERCENT_MAX {
        warnings.extend(withhold_shared(&mut rows, cpu, others_percent));
    }
    warnings.extend(withhold_doubtful(&mut rows));
    ladder::set_kept(&mut rows);
    let host = HostFacts::here();
    Ok(CopiesReport { rows, warnings, ..Report::new("copies", started, host, Some(lab)) })
}

/// Keeps the calling thread on the CPU on which it runs, until dropped.
struct OnOneCpu {
    cpu: usize,
    allowed: CpuSet,
}

impl OnOneCpu {
    fn new() -> rustix::io::Result<Self> {
        let allowed = sched_getaffinity(None)?;
        let cpu = sched_getcpu();
        let mut only = CpuSet::new();
        only.set(cpu);
        sched_setaffinity(None, &only)?;
        Ok(Self { cpu, allowed })
    }
}

impl Drop for OnOneCpu {
    fn drop(&mut self) {
        // A CPU that was taken from the process in the meantime is not an error here.
        let _ = sched_setaffinity(None, &self.allowed);
    }
}

/// All rows, the files that the rows send, and the connection that all rows use.
struct Ladder {
    lock_step: LockStepConnection,
    rows: Vec<LadderRow>,
    workloads: HashMap<Workload, Opened>,
}

/// A row and its method.
struct LadderRow {
    row: CopiesRow,
    method: TestedMethod,
    workload: Workload,
    /// `None` if the method is refused.
    sender: Option<BatchSender>,
}

impl Ladder {
    /// Opens the files and sets the methods up.
    fn open(parameters: &CopiesParameters, congestion: &str) -> Result<Self, BenchError> {
        let lock_step = LockStepConnection::new(congestion)
            .map_err(|error| BenchError::Failed(error.to_string()))?;
        let mut ladder = Self { lock_step, rows: Vec::new(), workloads: HashMap::new() };
        for (chunk, files) in parameters.conditions() {
            for &buffers in &parameters.buffers {
                for workload in &files {
                    for method in file_methods() {
                        ladder.add(method, workload.clone(), (chunk, buffers))?;
                    }
                }
                let memory = Workload::Memory(chunk);
                for file in parameters.files.iter().filter(|file| **file >= chunk) {
                    let conditions = (chunk, buffers);
                    ladder.add(SEND_METHOD.into(), memory.clone(), conditions)?;
                    if let Some(LadderRow { row, .. }) = ladder.rows.last_mut() {
                        (row.path, row.file_bytes) = (SEND.into(), file.0);
                    }
                }
            }
        }
        let place = |row: &LadderRow| (row.row.file_bytes, row.row.chunk_bytes);
        ladder.rows.sort_by_key(place);
        Ok(ladder)
    }

    fn add(
        &mut self,
        method: TestedMethod,
        workload: Workload,
        (chunk, buffers): (Size, Option<Size>),
    ) -> Result<(), BenchError> {
        if !self.workloads.contains_key(&workload) {
            self.workloads.insert(workload.clone(), workload.open()?);
        }
        let place =
            if let Workload::PageCache { folios, .. } = workload { folios.prefix() } else { "" };
        let mut row = CopiesRow {
            meter: CopiesMeter::Cycles,
            path: method.name().into(),
            file_bytes: self.workloads[&workload].largest().0,
            place: place.into(),
            chunk_bytes: chunk.0,
            buffer_bytes: buffers.map(|size| size.0),
            ..CopiesRow::default()
        };
        let (batch, least) = (buffers.map_or(0, |size| size.0), chunk.0.max(BATCH_BYTES_MIN));
        let mut sender = None;
        if buffers.is_some() && batch < least {
            row.refused = Some(format!("a batch has at least {} in flight", Size(least)));
        } else {
            match self.lock_step.attach(method, chunk.0, batch) {
                Ok(attached) => sender = Some(attached),
                Err(error) => row.refused = Some(error.to_string()),
            }
        }
        self.rows.push(LadderRow { row, method, workload, sender });
        Ok(())
    }

    /// Proves the copies of each method, and sends until the buffers of each row are large enough.
    fn prepare(&mut self, congestion: &str) {
        let mut proofs: HashMap<TestedMethod, Option<f64>> = HashMap::new();
        for row in &mut self.rows {
            let copied_percent = proofs.entry(row.method).or_insert_with(|| {
                let (from, to) = lock_step::connect(congestion).ok()?;
                Some(row.method.prove(&from, &to).ok()?.copied_percent())
            });
            row.row.set_proof(*copied_percent);
            row.attempt(&self.workloads, |sender, opened| {
                self.lock_step.warm_up(sender, &opened.pieces[0])
            });
        }
    }

    /// Measures rounds, in each of which every row is measured once.
    fn measure(&mut self, pace: Pace, steps: &mut Steps<'_>) {
        for round in 0.. {
            let Some(counted) = self.paired_rounds() else { return };
            let is_enough = match pace.limit {
                None => counted >= pace.rounds || round >= ROUNDS_FACTOR_MAX * pace.rounds,
                Some(_) => pace.is_over() && round >= VERDICT_ROUNDS_MIN,
            };
            if is_enough {
                return;
            }
            for row in &mut self.rows {
                if !steps.go_on(&row.row.path) {
                    return;
                }
                let cost = row.attempt(&self.workloads, |sender, opened| {
                    measure_round(&mut self.lock_step, sender, opened, pace.window)
                });
                row.row.round_costs.extend(cost.map(|cost| RoundCost { round, ..cost }));
            }
        }
    }

    /// The fewest rounds that a row and its `read+write` both count. `None` if no row can be
    /// measured.
    fn paired_rounds(&self) -> Option<usize> {
        let rows: Vec<CopiesRow> =
            self.rows.iter().filter(|row| row.sender.is_some()).map(LadderRow::counted).collect();
        rows.iter().map(|row| ladder::paired_rounds(row, &rows)).min()
    }

    /// How many rounds did not count.
    fn slow_rounds_warning(&self) -> Option<Warning> {
        let measured: usize = self.rows.iter().map(|row| row.row.round_costs.len()).sum();
        let counted: usize = self.rows.iter().map(|row| row.counted_rounds().count()).sum();
        let slow = measured - counted;
        (slow as f64 > SLOW_SHARE_MAX * measured as f64).then(|| {
            let detail = format!(
                "in lock step {slow} of {measured} windows did not count, because the CPU was \
                 slower in them, as it is when another program uses the same core"
            );
            Warning::new(Kind::FrequencyDrift, detail)
        })
    }
}

impl LadderRow {
    /// Does something with the method. After an error the row is not measured again.
    fn attempt<T>(
        &mut self,
        workloads: &HashMap<Workload, Opened>,
        work: impl FnOnce(&mut BatchSender, &Opened) -> Result<T, LockStepError>,
    ) -> Option<T> {
        let result = work(self.sender.as_mut()?, &workloads[&self.workload]);
        if let Err(error) = &result {
            self.sender = None;
            self.row.refused = Some(error.to_string());
        }
        result.ok()
    }

    /// The rounds in which the CPU was as fast as in the row's fastest rounds.
    fn counted_rounds(&self) -> impl Iterator<Item = &RoundCost> {
        let rounds = &self.row.round_costs;
        let limit = SLOWER_MAX * lower_quartile(rounds.iter().map(|round| round.cost).collect());
        rounds.iter().filter(move |round| round.cost <= limit)
    }

    /// The row of the report, with the rounds that count.
    fn counted(&self) -> CopiesRow {
        let round_costs: Vec<RoundCost> = self.counted_rounds().copied().collect();
        let costs: Vec<f64> = round_costs.iter().map(|round| round.cost).collect();
        let others: Vec<f64> =
            round_costs.iter().filter_map(|round| round.other_host_cost).collect();
        CopiesRow {
            rounds: costs.len(),
            sender_us_per_mib: Estimate::of(&costs),
            receiver_us_per_mib: Estimate::of(&others),
            round_costs,
            ..self.row.clone()
        }
    }
}

/// Sends and receives for the length of a window. Returns the costs of both ends.
fn measure_round(
    lock_step: &mut LockStepConnection,
    sender: &mut BatchSender,
    opened: &Opened,
    window: Duration,
) -> Result<RoundCost, LockStepError> {
    let piece = &opened.pieces[0];
    // The first batch finds the caches as the previous row left them.
    let sent = lock_step.send(sender, piece)?;
    lock_step.receive(sender, sent)?;
    let us_per_mib =
        |time: Duration, bytes: u64| time.as_secs_f64() * 1e6 * f64::from(1 << 20) / bytes as f64;
    let (mut sending, mut receiving) = (Vec::new(), Vec::new());
    let began = Instant::now();
    while began.elapsed() < window || sending.len() < BATCHES_MIN {
        if began.elapsed() > WINDOW_MAX {
            break;
        }
        let begin = Instant::now();
        let sent = lock_step.send(sender, piece)?;
        let middle = Instant::now();
        lock_step.receive(sender, sent)?;
        let end = Instant::now();
        if sent == 0 {
            continue;
        }
        sending.push(us_per_mib(middle - begin, sent));
        receiving.push(us_per_mib(end - middle, sent));
    }
    Ok(RoundCost {
        round: 0,
        cost: lower_quartile(sending),
        other_host_cost: Some(lower_quartile(receiving)),
        is_at_other_distance: false,
    })
}

fn lower_quartile(mut costs: Vec<f64>) -> f64 {
    costs.sort_unstable_by(f64::total_cmp);
    costs.get(costs.len() / 4).copied().unwrap_or(f64::NAN)
}

/// Removes the ratios of files in the cache that this CPU shares with the CPUs of other programs.
fn withhold_shared(rows: &mut [CopiesRow], cpu: usize, others_percent: f64) -> Option<Warning> {
    let caches = Caches::of_cpu(cpu).unwrap_or(Caches::USUAL);
    let mut files = Vec::new();
    for row in rows.iter_mut().filter(|row| caches.shares(row.file_bytes)) {
        row.sender_us_ratio = None;
        files.push(Size(row.file_bytes).to_string());
    }
    files.dedup();
    (!files.is_empty()).then(|| {
        let detail = format!(
            "no ratios in lock step for a file of {}: other programs took {others_percent:.0} % of \
             a CPU, and use the cache in which the file is",
            short_list(&files)
        );
        Warning::new(Kind::Disturbed, detail)
    })
}

/// Removes the ratios of too few rounds, and the ratios whose interval is too wide to be compared
/// with the ratios of another run.
fn withhold_doubtful(rows: &mut [CopiesRow]) -> Option<Warning> {
    let mut paths = Vec::new();
    for row in rows {
        let is_doubtful = |ratio: Estimate| {
            ratio.rounds < VERDICT_ROUNDS_MIN
                || !ratio.is_conclusive()
                || ratio.spread() > SPREAD_MAX
        };
        if row.sender_us_ratio.is_some_and(is_doubtful) {
            row.sender_us_ratio = None;
            paths.push(format!("{} ({})", row.path, Size(row.file_bytes)));
        }
    }
    (!paths.is_empty()).then(|| {
        let detail = format!(
            "no ratio in lock step of {}: fewer than {VERDICT_ROUNDS_MIN} rounds count, or the \
             rounds differ too much",
            short_list(&paths)
        );
        Warning::new(Kind::Disturbed, detail)
    })
}
