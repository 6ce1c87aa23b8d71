//! Metrics in the Prometheus text format, served on a separate address.
//!
//! The address is the access control: it should be reachable by the monitoring alone.

mod endpoint;

pub use endpoint::{MetricsServer, listen};

use crate::counter::{ConnectionCounters, SingleWriterCounter};
use std::fmt::{Display, Write as _};
use std::sync::Arc;
use std::time::SystemTime;

/// A source of metrics.
pub trait Collect: Send {
    /// Appends the current values.
    fn collect(&self, text: &mut Exposition);
}

impl<F: Fn(&mut Exposition) + Send> Collect for F {
    fn collect(&self, text: &mut Exposition) {
        self(text);
    }
}

/// The metrics of a service: its sources in the order of the page.
#[derive(Default)]
pub struct Registry {
    sources: Vec<Box<dyn Collect>>,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Registry").field("sources", &self.sources.len()).finish()
    }
}

impl Registry {
    /// Adds a source.
    pub fn register(&mut self, source: impl Collect + 'static) {
        self.sources.push(Box::new(source));
    }

    /// Adds the version of the program, and the time at which the process was started. The names
    /// come from Prometheus's client libraries.
    pub fn register_process(&mut self, version: &str, started: SystemTime) {
        let label = format!("version=\"{version}\"");
        let started = seconds_since_1970(started);
        self.register(move |text: &mut Exposition| {
            let name = "haul_build_info";
            text.family(name, "gauge", "The version of the program; the value is 1.");
            text.sample(name, &label, 1);
            text.gauge(
                "process_start_time_seconds",
                "When the process was started, in seconds since 1970.",
                started,
            );
        });
    }

    /// Adds the connections of all event loops.
    pub fn register_connections(&mut self, loops: Vec<Arc<ConnectionCounters>>) {
        self.register(move |text: &mut Exposition| {
            text.connections(&loops.iter().map(Arc::as_ref).collect::<Vec<_>>());
        });
    }

    /// The page with the current values.
    pub fn render(&self) -> String {
        let mut text = Exposition::default();
        for source in &self.sources {
            source.collect(&mut text);
        }
        text.0
    }
}

/// A page in the Prometheus text format (version 0.0.4).
#[derive(Debug, Default)]
pub struct Exposition(String);

impl Exposition {
    /// A counter without labels.
    pub fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "counter", help);
        self.sample(name, "", value);
    }

    /// A gauge without labels.
    pub fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "gauge", help);
        self.sample(name, "", value);
    }

    /// The head of a metric family; its samples follow.
    pub fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a String does not fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// A sample of the last family. `labels` is empty or like `class="2xx"`.
    pub fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = match labels {
            "" => writeln!(self.0, "{name} {value}"),
            labels => writeln!(self.0, "{name}{{{labels}}} {value}"),
        };
    }

    /// A histogram: the upper bounds, the counts of the classes (one more than bounds), the sum.
    pub fn histogram(&mut self, name: &str, help: &str, bounds: &[f64], counts: &[u64], sum: f64) {
        self.family(name, "histogram", help);
        let mut total = 0;
        for (bound, count) in bounds.iter().zip(counts) {
            total += count;
            self.sample(&format!("{name}_bucket"), &format!("le=\"{bound}\""), total);
        }
        total += counts.iter().skip(bounds.len()).sum::<u64>();
        self.sample(&format!("{name}_bucket"), "le=\"+Inf\"", total);
        self.sample(&format!("{name}_sum"), "", sum);
        self.sample(&format!("{name}_count"), "", total);
    }

    /// The connections of all event loops.
    pub fn connections(&mut self, loops: &[&ConnectionCounters]) {
        let sum = |of: fn(&ConnectionCounters) -> &SingleWriterCounter| {
            loops.iter().map(|counters| of(counters).get()).fold(0, u64::wrapping_add)
        };
        self.counter(
            "haul_connections_accepted_total",
            "Connections accepted.",
            sum(|counters| &counters.accepted),
        );
        self.gauge("haul_connections", "Connections open now.", sum(|counters| &counters.open));
        self.gauge(
            "haul_connections_waiting",
            "Connections accepted that wait until another is closed.",
            sum(|counters| &counters.waiting),
        );
        self.counter(
            "haul_connections_evicted_total",
            "Connections closed to make room for others.",
            sum(|counters| &counters.evicted),
        );
        self.counter(
            "haul_connections_refused_total",
            "Connections closed before anything was read: by a rule, because their address had too \
             many, or because their proxy named no client.",
            sum(|counters| &counters.refused),
        );
        self.counter(
            "haul_connections_timed_out_total",
            "Connections that a time limit has ended; of HTTP, those that were not idle.",
            sum(|counters| &counters.timed_out),
        );
    }
}

/// A time as Prometheus writes it, to the millisecond.
pub fn seconds_since_1970(time: SystemTime) -> f64 {
    let since_1970 = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    since_1970.as_millis() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_is_cumulative() {
        let mut text = Exposition::default();
        text.histogram("h", "Help.", &[0.1, 0.3], &[2, 1, 4], 5.5);
        let expected = "# HELP h Help.\n# TYPE h histogram\nh_bucket{le=\"0.1\"} 2\n\
                        h_bucket{le=\"0.3\"} 3\nh_bucket{le=\"+Inf\"} 7\nh_sum 5.5\nh_count 7\n";
        assert_eq!(text.0, expected);
    }
}
