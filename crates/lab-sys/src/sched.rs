//! Idle-priority scheduling of the calling thread.

use std::io;

/// Gives the calling thread idle priority: it runs only when no other thread needs its CPU.
///
/// Two settings are made. `SCHED_IDLE` (Linux 2.6.23) lets every ordinary thread preempt it at
/// once. Nice 19 does not change that, but makes the kernel account the thread's time as `nice` in
/// `/proc/stat`. There `account_user_time` in kernel/sched/cputime.c checks the nice value, not the
/// policy. So the time of an idle-priority spinner can be separated from the load that it measures.
///
/// Neither setting needs a privilege, since both only lower the thread's priority.
pub fn run_at_idle_priority() -> io::Result<()> {
    // The system call itself: musl's function of this name always fails with `ENOSYS`, and its
    // sched_param has more fields than the kernel's.
    let priority: libc::c_int = 0;
    // SAFETY: the kernel reads a sched_param, one int, which is valid for the duration of the call;
    // pid 0 is the calling thread.
    let result = unsafe {
        libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_IDLE, &raw const priority)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: setpriority takes integers only; who 0 is the calling thread.
    if unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
