//! Processes that a measured command left behind.
//!
//! The kernel adds the CPU time of a process to its parent's account when the parent waits for the
//! process (`getrusage(RUSAGE_CHILDREN)`). A script that kills its server and does not wait leaves
//! the server's time out. So this process adopts the orphans of the command
//! (`PR_SET_CHILD_SUBREAPER`, Linux 3.4), waits for the ended ones, and names the others.

use haul_lab_sys::process_stat::ProcessStat;
use rustix::process::{Pid, WaitId, WaitIdOptions, getpid, set_child_subreaper, waitid};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a process that was killed at the end of the command may take to end.
const END_MAX: Duration = Duration::from_millis(300);
/// Interval at which the children are listed again.
const INTERVAL: Duration = Duration::from_millis(5);
/// Processes that a warning names.
const NAMED_MAX: usize = 4;

/// The orphans that ran on after their command.
static ORPHANS: Mutex<Vec<u32>> = Mutex::new(Vec::new());

fn orphans() -> MutexGuard<'static, Vec<u32>> {
    ORPHANS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The children of this process that are not orphans of a command.
pub(crate) struct KnownChildren {
    processes: Vec<u32>,
    /// On a full machine the meter of an earlier measurement takes long to end. Its CPU time is not
    /// the command's.
    meter_sessions: Vec<u32>,
}

impl KnownChildren {
    /// Makes this process the parent of every orphan among its descendants, and lists the children
    /// that it has before a command starts. `None` if the kernel does not adopt orphans.
    pub fn before_command(meter_sessions: Vec<u32>) -> Option<Self> {
        set_child_subreaper(Some(getpid())).ok()?;
        // Spinners of earlier measurements that ended would stay as zombies.
        for (process, _) in children().filter(|(_, stat)| meter_sessions.contains(&stat.session)) {
            reap_if_ended(process);
        }
        orphans().retain(|&process| !reap_if_ended(process));
        let processes = children().map(|(process, _)| process).collect();
        Some(Self { processes, meter_sessions })
    }

    /// Waits for the orphans that end soon, so that their CPU time is accounted. Describes the
    /// orphans that run on; `None` if all ended.
    pub fn reap_others(&self) -> Option<String> {
        let deadline = Instant::now() + END_MAX;
        loop {
            let is_orphan = |process: u32, stat: &ProcessStat| {
                !self.processes.contains(&process) && !self.meter_sessions.contains(&stat.session)
            };
            let running: Vec<_> = children()
                .filter(|(process, stat)| is_orphan(*process, stat) && !reap_if_ended(*process))
                .collect();
            if running.is_empty() {
                return None;
            }
            if Instant::now() >= deadline {
                orphans().extend(running.iter().map(|(process, _)| process));
                let name = |(process, stat): &(u32, ProcessStat)| {
                    format!("{} (process {process})", stat.name)
                };
                let mut running: Vec<String> = running.iter().map(name).collect();
                let more = running.len().saturating_sub(NAMED_MAX);
                running.truncate(NAMED_MAX);
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                return Some(running.join(", ") + &more);
            }
            thread::sleep(INTERVAL);
        }
    }
}

/// Waits for a child if the child ended. Returns whether the child is gone.
fn reap_if_ended(process: u32) -> bool {
    let Some(process) = Pid::from_raw(process.cast_signed()) else { return true };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    !matches!(waitid(WaitId::Pid(process), options), Ok(None))
}

/// The children of this process. Empty if `/proc` does not show them.
fn children() -> impl Iterator<Item = (u32, ProcessStat)> {
    ProcessStat::all().filter(|(_, stat)| stat.parent == std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_lab_sys::rusage::{Who, usage};
    use std::process::Command;

    /// One test, because all tests of this program have the same children.
    #[test]
    fn orphans_that_ended_are_accounted_and_others_are_named() {
        let known = KnownChildren::before_command(Vec::new()).unwrap();
        let before = usage(Who::Children).unwrap().cpu();
        // The loop uses a second of CPU time. Its parent ends first, after the loop started.
        let folder = tempfile::tempdir().unwrap();
        let line = "timeout --foreground 60 \
                    sh -c ': > started; ulimit -t 1; while :; do :; done' & \
                    while ! [ -e started ]; do sleep 0.01; done";
        Command::new("sh").args(["-c", line]).current_dir(folder.path()).status().unwrap();
        let limit = Instant::now() + Duration::from_secs(60);
        let named = known.reap_others();
        while known.reap_others().is_some() {
            assert!(Instant::now() < limit, "the orphan does not end");
        }
        assert!(named.unwrap().contains("timeout"));
        let used = usage(Who::Children).unwrap().cpu().saturating_sub(before);
        assert!(used >= Duration::from_millis(900), "{used:?}");
    }
}
