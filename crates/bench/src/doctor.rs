//! What this kernel, network device and limit set allow, and how to mend what they do not.
//!
//! Nothing is changed. Paths are tried on loopback; whether one would avoid the copy towards a peer is
//! concluded from the device that leads there, since the device decides: see each path's own page for the
//! rule.

mod paths;
mod peer;
mod settings;
mod sockets;

pub use peer::PeerError;
pub(crate) use peer::{device_towards, mtu_of};

use serde::Serialize;

/// The contract's name and version. A field that is added keeps the version; one that changes or goes does
/// not.
pub const SCHEMA: &str = "haul.doctor/1";

/// The findings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Diagnosis {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// The kernel's release.
    pub kernel: String,
    /// The device that the findings on copies are for.
    pub device: DeviceFacts,
    /// Each path.
    pub paths: Vec<PathFinding>,
    /// Each feature, limit and setting.
    pub settings: Vec<Finding>,
}

/// A network device, as far as it decides whether bytes are copied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceFacts {
    /// The peer it leads to, as it was given.
    pub peer: Option<String>,
    /// The peer's address.
    pub address: Option<String>,
    /// Whether it answered; a firewall may keep it from that.
    pub answered: Option<bool>,
    /// The device's name.
    pub name: String,
    /// Its driver; `lo` has none.
    pub driver: Option<String>,
    /// In bytes.
    pub mtu: Option<u32>,
    /// Whether it gathers packets from several pieces of memory.
    pub scatter_gather: Option<bool>,
    /// Whether it computes checksums.
    pub transmit_checksum: Option<bool>,
    /// Whether it cuts large segments.
    pub segmentation: Option<bool>,
}

/// One path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PathFinding {
    /// Its name.
    pub path: String,
    /// Whether the kernel does it.
    pub available: bool,
    /// Whether it would really avoid the copy through this device.
    pub avoids_copy: bool,
    /// Why, or why not.
    pub why: String,
    /// The command or setting that mends it.
    pub mend: Option<String>,
}

/// How a setting stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Nothing to do.
    Good,
    /// It works and costs.
    Costly,
    /// Something does not work for it.
    Missing,
}

/// One feature, limit or setting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What it is called.
    pub name: &'static str,
    /// What it is now.
    pub value: String,
    /// How it stands.
    pub verdict: Verdict,
    /// What that means.
    pub why: String,
    /// The command or setting that mends it.
    pub mend: Option<String>,
}

/// Examines this machine, towards `peer` if there is one, else towards the default route, else loopback.
///
/// Begins by giving an ordinary user's process the user namespace that a lab needs, and so wants to be called
/// before the process has a second thread.
pub fn examine(peer: Option<&str>) -> Result<Diagnosis, PeerError> {
    // First of all: a ring gives the process a second thread, and with it ends the right to a user namespace.
    let user = settings::User::become_lab_user();
    let device = device_towards(peer)?;
    Ok(Diagnosis {
        schema: SCHEMA,
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        paths: paths::examine(&device),
        settings: settings::examine(&device, &user),
        device,
    })
}
