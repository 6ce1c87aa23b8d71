//! File access that other users of the machine and remote clients cannot subvert.
//!
//! * [`Root`] opens paths below one directory; the kernel refuses every path that leaves it.
//! * [`AtomicFile`] and [`replace`] write a file that readers see whole or not at all.
//! * [`remove_abandoned_files`] removes what a killed process has left of it.
//!
//! The crate knows nothing of what the files are for.

#![forbid(unsafe_code)]

mod abandoned;
mod atomic_file;
mod root;

pub use abandoned::remove_abandoned_files;
pub use atomic_file::{AtomicFile, Committed, replace};
pub use root::{Blocking, Root, Symlinks};
