//! Chooses how many direct streams carry content: more, as long as more raise the rate.
//!
//! One stream is the cheapest. More streams help where one CPU encrypts slower than the network
//! sends, and where the window of one connection limits the rate.

use crate::direct::AUTO_STREAMS_MAX;
use crate::source::jobs::Jobs;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The time in which a rate is measured.
const MEASURE_TIME: Duration = Duration::from_millis(250);
/// The time before a measurement, in which the streams adapt.
const ADAPT_TIME: Duration = Duration::from_millis(150);
/// A larger number of streams stays if the rate is at least so much of the rate before.
const GAIN: f64 = 1.1;
/// The time until a larger number is tried again.
const RETRY_TIME: Duration = Duration::from_secs(10);

/// Changes the number of streams until the end of the session.
pub fn adapt(jobs: &Jobs, bytes: &AtomicU64) {
    let _ = try_adapt(jobs, bytes);
}

/// `None` at the end of the session.
fn try_adapt(jobs: &Jobs, bytes: &AtomicU64) -> Option<()> {
    loop {
        let count = jobs.working_max();
        let before = measure(jobs, bytes)?;
        let more = (2 * count).min(AUTO_STREAMS_MAX.into());
        // Without content, or with streams that wait for work, more streams do not help.
        if before == 0.0 || more == count || jobs.is_idle() {
            wait(jobs, MEASURE_TIME)?;
            continue;
        }
        jobs.set_working_max(more);
        if measure(jobs, bytes)? < before * GAIN {
            jobs.set_working_max(count);
            wait(jobs, RETRY_TIME)?;
        }
    }
}

/// The bytes per second of all direct streams: content, and blocks whose hashes were sent.
fn measure(jobs: &Jobs, bytes: &AtomicU64) -> Option<f64> {
    wait(jobs, ADAPT_TIME)?;
    let total = || bytes.load(Relaxed) + jobs.compared_bytes().load(Relaxed);
    let (before, begun) = (total(), Instant::now());
    wait(jobs, MEASURE_TIME)?;
    Some((total() - before) as f64 / begun.elapsed().as_secs_f64())
}

fn wait(jobs: &Jobs, time: Duration) -> Option<()> {
    jobs.wait_for_end(time).then_some(())
}
