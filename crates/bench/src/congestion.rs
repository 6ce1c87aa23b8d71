//! Which congestion control the sockets get.

use crate::BenchError;
use crate::topology::Topology;
use rustix::net::{AddressFamily, SocketType, ipproto, socket, sockopt};
use std::fs;
use std::io;

/// Congestion controls that do not pace by themselves, the common one first.
const UNPACED: [&str; 2] = ["cubic", "reno"];

/// The default of new sockets.
pub(crate) const DEFAULT_CONGESTION_FILE: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

/// Whether a congestion control paces by itself.
pub(crate) fn paces(name: &str) -> bool {
    name.starts_with("bbr")
}

/// The one that was named, else the first unpaced one that may be set here, and on the other machine where there is one.
///
/// Tried on a socket of the lab, since a name can be wrong, and outside a namespace of his own an ordinary
/// user may set only some.
pub(crate) fn choose<'a>(
    site: impl Into<Topology<'a>>,
    named: Option<&str>,
) -> Result<String, BenchError> {
    let site = site.into();
    let candidates = named.map_or(UNPACED.to_vec(), |name| vec![name]);
    let mut refusals = Vec::new();
    for name in candidates {
        let tried = match site.lab() {
            Some(lab) => lab.sender.run(|| attempt(name))?,
            None => attempt(name),
        };
        let there = site.pair().map(|pair| &pair.facts().congestion);
        match tried {
            Ok(()) if there.is_none_or(|there| there.iter().any(|known| known == name)) => {
                // For sockets that are not the experiment's own. Those set theirs before they connect, also where a
                // namespace may not have this default.
                if let Some(lab) = site.lab() {
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
                refusals.push(format!("congestion control {name:?} cannot be set: {error}"))
            }
        }
    }
    Err(BenchError::BadInput(format!(
        "{} (available: {})",
        refusals.join("; "),
        available().join(" ")
    )))
}

/// All that may be set on a socket of this process.
pub(crate) fn settable() -> Vec<String> {
    available().into_iter().filter(|name| attempt(name).is_ok()).collect()
}

fn available() -> Vec<String> {
    let names = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control");
    names.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

fn attempt(name: &str) -> io::Result<()> {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, Some(ipproto::TCP))?;
    Ok(sockopt::set_tcp_congestion(&socket, name)?)
}
