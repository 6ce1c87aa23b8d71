//! The ways of sending, as a table with one line each.
//!
//! Every way is a file of its own under `path/` with the same four parts: what it is and when it silently
//! copies, how it is tried, how it sends, what to step down to. Adding one is adding such a file, a name in
//! [`SendMethod`] and a line in the table.

mod buffered;
mod floor;
mod mmap_send;
mod piped;
mod read_send;
mod read_write;
mod sendfile;
mod splice;
mod uring_chain;
mod uring_send;
mod uring_zerocopy;
mod vmsplice;
mod zerocopy;

use crate::Source;
use crate::error::Error;
use haul_sys::region::page_bytes;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::str::FromStr;

/// A way of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "&'static str", try_from = "String")]
pub enum SendMethod {
    /// `read` into a buffer, `write` it.
    ReadWrite,
    /// `read` into a buffer, `send` it.
    ReadSend,
    /// Map the file, slide a window over it, one `send` a window.
    MmapSend,
    /// `sendfile`.
    Sendfile,
    /// `splice` into a pipe and on into the socket.
    Splice,
    /// `vmsplice` mapped pages into a pipe, `splice` on into the socket.
    Vmsplice,
    /// `send` with `MSG_ZEROCOPY`.
    Zerocopy,
    /// io_uring: read, then send.
    UringSend,
    /// io_uring: `SEND_ZC` from registered buffers.
    UringZerocopy,
    /// io_uring: read linked to send, one system call.
    UringChain,
    /// The same few hot pages spliced again and again: the network stack's own cost. **It sends other bytes than the
    /// source's**; it is for measuring, and a [`crate::Sender`] refuses it.
    Floor,
}

/// What there is to know of a path: one line each.
fn entry(path: SendMethod) -> &'static Entry {
    match path {
        SendMethod::ReadWrite => &read_write::ENTRY,
        SendMethod::ReadSend => &read_send::ENTRY,
        SendMethod::MmapSend => &mmap_send::ENTRY,
        SendMethod::Sendfile => &sendfile::ENTRY,
        SendMethod::Splice => &splice::ENTRY,
        SendMethod::Vmsplice => &vmsplice::ENTRY,
        SendMethod::Zerocopy => &zerocopy::ENTRY,
        SendMethod::UringSend => &uring_send::ENTRY,
        SendMethod::UringZerocopy => &uring_zerocopy::ENTRY,
        SendMethod::UringChain => &uring_chain::ENTRY,
        SendMethod::Floor => &floor::ENTRY,
    }
}

/// What the table says of a path.
struct Entry {
    name: &'static str,
    copying: Copying,
    fallback: Option<SendMethod>,
    open: fn(BorrowedFd<'_>, &MethodOptions) -> Opened,
}

/// A path set up for a socket, or the reason why not.
type Opened = Result<Box<dyn BoundMethod>, Error>;

/// Whether a path copies the bytes on the sending host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copying {
    /// Always: through a buffer, or from the mapping into the kernel.
    Always,
    /// The pages themselves travel, unless the device cannot gather them.
    Pages,
    /// It depends, and the kernel tells afterwards.
    KernelTells,
}

/// How a path is to work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MethodOptions {
    /// The most that one [`BoundMethod::send`] takes, in bytes: the size of the buffer, the window or the system
    /// call.
    pub chunk_bytes: usize,
    /// The capacity to ask for a pipe, in bytes; `None` for what a chunk needs, up to 1 MiB.
    pub pipe_bytes: Option<usize>,
}

impl Default for MethodOptions {
    /// Chunks of 64 KiB, the size up to which the kernel builds one packet for the device to cut.
    fn default() -> Self {
        Self { chunk_bytes: 64 * 1024, pipe_bytes: None }
    }
}

/// What a path has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes that the socket took.
    pub bytes: u64,
    /// System calls made.
    pub calls: u64,
    /// Bytes that the kernel said it sent without copying.
    pub zero_copied_bytes: u64,
    /// Bytes that were to go without copying and were copied after all, by the kernel's word or because it
    /// had no room to keep account of them.
    pub copied_bytes: u64,
}

/// One way of sending, with the buffers, pipes or rings it needs.
///
/// A value belongs to one socket: it keeps what is on its way (bytes in a pipe, pages lent to the kernel).
pub trait BoundMethod: Send {
    /// Sends the beginning of `range` of `source`, at most one chunk; returns the bytes that the socket took,
    /// at least one.
    ///
    /// To go on, call again with what is left of the range: a path may hold bytes that it has read ahead.
    /// `range` must not be empty.
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error>;

