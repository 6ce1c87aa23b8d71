//! Safe wrappers of the kernel facilities that only the lab and the measurements need, one per
//! file: namespaces, child processes, lifelines, device settings, counters, profiles, filters,
//! signals, sockmap, TUN devices, checksums, mapped files, marks for an emulator.
//!
//! They are apart from `haul-sys`, so that a program which uses the library does not link them.
//! Some of them fork, or change the namespaces of the calling thread.
//!
//! Errors are [`std::io::Error`] with the kernel's errno unchanged.

pub mod child;
pub mod clock;
pub mod ethtool;
pub mod interface;
pub mod lifeline;
pub mod mapped_file;
pub mod marker;
pub mod namespace;
pub mod peer;
pub mod perf;
pub mod process_stat;
pub mod rusage;
pub mod sched;
pub mod seccomp;
pub mod shared_counters;
pub mod signals;
pub mod sockmap;
pub mod tun;
pub mod udp;
