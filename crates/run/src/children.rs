//! The processes of a command: they end with this process, and this process waits for all.

use haul_lab_sys::child::dies_with_parent;
use haul_lab_sys::process_stat::ProcessStat;
use haul_lab_sys::rusage::{Who, usage};
use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions, getpid, set_child_subreaper, waitid};
use std::io;
use std::process::{Child, Command};
use std::time::Duration;

/// Starts a command that ends with the calling thread. Its orphans become children of this process
/// (`PR_SET_CHILD_SUBREAPER`, Linux 3.4), so that a service that goes to the background is waited
/// for.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    set_child_subreaper(Some(getpid()))?;
    dies_with_parent(command).spawn()
}

/// Waits until `process` ends, and leaves it to be waited for. Waits for all other children that
/// end before: a service with many orphans would leave as many zombies.
pub fn reap_others_until(process: Pid) {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let has_ended = || {
        let ended = waitid(WaitId::Pid(process), options | WaitIdOptions::NOHANG);
        !matches!(ended, Ok(None) | Err(Errno::INTR))
    };
    while !has_ended() {
        // Returns when any child ended, and does not tell which.
        match waitid(WaitId::All, options) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        let ended = ProcessStat::all()
            .filter(|(_, stat)| stat.parent == std::process::id() && stat.has_ended())
            .filter_map(|(child, _)| Pid::from_raw(child.cast_signed()))
            .filter(|&child| child != process);
        for child in ended {
            let _ = waitid(WaitId::Pid(child), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
        }
    }
}

/// Waits for all children that ended. Returns whether others run.
pub fn reap_remaining() -> bool {
    loop {
        match waitid(WaitId::All, WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) => return true,
            // Every child was waited for.
            Err(_) => return false,
        }
    }
}

/// The CPU time of the children that were waited for.
pub fn children_cpu_time() -> Duration {
    usage(Who::Children).unwrap_or_default().cpu()
}
