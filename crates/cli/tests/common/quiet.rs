//! Whether the machine is quiet enough for a test that asserts what a measurement finds.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// The time in which other tests of the same program may end.
const WAIT_MAX: Duration = Duration::from_secs(20);
/// The time over which the use of a CPU is averaged.
const WINDOW: Duration = Duration::from_millis(500);
/// The largest use of a CPU of a quiet machine, in percent.
const BUSY_PERCENT_MAX: f64 = 30.0;

/// Waits until no CPU is busy. On a machine that stays busy, prints a message that begins with
/// `SKIPPED` and returns false.
pub fn is_quiet() -> bool {
    let deadline = Instant::now() + WAIT_MAX;
    loop {
        let busy_percent = busiest_cpu_percent();
        if busy_percent <= BUSY_PERCENT_MAX {
            return true;
        }
        if Instant::now() > deadline {
            eprintln!("SKIPPED: other programs use {busy_percent:.0} % of a CPU");
            return false;
        }
    }
}

/// The use of the busiest CPU in a window.
fn busiest_cpu_percent() -> f64 {
    let before = cpu_times();
    thread::sleep(WINDOW);
    let used = cpu_times().into_iter().zip(before).map(|(after, before)| {
        let (total, idle) = (after.0 - before.0, after.1 - before.1);
        100.0 * (1.0 - idle as f64 / total.max(1) as f64)
    });
    used.fold(0.0, f64::max)
}

/// The ticks of each CPU so far: all, and the idle ones.
fn cpu_times() -> Vec<(u64, u64)> {
    let stat = fs::read_to_string("/proc/stat").unwrap();
    let lines = stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu "));
    let times = |line: &str| {
        let fields: Vec<u64> =
            line.split_ascii_whitespace().skip(1).map(|field| field.parse().unwrap()).collect();
        // user, nice, system, idle, iowait, irq, softirq, steal
        (fields.iter().take(8).sum(), fields[3] + fields[4])
    };
    lines.map(times).collect()
}
