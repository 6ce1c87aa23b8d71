//! [`Buffer`], memory that can be lent, and [`BufferPool`], a pool of it.

use crate::call::Call;
use crate::error::{Error, failed};
use haul_sys::pages::PageBuffer;
use haul_sys::region::page_bytes;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Memory that can be lent: its type guarantees that its bytes do not change during the loan.
///
/// The kernel does not require alignment, but a loan is cheapest if its buffer consists of whole
/// pages of its own. The buffers of a [`BufferPool`] do.
pub enum Buffer {
    /// A buffer of a [`BufferPool`]. Dropping it returns it to the pool.
    Pooled(PooledBuffer),
    /// Memory of the allocator.
    Vec(Vec<u8>),
    /// Memory that several loans may share: the same bytes to many peers.
    Shared(Arc<[u8]>),
    /// Memory that is part of the program.
    Static(&'static [u8]),
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Pooled(buffer) => buffer,
            Self::Vec(bytes) => bytes,
            Self::Shared(bytes) => bytes,
            Self::Static(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Buffer {
    /// Prints the kind and the length, never the content.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Pooled(_) => "Pooled",
            Self::Vec(_) => "Vec",
            Self::Shared(_) => "Shared",
            Self::Static(_) => "Static",
        };
        write!(formatter, "{kind}({} bytes)", self.len())
    }
}

impl TryFrom<Buffer> for PooledBuffer {
    type Error = Buffer;

    /// Returns the pool's buffer if it is one, else the buffer unchanged.
    fn try_from(buffer: Buffer) -> Result<Self, Buffer> {
        if let Buffer::Pooled(buffer) = buffer { Ok(buffer) } else { Err(buffer) }
    }
}

impl TryFrom<Buffer> for Vec<u8> {
    type Error = Buffer;

    /// Returns the vector if it is one, else the buffer unchanged.
    fn try_from(buffer: Buffer) -> Result<Self, Buffer> {
        if let Buffer::Vec(bytes) = buffer { Ok(bytes) } else { Err(buffer) }
    }
}

impl From<Box<[u8]>> for Buffer {
    fn from(bytes: Box<[u8]>) -> Self {
        Self::Vec(bytes.into_vec())
    }
}

impl From<String> for Buffer {
    fn from(text: String) -> Self {
        Self::Vec(text.into_bytes())
    }
}

impl<const N: usize> From<&'static [u8; N]> for Buffer {
    fn from(bytes: &'static [u8; N]) -> Self {
        Self::Static(bytes)
    }
}

impl From<PooledBuffer> for Buffer {
    fn from(buffer: PooledBuffer) -> Self {
        Self::Pooled(buffer)
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Vec(bytes)
    }
}

impl From<Arc<[u8]>> for Buffer {
    fn from(bytes: Arc<[u8]>) -> Self {
        Self::Shared(bytes)
    }
}

impl From<&'static [u8]> for Buffer {
    fn from(bytes: &'static [u8]) -> Self {
        Self::Static(bytes)
    }
}

/// A pool of reusable buffers of one size, each in pages of its own.
///
/// A pool bounds a program's memory: it has a maximum number of buffers, which are allocated when
/// they are first needed. Clones share one pool.
#[derive(Debug, Clone)]
pub struct BufferPool(Arc<PoolInner>);

#[derive(Debug)]
struct PoolInner {
    buffer_bytes: usize,
    buffers_max: usize,
    huge_pages: bool,
    state: Mutex<PoolState>,
}

#[derive(Debug, Default)]
struct PoolState {
    idle: Vec<PageBuffer>,
    allocated: usize,
}

impl BufferPool {
    /// Creates a pool of `buffers_max` buffers of `buffer_bytes` each, every one in whole pages of
    /// its own.
    pub fn new(buffer_bytes: usize, buffers_max: usize) -> Result<Self, Error> {
        Self::with_pages(buffer_bytes, buffers_max, false)
    }

    /// Like [`BufferPool::new`], in huge pages if the kernel has some: fewer page references per
    /// loan. It pays from 2 MiB per buffer on.
    pub fn with_huge_pages(buffer_bytes: usize, buffers_max: usize) -> Result<Self, Error> {
        Self::with_pages(buffer_bytes, buffers_max, true)
    }

    fn with_pages(
        buffer_bytes: usize,
        buffers_max: usize,
        huge_pages: bool,
    ) -> Result<Self, Error> {
        // A buffer occupies whole pages, so that size must be representable, too.
        let fits = buffer_bytes.checked_next_multiple_of(page_bytes()).is_some();
        if buffer_bytes == 0 || buffers_max == 0 || !fits {
            return Err(Error::Unsuited("a pool needs at least one buffer of at least one byte"));
        }
        let state = Mutex::default();
        Ok(Self(Arc::new(PoolInner { buffer_bytes, buffers_max, huge_pages, state })))
    }

