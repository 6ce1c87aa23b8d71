//! A lab: two hosts on one machine, to measure the cost of network work on each of them.
//!
//! A [`Lab`] is two network namespaces joined by a veth pair. Each [`Host`] has a CPU of its own:
//! its threads are pinned there, and receive packet steering directs its received packets there. So
//! one CPU's load is the sending host's and the other CPU's the receiving host's, as with two
//! machines.
//!
//! With [`Settings::delay`] packets take a time from one host to the other.
//!
//! The lab leaves nothing behind, even after `kill -9`. The namespaces have no name, only this
//! process's file descriptors hold them, and a namespace's devices are removed with it. Programs
//! started on a host are killed with this process. Processes started by those programs are not, and
//! hold the namespace until they end.
//!
//! Limitations: a veth pair has no interrupts of its own, no DMA and no physical link;
//! `MSG_ZEROCOPY` copies on it; and the two CPUs share a last-level cache and memory.
//!
//! Root needs no other setup. An ordinary user first calls [`enter_user_namespace`], before the
//! process has a second thread. If namespaces are forbidden or there is only one CPU, [`Lab::open`]
//! falls back to loopback, and [`Lab::caveats`] describes the effects.

#![forbid(unsafe_code)]

mod advice;
mod cpus;
mod delay_line;
mod distance;
mod error;
mod host;
mod impair;
mod lab;
mod link;
mod netlink;
mod receive;
mod setting;
mod steer;

pub use advice::namespace_fix;
pub use cpus::{CpuPair, allowed_cpus};
pub use error::{LabError, MTU_MAX, MTU_MIN};
pub use host::{Host, Running};
pub use impair::{Loss, ParseLossError};
pub use lab::{Kind, Lab, Settings, enter_user_namespace};
pub use link::Offloads;
pub use receive::Reception;
pub use setting::HostSetting;
