//! seccomp filters: a system call that the kernel refuses, as a container's filter refuses it.

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use std::io;

/// Makes a system call fail with `errno` in the calling *thread* and in those that it starts later,
/// for as long as they live (`SECCOMP_SET_MODE_FILTER`, Linux 3.17).
///
/// Only calls whose arguments have the values of `arguments`, pairs of an index and a value of 32
/// bits, are refused; all if there are none. With an `errno` of 0 the call succeeds without an
/// effect. Other calls are not changed. Child processes of the thread inherit the filter, and the
/// thread gains no privileges by `execve` any more (`no_new_privs`).
pub fn refuse(call: libc::c_long, arguments: &[(u8, i32)], errno: i32) -> io::Result<()> {
    let equals = |&(index, value): &(u8, i32)| {
        let value = u64::from(value.cast_unsigned());
        SeccompCondition::new(index, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
    };
    let rules = if arguments.is_empty() {
        Vec::new()
    } else {
        let conditions = arguments.iter().map(equals).collect::<Result<_, _>>();
        vec![SeccompRule::new(conditions.map_err(io::Error::other)?).map_err(io::Error::other)?]
    };
    let filter = SeccompFilter::new(
        [(call, rules)].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(errno.cast_unsigned()),
        std::env::consts::ARCH.try_into().map_err(io::Error::other)?,
    );
    let program: BpfProgram =
        filter.map_err(io::Error::other)?.try_into().map_err(io::Error::other)?;
    seccompiler::apply_filter(&program).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_named_call_of_this_thread_is_refused() {
        let pipe = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map(drop);
        let refused = std::thread::spawn(move || {
            refuse(libc::SYS_pipe2, &[], libc::EMFILE).unwrap();
            refuse(libc::SYS_getpriority, &[(0, libc::PRIO_USER as _)], libc::EACCES).unwrap();
            let user = rustix::process::getpriority_user(rustix::process::Uid::ROOT);
            let process = rustix::process::getpriority_process(None);
            (pipe(), user, process.is_ok(), std::fs::metadata("/").is_ok())
        });
        let errno = rustix::io::Errno::MFILE;
        let expected = (Err(errno), Err(rustix::io::Errno::ACCESS), true, true);
        assert_eq!(refused.join().unwrap(), expected);
        assert_eq!(pipe(), Ok(()));
    }
}
