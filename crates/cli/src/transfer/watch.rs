//! Shows how far a transfer is while it runs, and what it waits for.

use super::bottleneck::{Observed, Side, Wait};
use super::console::Console;
use super::line::{ProgressLine, TransferLine};
use super::text::time_text;
use haul_transfer::{DirectStreams, Progress, ProgressSnapshot, Role, cpu_of};
use haul_units::size_text;
use rustix::process::Pid;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The interval at which the bar changes.
const BAR_INTERVAL: Duration = Duration::from_millis(200);
/// The interval of JSON documents.
const JSON_INTERVAL: Duration = Duration::from_secs(1);
/// The interval of lines in a log.
const TEXT_INTERVAL: Duration = Duration::from_secs(10);
/// The interval at which it is checked whether a line is due.
const TEXT_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// When the user learns what the transfer waits for.
const WAIT_TIME: Duration = Duration::from_secs(8);
/// A share of the rate so far that counts in the rate of the last seconds, each second.
const KEPT_SHARE: f64 = 0.7;

/// What is observed of a transfer.
#[derive(Debug, Clone)]
pub struct Observer {
    pub progress: Progress,
    pub direct: Option<DirectStreams>,
    /// What the other end is.
    pub role: Role,
    /// The process of ssh; `None` with several hosts.
    pub ssh: Option<Pid>,
    /// The number of hosts that receive.
    pub hosts: usize,
    /// When the command started.
    pub started: Instant,
    /// When the transfer began, after the login.
    pub begun: Instant,
}

impl Observer {
    /// What the transfer waits for so far; `None` with several hosts.
    pub fn wait(&self) -> Option<Wait> {
        let ssh = self.ssh?;
        let ProgressSnapshot { mut own, peer, bytes_done, .. } = self.progress.snapshot();
        own.ssh_cpu = cpu_of(ssh).unwrap_or(0.0);
        let (source, destination, source_side) = match self.role {
            Role::Destination => (own, peer, Side::Here),
            Role::Source => (peer, own, Side::There),
        };
        let direct = self.direct.as_ref().map_or(0, |direct| direct.report().bytes);
        let (seconds, is_through_ssh) =
            (self.begun.elapsed().as_secs_f64(), direct * 2 < bytes_done);
        Observed { source, destination, source_side, seconds, is_through_ssh }.wait()
    }

    fn line(&self, bytes_per_s: f64) -> ProgressLine {
        let snapshot = self.progress.snapshot();
        let left = snapshot.bytes_requested.saturating_sub(snapshot.bytes_done);
        let knows_left = snapshot.is_total && bytes_per_s > 0.0;
        ProgressLine {
            seconds: self.started.elapsed().as_secs_f64(),
            entries: snapshot.entries,
            files_done: snapshot.files_done,
            files: snapshot.files_requested,
            bytes_done: snapshot.bytes_done,
            bytes: snapshot.bytes_requested,
            is_total: snapshot.is_total,
            bytes_per_s,
            seconds_left: knows_left.then(|| left as f64 / bytes_per_s),
            streams: self.direct.as_ref().map_or(0, |direct| direct.report().streams),
            hosts: self.hosts,
        }
    }
}

/// Shows the progress on a thread, which ends with the transfer. `prints_progress` prints the
/// progress now and then if standard error is not a terminal.
pub fn start(
    observer: Observer,
    console: Console,
    host: String,
    prints_progress: bool,
) -> Option<JoinHandle<()>> {
    let show = move || show(&observer, &console, &host, prints_progress);
    // Without the thread, the transfer is not shown.
    thread::Builder::new().name("haul-progress".into()).spawn(show).ok()
}

fn show(observer: &Observer, console: &Console, host: &str, prints_progress: bool) {
    let interval = if console.is_json() {
        JSON_INTERVAL
    } else if console.has_bar() {
        BAR_INTERVAL
    } else {
        TEXT_CHECK_INTERVAL
    };
    let mut rate = Rate::default();
    let (mut tells_wait, mut printed) = (true, Instant::now());
    while observer.progress.wait(interval) {
        let bytes_per_s = rate.update(observer.progress.snapshot().bytes_done);
        let line = observer.line(bytes_per_s);
        if console.is_json() {
            console.json(&TransferLine::Progress(line));
        } else if console.has_bar() {
            console.set_bar(text(&line));
        } else if prints_progress && printed.elapsed() >= TEXT_INTERVAL {
            printed = Instant::now();
            console.notice(&text(&line));
        }
        if tells_wait && observer.begun.elapsed() >= WAIT_TIME {
            tells_wait = false;
            if let Some(Wait { bottleneck, share }) = observer.wait() {
                let (what, percent) = (bottleneck.text(host), 100.0 * share);
                console.notice(&format!(
                    "this transfer waits for {what} ({percent:.0} % of the time)"
                ));
            }
        }
    }
}

/// The progress in one line.
fn text(line: &ProgressLine) -> String {
    let ProgressLine { files_done, files, bytes_done, bytes, is_total, bytes_per_s, .. } = *line;
    let rate = size_text(bytes_per_s as u64);
    let done = size_text(bytes_done);
    let total = size_text(bytes.max(bytes_done));
    let way = match line.streams {
        _ if line.hosts > 1 => format!("to {} hosts", line.hosts),
        0 => "through ssh".to_owned(),
        1 => "1 stream".to_owned(),
        streams => format!("{streams} streams"),
    };
    if !is_total {
        return format!(
            "{done} of {total} or more, {rate}/s, {files_done} of {files} files or more, {way}"
        );
    }
    let percent = bytes_done.min(bytes).saturating_mul(100).checked_div(bytes).unwrap_or(100);
    let left = line
        .seconds_left
        .map_or_else(String::new, |seconds| format!(", {} left", time_text(seconds.ceil() as u64)));
    format!("{done} of {total} ({percent} %), {rate}/s{left}, {files_done} of {files} files, {way}")
}

/// The rate of the last seconds.
#[derive(Debug)]
struct Rate {
    at: Instant,
    bytes: u64,
    bytes_per_s: Option<f64>,
}

impl Default for Rate {
    fn default() -> Self {
        Self { at: Instant::now(), bytes: 0, bytes_per_s: None }
    }
}

impl Rate {
    /// Takes the bytes so far.
    fn update(&mut self, bytes: u64) -> f64 {
        let seconds = self.at.elapsed().as_secs_f64();
        let now = bytes.saturating_sub(self.bytes) as f64 / seconds.max(1e-3);
        let kept = KEPT_SHARE.powf(seconds);
        let rate = self.bytes_per_s.map_or(now, |before| kept * before + (1.0 - kept) * now);
        (self.at, self.bytes, self.bytes_per_s) = (Instant::now(), bytes, Some(rate));
        rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_is_one_line() {
        let mut line = ProgressLine {
            seconds: 3.0,
            entries: 7,
            files_done: 2,
            files: 3,
            bytes_done: 3 << 20,
            bytes: 4 << 20,
            is_total: false,
            bytes_per_s: f64::from(1 << 20),
            seconds_left: None,
            streams: 0,
            hosts: 1,
        };
        let begun = "3.0 MiB of 4.0 MiB or more, 1.0 MiB/s, 2 of 3 files or more, through ssh";
        assert_eq!(text(&line), begun);
        (line.is_total, line.seconds_left, line.streams) = (true, Some(0.9), 2);
        let known = "3.0 MiB of 4.0 MiB (75 %), 1.0 MiB/s, 1 s left, 2 of 3 files, 2 streams";
        assert_eq!(text(&line), known);
    }
}
