//! Reports which methods and features this machine supports, and which changes would help: kernel,
//! network device, limits.
//!
//! Nothing is changed. Methods are tried on loopback. Whether a method would avoid the copy to a
//! peer is derived from the device that leads there, because the device decides. The documentation
//! page of each method states the rule.

mod page_cache;
mod paths;
mod peer;
mod settings;
mod sockets;

pub use peer::PeerError;
pub(crate) use peer::device_towards;

use crate::verdict::Safety;
use schemars::JsonSchema;
use serde::Serialize;

/// Name and version of the JSON contract. The version changes if a field changes or is removed, not
/// if one is added.
pub const SCHEMA: &str = "haul.doctor/2";

/// Result of the diagnosis.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Diagnosis {
    /// Name and version of the contract.
    #[schemars(extend("const" = SCHEMA))]
    pub schema: &'static str,
    /// The kernel's release.
    pub kernel: String,
    /// The device for which the findings on copies hold.
    pub device: DeviceFacts,
    /// One finding per send method.
    pub paths: Vec<PathFinding>,
    /// One finding per feature, limit and setting.
    pub settings: Vec<Finding>,
}

/// Facts about a network device that decide whether bytes are copied.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct DeviceFacts {
    /// The peer to which the device leads, as it was given.
    pub peer: Option<String>,
    /// The peer's address.
    pub address: Option<String>,
    /// Whether the peer answered. A firewall may prevent that.
    pub answered: Option<bool>,
    /// The error that came back instead of an answer, from a firewall or a router.
    pub refusal: Option<String>,
    /// Whether there is a route: to the peer, or a default route. Without a route, the device is
    /// loopback.
    pub has_route: bool,
    /// The device's name.
    pub name: String,
    /// Its driver; `lo` has none.
    pub driver: Option<String>,
    /// MTU in bytes.
    pub mtu: Option<u32>,
    /// Whether it has scatter-gather.
    pub scatter_gather: Option<bool>,
    /// Whether it has transmit checksum offload.
    pub transmit_checksum: Option<bool>,
    /// Whether it has TCP segmentation offload.
    pub segmentation: Option<bool>,
}

/// Finding on one send method.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct PathFinding {
    /// The method's name.
    pub path: String,
    /// Whether the kernel supports it.
    pub available: bool,
    /// Whether it would avoid the copy through this device.
    pub avoids_copy: bool,
    /// The reason.
    pub why: String,
    /// The command or setting that enables it.
    pub fix: Option<String>,
}

/// Verdict on a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(rename_all = "kebab-case")]
#[schemars(rename = "DoctorVerdict")]
pub enum Verdict {
    /// Nothing to do.
    Good,
    /// It works. A change would serve a single method.
    Note,
    /// It works, at a cost.
    Costly,
    /// A feature is missing, or the peer does not answer.
    Missing,
}

/// Finding on one feature, limit or setting.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
#[schemars(rename = "DoctorFinding")]
pub struct Finding {
    /// Its name.
    pub name: &'static str,
    /// Its current value.
    pub value: String,
    /// The verdict on it.
    pub verdict: Verdict,
    /// The meaning of the value.
    pub why: String,
    /// The command or setting that improves it.
    pub fix: Option<String>,
    /// Where the fix can be applied without harm; `null` without a fix.
    pub safety: Option<Safety>,
}

/// Examines this machine and its device: towards `peer` if there is a peer, else the device of the
/// default route, else loopback.
///
/// First moves an ordinary user's process into the user namespace that a lab needs. So it must be
/// called before the process has a second thread.
pub fn examine(peer: Option<&str>) -> Result<Diagnosis, PeerError> {
    // Must come first: a ring gives the process a second thread, after which it may not enter a
    // user namespace.
    let user = settings::Privileges::acquire();
    let device = device_towards(peer)?;
    let mut settings = settings::examine(&device, &user);
    settings.extend(page_cache::examine());
    Ok(Diagnosis {
        schema: SCHEMA,
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        paths: paths::examine(&device),
        settings,
        device,
    })
}
