//! The state of a running file service, as its control socket shows it.

use crate::error::Error;
use jiff::Timestamp;
use rustix::fs::{Mode, OFlags, Stat};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The answer of the control socket to a command.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ControlResponse {
    /// The result of a reload, successful or not.
    Reloaded(Box<ServiceReload>),
    /// The state of the service.
    Status(Box<ServiceStatus>),
    /// The command failed, for this reason.
    Error(String),
}

/// A running file service.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct ServiceStatus {
    /// The version of the program.
    pub version: String,
    /// The number of the process.
    pub pid: u32,
    /// When the process started.
    pub started: String,
    /// Time since the start, in seconds.
    pub uptime_seconds: u64,
    /// The number of event loops.
    pub loops: usize,
    /// Connections that are open now.
    pub connections: u64,
    /// The most connections at a time (`--max-connections`).
    pub connections_max: usize,
    /// Whether the service is ending: it accepts no clients, and open responses have the time of
    /// `--drain-timeout` to finish.
    pub is_ending: bool,
    /// The directory that is served.
    pub root: String,
    /// The addresses at which the service listens.
    pub addresses: Vec<String>,
    /// The latest reload; absent before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reload: Option<ServiceReload>,
}

/// How a reload of a file service ended.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct ServiceReload {
    /// When the reload ended.
    pub time: String,
    /// The names of what was read again, such as `the certificate /etc/haul/tls/c.pem`.
    pub reloaded: Vec<String>,
    /// What could not be read and stays as it was; absent if everything was read again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What the reload did not do; absent without a warning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

impl ServiceReload {
    /// A reload that ended at this time, with these errors.
    pub(crate) fn new(
        time: SystemTime,
        reloaded: Vec<String>,
        errors: &[Error],
        warning: Option<String>,
    ) -> Self {
        let error = (!errors.is_empty()).then(|| joined(errors));
        Self { time: timestamp(time), reloaded, error, warning }
    }
}

/// A version of a file. The open descriptor, without the right to read, tells of changes also after
/// the process became another user.
#[derive(Debug)]
pub struct FileVersion {
    path: PathBuf,
    file: OwnedFd,
    /// The size and the modification time.
    identity: (i64, i64, i64),
}

impl FileVersion {
    /// The present version of a file; `None` if the file cannot be found.
    pub fn of(path: &Path) -> Option<Self> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
        let identity = identity(&rustix::fs::fstat(&file).ok()?);
        Some(Self { path: path.to_owned(), file, identity })
    }

    /// A warning if the file changed after this version, or was replaced.
    pub fn change(&self) -> Option<String> {
        let now = rustix::fs::fstat(&self.file).ok()?;
        let has_changed = now.st_nlink == 0 || identity(&now) != self.identity;
        has_changed.then(|| {
            format!("{} changed after the start: its options need a restart", self.path.display())
        })
    }
}

fn identity(file: &Stat) -> (i64, i64, i64) {
    (file.st_size, file.st_mtime, file.st_mtime_nsec as i64)
}

/// The names of what was read again, as one text.
pub fn reloaded_text(names: &[String]) -> String {
    if names.is_empty() { "nothing".into() } else { names.join(", ") }
}

/// Several errors as one text.
pub fn joined(errors: &[Error]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// A time to the second.
pub fn timestamp(time: SystemTime) -> String {
    format!("{:.0}", Timestamp::try_from(time).unwrap_or_default())
}