    /// Takes the kernel's word on pages it was lent; returns how many sends it still holds. Never blocks.
    fn settle(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Error> {
        let _ = socket;
        Ok(0)
    }

    /// What it has done so far.
    fn counts(&self) -> Counts;
}

impl SendMethod {
    /// Every path, in the order of reports.
    pub const ALL: [Self; 11] = [
        Self::ReadWrite,
        Self::ReadSend,
        Self::MmapSend,
        Self::Sendfile,
        Self::Splice,
        Self::Vmsplice,
        Self::Zerocopy,
        Self::UringSend,
        Self::UringZerocopy,
        Self::UringChain,
        Self::Floor,
    ];

    /// Its name, the same in every report and flag.
    pub fn name(self) -> &'static str {
        entry(self).name
    }

    /// Whether it copies the bytes on the sending host.
    pub fn copying(self) -> Copying {
        entry(self).copying
    }

    /// Whether it can send memory; the others need a file to read or map.
    pub fn takes_memory(self) -> bool {
        !matches!(self, Self::MmapSend | Self::UringChain)
    }

    /// The next best path where the kernel refuses this one; `None` for the one that always works.
    pub fn fallback(self) -> Option<Self> {
        entry(self).fallback
    }

    /// Sets the path up for `socket`, or says why the kernel refuses. The io_uring paths look up here, once,
    /// whether the socket is non-blocking.
    pub fn open(self, socket: BorrowedFd<'_>, options: &MethodOptions) -> Opened {
        if options.chunk_bytes == 0 {
            return Err(Error::Unsuited(
                "chunk_bytes is 0: a path must take at least a byte at a time",
            ));
        }
        (entry(self).open)(socket, options)
    }
}

impl fmt::Display for SendMethod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// A name that no path has.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown path {0:?}; the paths are {names}", names = SendMethod::ALL.map(SendMethod::name).join(", "))]
pub struct UnknownMethod(pub String);

impl From<SendMethod> for &'static str {
    fn from(path: SendMethod) -> Self {
        path.name()
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
            .into_iter()
            .find(|path| path.name() == text)
            .ok_or_else(|| UnknownMethod(text.into()))
    }
}

/// The beginning of `range`, at most `chunk_bytes` of it, as an offset and a length.
fn chunk_of(range: &Range<u64>, chunk_bytes: usize) -> (u64, usize) {
    let left = range.end.saturating_sub(range.start);
    (range.start, usize::try_from(left).unwrap_or(usize::MAX).min(chunk_bytes))
}

/// The same, ending where a page does, for ways that move pages: a socket takes what it has room for, and every page from
/// there on would go in two halves (a fifth more CPU time in the lab).
fn pages_of(range: &Range<u64>, chunk_bytes: usize) -> (u64, usize) {
    let (offset, len) = chunk_of(range, chunk_bytes);
    let beyond = (offset + len as u64) as usize % page_bytes();
    let ends_the_range = offset + len as u64 == range.end;
    (offset, if ends_the_range || beyond >= len { len } else { len - beyond })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_ends_where_a_page_does_or_where_the_range_does() {
        let page = page_bytes();
        assert_eq!(pages_of(&(0..100), 4 * page), (0, 100));
        assert_eq!(pages_of(&(0..u64::MAX), 4 * page), (0, 4 * page));
        assert_eq!(pages_of(&(7..u64::MAX), 4 * page), (7, 4 * page - 7));
        assert_eq!(pages_of(&(7..4 * page as u64 + 7), 4 * page), (7, 4 * page));
        assert_eq!(pages_of(&(7..u64::MAX), 100), (7, 100), "a piece within a page is what it is");
    }

    #[test]
    fn names_are_unique_and_parse() {
        for path in SendMethod::ALL {
            assert_eq!(path.name().parse(), Ok(path));
        }
        assert_eq!("sendfil".parse::<SendMethod>(), Err(UnknownMethod("sendfil".into())));
    }

    #[test]
    fn every_path_steps_down_to_read_write_in_the_end() {
        for path in SendMethod::ALL {
            let mut steps = vec![path];
            while let Some(next) = steps[steps.len() - 1].fallback() {
                assert!(!steps.contains(&next), "{path} goes round in circles");
                steps.push(next);
            }
            assert_eq!(steps.last(), Some(&SendMethod::ReadWrite));
        }
    }
}
