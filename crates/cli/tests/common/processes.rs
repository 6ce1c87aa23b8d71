//! Processes, by what `/proc` shows.

pub use haul_testing::wait_until;
use std::fs;

/// The state and the parent of a process; `None` if the process does not exist.
fn state_of(process: u32) -> Option<(String, u32)> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name is in parentheses and may contain any byte. The state and the parent follow.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
}

/// The running children of a process.
pub fn children_of(parent: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    processes
        .filter(|&process| state_of(process).is_some_and(|(_, other)| other == parent))
        .filter(|&process| is_running(process))
        .collect()
}

/// Whether a process exists and is not a zombie.
pub fn is_running(process: u32) -> bool {
    state_of(process).is_some_and(|(state, _)| state != "Z" && state != "X")
}
