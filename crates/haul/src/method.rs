//! Send methods: the table of their names, properties and implementations.
//!
//! Every method is a file under `method/` with the same four parts: what it is and when it silently
//! copies, how it is probed, how it sends, and its fallback. To add a method, add such a file, a
//! variant of [`SendMethod`] and a row of the table.

mod buffered;
mod floor;
mod mmap_send;
mod piped;
mod read_send;
mod read_write;
mod sendfile;
mod splice;
mod vmsplice;
mod zerocopy;

use crate::error::Error;
use crate::source::Source;
use haul_sys::region::page_bytes;
use std::fmt;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::str::FromStr;

/// A method of sending a file or memory through a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "plan-file", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schemars", schemars(extend("enum" = Self::names())))]
#[non_exhaustive]
#[cfg_attr(feature = "plan-file", serde(into = "&'static str", try_from = "String"))]
pub enum SendMethod {
    /// `read` into a buffer, then `write` it to the socket.
    ReadWrite,
    /// `read` into a buffer, then `send` it.
    ReadSend,
    /// Map the file in windows, then `send` each window.
    MmapSend,
    /// `sendfile`.
    Sendfile,
    /// `splice` into a pipe, then from the pipe into the socket.
    Splice,
    /// `vmsplice` mapped pages into a pipe, then `splice` them into the socket.
    Vmsplice,
    /// `send` with `MSG_ZEROCOPY`.
    Zerocopy,
    /// Splices the same few cached pages repeatedly, to measure the network stack's own cost. **It
    /// does not send the bytes of the source**: it is for measuring, and a [`crate::Sender`]
    /// refuses it.
    Floor,
}

/// Returns the table row of a method.
fn entry(method: SendMethod) -> &'static Entry {
    match method {
        SendMethod::ReadWrite => &read_write::ENTRY,
        SendMethod::ReadSend => &read_send::ENTRY,
        SendMethod::MmapSend => &mmap_send::ENTRY,
        SendMethod::Sendfile => &sendfile::ENTRY,
        SendMethod::Splice => &splice::ENTRY,
        SendMethod::Vmsplice => &vmsplice::ENTRY,
        SendMethod::Zerocopy => &zerocopy::ENTRY,
        SendMethod::Floor => &floor::ENTRY,
    }
}

/// A row of the table of send methods.
struct Entry {
    name: &'static str,
    copying: Copying,
    fallback: Option<SendMethod>,
    attach: fn(BorrowedFd<'_>, &MethodOptions) -> AttachResult,
}

/// A method that is set up for a socket, or the reason why it cannot be.
type AttachResult = Result<Box<dyn AttachedMethod>, Error>;

/// Whether a method copies the bytes on the sending host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Copying {
    /// Always: through a buffer, or from the mapping into the kernel.
    Always,
    /// Only if the device cannot gather pages; otherwise the pages themselves are sent.
    Pages,
    /// It depends, and the kernel reports it in the completion.
    ReportedByKernel,
}

/// Options of a send method.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MethodOptions {
    /// The most bytes that one [`AttachedMethod::send`] sends: the size of the buffer, the window
    /// or the system call.
    pub chunk_bytes: usize,
    /// The pipe capacity to request, in bytes; `None` for the size of a chunk, up to 1 MiB.
    pub pipe_bytes: Option<usize>,
    /// The bytes that the sender itself sent before: they are not a reason to wait until the
    /// socket is empty.
    pub(crate) own_bytes: u64,
}

impl Default for MethodOptions {
    /// Chunks of 64 KiB, the largest packet that the kernel builds for the device to segment.
    fn default() -> Self {
        Self { chunk_bytes: 64 * 1024, pipe_bytes: None, own_bytes: 0 }
    }
}

impl MethodOptions {
    /// Sets the most bytes of one send.
    #[must_use]
    pub fn with_chunk_bytes(mut self, chunk_bytes: usize) -> Self {
        self.chunk_bytes = chunk_bytes;
        self
    }

    /// Sets the pipe capacity to request, in bytes.
    #[must_use]
    pub fn with_pipe_bytes(mut self, pipe_bytes: Option<usize>) -> Self {
        self.pipe_bytes = pipe_bytes;
        self
    }
}

/// Counters of bytes and system calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Bytes that were moved: accepted by the socket, or received from it.
    pub bytes: u64,
    /// System calls made.
    pub calls: u64,
    /// Bytes that the kernel reported as sent without a copy.
    pub zero_copied_bytes: u64,
    /// Bytes that were copied although they were to be sent without a copy. The kernel reported it,
    /// or it lacked memory to track them (`ENOBUFS`). Of loans, also the bytes that this library
    /// copied.
    pub copied_bytes: u64,
}

/// A send method that is set up for one socket, with the buffers and pipes that it needs.
///
/// A value belongs to its socket, because it keeps data in transit: bytes in a pipe, pages lent to
/// the kernel. Only this crate implements it.
#[expect(private_bounds, reason = "so that no other crate can implement it")]
pub trait AttachedMethod: Sealed + Send + Sync {
    /// Sends a prefix of `range` of `source`, at most one chunk; returns the bytes that the socket
    /// accepted, at least one.
    ///
    /// To continue, call again with the rest of the range: a method may hold bytes that it has read
    /// ahead. `range` must not be empty.
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error>;

