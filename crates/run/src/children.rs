//! The processes of a command: they end with this process, and this process waits for all.

use haul_lab_sys::child::dies_with_parent;
use haul_lab_sys::process_stat::ProcessStat;
use haul_lab_sys::rusage::{Who, usage};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions, getpid, set_child_subreaper, waitid};
use rustix::process::{PidfdFlags, pidfd_open};
use std::io;
use std::process::{Child, Command};
use std::thread;
use std::time::Duration;

/// Interval at which ended children are looked for.
const WAIT_INTERVAL: Duration = Duration::from_millis(100);

/// Starts a command that ends with the calling thread. Its orphans become children of this process
/// (`PR_SET_CHILD_SUBREAPER`, Linux 3.4), so that a service that goes to the background is waited
/// for.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    set_child_subreaper(Some(getpid()))?;
    dies_with_parent(command).spawn()
}

/// Waits until `process` ends, and leaves it to be waited for. Waits for all other children that
/// end before, but for the broker: a service with many orphans would leave as many zombies.
pub fn reap_others_until(process: Pid, broker: u32) {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    let has_ended = |child| !matches!(waitid(child, options), Ok(None) | Err(Errno::INTR));
    // Before Linux 5.3 the interval is the time that the end is noticed late.
    let pidfd = pidfd_open(process, PidfdFlags::empty());
    let interval = Timespec { tv_sec: 0, tv_nsec: WAIT_INTERVAL.subsec_nanos().into() };
    while !has_ended(WaitId::Pid(process)) {
        // Listing the processes takes long on a machine with many.
        if has_ended(WaitId::All) {
            let ended = children().filter(|(child, stat)| *child != broker && stat.has_ended());
            for (child, _) in ended {
                if Pid::from_raw(child.cast_signed()) != Some(process) {
                    reap(child);
                }
            }
        }
        match &pidfd {
            // Fails only if a signal arrives.
            Ok(pidfd) => drop(poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&interval))),
            Err(_) => thread::sleep(WAIT_INTERVAL),
        }
    }
}

/// Reaps all children that ended, except the broker. Returns whether another child still runs. Does
/// not block.
pub fn reap_remaining(broker: u32) -> bool {
    let mut is_one_running = false;
    for (child, stat) in children().filter(|&(child, _)| child != broker) {
        if stat.has_ended() {
            reap(child);
        } else {
            is_one_running = true;
        }
    }
    is_one_running
}

/// The children of this process.
fn children() -> impl Iterator<Item = (u32, ProcessStat)> {
    ProcessStat::all().filter(|(_, stat)| stat.parent == std::process::id())
}

fn reap(child: u32) {
    if let Some(child) = Pid::from_raw(child.cast_signed()) {
        let _ = waitid(WaitId::Pid(child), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    }
}

/// The CPU time of the children that were waited for.
pub fn children_cpu_time() -> Duration {
    usage(Who::Children).unwrap_or_default().cpu()
}
