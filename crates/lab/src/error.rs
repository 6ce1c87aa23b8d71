//! Errors of creating or changing a lab.

use std::io;

/// The smallest MTU for IPv4 (RFC 791 requires every link to accept 576-byte datagrams).
pub const MTU_MIN: u32 = 576;
/// The largest MTU of a veth device (`ETH_MAX_MTU`).
pub const MTU_MAX: u32 = 65_535;

/// Errors of creating or changing a lab.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// The kernel does not allow this user to create namespaces.
    #[error("namespaces are refused here ({error}): {advice}")]
    NoNamespaces {
        /// The kernel's error.
        error: io::Error,
        /// How to allow it.
        advice: String,
    },
    /// The process may run on one CPU only.
    #[error(
        "only CPU {cpu} is allowed to this process: give it two (taskset, cpuset) for separate \
         hosts"
    )]
    OneCpu {
        /// That CPU.
        cpu: usize,
    },
    /// A veth device cannot have this MTU.
    #[error("MTU {0} is outside {MTU_MIN} to {MTU_MAX}")]
    Mtu(u32),
    /// A step of building or changing the lab failed.
    #[error("{step}: {error}")]
    Step {
        /// The step that failed.
        step: String,
        /// The kernel's error.
        error: io::Error,
    },
    /// The setting exists only in a veth lab.
    #[error("{0} cannot be set on loopback: it needs two hosts in namespaces")]
    Loopback(&'static str),
    /// A device did not change an offload.
    #[error("device {device} keeps offload {offload} {state}")]
    Offload {
        /// The device.
        device: String,
        /// The offload's ethtool name.
        offload: &'static str,
        /// `on` or `off`.
        state: &'static str,
    },
    /// A setting of the whole machine cannot be changed.
    #[error("host setting {name} cannot be changed: {error} (run as root, outside a container)")]
    Setting {
        /// The setting's name, as in `sysctl`.
        name: String,
        /// The kernel's error.
        error: io::Error,
    },
    /// A program that the lab runs is missing or failed.
    #[error("{program} {problem}")]
    Program {
        /// The program.
        program: &'static str,
        /// The problem, and how to solve it.
        problem: String,
    },
}

impl LabError {
    pub(crate) fn step(step: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::Step { step: step.into(), error }
    }
}
