//! Processes that a measured command left behind.
//!
//! The kernel adds the CPU time of a process to its parent's account when the parent waits for the
//! process (`getrusage(RUSAGE_CHILDREN)`). A script that kills its server and does not wait leaves
//! the server's time out. So this process adopts the orphans of the command
//! (`PR_SET_CHILD_SUBREAPER`, Linux 3.4), waits for the ended ones, and names the others.

use rustix::process::{Pid, WaitId, WaitIdOptions, getpid, set_child_subreaper, waitid};
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// How long a process that was killed at the end of the command may take to end.
const END_MAX: Duration = Duration::from_millis(300);
/// Interval at which the children are listed again.
const INTERVAL: Duration = Duration::from_millis(5);
/// Processes that a warning names.
const NAMED_MAX: usize = 4;

/// Makes this process the parent of every orphan among its descendants. Returns whether the kernel
/// does so.
pub(crate) fn adopt() -> bool {
    set_child_subreaper(Some(getpid())).is_ok()
}

/// Waits for the adopted processes that end soon, so that their CPU time is accounted. Describes
/// the processes that run on; `None` if all ended.
///
/// The processes of `meter_sessions` are left alone. On a full machine the meter of an earlier
/// measurement takes long to end, and its CPU time is not the command's.
pub(crate) fn reap(meter_sessions: &[u32]) -> Option<String> {
    let deadline = Instant::now() + END_MAX;
    loop {
        let mut running = Vec::new();
        for Orphan { process, session, name } in children() {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            if meter_sessions.contains(&session) {
                continue;
            }
            if let Ok(None) = waitid(WaitId::Pid(process), options) {
                running.push(format!("{name} (process {})", process.as_raw_nonzero()));
            }
        }
        if running.is_empty() {
            return None;
        }
        if Instant::now() >= deadline {
            let more = running.len().saturating_sub(NAMED_MAX);
            running.truncate(NAMED_MAX);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            return Some(running.join(", ") + &more);
        }
        thread::sleep(INTERVAL);
    }
}

/// A child of this process.
struct Orphan {
    process: Pid,
    session: u32,
    name: String,
}

/// The children of this process. Empty if `/proc` does not show them.
fn children() -> Vec<Orphan> {
    let own = getpid().as_raw_nonzero().get();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let child = |entry: fs::DirEntry| {
        let process = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        // The name is in parentheses and may contain any byte. The state, the parent, the group and
        // the session follow.
        let (start, fields) = stat.rsplit_once(')')?;
        let (_, name) = start.split_once('(')?;
        let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
        let (parent, session) = (fields.get(1)?.parse::<i32>().ok()?, fields.get(3)?.parse().ok()?);
        (parent == own).then(|| Orphan { process, session, name: name.to_owned() })
    };
    entries.filter_map(child).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_lab_sys::rusage::{Who, usage};
    use std::process::Command;

    /// One test, because all tests of this program have the same children.
    #[test]
    fn orphans_that_ended_are_accounted_and_others_are_named() {
        assert!(adopt());
        let before = usage(Who::Children).unwrap().cpu();
        // The loop uses half a second of CPU time, and its parent ends first.
        let line = "(timeout --foreground 60 sh -c 'ulimit -t 1; while :; do :; done') & \
                    sleep 0.01";
        Command::new("sh").args(["-c", line]).status().unwrap();
        let limit = Instant::now() + Duration::from_secs(60);
        let named = reap(&[]);
        while reap(&[]).is_some() {
            assert!(Instant::now() < limit, "the orphan does not end");
        }
        assert!(named.unwrap().contains("timeout"));
        let used = usage(Who::Children).unwrap().cpu().saturating_sub(before);
        assert!(used >= Duration::from_millis(900), "{used:?}");
    }
}
