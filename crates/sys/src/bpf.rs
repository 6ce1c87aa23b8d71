//! BPF programs of control groups (`bpf(2)`): loads a program and attaches it.
//!
//! The caller assembles the instructions; the kernel's verifier checks them before it loads the
//! program, so no instruction can harm the kernel. Needs `CAP_BPF` and `CAP_NET_ADMIN` in the
//! host's user namespace; `EPERM` without them.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

// <linux/bpf.h>.
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_PROG_TYPE_SOCK_OPS: u32 = 13;
const BPF_CGROUP_SOCK_OPS: u32 = 3;
/// A license that allows helper functions that are not limited to the GPL.
const LICENSE: &CStr = c"MIT OR Apache-2.0";

/// One instruction (`struct bpf_insn`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instruction {
    /// Operation.
    pub code: u8,
    /// Destination register in the low four bits, source register in the high ones.
    pub registers: u8,
    /// Offset of a memory access in bytes, or of a jump in instructions.
    pub offset: i16,
    /// Constant operand.
    pub immediate: i32,
}
const _: () = assert!(size_of::<Instruction>() == 8);

/// The first part of `union bpf_attr` for `BPF_PROG_LOAD`; the kernel assumes zero for the rest.
#[repr(C)]
struct LoadAttributes {
    program_type: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_bytes: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface_index: u32,
    expected_attach_type: u32,
}
const _: () = assert!(size_of::<LoadAttributes>() == 72);

/// The first part of `union bpf_attr` for `BPF_LINK_CREATE`.
#[repr(C)]
struct LinkAttributes {
    program: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
}
const _: () = assert!(size_of::<LinkAttributes>() == 16);

/// Loads a program of the type `BPF_PROG_TYPE_SOCK_OPS`, which the kernel runs at events of TCP
/// connections (Linux 4.13; the link that [`attach_to_cgroup`] needs, 5.7).
///
/// `EPERM` without the capabilities, `EINVAL` or `EACCES` if the verifier refuses the program.
pub fn load_sock_ops(instructions: &[Instruction]) -> io::Result<OwnedFd> {
    let attributes = LoadAttributes {
        program_type: BPF_PROG_TYPE_SOCK_OPS,
        instruction_count: instructions.len() as u32,
        instructions: instructions.as_ptr() as u64,
        license: LICENSE.as_ptr() as u64,
        log_level: 0,
        log_bytes: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
        name: *b"haul_sock_ops\0\0\0",
        interface_index: 0,
        expected_attach_type: BPF_CGROUP_SOCK_OPS,
    };
    // SAFETY: the pointers in `attributes` are valid for their lengths during the call.
    unsafe { bpf(BPF_PROG_LOAD, &attributes) }
}

/// Attaches a program to a control group of version 2, for the sockets of its processes and of
/// those in groups below. It stays attached while the returned descriptor, a link, is open.
pub fn attach_to_cgroup(program: impl AsFd, cgroup: impl AsFd) -> io::Result<OwnedFd> {
    let attributes = LinkAttributes {
        program: program.as_fd().as_raw_fd() as u32,
        target: cgroup.as_fd().as_raw_fd() as u32,
        attach_type: BPF_CGROUP_SOCK_OPS,
        flags: 0,
    };
    // SAFETY: `attributes` holds no pointers.
    unsafe { bpf(BPF_LINK_CREATE, &attributes) }
}

/// Makes a `bpf` system call that returns a new descriptor.
///
/// # Safety
///
/// Pointers in `attributes` must be valid for what the command does with them.
unsafe fn bpf<T>(command: libc::c_int, attributes: &T) -> io::Result<OwnedFd> {
    let pointer: *const T = attributes;
    // SAFETY: the kernel reads the attributes, `size_of::<T>()` bytes. The caller answers for the
    // pointers in them.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, pointer, size_of::<T>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: both commands return a new descriptor (close-on-exec), which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(result as libc::c_int) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    /// `return 1`, as two instructions.
    const RETURN_1: [Instruction; 2] = [
        Instruction { code: 0xB7, registers: 0, offset: 0, immediate: 1 },
        Instruction { code: 0x95, registers: 0, offset: 0, immediate: 0 },
    ];

    #[test]
    fn the_verifier_accepts_a_program_and_refuses_a_broken_one() {
        match load_sock_ops(&RETURN_1) {
            Ok(program) => {
                // Standard input is no control group.
                assert!(attach_to_cgroup(program, io::stdin()).is_err());
                // Without an exit.
                assert!(load_sock_ops(&RETURN_1[..1]).is_err());
            }
            Err(error) => {
                let errno = Errno::from_io_error(&error);
                assert!(matches!(errno, Some(Errno::PERM | Errno::NOSYS)), "{error}");
                eprintln!("SKIPPED: no BPF program can be loaded here: {error}");
            }
        }
    }
}
