//! The progress of a run of experiments: which one runs, and how long all of them take.

use haul_bench::Progress;
use haul_soak::exclusive;
use indicatif::{ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// A progress bar for one or several experiments.
pub struct RunProgress {
    bar: ProgressBar,
    /// The start of the run and the time for all experiments; `None` if that is not known.
    time: Cell<Option<(Instant, Duration)>>,
}

impl RunProgress {
    pub fn new() -> Self {
        let style = ProgressStyle::with_template("{prefix}{bar:20} {msg}");
        let bar =
            ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, time: Cell::new(None) }
    }

    /// Sets the time for all experiments. From now on the bar shows that time.
    pub fn set_time(&self, start: Instant, time: Duration) {
        self.time.set(Some((start, time)));
    }

    /// Begins an experiment, the `index`-th of `count`.
    pub fn begin(&self, index: usize, count: usize, name: &str) {
        let number = if count > 1 { format!("{}/{count} ", index + 1) } else { String::new() };
        self.bar.set_prefix(format!("{number}{name} "));
        self.bar.reset_eta();
    }

    pub fn update(&self, Progress { done, total, next }: Progress) {
        let (done, total, left) = if let Some((start, time)) = self.time.get() {
            let elapsed = start.elapsed().saturating_sub(exclusive::waited()).min(time);
            let left = format!("~{} s left in all", time.saturating_sub(elapsed).as_secs());
            (elapsed.as_millis() as usize, time.as_millis() as usize, left)
        } else {
            // Before the first measurement nothing is known of the time.
            let eta = self.bar.eta().as_secs();
            (done, total, if done == 0 { String::new() } else { format!("~{eta} s left") })
        };
        self.bar.set_length(total as u64);
        self.bar.set_position(done as u64);
        self.bar.set_message(format!("{left}  {next}"));
    }

    /// Prints lines to standard output, above the bar.
    pub fn print(&self, text: &str) {
        // If standard output is closed, the reports are still written.
        self.bar.suspend(|| drop(io::stdout().write_all(text.as_bytes())));
    }

    /// Prints lines to standard error, above the bar.
    pub fn print_error(&self, text: &str) {
        // If standard error is closed, the summary still has the text.
        self.bar.suspend(|| drop(io::stderr().write_all(text.as_bytes())));
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