    /// Processes the completions that have arrived; returns the number of sends still in flight.
    /// Never blocks.
    fn process_completions(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Error> {
        let _ = socket;
        Ok(0)
    }

    /// The number of sends in flight, by the completions that were processed so far.
    fn sends_in_flight(&self) -> usize {
        0
    }

    /// The counters so far.
    fn counts(&self) -> Counts;

    /// The bytes that the kernel has copied although the call requested that it does not; not those
    /// that the method itself has sent with a copy.
    fn kernel_copied_bytes(&self) -> u64 {
        self.counts().copied_bytes
    }
}

/// Bounds a trait to the types of this crate.
trait Sealed {}

impl SendMethod {
    /// Every method, in the order of reports.
    pub const ALL: &[Self] = &[
        Self::ReadWrite,
        Self::ReadSend,
        Self::MmapSend,
        Self::Sendfile,
        Self::Splice,
        Self::Vmsplice,
        Self::Zerocopy,
        Self::Floor,
    ];

    #[cfg(feature = "schemars")]
    fn names() -> Vec<&'static str> {
        Self::ALL.iter().map(|method| method.name()).collect()
    }

    /// The name of the method, the same in every report and flag.
    pub fn name(self) -> &'static str {
        entry(self).name
    }

    /// When the method copies the bytes on the sending host.
    pub fn copying(self) -> Copying {
        entry(self).copying
    }

    /// Whether the method can send memory; the others need a file to read or map.
    pub fn takes_memory(self) -> bool {
        self != Self::MmapSend
    }

    /// The method to try next if the kernel refuses this one; `None` for the one that always works.
    pub fn fallback(self) -> Option<Self> {
        entry(self).fallback
    }

    /// Sets the method up for `socket`; fails if the kernel refuses it.
    pub fn attach(self, socket: BorrowedFd<'_>, options: &MethodOptions) -> AttachResult {
        if options.chunk_bytes == 0 {
            return Err(Error::InvalidInput(
                "chunk_bytes is 0: a send method needs at least one byte per call",
            ));
        }
        (entry(self).attach)(socket, options)
    }
}

impl fmt::Display for SendMethod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// A name that no send method has.
#[derive(Debug, PartialEq, Eq)]
pub struct UnknownMethod(String);

impl fmt::Display for UnknownMethod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "unknown path {:?}; the paths are ", self.0)?;
        for (index, method) in SendMethod::ALL.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(formatter, "{separator}{method}")?;
        }
        Ok(())
    }
}

impl std::error::Error for UnknownMethod {}

impl From<SendMethod> for &'static str {
    fn from(method: SendMethod) -> Self {
        method.name()
    }
}

impl TryFrom<String> for SendMethod {
    type Error = UnknownMethod;

    fn try_from(name: String) -> Result<Self, UnknownMethod> {
        name.parse()
    }
}

impl FromStr for SendMethod {
    type Err = UnknownMethod;

    fn from_str(text: &str) -> Result<Self, UnknownMethod> {
        Self::ALL
            .iter()
            .copied()
            .find(|method| method.name() == text)
            .ok_or_else(|| UnknownMethod(text.into()))
    }
}

/// The offset and the length of the first chunk of `range`, at most `chunk_bytes`. Of memory at
/// most what it has; [`Error::Ended`] behind its end.
fn first_chunk(
    source: Source<'_>,
    range: &Range<u64>,
    chunk_bytes: usize,
) -> Result<(u64, usize), Error> {
    let end = source.as_memory().map_or(range.end, |memory| range.end.min(memory.len() as u64));
    match end.checked_sub(range.start) {
        Some(left) if left > 0 || range.is_empty() => {
            Ok((range.start, usize::try_from(left).unwrap_or(usize::MAX).min(chunk_bytes)))
        }
        _ => Err(Error::Ended { at: range.start }),
    }
}

/// The length of a chunk that ends on a page boundary, for methods that send pages.
///
/// A socket accepts as much as it has room for, so a range may continue inside a page. Without the
/// alignment, every page from there on would be sent in two halves (a fifth more CPU time in the
/// lab).
fn page_aligned(offset: u64, len: usize, range: &Range<u64>) -> usize {
    let excess = (offset + len as u64) as usize % page_bytes();
    let ends_the_range = offset + len as u64 == range.end;
    if ends_the_range || excess >= len { len } else { len - excess }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_ends_on_a_page_boundary_or_with_the_range() {
        let page = page_bytes();
        let aligned = |range: Range<u64>, chunk_bytes: usize| {
            let len = chunk_bytes.min(usize::try_from(range.end - range.start).unwrap());
            page_aligned(range.start, len, &range)
        };
        assert_eq!(aligned(0..100, 4 * page), 100);
        assert_eq!(aligned(0..u64::MAX, 4 * page), 4 * page);
        assert_eq!(aligned(7..u64::MAX, 4 * page), 4 * page - 7);
        assert_eq!(aligned(7..4 * page as u64 + 7, 4 * page), 4 * page);
        assert_eq!(aligned(7..u64::MAX, 100), 100, "within a page: unchanged");
    }

    #[test]
    fn names_are_unique_and_parse() {
        for &method in SendMethod::ALL {
            assert_eq!(method.name().parse(), Ok(method));
        }
        assert_eq!("sendfil".parse::<SendMethod>(), Err(UnknownMethod("sendfil".into())));
    }

    #[test]
    fn every_fallback_chain_ends_in_read_write() {
        for &method in SendMethod::ALL {
            let mut chain = vec![method];
            while let Some(next) = chain[chain.len() - 1].fallback() {
                assert!(!chain.contains(&next), "{method} is in a cycle of fallbacks");
                chain.push(next);
            }
            assert_eq!(chain.last(), Some(&SendMethod::ReadWrite));
        }
    }
}
