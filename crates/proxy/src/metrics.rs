//! The counters of a proxy, and their page for Prometheus.

use crate::log::End;
use crate::routing::{CurrentTable, RoutingTable};
use crate::upstream::{Upstream, UpstreamCounters};
use haul::{DirectionReport, ForwardReport};
use haul_server::metrics::{Collect, Exposition};
use haul_server::{ConnectionCounters, Counter};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// The counters of one event loop.
#[derive(Debug, Default)]
pub struct LoopCounters {
    /// The connections.
    pub connections: ConnectionCounters,
    /// Connections by their end, in the order of [`End::ALL`].
    ends: [Counter; End::ALL.len()],
    to_upstream: DirectionCounters,
    to_client: DirectionCounters,
}

/// Bytes of ended connections, by how they were forwarded.
#[derive(Debug, Default)]
struct DirectionCounters {
    spliced_bytes: Counter,
    copied_bytes: Counter,
}

impl DirectionCounters {
    fn record(&self, report: &DirectionReport) {
        self.spliced_bytes.add(report.spliced.bytes);
        self.copied_bytes.add(report.copied.bytes);
    }
}

impl LoopCounters {
    /// Counts a connection that has ended.
    pub fn record(&self, end: End, report: &ForwardReport) {
        if let Some(at) = End::ALL.iter().position(|&other| other == end) {
            self.ends[at].add(1);
        }
        self.to_upstream.record(&report.a_to_b);
        self.to_client.record(&report.b_to_a);
    }
}

/// The metrics of a proxy.
pub struct ProxyMetrics {
    /// The counters of all event loops.
    pub loops: Vec<Arc<LoopCounters>>,
    /// The upstreams.
    pub table: Arc<CurrentTable>,
}

impl ProxyMetrics {
    fn sum(&self, of: impl Fn(&LoopCounters) -> &Counter) -> u64 {
        self.loops.iter().map(|counters| of(counters).get()).fold(0, u64::wrapping_add)
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

/// A metric of the upstreams: its name, kind and help, and the value of each.
fn write_upstreams(
    text: &mut Exposition,
    table: &RoutingTable,
    (name, kind, help): (&str, &str, &str),
    of: impl Fn(&UpstreamCounters) -> u64,
) {
    text.family(name, kind, help);
    for (label, upstream) in labelled(table) {
        text.sample(name, &label, of(upstream.counters()));
    }
}

/// The upstreams, each with its labels.
fn labelled(table: &RoutingTable) -> impl Iterator<Item = (String, &Upstream)> {
    table.groups().iter().flat_map(|group| {
        let label = |upstream: &Upstream| {
            let (group, upstream) = (escape(group.name()), escape(upstream.name()));
            format!("group=\"{group}\",upstream=\"{upstream}\"")
        };
        group.upstreams().iter().map(move |upstream| (label(upstream), upstream.as_ref()))
    })
}

/// Escapes the value of a label. A path may have any character.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

impl Collect for ProxyMetrics {
    fn collect(&self, text: &mut Exposition) {
        let connections: Vec<_> = self.loops.iter().map(|loop_| &loop_.connections).collect();
        text.connections(&connections);
        let name = "haul_proxy_loop_connections";
        text.family(name, "gauge", "Connections of each event loop.");
        for (index, connections) in connections.iter().enumerate() {
            text.sample(name, &format!("loop=\"{index}\""), connections.open.get());
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
        write_upstreams(
            text,
            &table,
            ("haul_proxy_upstream_connections", "gauge", "Connections to each upstream."),
            |counters| counters.open.load(Relaxed) as u64,
        );
        write_upstreams(
            text,
            &table,
            ("haul_proxy_upstream_connected_total", "counter", "Connections established."),
            |counters| counters.connected.load(Relaxed),
        );
        write_upstreams(
            text,
            &table,
            ("haul_proxy_upstream_failed_total", "counter", "Connections not established."),
            |counters| counters.failed.load(Relaxed),
        );
        let name = "haul_proxy_queued_connections";
        text.family(name, "gauge", "Clients that wait for an upstream below its limit.");
        for group in table.groups() {
            let label = format!("group=\"{}\"", escape(group.name()));
            text.sample(name, &label, group.queue().len() as u64);
        }
        let name = "haul_proxy_upstream_up";
        text.family(name, "gauge", "Whether the active check has found the upstream up.");
        for (label, upstream) in labelled(&table) {
            text.sample(name, &label, u64::from(!upstream.is_down()));
        }
    }
}
