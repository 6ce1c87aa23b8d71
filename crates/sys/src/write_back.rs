//! Starting to write a file to the disk (sync_file_range(2), Linux 2.6.17).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Lets the kernel write the dirty pages of a file to the disk, without waiting for the disk, so
/// that a sync later waits less. The kernel writes neither the size of the file nor other metadata,
/// and does not empty the cache of the disk, so the file is not safe before a sync.
///
/// # Errors
///
/// `ESPIPE` for something else than a file, and errors of the disk.
pub fn start_write_back(file: impl AsFd) -> io::Result<()> {
    // To the end of the file.
    let (offset, bytes) = (0, 0);
    // SAFETY: the descriptor is open, and the kernel reads no memory of this process.
    let result = unsafe {
        libc::sync_file_range(file.as_fd().as_raw_fd(), offset, bytes, libc::SYNC_FILE_RANGE_WRITE)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn files_are_accepted_and_pipes_are_not() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; 100_000]).unwrap();
        start_write_back(&file).unwrap();
        let (reader, _writer) = io::pipe().unwrap();
        assert_eq!(start_write_back(&reader).unwrap_err().raw_os_error(), Some(libc::ESPIPE));
    }
}
