//! The interposer: a library that the dynamic linker loads before the C library (`LD_PRELOAD`), so
//! that the program's calls pass through it.
//!
//! `haul run --watch` uses the interposer to count which bytes a program reads from where, and how
//! it sends them. The interposer changes nothing of the program: each call goes to the C library
//! with the arguments of the program, and its result and `errno` return to the program.
//!
//! # Rules for code in this crate
//!
//! The code runs inside of other people's programs: in signal handlers, after `fork` in a program
//! with threads, in the child of `vfork`, on small stacks. So it
//!
//! * allocates no memory, takes no lock that could be held elsewhere, and starts no thread,
//! * keeps no file descriptor open while it only watches,
//! * calls functions of the C library that it interposes only through [`next`],
//! * preserves `errno`,
//! * never panics: indices are checked before their use, and arithmetic wraps or saturates.
//!
//! The tables of this crate ([`descriptors`], [`recent_reads`], [`mappings`]) are hints: a program
//! can make system calls that the interposer does not see. The counts of sent bytes are compared
//! with the kernel's counts when a socket is closed ([`connection`]), so the report has
//! the bytes of unseen calls.
//!
//! # Limits
//!
//! Not seen are: system calls by `syscall` instructions of the program (Go), io_uring, calls that
//! the C library makes inside of other functions (`fwrite`, `fclose`), and statically linked
//! programs. Descriptors beyond [`descriptors::TRACKED`] are counted, but not compared.

mod account;
mod broker;
mod connection;
mod descriptors;
pub mod elide;
mod environment;
mod errno;
pub mod exports;
mod high_descriptor;
mod kernel;
pub mod lifecycle;
mod locks;
mod mappings;
pub mod next;
mod pieces;
mod recent_reads;
mod settings;
mod tally;
