//! The origin of a report: the version of haul, the commit that it was built from, the host and
//! the command line.
//!
//! The commit comes from git when the crate is built. Without a git checkout it is empty.

#![forbid(unsafe_code)]

/// The version of all crates, such as `0.1.0`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The abbreviated commit; empty if unknown.
pub const COMMIT: &str = env!("HAUL_COMMIT");

/// The version with its commit: `0.1.0 (1a2b3c4, 2026-11-22)`, or `0.1.0` if the commit is unknown.
pub const FULL: &str = env!("HAUL_FULL_VERSION");

/// The name of this host.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The release of this host's kernel.
pub fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// The arguments of this process, the program's name first.
pub fn command_line() -> Vec<String> {
    std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_full_version_begins_with_the_version() {
        assert!(super::FULL.starts_with(super::VERSION));
    }
}
