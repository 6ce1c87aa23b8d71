//! Child processes: one that does not outlive its parent, one in a session of its own.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Has the kernel kill the child when the *thread* that spawns it ends, however it ends (`PR_SET_PDEATHSIG`).
///
/// The signal is tied to the spawning thread, not to the process: that thread must stay until the child is
/// done. A child that changes its own credentials (a set-user-ID program) loses the setting.
pub fn dies_with_parent(command: &mut Command) -> &mut Command {
    // SAFETY: the closure runs between fork and exec and makes one async-signal-safe system call; it
    // neither allocates nor locks.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
                .map_err(std::io::Error::from)
        })
    }
}

/// Has the child start in a new session, and so in a scheduling autogroup of its own where there are any.
pub fn in_new_session(command: &mut Command) -> &mut Command {
    // SAFETY: as above; setsid is async-signal-safe and cannot fail for a child that leads no group.
    unsafe { command.pre_exec(|| rustix::process::setsid().map(drop).map_err(std::io::Error::from)) }
}
