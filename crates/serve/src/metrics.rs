//! The file service's metrics, from the counters of all event loops.

use crate::counters::{Counters, LATENCY_BOUNDS_US, TransportCounters};
use haul_server::metrics::{Collect, Exposition};
use haul_server::{SingleWriterCounter, Transport};
use std::sync::Arc;

/// Name, help and value of a metric of each transport.
type Family = (&'static str, &'static str, fn(&TransportCounters) -> f64);

/// The metrics of a file service.
#[derive(Debug)]
pub struct ServeMetrics {
    /// The counters, one for each event loop.
    pub loops: Vec<Arc<Counters>>,
    /// Log lines that could not be written; `None` without a log.
    pub unwritten: Option<Arc<SingleWriterCounter>>,
}

impl ServeMetrics {
    fn sum(&self, of: impl Fn(&Counters) -> &SingleWriterCounter) -> u64 {
        self.loops.iter().map(|counters| of(counters).get()).fold(0, u64::wrapping_add)
    }

    fn transports(&self, text: &mut Exposition) {
        let bytes = |transport| self.sum(|counters| &counters.by(transport).bytes);
        let used: Vec<Transport> = Transport::all().filter(|&one| bytes(one) > 0).collect();
        let label = |transport: Transport| format!("path=\"{}\"", transport.name());
        let families: [Family; 3] = [
            (
                "haul_sent_bytes_total",
                "Bytes that sockets took, by the path they took.",
                |counters| counters.bytes.get() as f64,
            ),
            (
                "haul_timed_bytes_total",
                "Of those, the bytes whose sending was timed.",
                |counters| counters.timed_bytes.get() as f64,
            ),
            (
                "haul_timed_cpu_seconds_total",
                "CPU time of the event loop for the timed bytes, interrupts not included.",
                |counters| counters.timed_ns.get() as f64 / 1e9,
            ),
        ];
        for (name, help, of) in families {
            text.family(name, "counter", help);
            for &transport in &used {
                let total: f64 = self.loops.iter().map(|counters| of(counters.by(transport))).sum();
                text.sample(name, &label(transport), total);
            }
        }
    }
}

impl Collect for ServeMetrics {
    fn collect(&self, text: &mut Exposition) {
        let connections: Vec<_> = self.loops.iter().map(|loop_| &loop_.connections).collect();
        text.connections(&connections);
        text.counter(
            "haul_responses_cut_short_total",
            "Responses ended because their file was written to while it was sent.",
            self.sum(|counters| &counters.cut_short),
        );
        text.counter(
            "haul_fallbacks_total",
            "Send methods that the kernel refused and that another replaced.",
            self.sum(|counters| &counters.fallbacks),
        );
        text.counter(
            "haul_disk_waits_total",
            "Requests that an offload thread served because they may wait for the disk.",
            self.sum(|counters| &counters.disk_waits),
        );
        text.counter(
            "haul_log_lines_dropped_total",
            "Lines of the access log dropped because they could not be written fast enough.",
            self.sum(|counters| &counters.log_dropped),
        );
        let name = "haul_responses_total";
        text.family(name, "counter", "Responses by the class of their status.");
        for class in 0..5 {
            let count = self.sum(|counters| &counters.responses[class]);
            text.sample(name, &format!("class=\"{}xx\"", class + 1), count);
        }
        self.transports(text);
        let bounds = LATENCY_BOUNDS_US.map(|bound| bound as f64 / 1e6);
        let counts: Vec<u64> = (0..=LATENCY_BOUNDS_US.len())
            .map(|class| self.sum(|counters| &counters.latencies[class]))
            .collect();
        let sum = self.sum(|counters| &counters.latency_us) as f64 / 1e6;
        let help = "From a request's head to the last byte of its response with the kernel.";
        text.histogram("haul_response_seconds", help, &bounds, &counts, sum);
        if let Some(unwritten) = &self.unwritten {
            text.counter(
                "haul_log_lines_unwritten_total",
                "Lines of the access log that could not be written: the disk is full or the pipe \
                 has no reader.",
                unwritten.get(),
            );
        }
    }
}
