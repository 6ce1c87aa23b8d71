//! Which congestion control the sockets get.

use crate::BenchError;
use haul_lab::Lab;
use rustix::net::{AddressFamily, SocketType, ipproto, socket, sockopt};
use std::fs;
use std::io;

/// Congestion controls that do not pace by themselves, the common one first.
const UNPACED: [&str; 2] = ["cubic", "reno"];

/// The one that was named, else the first unpaced one that may be set here.
///
/// Tried on a socket of the lab, since a name can be wrong, and outside a namespace of his own an ordinary
/// user may set only some.
pub(crate) fn choose(lab: &Lab, named: Option<&str>) -> Result<String, BenchError> {
    let candidates = named.map_or(UNPACED.to_vec(), |name| vec![name]);
    let mut refusals = Vec::new();
    for name in candidates {
        match attempt(lab, name)? {
            Ok(()) => return Ok(name.into()),
            Err(error) => refusals.push(format!("congestion control {name:?} cannot be set: {error}")),
        }
    }
    let available = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control");
    Err(BenchError::BadInput(format!(
        "{} (available: {})",
        refusals.join("; "),
        available.unwrap_or_default().trim()
    )))
}

fn attempt(lab: &Lab, name: &str) -> Result<io::Result<()>, BenchError> {
    Ok(lab.sender.run(|| {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, Some(ipproto::TCP))?;
        Ok(sockopt::set_tcp_congestion(&socket, name)?)
    })?)
}
