//! Child processes that die with their parent, start in a session of their own, or are a forked
//! copy.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Kills the child when the *thread* that spawned it ends, for whatever reason
/// (`PR_SET_PDEATHSIG`).
///
/// The signal is tied to the spawning thread, not to the process: that thread must live until the
/// child is done. A child that changes its own credentials (a set-user-ID program) loses the
/// setting.
pub fn dies_with_parent(command: &mut Command) -> &mut Command {
    let parent = rustix::process::getpid();
    // SAFETY: the closure runs between fork and exec and makes two async-signal-safe system calls.
    // It neither allocates nor locks.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            // A parent that ended before the call above sends no signal.
            if rustix::process::getppid() == Some(parent) {
                Ok(())
            } else {
                Err(io::Error::from_raw_os_error(libc::ECHILD))
            }
        })
    }
}

/// Starts the child in a new session, and so in a separate scheduling autogroup where the kernel
/// has them.
pub fn start_in_new_session(command: &mut Command) -> &mut Command {
    // SAFETY: as above; setsid is async-signal-safe and cannot fail for a child that leads no
    // group.
    unsafe { command.pre_exec(|| rustix::process::setsid().map(drop).map_err(io::Error::from)) }
}

/// Forks, runs `work` in the child and waits for it; returns the child's exit code, which `work`
/// returned.
///
/// Returns `None` if a signal ended the child. For tests of operations that a forked child may
/// perform. The child has only this thread: `work` must not wait for another thread, and a lock
/// that another thread held stays locked.
pub fn in_forked_child(work: impl FnOnce() -> i32) -> io::Result<Option<i32>> {
    // SAFETY: the child continues on a copy of this thread's memory, in which all references stay
    // valid; glibc makes its own locks usable again. The child leaves by `_exit`, so nothing of the
    // parent's is run or dropped twice.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(101);
            // SAFETY: ends the child at once, without destructors.
            unsafe { libc::_exit(code) }
        }
        child => {
            let mut status = 0;
            haul_sys::syscall(|| {
                // SAFETY: `status` is a valid place for the result.
                let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
                ended as libc::ssize_t
            })?;
            Ok(libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::{unshare_processes_of_children, unshare_user};
    use haul_sys::fork::generation;

    #[test]
    fn each_child_has_another_generation() {
        let own = generation();
        assert_eq!(generation(), own);
        let code = in_forked_child(|| {
            let childs = generation();
            let grandchild = in_forked_child(|| i32::from([own, childs].contains(&generation())));
            i32::from(childs == own || generation() != childs || !matches!(grandchild, Ok(Some(0))))
        });
        assert_eq!(code.unwrap(), Some(0));
        assert_eq!(generation(), own);
    }

    /// The process id does not tell a child from its parent if each is the first process of its
    /// namespace.
    #[test]
    fn a_child_with_the_process_id_of_its_parent_has_another_generation() {
        const UNSUPPORTED: i32 = 77;
        let code = in_forked_child(|| {
            // An ordinary user needs a user namespace, which a process of one thread may enter.
            let unshared = unshare_processes_of_children()
                .or_else(|_| unshare_user().and_then(|()| unshare_processes_of_children()));
            if unshared.is_err() {
                return UNSUPPORTED;
            }
            in_forked_child(|| {
                let parent = (std::process::id(), generation());
                unshare_processes_of_children().unwrap();
                let code = in_forked_child(|| {
                    let child = (std::process::id(), generation());
                    i32::from(parent.0 != child.0 || parent.1 == child.1)
                });
                code.unwrap().unwrap_or(2)
            })
            .unwrap()
            .unwrap_or(3)
        });
        match code.unwrap() {
            Some(UNSUPPORTED) => eprintln!("SKIPPED: this host forbids process namespaces"),
            code => assert_eq!(code, Some(0)),
        }
    }
}
