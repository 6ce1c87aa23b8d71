//! Files as bodies of hyper, and of every server over hyper, sent by `sendfile`.
//!
//! hyper does not give its socket away, but it passes the memory of a body to the connection
//! unread. So a body is a mapping of the file ([`file_bytes`]), and the connection
//! ([`FileStream`]) recognises the mapping by its address, and sends the file in place of the
//! memory. A layer that reads the body, such as compression, reads the mapping, which has the same
//! bytes.

use bytes::Bytes;
use haul_tokio::{FilePolicy, Stream};
use memmap2::{Mmap, MmapOptions};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Smaller bodies are read into memory, because a copy of so few bytes is cheaper.
const FILE_BYTES_MIN: usize = 16 << 10;

/// The mappings of all bodies, by their addresses.
static MAPPINGS: Mutex<BTreeMap<usize, Part>> = Mutex::new(BTreeMap::new());
/// The bytes that were sent from files and not from memory.
static FILE_BYTES_SENT: AtomicU64 = AtomicU64::new(0);

/// A range of a file.
#[derive(Clone)]
struct Part {
    file: Arc<File>,
    range: Range<u64>,
}

/// Memory that is in [`MAPPINGS`] as long as it exists.
struct RegisteredMap(Mmap);

impl AsRef<[u8]> for RegisteredMap {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for RegisteredMap {
    fn drop(&mut self) {
        let address = self.0.as_ptr().addr();
        MAPPINGS.lock().unwrap_or_else(PoisonError::into_inner).remove(&address);
    }
}

/// The bytes of a range of a file, for a body such as `Full` or `axum::body::Body`.
///
/// The file must not become shorter while a layer reads the bytes, because the process would get
/// `SIGBUS`, or zeros in the last page. Without such a layer, nothing in the process reads the
/// bytes of a large file.
#[expect(unsafe_code, reason = "nothing can guarantee that a mapped file does not change")]
pub fn file_bytes(file: File, range: Range<u64>) -> io::Result<Bytes> {
    let len = usize::try_from(range.end.saturating_sub(range.start)).map_err(io::Error::other)?;
    if len < FILE_BYTES_MIN {
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, range.start)?;
        return Ok(bytes.into());
    }
    // SAFETY: see above; the caller serves files that are replaced, and not changed in place.
    let map = unsafe { MmapOptions::new().offset(range.start).len(len).map(&file)? };
    let part = Part { file: Arc::new(file), range };
    let address = map.as_ptr().addr();
    MAPPINGS.lock().unwrap_or_else(PoisonError::into_inner).insert(address, part);
    Ok(Bytes::from_owner(RegisteredMap(map)))
}

/// The part of a file that this memory maps.
fn part_of(memory: &[u8]) -> Option<Part> {
    let mappings = MAPPINGS.lock().unwrap_or_else(PoisonError::into_inner);
    let (start, part) = mappings.range(..=memory.as_ptr().addr()).next_back()?;
    let from = part.range.start + (memory.as_ptr().addr() - start) as u64;
    let range = from..from + memory.len() as u64;
    (range.end <= part.range.end).then(|| Part { file: Arc::clone(&part.file), range })
}

/// The bytes of bodies that were sent from files so far.
pub fn file_bytes_sent() -> u64 {
    FILE_BYTES_SENT.load(Relaxed)
}

/// A connection for hyper that sends the bodies of [`file_bytes`] from their files.
pub struct FileStream(Stream);

impl FileStream {
    pub fn new(socket: tokio::net::TcpStream) -> io::Result<Self> {
        Stream::from_tokio(socket).map(Self)
    }
}

impl AsyncRead for FileStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for FileStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let file = parts.iter().enumerate().find_map(|(at, part)| Some((at, part_of(part)?)));
        // hyper passes the head of the response before the body.
        let (head, Part { file, range }) = match file {
            Some((0, part)) => (&[][..], part),
            Some((1, part)) => (&*parts[0], part),
            Some((at, _)) => {
                return Pin::new(&mut self.0).poll_write_vectored(context, &parts[..at]);
            }
            None => return Pin::new(&mut self.0).poll_write_vectored(context, parts),
        };
        let policy = FilePolicy::Prefetch;
        let sent = self.0.sender().poll_send_response(context, head, &file, range, policy);
        sent.map_ok(|sent| {
            FILE_BYTES_SENT.fetch_add(sent.saturating_sub(head.len() as u64), Relaxed);
            sent as usize
        })
    }

    /// hyper would copy bodies into its buffer otherwise.
    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

/// Opens a regular file below a folder by the path of a URL; `None` for any other path. Symbolic
/// links are followed.
pub async fn open(root: &Path, path: &str) -> Option<(File, u64)> {
    let below = Path::new(path.strip_prefix('/')?);
    let is_plain = below.components().all(|component| matches!(component, Component::Normal(_)));
    let path: PathBuf = root.join(below);
    if !is_plain {
        return None;
    }
    // The open of a FIFO would wait for a writer.
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let mut options = tokio::fs::OpenOptions::new();
    let file = options.read(true).custom_flags(nonblocking).open(path).await.ok()?;
    let metadata = file.metadata().await.ok()?;
    metadata.is_file().then_some(())?;
    Some((file.into_std().await, metadata.len()))
}
