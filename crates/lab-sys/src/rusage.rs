//! `getrusage`: the CPU time that the kernel charges to a thread, the process, or its ended
//! children.

use std::io;
use std::time::Duration;

/// Selects the tasks whose usage is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// The calling thread (`RUSAGE_THREAD`, Linux 2.6.26).
    Thread,
    /// All threads of the process.
    Process,
    /// Children that have ended and were waited for, and their descendants likewise.
    Children,
}

/// Resource usage as `getrusage` reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Time in user mode.
    pub user: Duration,
    /// Time in the kernel on behalf of the task. Work done in interrupts is charged to no process.
    pub system: Duration,
    /// Voluntary and involuntary context switches.
    pub context_switches: u64,
}

impl Usage {
    /// Returns user plus system time.
    pub fn cpu(&self) -> Duration {
        self.user + self.system
    }
}

/// Reads the resource usage of `who`.
pub fn usage(who: Who) -> io::Result<Usage> {
    let who = match who {
        Who::Thread => libc::RUSAGE_THREAD,
        Who::Process => libc::RUSAGE_SELF,
        Who::Children => libc::RUSAGE_CHILDREN,
    };
    // SAFETY: an all-zero rusage is a valid value of this plain C struct.
    let mut raw: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `raw` is a valid place for the result.
    if unsafe { libc::getrusage(who, &raw mut raw) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let duration =
        |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    Ok(Usage {
        user: duration(raw.ru_utime),
        system: duration(raw.ru_stime),
        context_switches: (raw.ru_nvcsw + raw.ru_nivcsw) as u64,
    })
}
