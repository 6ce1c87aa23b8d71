//! TCP sockets whose received data a BPF program handles: two that are joined in the kernel, each
//! sending what the other receives, and one whose data the program only passes on.
//!
//! Uses `BPF_MAP_TYPE_SOCKMAP` (Linux 4.14; with only a verdict program 5.13). The programs have at
//! most six instructions, encoded here by hand.
//!
//! Limitation: there is no notification when all data has been forwarded. The kernel forwards from
//! a separate queue, so shutting down a socket after its peer ended may lose the queued bytes.
//! This module is for measurements.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

// `enum bpf_cmd`, `bpf_map_type`, `bpf_prog_type` and `bpf_attach_type` of <linux/bpf.h>.
const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_MAP_TYPE_SOCKMAP: u32 = 15;
const BPF_PROG_TYPE_SK_SKB: u32 = 14;
const BPF_SK_SKB_VERDICT: u32 = 38;
/// `BPF_FUNC_sk_redirect_map`.
const SK_REDIRECT_MAP: i32 = 52;
/// `BPF_PSEUDO_MAP_FD`: the immediate value of the instruction is a map's descriptor.
const PSEUDO_MAP_FD: u8 = 1;

/// `struct bpf_insn` of <linux/bpf.h>.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    /// Destination register in the low four bits, source register in the high four.
    registers: u8,
    offset: i16,
    immediate: i32,
}
const _: () = assert!(size_of::<Instruction>() == 8);

/// The fields of `union bpf_attr` for `BPF_MAP_CREATE`.
#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
}

#[repr(C)]
struct MapUpdate {
    map_fd: u32,
    _pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct ProgramLoad {
    prog_type: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buffer: u64,
    kernel_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}
const _: () = assert!(size_of::<ProgramLoad>() == 72);

#[repr(C)]
struct ProgramAttach {
    target_fd: u32,
    attach_bpf_fd: u32,
    attach_type: u32,
    attach_flags: u32,
}

/// The sockets in a BPF program's hands. Dropping this takes them out and may lose the bytes that
/// the kernel has queued.
#[derive(Debug)]
pub struct Sockmap {
    _maps: Vec<OwnedFd>,
    _programs: Vec<OwnedFd>,
}

impl Sockmap {
    /// Joins two connected TCP sockets. After that no program may read from them.
    ///
    /// `EPERM` without `CAP_BPF` and `CAP_NET_ADMIN` in the initial user namespace, `EINVAL` if the
    /// kernel does not support it.
    pub fn join(one: impl AsFd, other: impl AsFd) -> io::Result<Self> {
        let maps = [create_map()?, create_map()?];
        // Data received on one socket is redirected to the socket in the other socket's map.
        let programs = [load_redirect_to(&maps[1])?, load_redirect_to(&maps[0])?];
        attach(&maps[0], &programs[0])?;
        attach(&maps[1], &programs[1])?;
        insert(&maps[1], other.as_fd())?;
        insert(&maps[0], one.as_fd())?;
        for socket in [one.as_fd(), other.as_fd()] {
            // Data that was received before the program was attached is processed at the socket's
            // next data-ready event; setting the low-water mark causes one (`tcp_set_rcvlowat`
            // calls `tcp_data_ready`).
            haul_sys::sockopt::set_receive_low_water(socket, 1)?;
        }
        Ok(Self { _maps: maps.into(), _programs: programs.into() })
    }

