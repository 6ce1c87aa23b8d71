//! Idle-priority scheduling of the calling thread.

use std::io;

/// Makes the calling thread run only when nothing else wants its CPU.
///
/// Two settings are made. `SCHED_IDLE` (Linux 2.6.23) lets every ordinary thread preempt it at once. Nice 19
/// changes nothing about that, but it makes the kernel book the thread's time as `nice` in `/proc/stat`
/// (`account_user_time` in kernel/sched/cputime.c looks at the nice value, not at the policy), so that an
/// idle-priority spinner can be told apart from the load it measures.
///
/// Neither needs a privilege: both only lower the thread's claim.
pub fn run_at_idle_priority() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: `parameters` is a valid sched_param for the duration of the call; pid 0 is the calling thread.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: setpriority takes integers only; who 0 is the calling thread.
    if unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
