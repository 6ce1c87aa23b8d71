//! Selects the congestion control of the sockets.

use crate::error::BenchError;
use crate::topology::Topology;
use rustix::net::{AddressFamily, SocketType, ipproto, socket, sockopt};
use std::fs;
use std::io;

/// Congestion controls without pacing of their own, the common one first.
const UNPACED: [&str; 2] = ["cubic", "reno"];

/// The default congestion control of new sockets.
pub(crate) const DEFAULT_CONGESTION_FILE: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

/// Whether a congestion control paces by itself.
pub(crate) fn paces(name: &str) -> bool {
    name.starts_with("bbr")
}

/// The named congestion control, or else the first of [`UNPACED`] that can be set here, and on the
/// other machine if there is one.
///
/// It is tried on a socket of the lab, since the name may be wrong. Outside a separate network
/// namespace, a process without privileges may set only some.
pub(crate) fn choose<'a>(
    topology: impl Into<Topology<'a>>,
    named: Option<&str>,
) -> Result<String, BenchError> {
    let topology = topology.into();
    let candidates = named.map_or(UNPACED.to_vec(), |name| vec![name]);
    let mut refusals = Vec::new();
    for name in candidates {
        let result = match topology.lab() {
            Some(lab) => lab.sender.run(|| try_on_socket(name))?,
            None => try_on_socket(name),
        };
        let remote = topology.pair().map(|pair| &pair.facts().congestion);
        match result {
            Ok(()) if remote.is_none_or(|remote| remote.iter().any(|known| known == name)) => {
                // For sockets that the experiment does not create. Its own sockets set theirs
                // before they connect, even if the namespace does not allow this default.
                if let Some(lab) = topology.lab() {
                    let _ = lab.set_default_congestion(name);
                }
                return Ok(name.into());
            }
            Ok(()) => {
                refusals.push(format!(
                    "congestion control {name:?} cannot be set on the other machine"
                ));
            }
            Err(error) => {
                refusals.push(refusal(name, &error));
            }
        }
    }
    Err(nothing_to_set(&refusals))
}

fn refusal(name: &str, error: &io::Error) -> String {
    format!("congestion control {name:?} cannot be set: {error}")
}

fn nothing_to_set(refusals: &[String]) -> BenchError {
    let available = available().join(" ");
    BenchError::BadInput(format!("{} (available: {available})", refusals.join("; ")))
}

/// The named congestion control, or else the first of [`UNPACED`] that this process can set.
pub(crate) fn choose_here(named: Option<&str>) -> Result<String, BenchError> {
    let candidates = named.map_or(UNPACED.to_vec(), |name| vec![name]);
    let mut refusals = Vec::new();
    for name in candidates {
        match try_on_socket(name) {
            Ok(()) => return Ok(name.into()),
            Err(error) => refusals.push(refusal(name, &error)),
        }
    }
    Err(nothing_to_set(&refusals))
}

/// The congestion controls that can be set on a socket of this process.
pub(crate) fn settable() -> Vec<String> {
    available().into_iter().filter(|name| try_on_socket(name).is_ok()).collect()
}

fn available() -> Vec<String> {
    let names = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control");
    names.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

fn try_on_socket(name: &str) -> io::Result<()> {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, Some(ipproto::TCP))?;
    Ok(sockopt::set_tcp_congestion(&socket, name)?)
}
