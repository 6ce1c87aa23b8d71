//! Send methods that use io_uring, to compare with the methods of the library.
//!
//! They exist for the comparison only, because no measurement showed that a ring of one connection
//! saves CPU time (docs/decisions/library.md).
//!
//! * `uring-send` reads the file into a buffer and sends the buffer. Memory is sent directly. Each
//!   operation is one system call (Linux 5.6).
//! * `uring-chain` links the read and the send, so that both are one system call (Linux 5.6). If
//!   the file was truncated, the short read breaks the chain, and the bytes that were read are sent
//!   separately. Memory is refused, because memory needs no read.
//! * `uring-zerocopy` sends registered buffers by `SEND_ZC` ([`zerocopy`]).
//!
//! A ring waits for a blocking socket. For a non-blocking socket it returns `EAGAIN`. Whether the
//! socket is blocking is examined once, when the method is attached.

mod zerocopy;

use haul::Counts;
use haul_sys::region::MappedRegion;
use haul_sys::uring::Ring;
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use zerocopy::ZerocopySender;

/// A send method that uses io_uring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RingMethod {
    /// A read, then a send.
    Send,
    /// `SEND_ZC` from registered buffers.
    Zerocopy,
    /// A read that is linked to a send, in one system call.
    Chain,
}

impl RingMethod {
    /// All methods, in the order of reports.
    pub const ALL: [Self; 3] = [Self::Send, Self::Zerocopy, Self::Chain];

    /// The name in reports and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Send => "uring-send",
            Self::Zerocopy => "uring-zerocopy",
            Self::Chain => "uring-chain",
        }
    }

    /// Whether the method can send memory. The other methods need a file to read.
    pub fn takes_memory(self) -> bool {
        self != Self::Chain
    }
}

/// What a ring sends.
#[derive(Debug, Clone, Copy)]
pub enum RingSource<'a> {
    /// A file, which is read.
    File(&'a File),
    /// A memory file, which is mapped and sent from the mapping. It must be open for writing,
    /// because io_uring registers only writable memory.
    Memory(&'a File),
}

/// Sends by a ring. A value belongs to the socket that it was made for.
pub struct RingSender {
    way: Way,
    chunk_bytes: usize,
    mappings: Mappings,
}

/// How a ring sends.
enum Way {
    Plain(PlainSender),
    Zerocopy(ZerocopySender),
}

impl RingSender {
    /// Sets the method up for `socket`. Each call sends at most `chunk_bytes`.
    ///
    /// [`io::ErrorKind::Unsupported`] if the kernel refuses the method.
    pub fn new(method: RingMethod, socket: BorrowedFd<'_>, chunk_bytes: usize) -> io::Result<Self> {
        let mut ring = Ring::new().map_err(failed("io_uring_setup"))?;
        let flags = rustix::fs::fcntl_getfl(socket)?;
        let is_nonblocking = flags.contains(rustix::fs::OFlags::NONBLOCK);
        if is_nonblocking {
            ring.set_nonblocking();
        }
        let way = match method {
            RingMethod::Zerocopy => {
                Way::Zerocopy(ZerocopySender::new(ring, chunk_bytes, is_nonblocking)?)
            }
            RingMethod::Send | RingMethod::Chain => {
                let buffer = MappedRegion::anonymous(chunk_bytes).map_err(failed("mmap"))?;
                let is_chained = method == RingMethod::Chain;
                let (buffer, counts) = (Arc::new(buffer), Counts::default());
                Way::Plain(PlainSender { ring, buffer, is_chained, counts })
            }
        };
        Ok(Self { way, chunk_bytes, mappings: Mappings::default() })
    }

    /// Sends the beginning of a range of the source, which must not be empty. Returns the number of
    /// bytes.
    ///
    /// [`io::ErrorKind::Unsupported`] if the kernel or the source does not support the method, and
    /// [`io::ErrorKind::UnexpectedEof`] if the source ends before the range.
    pub fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: RingSource<'_>,
        range: &Range<u64>,
    ) -> io::Result<u64> {
        let left = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let len = left.min(self.chunk_bytes);
        let sent = match source {
            RingSource::File(file) => match &mut self.way {
                Way::Plain(sender) => sender.send_file(socket, file, range.start, len),
                Way::Zerocopy(sender) => sender.send_file(socket, file, range.start, len),
            },
            RingSource::Memory(file) => {
                let region = self.mappings.of(file)?;
                let start = usize::try_from(range.start).map_err(|_| Errno::OVERFLOW)?;
                let chunk = start..region.len().min(start.saturating_add(len));
                if chunk.is_empty() {
                    return Err(ended(range.start));
                }
                match &mut self.way {
                    Way::Plain(sender) => sender.send_memory(socket, &region, chunk),
                    Way::Zerocopy(sender) => sender.send_memory(socket, &region, chunk),
                }
            }
        };
        sent.map(|bytes| bytes as u64)
    }

    /// Processes the completions that arrived. Returns the number of sends that still use memory.
    pub fn process_completions(&mut self) -> usize {
        match &mut self.way {
            Way::Plain(_) => 0,
            Way::Zerocopy(sender) => sender.process_completions(),
        }
    }

    /// Counters of the bytes and calls so far.
    pub fn counts(&self) -> Counts {
        match &self.way {
            Way::Plain(sender) => {
                let mut counts = sender.counts;
                counts.calls = sender.ring.enters();
                counts
            }
            Way::Zerocopy(sender) => sender.counts(),
        }
    }
}

