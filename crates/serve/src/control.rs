//! The control socket: commands of an operator to a running file service.
//!
//! A command is one line, and its answer one line of JSON ([`ControlResponse`]):
//!
//! | command | effect |
//! |---|---|
//! | `reload` | reads the certificate and the passwords again, and opens the access log again |
//! | `status` | shows the version, the addresses, the connections and the latest reload |

use crate::handle::Handle;
use crate::status::{ControlResponse, ServiceStatus, timestamp};
use std::time::{Instant, SystemTime};

/// Carries out commands.
#[derive(Debug)]
pub struct Controller {
    handle: Handle,
    started: (SystemTime, Instant),
    addresses: Vec<String>,
}

impl Controller {
    /// The controller of a service that started at this time and listens at these addresses.
    pub fn new(handle: Handle, started: (SystemTime, Instant), addresses: Vec<String>) -> Self {
        Self { handle, started, addresses }
    }

    /// Carries out the command of a line, and returns the line of its answer.
    pub fn answer(&self, line: &str) -> Vec<u8> {
        let response = match line.split_ascii_whitespace().collect::<Vec<_>>()[..] {
            ["reload"] => ControlResponse::Reloaded(Box::new(self.handle.reload_with_status().0)),
            ["status"] => ControlResponse::Status(Box::new(self.status())),
            _ => {
                ControlResponse::Error(format!("unknown command {line:?}: write reload or status"))
            }
        };
        // Writing to memory does not fail, and neither do these types.
        let mut text = serde_json::to_vec(&response).unwrap_or_default();
        text.push(b'\n');
        text
    }

    fn status(&self) -> ServiceStatus {
        let (handle, config) = (&self.handle, self.handle.config());
        let open = handle.counters().iter().map(|counters| counters.connections.open.get());
        ServiceStatus {
            version: config.version.clone(),
            pid: std::process::id(),
            started: timestamp(self.started.0),
            uptime_seconds: self.started.1.elapsed().as_secs(),
            loops: handle.counters().len(),
            connections: open.sum(),
            connections_max: config.limits.connections_max,
            is_ending: handle.control().is_draining(),
            root: config.root.display().to_string(),
            addresses: self.addresses.clone(),
            reload: handle.latest_reload(),
        }
    }
}
