//! File access that other users of the machine and remote clients cannot subvert.
//!
//! * [`Root`] opens paths below one directory; the kernel refuses every path that leaves it.
//! * [`AtomicFile`] writes a file that readers see whole or not at all.
//! * [`write_output`] writes to the path that a user names, which may be a pipe or a device.
//! * [`remove_abandoned_files`] removes what a killed process has left of it.
//!
//! The crate knows nothing of what the files are for.

#![forbid(unsafe_code)]

mod abandoned;
mod atomic_file;
mod output_file;
mod root;

pub use abandoned::remove_abandoned_files;
pub use atomic_file::{AtomicFile, Committed, NAME_BYTES_MAX, temporary_name};
pub use output_file::{check_directory, check_output, write_output};
pub use root::{Blocking, Root, Symlinks};