/// Mappings of the memory files, by the descriptor of the file, which stays open.
#[derive(Default)]
struct Mappings(HashMap<RawFd, Arc<MappedRegion>>);

impl Mappings {
    fn of(&mut self, file: &File) -> io::Result<Arc<MappedRegion>> {
        if let Some(region) = self.0.get(&file.as_raw_fd()) {
            return Ok(Arc::clone(region));
        }
        let len = usize::try_from(file.metadata()?.len()).map_err(|_| Errno::OVERFLOW)?;
        let region = Arc::new(MappedRegion::of_memory_file(file, len).map_err(failed("mmap"))?);
        self.0.insert(file.as_raw_fd(), Arc::clone(&region));
        Ok(region)
    }
}

/// Sends with a copy: `uring-send` and `uring-chain`.
struct PlainSender {
    ring: Ring,
    buffer: Arc<MappedRegion>,
    is_chained: bool,
    counts: Counts,
}

impl PlainSender {
    fn send_file(
        &mut self,
        socket: BorrowedFd<'_>,
        file: &File,
        offset: u64,
        len: usize,
    ) -> io::Result<usize> {
        let (read, sent) = if self.is_chained {
            let (read, sent) = self
                .ring
                .read_then_send(file, offset, socket, &self.buffer, 0..len)
                .map_err(failed("io_uring_enter"))?;
            (read, Some(sent))
        } else {
            (self.ring.read(file, offset, &self.buffer, 0..len), None)
        };
        let read = read.map_err(failed("IORING_OP_READ"))?;
        if read == 0 {
            return Err(ended(offset));
        }
        let sent = match sent {
            Some(sent) if read == len => sent.map_err(failed("IORING_OP_SEND")),
            _ => send(&mut self.ring, socket, &self.buffer, 0..read),
        }?;
        self.counts.bytes += sent as u64;
        Ok(sent)
    }

    fn send_memory(
        &mut self,
        socket: BorrowedFd<'_>,
        region: &Arc<MappedRegion>,
        range: Range<usize>,
    ) -> io::Result<usize> {
        if self.is_chained {
            return Err(unsupported("memory needs no read: use uring-send"));
        }
        let sent = send(&mut self.ring, socket, region, range)?;
        self.counts.bytes += sent as u64;
        Ok(sent)
    }
}

fn send(
    ring: &mut Ring,
    socket: BorrowedFd<'_>,
    region: &Arc<MappedRegion>,
    range: Range<usize>,
) -> io::Result<usize> {
    ring.send(socket, region, range).map_err(failed("IORING_OP_SEND"))
}

fn unsupported(reason: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, reason.into())
}

/// Adds the name of the call and advice to an error. An error by which the kernel refuses the
/// method becomes [`io::ErrorKind::Unsupported`], and an error of the connection or the disk keeps
/// its kind.
fn failed(call: &'static str) -> impl Fn(io::Error) -> io::Error {
    move |error| {
        let errno = Errno::from_io_error(&error);
        if errno == Some(Errno::AGAIN) && matches!(call, "IORING_OP_SEND" | "SEND_ZC") {
            return io::ErrorKind::WouldBlock.into();
        }
        let is_refusal = matches!(
            errno,
            Some(
                Errno::INVAL
                    | Errno::OPNOTSUPP
                    | Errno::PERM
                    | Errno::ACCESS
                    | Errno::NOSYS
                    | Errno::NODEV
                    | Errno::NOMEM
                    | Errno::MFILE
                    | Errno::NFILE
                    | Errno::NOPROTOOPT
                    | Errno::AGAIN
                    // A ring that an earlier error left unusable.
                    | Errno::BADFD
            )
        );
        if !is_refusal {
            return io::Error::new(error.kind(), format!("{call}: {error}"));
        }
        let advice = match (call, errno) {
            ("io_uring_setup", Some(Errno::PERM)) => {
                " (sysctl kernel.io_uring_disabled=0, or allow it in seccomp)"
            }
            ("io_uring_setup", Some(Errno::NOSYS)) => {
                " (the kernel is older than 5.6, or seccomp hides io_uring)"
            }
            ("io_uring_register" | "SEND_ZC", Some(Errno::NOMEM)) => " (raise ulimit -l)",
            (_, Some(Errno::MFILE)) => " (raise ulimit -n)",
            _ => "",
        };
        unsupported(format!("the kernel refuses {call}: {error}{advice}"))
    }
}

/// A source that ends before the range.
fn ended(at: u64) -> io::Error {
    let message = format!("the source ends at byte {at}, before the range does");
    io::Error::new(io::ErrorKind::UnexpectedEof, message)
}

#[cfg(test)]
mod tests;