    /// Lets a program receive the data of a connected TCP socket in TCP's place, and pass it on to
    /// the socket's reader.
    ///
    /// **`getsockopt(TCP_ZEROCOPY_RECEIVE)` on that socket may crash the kernel** (seen with 6.18).
    /// Errors are those of [`Sockmap::join`].
    pub fn intercept(socket: impl AsFd) -> io::Result<Self> {
        /// `SK_PASS` of `enum sk_action`.
        const SK_PASS: i32 = 1;
        let map = create_map()?;
        let program = load(&[move_immediate(0, SK_PASS), EXIT])?;
        attach(&map, &program)?;
        insert(&map, socket.as_fd())?;
        Ok(Self { _maps: vec![map], _programs: vec![program] })
    }
}

fn create_map() -> io::Result<OwnedFd> {
    bpf_descriptor(
        BPF_MAP_CREATE,
        &MapCreate { map_type: BPF_MAP_TYPE_SOCKMAP, key_size: 4, value_size: 4, max_entries: 1 },
    )
}

/// Loads `return bpf_sk_redirect_map(skb, map, 0, 0)`; the packet's context stays in register 1.
fn load_redirect_to(map: &OwnedFd) -> io::Result<OwnedFd> {
    load(&[
        // BPF_LD | BPF_IMM | BPF_DW: a 64-bit immediate takes two instructions.
        Instruction {
            code: 0x18,
            registers: 2 | PSEUDO_MAP_FD << 4,
            offset: 0,
            immediate: map.as_raw_fd(),
        },
        Instruction { code: 0, registers: 0, offset: 0, immediate: 0 },
        move_immediate(3, 0),
        move_immediate(4, 0),
        // BPF_JMP | BPF_CALL
        Instruction { code: 0x85, registers: 0, offset: 0, immediate: SK_REDIRECT_MAP },
        EXIT,
    ])
}

/// BPF_JMP | BPF_EXIT: returns register 0.
const EXIT: Instruction = Instruction { code: 0x95, registers: 0, offset: 0, immediate: 0 };

/// BPF_ALU64 | BPF_MOV | BPF_K
fn move_immediate(register: u8, immediate: i32) -> Instruction {
    Instruction { code: 0xb7, registers: register, offset: 0, immediate }
}

/// Loads a program that decides what becomes of received data.
fn load(program: &[Instruction]) -> io::Result<OwnedFd> {
    bpf_descriptor(
        BPF_PROG_LOAD,
        &ProgramLoad {
            prog_type: BPF_PROG_TYPE_SK_SKB,
            instruction_count: program.len() as u32,
            instructions: program.as_ptr() as u64,
            license: c"MIT".as_ptr() as u64,
            log_level: 0,
            log_size: 0,
            log_buffer: 0,
            kernel_version: 0,
            prog_flags: 0,
            prog_name: [0; 16],
            prog_ifindex: 0,
            expected_attach_type: BPF_SK_SKB_VERDICT,
        },
    )
}

fn attach(map: &OwnedFd, program: &OwnedFd) -> io::Result<()> {
    let request = ProgramAttach {
        target_fd: map.as_raw_fd() as u32,
        attach_bpf_fd: program.as_raw_fd() as u32,
        attach_type: BPF_SK_SKB_VERDICT,
        attach_flags: 0,
    };
    bpf(BPF_PROG_ATTACH, &request).map(drop)
}

fn insert(map: &OwnedFd, socket: impl AsFd) -> io::Result<()> {
    let (key, value) = (0u32, socket.as_fd().as_raw_fd());
    let request = MapUpdate {
        map_fd: map.as_raw_fd() as u32,
        _pad: 0,
        key: &raw const key as u64,
        value: &raw const value as u64,
        flags: 0,
    };
    bpf(BPF_MAP_UPDATE_ELEM, &request).map(drop)
}

fn bpf_descriptor<T>(command: libc::c_int, request: &T) -> io::Result<OwnedFd> {
    let descriptor = bpf(command, request)?;
    // SAFETY: these commands return a new descriptor that has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as libc::c_int) })
}

/// `bpf(2)`, which rustix and libc lack. `request` is the beginning of a `union bpf_attr`; the
/// kernel assumes zero for the rest.
fn bpf<T>(command: libc::c_int, request: &T) -> io::Result<usize> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes of the request and, through the addresses in
    // it, memory that the caller holds until this returns. With these commands it writes to none of
    // it.
    haul_sys::syscall(|| unsafe {
        libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(request), size_of::<T>())
            as libc::ssize_t
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn each_end_receives_the_bytes_that_the_other_sends() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let pair = || {
            let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (one, listener.accept().unwrap().0)
        };
        let ((mut client, from), (to, mut server)) = (pair(), pair());
        client.write_all(b"before").unwrap();
        let joined = match Sockmap::join(&from, &to) {
            Ok(joined) => joined,
            Err(error) => {
                return eprintln!("SKIPPED: sockets cannot be joined in the kernel here: {error}");
            }
        };
        client.write_all(b" and after").unwrap();
        let mut received = [0; 16];
        server.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"before and after");
        server.write_all(b"back").unwrap();
        let mut received = [0; 4];
        client.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"back");
        drop(joined);
    }
}
