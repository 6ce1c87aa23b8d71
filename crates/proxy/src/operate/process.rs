//! The process as a whole: its version, start and latest reload.

use crate::config::Config;
use crate::operate::reload::Reloader;
use crate::record::counters::LoopCounters;
use haul_server::Control;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Instant, SystemTime};

/// A running proxy.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct ProcessStatus {
    /// The version of the program.
    pub version: String,
    /// The process's number.
    pub pid: u32,
    /// When the process was started.
    pub started: String,
    /// Time since the start, in seconds.
    pub uptime_seconds: u64,
    /// The number of event loops.
    pub loops: usize,
    /// Connections open now.
    pub connections: u64,
    /// The most connections at a time (`--max-connections`).
    pub connections_max: usize,
    /// Whether the process is ending: it does not accept clients, and its connections have time to
    /// drain.
    #[serde(default)]
    pub is_ending: bool,
    /// Whether the process before this one still runs.
    pub has_predecessor: bool,
    /// The configuration file; absent without a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_file: Option<String>,
    /// The latest reload; absent before the first reload.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reload: Option<ReloadStatus>,
    /// The listeners, in the order of the configuration.
    pub listeners: Vec<ListenerStatus>,
}

/// How a reload ended.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct ReloadStatus {
    /// When the reload ended.
    pub time: String,
    /// Why the reload changed nothing; absent if the reload succeeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Settings that are not as the file has them, such as settings that need `--upgrade`; absent
    /// if all are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A listener.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct ListenerStatus {
    /// The configured address.
    pub address: String,
    /// The groups of the routes, in the order of the routes, and the group of clients that do not
    /// fit a route. Each group is listed once.
    pub groups: Vec<String>,
    /// The clients that the listener accepted.
    pub accepted: u64,
}

/// The facts that a proxy reports about itself.
#[derive(Debug)]
pub struct Process {
    version: String,
    started: SystemTime,
    started_at: Instant,
    connections_max: usize,
    config_file: Option<String>,
    /// The counters of each event loop.
    pub loops: Vec<Arc<LoopCounters>>,
    /// The reloader has the configuration in force.
    pub reloader: Arc<Reloader>,
    has_predecessor: Arc<AtomicBool>,
    control: Arc<Control>,
}

impl Process {
    /// Creates the description of this process, with its start time.
    pub fn new(
        config: &Config,
        started: (SystemTime, Instant),
        loops: Vec<Arc<LoopCounters>>,
        reloader: Arc<Reloader>,
        has_predecessor: Arc<AtomicBool>,
        control: Arc<Control>,
    ) -> Self {
        Self {
            version: config.process.version.clone(),
            started: started.0,
            started_at: started.1,
            connections_max: config.limits.connections_max,
            config_file: config.process.config_file.as_ref().map(|path| path.display().to_string()),
            loops,
            reloader,
            has_predecessor,
            control,
        }
    }

    /// The most connections at a time.
    pub fn connections_max(&self) -> usize {
        self.connections_max
    }

    /// Whether the process is ending.
    pub fn is_ending(&self) -> bool {
        self.control.is_draining()
    }

    /// The present state.
    pub fn status(&self) -> ProcessStatus {
        let open = self.loops.iter().map(|counters| counters.connections.open.get()).sum();
        ProcessStatus {
            version: self.version.clone(),
            pid: std::process::id(),
            started: timestamp(self.started),
            uptime_seconds: self.started_at.elapsed().as_secs(),
            loops: self.loops.len(),
            connections: open,
            connections_max: self.connections_max,
            is_ending: self.is_ending(),
            has_predecessor: self.has_predecessor.load(Relaxed),
            config_file: self.config_file.clone(),
            reload: self.reloader.history().last.map(|last| ReloadStatus {
                time: timestamp(last.time),
                error: last.error,
                warnings: last.caveats,
            }),
            listeners: self.listeners(),
        }
    }

    /// The listeners, whose groups a reload may have changed.
    pub fn listeners(&self) -> Vec<ListenerStatus> {
        let listeners = self.reloader.listeners().into_iter().enumerate();
        let status = |(at, listener): (usize, crate::config::ListenerConfig)| {
            let accepted = self.loops.iter().map(|counters| counters.listeners[at].get());
            let routed = listener.routed_groups();
            let other = listener.group.as_deref().filter(|group| !routed.contains(group));
            ListenerStatus {
                address: listener.address.to_string(),
                groups: routed.iter().copied().chain(other).map(str::to_owned).collect(),
                accepted: accepted.fold(0, u64::wrapping_add),
            }
        };
        listeners.map(status).collect()
    }
}

fn timestamp(time: SystemTime) -> String {
    // To the second.
    format!("{:.0}", Timestamp::try_from(time).unwrap_or_default())
}
