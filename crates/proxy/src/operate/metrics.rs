//! The metrics of a proxy: its page for Prometheus.

use crate::operate::process::Process;
use crate::operate::status::{self, UpstreamStatus};
use crate::record::counters::{DirectionCounters, LoopCounters};
use crate::record::log::End;
use crate::upstreams::closing::Closings;
use crate::upstreams::routing::CurrentTable;
use crate::upstreams::upstream::AdminState;
use haul_server::SingleWriterCounter;
use haul_server::metrics::{Collect, Exposition, seconds_since_1970};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The metrics of a proxy.
pub struct ProxyMetrics {
    /// The process, with the counters of all event loops.
    pub process: Arc<Process>,
    /// The upstreams.
    pub table: Arc<CurrentTable>,
    /// When the connections of upstreams are closed.
    pub closings: Arc<Closings>,
}

impl ProxyMetrics {
    fn sum(&self, of: impl Fn(&LoopCounters) -> &SingleWriterCounter) -> u64 {
        self.process.loops.iter().map(|counters| of(counters).get()).fold(0, u64::wrapping_add)
    }

    /// The results of the reloads.
    fn reloads(&self, text: &mut Exposition) {
        let history = self.process.reloader.history();
        let name = "haul_proxy_reloads_total";
        text.family(name, "counter", "Reloads of the configuration, by their result.");
        text.sample(name, "result=\"success\"", history.succeeded);
        text.sample(name, "result=\"failure\"", history.failed);
        let Some(last) = history.last else { return };
        text.gauge(
            "haul_proxy_last_reload_successful",
            "Whether the latest reload has put the configuration in force.",
            u8::from(last.error.is_none()),
        );
        text.gauge(
            "haul_proxy_last_reload_timestamp_seconds",
            "When the latest reload ended, in seconds since 1970.",
            seconds_since_1970(last.time),
        );
    }

    fn direction(
        &self,
        text: &mut Exposition,
        direction: &str,
        of: impl Fn(&LoopCounters) -> &DirectionCounters,
    ) {
        let spliced = self.sum(|counters| &of(counters).spliced_bytes);
        let copied = self.sum(|counters| &of(counters).copied_bytes);
        for (method, bytes) in [("splice", spliced), ("copy", copied)] {
            let label = format!("direction=\"{direction}\",method=\"{method}\"");
            text.sample("haul_proxy_forwarded_bytes_total", &label, bytes);
        }
    }
}

/// A metric of each upstream: its name, kind and help, and its value, if the upstream has the
/// metric.
type UpstreamMetric =
    (&'static str, &'static str, &'static str, fn(&UpstreamStatus) -> Option<u64>);

const UPSTREAM_METRICS: [UpstreamMetric; 9] = [
    ("haul_proxy_upstream_connections", "gauge", "Connections to each upstream.", |one| {
        Some(one.counts.open_connections as u64)
    }),
    (
        "haul_proxy_upstream_connections_max",
        "gauge",
        "Most connections at a time, of each upstream with a limit.",
        |one| one.share.connections_max.map(|max| max as u64),
    ),
    ("haul_proxy_upstream_connected_total", "counter", "Connections established.", |one| {
        Some(one.counts.connected)
    }),
    ("haul_proxy_upstream_failed_total", "counter", "Connections not established.", |one| {
        Some(one.counts.failed)
    }),
    ("haul_proxy_upstream_failed_checks_total", "counter", "Active checks failed.", |one| {
        one.check.as_ref().map(|check| check.failed)
    }),
    (
        "haul_proxy_upstream_up",
        "gauge",
        "Whether the active check has found the upstream up.",
        |one| is_configured(one).then(|| one.is_up.into()),
    ),
    (
        "haul_proxy_upstream_ejected",
        "gauge",
        "Whether the upstream is ejected, because it could not be connected to.",
        |one| is_configured(one).then(|| one.is_ejected.into()),
    ),
    (
        "haul_proxy_upstream_enabled",
        "gauge",
        "Whether the upstream is neither draining nor disabled.",
        |one| is_configured(one).then(|| (one.administration == AdminState::Enabled).into()),
    ),
    (
        "haul_proxy_upstream_weight",
        "gauge",
        "Share of the connections, in relation to the others'.",
        |one| is_configured(one).then(|| one.share.weight.into()),
    ),
];

/// Whether an upstream is in the configuration. Some values of a removed upstream mean nothing.
fn is_configured(upstream: &UpstreamStatus) -> bool {
    upstream.administration != AdminState::Removed
}

/// Escapes the value of a label. A path may have any character.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

impl Collect for ProxyMetrics {
    fn collect(&self, text: &mut Exposition) {
        let process = &self.process;
        self.reloads(text);
        let connections: Vec<_> = process.loops.iter().map(|loop_| &loop_.connections).collect();
        text.connections(&connections);
        text.gauge(
            "haul_proxy_connections_max",
            "The most connections at a time: other clients wait in the kernel.",
            process.connections_max() as u64,
        );
        let name = "haul_proxy_loop_connections";
        text.family(name, "gauge", "Connections of each event loop.");
        for (index, connections) in connections.iter().enumerate() {
            text.sample(name, &format!("loop=\"{index}\""), connections.open.get());
        }
        let name = "haul_proxy_listener_connections_total";
        text.family(name, "counter", "Clients that each listener has accepted.");
        let mut accepted = BTreeMap::<String, u64>::new();
        for listener in process.listeners() {
            // Two listeners may have the port 0, which stands for any free port.
            *accepted.entry(listener.address).or_default() += listener.accepted;
        }
        for (listener, accepted) in accepted {
            text.sample(name, &format!("listener=\"{}\"", escape(&listener)), accepted);
        }
        let name = "haul_proxy_connections_total";
        text.family(name, "counter", "Connections that have ended, by how.");
        for (at, end) in End::ALL.iter().enumerate() {
            let label = format!("end=\"{}\"", end.name());
            text.sample(name, &label, self.sum(|counters| &counters.ends[at]));
        }
        let name = "haul_proxy_forwarded_bytes_total";
        text.family(name, "counter", "Bytes of ended connections, by direction and method.");
        self.direction(text, "to-upstream", |counters| &counters.to_upstream);
        self.direction(text, "to-client", |counters| &counters.to_client);
        let table = self.table.get();
        let upstreams = status::upstreams(&table, &self.closings, |_| true);
        for (name, kind, help, value_of) in UPSTREAM_METRICS {
            text.family(name, kind, help);
            for upstream in &upstreams {
                let (group, address) = (escape(&upstream.group), escape(&upstream.upstream));
                if let Some(value) = value_of(upstream) {
                    text.sample(name, &format!("group=\"{group}\",upstream=\"{address}\""), value);
                }
            }
        }
        let name = "haul_proxy_queued_connections";
        text.family(name, "gauge", "Clients that wait for an upstream below its limit.");
        for group in table.groups() {
            let label = format!("group=\"{}\"", escape(group.name()));
            text.sample(name, &label, group.queue().len() as u64);
        }
    }
}
