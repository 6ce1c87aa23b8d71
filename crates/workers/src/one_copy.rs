//! Send methods that make one copy, to compare with methods that make two copies or none.
//!
//! They exist for the comparison only: the library neither has nor chooses them.
//!
//! * `sendfile-copied` is `sendfile` as the kernel would be if it did not lend pages of the page
//!   cache. The file is opened with `O_DIRECT`, for which the kernel copies each page into a new
//!   page and sends the new page. On tmpfs this works since Linux 6.6. On a disk, `O_DIRECT` reads
//!   the disk, so other file systems are refused.
//! * `mapped+write` maps the whole file once, with all pages present, and then writes from the
//!   mapping. So the kernel copies once, and the program does not have a buffer.

use haul::Counts;
use haul_sys::region::MappedRegion;
use haul_sys::retry::{WaitsFor, retry};
use rustix::fs::{Mode, OFlags, fstatfs, open};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// `TMPFS_MAGIC` of `<linux/magic.h>`. Memory files (memfd) are also on tmpfs.
const TMPFS: u32 = 0x0102_1994;

/// A send method that makes one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OneCopyMethod {
    /// `sendfile` of a file that is opened with `O_DIRECT`.
    SendfileCopied,
    /// `write` from a mapping of the whole file.
    MappedWrite,
}

impl OneCopyMethod {
    /// All methods.
    pub const ALL: [Self; 2] = [Self::SendfileCopied, Self::MappedWrite];

    /// The name in reports and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::SendfileCopied => "sendfile-copied",
            Self::MappedWrite => "mapped+write",
        }
    }
}

/// A file that is ready to be sent.
enum Prepared {
    /// Opened again with `O_DIRECT`.
    Direct(OwnedFd),
    /// Mapped as a whole.
    Mapped(MappedRegion),
}

/// Sends files by a method. Each file is opened or mapped at its first use.
pub struct OneCopySender {
    method: OneCopyMethod,
    chunk_bytes: usize,
    counts: Counts,
    /// By the descriptor of the file, which stays open.
    prepared: HashMap<RawFd, Prepared>,
}

impl OneCopySender {
    /// A sender whose calls send at most `chunk_bytes`.
    pub fn new(method: OneCopyMethod, chunk_bytes: usize) -> Self {
        Self { method, chunk_bytes, counts: Counts::default(), prepared: HashMap::new() }
    }

    /// Counters of the bytes and calls so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Sends the beginning of a range of a file by one call. Returns the number of bytes.
    ///
    /// [`io::ErrorKind::Unsupported`] if the file system or the kernel does not support the method.
    pub fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        file: &File,
        range: &Range<u64>,
    ) -> io::Result<u64> {
        let prepared = match self.prepared.entry(file.as_raw_fd()) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(prepare(self.method, file)?)
            }
        };
        let bytes =
            self.chunk_bytes.min(usize::try_from(range.end - range.start).unwrap_or(usize::MAX));
        self.counts.calls += 1;
        let sent = match prepared {
            Prepared::Direct(direct) => {
                let mut position = range.start;
                retry(socket, WaitsFor::Send, || {
                    rustix::fs::sendfile(socket, &*direct, Some(&mut position), bytes)
                })?
            }
            Prepared::Mapped(region) => {
                let start = usize::try_from(range.start).map_err(|_| Errno::OVERFLOW)?;
                region.write(socket, start..start + bytes)?
            }
        };
        if sent == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.counts.bytes += sent as u64;
        Ok(sent as u64)
    }
}

fn prepare(method: OneCopyMethod, file: &File) -> io::Result<Prepared> {
    match method {
        OneCopyMethod::SendfileCopied => open_direct(file).map(Prepared::Direct),
        OneCopyMethod::MappedWrite => {
            let bytes = usize::try_from(file.metadata()?.len()).map_err(|_| Errno::OVERFLOW)?;
            MappedRegion::of_file(file, 0, bytes).map(Prepared::Mapped)
        }
    }
}

/// Opens a file again with `O_DIRECT`. `fcntl` cannot set the flag of a memory file.
fn open_direct(file: &File) -> io::Result<OwnedFd> {
    let unsupported = |reason| io::Error::new(io::ErrorKind::Unsupported, reason);
    if fstatfs(file)?.f_type as u32 != TMPFS {
        return Err(unsupported("not on this file system: O_DIRECT reads the disk (use tmpfs)"));
    }
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
    open(path, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::INVAL => unsupported("not on this kernel: tmpfs copies since Linux 6.6"),
        errno => errno.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    #[test]
    fn overwriting_the_file_proves_the_copy() {
        for method in OneCopyMethod::ALL {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (to, _) = listener.accept().unwrap();
            let mut sender = OneCopySender::new(method, 4096);
            let proof = haul::prove_by(&to, |memory, range| {
                sender
                    .send(from.as_fd(), memory.file(), &range)
                    .map_err(|error| haul::ProofError::Connection { step: "sending", error })
            });
            match proof {
                Ok(proof) => assert_eq!(proof.zero_copied_bytes, 0, "{}", method.name()),
                Err(error) => {
                    assert!(error.to_string().contains("not on this kernel"), "{error}");
                    eprintln!("SKIPPED: {}: {error}", method.name());
                }
            }
        }
    }

    #[test]
    fn a_file_on_a_disk_is_refused() {
        let file = tempfile::tempfile().unwrap();
        if fstatfs(&file).unwrap().f_type as u32 == TMPFS {
            return eprintln!("SKIPPED: the temporary folder is on tmpfs");
        }
        let error = open_direct(&file).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Unsupported, "{error}");
    }
}
