//! The process as a whole: what it is, since when it runs, and how its latest reload has ended.

use crate::config::Config;
use crate::counters::LoopCounters;
use crate::reload::Reloader;
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
    /// When it was started.
    pub started: String,
    /// Time since then, in seconds.
    pub uptime_seconds: u64,
    /// The number of event loops.
    pub loops: usize,
    /// Connections open now.
    pub connections: u64,
    /// The most connections at a time (`--max-connections`).
    pub connections_max: usize,
    /// Whether it is ending: it accepts no clients, and its connections have the time to drain.
    #[serde(default)]
    pub is_ending: bool,
    /// Whether the process that this one has taken over from has not ended yet.
    pub has_predecessor: bool,
    /// The configuration file; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_file: Option<String>,
    /// The latest reload; absent if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reload: Option<ReloadStatus>,
    /// The listeners, in the order of the configuration.
    pub listeners: Vec<ListenerStatus>,
}

/// How a reload ended.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct ReloadStatus {
    /// When it ended.
    pub time: String,
    /// Why the reload changed nothing; absent if the reload succeeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What is not as the file has it, such as settings that need `--upgrade`; absent if nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A listener.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct ListenerStatus {
    /// The configured address.
    pub address: String,
    /// The groups of its routes, in their order, and the group of clients that no route fits, each
    /// once.
    pub groups: Vec<String>,
    /// Clients that it has accepted.
    pub accepted: u64,
}

/// What a proxy knows of itself.
#[derive(Debug)]
pub struct Process {
    version: String,
    started: SystemTime,
    started_at: Instant,
    connections_max: usize,
    config_file: Option<String>,
    /// The counters of each event loop.
    pub loops: Vec<Arc<LoopCounters>>,
    /// It has the configuration in force.
    pub reloader: Arc<Reloader>,
    has_predecessor: Arc<AtomicBool>,
    control: Arc<Control>,
}

impl Process {
    /// A process that was started at a time.
    pub fn new(
        config: &Config,
        started: (SystemTime, Instant),
        loops: Vec<Arc<LoopCounters>>,
        reloader: Arc<Reloader>,
        has_predecessor: Arc<AtomicBool>,
        control: Arc<Control>,
    ) -> Self {
        Self {
            version: config.version.clone(),
            started: started.0,
            started_at: started.1,
            connections_max: config.limits.connections_max,
            config_file: config.config_file.as_ref().map(|path| path.display().to_string()),
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

    /// Whether it is ending.
    pub fn is_ending(&self) -> bool {
        self.control.is_draining()
    }

    /// Its state now.
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