    /// The size of a buffer, in bytes.
    pub fn buffer_bytes(&self) -> usize {
        self.0.buffer_bytes
    }

    /// Takes a buffer of [`BufferPool::buffer_bytes`]. **It holds the bytes of its last user**, or
    /// zeros. A caller that fills only a part of it must call [`PooledBuffer::set_len`] before
    /// lending it.
    pub fn take(&self) -> Result<PooledBuffer, Error> {
        let mut state = self.0.lock();
        let pages = match state.idle.pop() {
            Some(pages) => pages,
            None if state.allocated < self.0.buffers_max => {
                let allocate = if self.0.huge_pages { PageBuffer::huge } else { PageBuffer::new };
                let pages = allocate(self.0.buffer_bytes).map_err(failed(Call::Mmap))?;
                state.allocated += 1;
                pages
            }
            None => return Err(Error::PoolEmpty { buffers_max: self.0.buffers_max }),
        };
        Ok(PooledBuffer { len: pages.len(), pages: Some(pages), pool: Self(Arc::clone(&self.0)) })
    }

    /// The number of buffers in use.
    pub fn in_use(&self) -> usize {
        let state = self.0.lock();
        state.allocated - state.idle.len()
    }
}

impl PoolInner {
    fn lock(&self) -> std::sync::MutexGuard<'_, PoolState> {
        // A panic while the lock is held leaves whole buffers on both sides, so poisoning is
        // ignored.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A buffer of a [`BufferPool`], to which it returns when it is dropped.
pub struct PooledBuffer {
    /// `None` only during drop.
    pages: Option<PageBuffer>,
    len: usize,
    pool: BufferPool,
}

impl PooledBuffer {
    /// Sets the length, at most [`BufferPool::buffer_bytes`].
    pub fn set_len(&mut self, len: usize) {
        self.len = len.min(self.pool.0.buffer_bytes);
    }
}

impl fmt::Debug for PooledBuffer {
    /// Prints the length, never the content.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "PooledBuffer({} bytes)", self.len)
    }
}

impl Deref for PooledBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.pages.as_ref().map_or(&[], |pages| &pages[..self.len])
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        self.pages.as_mut().map_or(&mut [], |pages| &mut pages[..len])
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        self.pool.0.lock().idle.extend(self.pages.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_reuses_its_buffers_and_keeps_to_its_limit() {
        let pool = BufferPool::new(5000, 2).unwrap();
        assert_eq!(pool.buffer_bytes(), 5000);
        let mut one = pool.take().unwrap();
        one[0] = 7;
        one.set_len(4999);
        assert_eq!(one.len(), 4999);
        one.set_len(8192);
        assert_eq!(one.len(), 5000);
        let two = pool.clone().take().unwrap();
        assert_eq!((two[0], two.len(), pool.in_use()), (0, 5000, 2));
        assert!(matches!(pool.take(), Err(Error::PoolEmpty { buffers_max: 2 })));
        drop(one);
        let again = pool.take().unwrap();
        assert_eq!((again[0], again.len()), (7, 5000));
        drop((two, again));
        assert_eq!(pool.in_use(), 0);
        assert_eq!(pool.0.lock().idle.len(), 2);
    }

    #[test]
    fn a_buffer_converts_back_to_its_kind_and_debug_omits_its_content() {
        let pooled = Buffer::from(BufferPool::new(10, 1).unwrap().take().unwrap());
        assert_eq!(format!("{pooled:?}"), "Pooled(10 bytes)");
        assert_eq!(PooledBuffer::try_from(pooled).unwrap().len(), 10);
        let vector = Vec::<u8>::try_from(Buffer::from("secret".to_owned())).unwrap();
        assert_eq!(vector, b"secret");
        let other = Vec::<u8>::try_from(Buffer::from(b"static")).unwrap_err();
        assert_eq!(format!("{other:?}"), "Static(6 bytes)");
    }

    #[test]
    fn an_empty_pool_is_an_error() {
        for (bytes, count) in [(0, 1), (1, 0), (usize::MAX, 1)] {
            assert!(
                matches!(BufferPool::new(bytes, count), Err(Error::Unsuited(_))),
                "{bytes} {count}"
            );
        }
        let huge = BufferPool::with_huge_pages(1, 1).unwrap();
        assert_eq!(huge.take().unwrap()[0], 0);
    }
}
