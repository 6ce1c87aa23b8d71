//! Where the time of the threads that carry content goes. The times of both ends show what a
//! transfer waits for.

use rustix::process::Pid;
use rustix::time::{ClockId, Timespec, clock_gettime};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Seconds that the threads of one end spent, added up over all of its threads that carry content.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Times {
    /// Without work: the source looked for files, or waited for answers.
    pub idle: f64,
    /// In files: reads, writes, syncs and checksums.
    pub storage: f64,
    /// The part of `storage` in which the CPU worked.
    pub storage_cpu: f64,
    /// In streams: sending or receiving, encryption and compression included.
    pub stream: f64,
    /// The part of `stream` in which the CPU worked.
    pub stream_cpu: f64,
    /// Held back by a limit of the rate.
    pub limit: f64,
    /// The CPU time of the process.
    pub process_cpu: f64,
    /// The CPU time of the process of ssh or sshd at this end since the transfer began; 0 if it is
    /// not known.
    pub ssh_cpu: f64,
}

impl Times {
    /// Refuses numbers that are not times, because the other end may be hostile.
    pub(crate) fn check(self) -> Option<Self> {
        let Self { idle, storage, storage_cpu, stream, stream_cpu, limit, process_cpu, ssh_cpu } =
            self;
        let all = [idle, storage, storage_cpu, stream, stream_cpu, limit, process_cpu, ssh_cpu];
        all.iter().all(|time| (0.0..TIME_MAX).contains(time)).then_some(self)
    }
}

/// More seconds than a transfer takes.
const TIME_MAX: f64 = 1e12;

/// What a thread that carries content does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    Idle,
    Storage,
    Stream,
    Limit,
}

/// The number of activities.
const ACTIVITIES: usize = 4;

/// The times of this end, which its threads add to.
#[derive(Debug, Default)]
pub struct Clocks {
    nanoseconds: [AtomicU64; ACTIVITIES],
    cpu_nanoseconds: [AtomicU64; ACTIVITIES],
}

impl Clocks {
    /// Adds time without use of the CPU.
    pub fn add(&self, activity: Activity, time: Duration) {
        self.nanoseconds[activity as usize].fetch_add(nanoseconds(time), Relaxed);
    }

    /// The times so far.
    pub fn times(&self) -> Times {
        let seconds = |clock: &AtomicU64| clock.load(Relaxed) as f64 / 1e9;
        let wall = |activity: Activity| seconds(&self.nanoseconds[activity as usize]);
        let cpu = |activity: Activity| seconds(&self.cpu_nanoseconds[activity as usize]);
        Times {
            idle: wall(Activity::Idle),
            storage: wall(Activity::Storage),
            storage_cpu: cpu(Activity::Storage),
            stream: wall(Activity::Stream),
            stream_cpu: cpu(Activity::Stream),
            limit: wall(Activity::Limit),
            process_cpu: duration(clock_gettime(ClockId::ProcessCPUTime)).as_secs_f64(),
            ssh_cpu: 0.0,
        }
    }
}

/// Divides the time of one thread among its activities.
#[derive(Debug)]
pub struct Stopwatch<'c> {
    clocks: &'c Clocks,
    at: Instant,
    cpu: Duration,
}

impl<'c> Stopwatch<'c> {
    /// A stopwatch of this thread, which begins now.
    pub fn new(clocks: &'c Clocks) -> Self {
        Self { clocks, at: Instant::now(), cpu: thread_cpu() }
    }

    /// Adds the time since the last call to an activity.
    pub fn lap(&mut self, activity: Activity) {
        let (now, cpu) = (Instant::now(), thread_cpu());
        let used = cpu.saturating_sub(self.cpu);
        self.clocks.add(activity, now - self.at);
        self.clocks.cpu_nanoseconds[activity as usize].fetch_add(nanoseconds(used), Relaxed);
        (self.at, self.cpu) = (now, cpu);
    }

    /// Leaves out the time since the last call.
    pub fn skip(&mut self) {
        (self.at, self.cpu) = (Instant::now(), thread_cpu());
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn thread_cpu() -> Duration {
    duration(clock_gettime(ClockId::ThreadCPUTime))
}

fn duration(time: Timespec) -> Duration {
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// The CPU time of another process, in seconds; `None` if it is not visible.
pub fn cpu_of(process: Pid) -> Option<f64> {
    let mut file = File::open(format!("/proc/{}/stat", process.as_raw_nonzero())).ok()?;
    cpu_in(&mut file)
}

/// The CPU time in an open `/proc/PID/stat`.
fn cpu_in(file: &mut File) -> Option<f64> {
    let mut stat = String::new();
    file.rewind().ok()?;
    file.read_to_string(&mut stat).ok()?;
    // The name of the program, in parentheses, may contain spaces. utime and stime are the fields
    // 14 and 15 (proc_pid_stat(5)), and field 3 follows the name.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let ticks = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    Some(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// The process of sshd whose command this process is. Its file stays open, because a sandbox hides
/// it later.
#[derive(Debug)]
pub struct Sshd {
    stat: Mutex<File>,
    before: f64,
}

impl Sshd {
    /// The parent of this process; `None` if another program than sshd started this process.
    pub fn find() -> Option<Self> {
        let parent = rustix::process::getppid()?.as_raw_nonzero();
        let name = fs::read_to_string(format!("/proc/{parent}/comm")).ok()?;
        let mut stat = File::open(format!("/proc/{parent}/stat")).ok()?;
        let before = cpu_in(&mut stat).filter(|_| name.starts_with("sshd"))?;
        Some(Self { stat: Mutex::new(stat), before })
    }

    /// The CPU time since this process looked first, in seconds.
    pub fn cpu(&self) -> f64 {
        let mut stat = self.stat.lock().unwrap_or_else(PoisonError::into_inner);
        cpu_in(&mut stat).map_or(0.0, |now| now - self.before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_divides_its_time() {
        let clocks = Clocks::default();
        let mut watch = Stopwatch::new(&clocks);
        std::thread::sleep(Duration::from_millis(20));
        watch.lap(Activity::Stream);
        let begun = thread_cpu();
        while thread_cpu() < begun + Duration::from_millis(20) {}
        watch.lap(Activity::Storage);
        watch.skip();
        let times = clocks.times();
        assert!(times.stream >= 0.02 && times.storage >= 0.02, "{times:?}");
        assert!(times.storage_cpu >= 0.02 && times.process_cpu >= 0.02, "{times:?}");
        assert!(times.stream_cpu < times.stream, "{times:?}");
        assert!(cpu_of(rustix::process::getpid()).is_some());
    }
}
