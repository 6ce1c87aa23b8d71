//! [`BufferPool`]: reusable buffers of one size, each in pages of its own.

use crate::call::Call;
use crate::error::{Error, failed};
use haul_sys::fork;
use haul_sys::pages::PageBuffer;
use haul_sys::region::page_bytes;
use std::fmt;
use std::io::{self, Read};
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// A pool of reusable buffers of one size, each in pages of its own.
///
/// A pool bounds a program's memory: it has a maximum number of buffers, which are allocated when
/// they are first needed. Clones share one pool.
///
/// A buffer begins empty, and grows by what is written into it. So it never shows the bytes of its
/// last user.
///
/// ```
/// # fn main() -> Result<(), haul::Error> {
/// let pool = haul::BufferPool::new(64 << 10, 16)?;
/// let mut buffer = pool.take()?;
/// buffer.extend_from_slice(b"a message")?;
/// assert_eq!((buffer.len(), buffer.capacity()), (9, 64 << 10));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct BufferPool(Arc<PoolInner>);

#[derive(Debug)]
struct PoolInner {
    buffer_bytes: usize,
    buffers_max: usize,
    huge_pages: bool,
    /// The process that created the pool ([`fork::generation`]).
    process: u64,
    state: Mutex<PoolState>,
    /// Signalled when a buffer returns.
    returned: Condvar,
}

#[derive(Debug, Default)]
struct PoolState {
    idle: Vec<Pages>,
    allocated: usize,
    /// Threads that wait for a buffer: only then is a return signalled, which is a system call.
    waiting: usize,
}

/// The memory of a buffer.
#[derive(Debug)]
struct Pages {
    pages: PageBuffer,
    /// Bytes from here on have never been written: they are zero.
    written: usize,
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
        // A buffer occupies whole pages, so their size must also be representable.
        let fits = buffer_bytes.checked_next_multiple_of(page_bytes()).is_some();
        if buffer_bytes == 0 || buffers_max == 0 || !fits {
            return Err(Error::InvalidInput(
                "a pool needs at least one buffer, of at least one byte and less than half of the \
                 address space",
            ));
        }
        Ok(Self(Arc::new(PoolInner {
            buffer_bytes,
            buffers_max,
            huge_pages,
            process: fork::generation(),
            state: Mutex::default(),
            returned: Condvar::new(),
        })))
    }

    /// The capacity of a buffer, in bytes.
    pub fn buffer_bytes(&self) -> usize {
        self.0.buffer_bytes
    }

    /// Takes an empty buffer. [`Error::PoolEmpty`] if all are in use.
    pub fn take(&self) -> Result<PooledBuffer, Error> {
        self.take_timeout(Duration::ZERO)
    }

    /// Like [`BufferPool::take`], but waits at most `timeout` until a buffer returns.
    ///
    /// Do not wait in the thread that reclaims the loans whose buffers are to return.
    pub fn take_timeout(&self, timeout: Duration) -> Result<PooledBuffer, Error> {
        let Some(mut state) = self.0.lock() else {
            return self.0.allocate().map(|memory| self.buffer(memory));
        };
        // The clock is read only if there is something to wait for.
        let mut waiting_since = None;
        loop {
            if let Some(memory) = state.idle.pop() {
                return Ok(self.buffer(memory));
            }
            if state.allocated < self.0.buffers_max {
                state.allocated += 1;
                drop(state);
                let memory = self.0.allocate();
                if memory.is_err() {
                    self.0.forget_one();
                }
                return memory.map(|memory| self.buffer(memory));
            }
            let waited = waiting_since.map_or(Duration::ZERO, |since: Instant| since.elapsed());
            let left = timeout.saturating_sub(waited);
            if left.is_zero() {
                return Err(Error::PoolEmpty { buffers_max: self.0.buffers_max });
            }
            waiting_since.get_or_insert_with(Instant::now);
            state.waiting += 1;
            let woken = self.0.returned.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
        }
    }

    /// The number of buffers in use.
    pub fn in_use(&self) -> usize {
        self.0.lock().map_or(0, |state| state.allocated - state.idle.len())
    }

    /// Frees the memory of the buffers that are not in use; returns their number. The pool
    /// allocates them again when it needs them.
    pub fn shrink(&self) -> usize {
        let idle = self.0.lock().map(|mut state| {
            state.allocated -= state.idle.len();
            std::mem::take(&mut state.idle)
        });
        idle.map_or(0, |idle| idle.len())
    }

    fn buffer(&self, memory: Pages) -> PooledBuffer {
        PooledBuffer { len: 0, memory: Some(memory), pool: self.clone() }
    }
}

impl PoolInner {
    fn allocate(&self) -> Result<Pages, Error> {
        let allocate = if self.huge_pages { PageBuffer::huge } else { PageBuffer::new };
        let pages = allocate(self.buffer_bytes).map_err(failed(Call::Mmap))?;
        Ok(Pages { pages, written: 0 })
    }

    /// Uncounts a buffer that could not be allocated.
    fn forget_one(&self) {
        if let Some(mut state) = self.lock() {
            state.allocated -= 1;
            self.signal_return(&state);
        }
    }

    fn signal_return(&self, state: &PoolState) {
        if state.waiting > 0 {
            self.returned.notify_one();
        }
    }

    /// The state; `None` in a forked child if a thread of the parent held the lock at the fork:
    /// then it stays locked. The child's buffers are then allocated one by one, without a limit.
    fn lock(&self) -> Option<MutexGuard<'_, PoolState>> {
        // A panic while the lock is held leaves whole buffers on both sides, so poisoning is
        // ignored.
        if self.process == fork::generation() {
            return Some(self.state.lock().unwrap_or_else(PoisonError::into_inner));
        }
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// A buffer of a [`BufferPool`], to which it returns when it is dropped.
///
/// It dereferences to the bytes that were written into it.
pub struct PooledBuffer {
    /// `None` only during drop.
    memory: Option<Pages>,
    len: usize,
    pool: BufferPool,
}

impl PooledBuffer {
    /// The most bytes that it holds: [`BufferPool::buffer_bytes`].
    pub fn capacity(&self) -> usize {
        self.pool.0.buffer_bytes
    }

    /// Appends bytes. [`Error::InvalidInput`] if they do not fit; nothing is appended then.
    pub fn extend_from_slice(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let Some(room) = self.spare().get_mut(..bytes.len()) else { return Err(too_long()) };
        room.copy_from_slice(bytes);
        self.grow(bytes.len());
        Ok(())
    }

    /// Appends what one read of `reader` returns, at most the rest of the capacity; returns the
    /// number of bytes, 0 at the end of the reader or if the buffer is full.
    ///
    /// Bytes of an earlier user are cleared before the reader gets the memory.
    pub fn read_from(&mut self, mut reader: impl Read) -> io::Result<usize> {
        let old = self.len;
        if let Some(Pages { pages, written }) = &mut self.memory {
            let dirty = (*written).max(old);
            pages[old..dirty].fill(0);
        }
        // A reader may write more than it reports.
        let spare = &mut self.scratch()[old..];
        let count = reader.read(spare).map(|count| count.min(spare.len()));
        self.len = old;
        let count = count?;
        self.grow(count);
        Ok(count)
    }

    /// Appends what one `read` of a descriptor returns, at most the rest of the capacity; returns
    /// the number of bytes, 0 at its end or if the buffer is full. Costs less than
    /// [`PooledBuffer::read_from`]: the kernel does not read the memory, so it need not be cleared.
    pub fn read_from_fd(&mut self, descriptor: impl AsFd) -> io::Result<usize> {
        let count = rustix::io::read(descriptor, self.spare())?;
        self.grow(count);
        Ok(count)
    }

    /// Sets the length; new bytes are zero. [`Error::InvalidInput`] beyond the capacity.
    pub fn resize(&mut self, len: usize) -> Result<(), Error> {
        if len > self.capacity() {
            return Err(too_long());
        }
        let old = self.len;
        if let Some(Pages { pages, written }) = &mut self.memory {
            if len > old {
                let dirty = (*written).clamp(old, len);
                pages[old..dirty].fill(0);
                // The caller may write to all of them.
                *written = (*written).max(len);
            }
        }
        self.len = len;
        Ok(())
    }

    /// Shortens it to `len` bytes, if it is longer.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Removes all bytes.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// The memory after the bytes. **It may hold the bytes of another user.**
    fn spare(&mut self) -> &mut [u8] {
        let len = self.len;
        self.memory.as_mut().map_or(&mut [], |memory| &mut memory.pages[len..])
    }

    /// All of its memory, as working space. **It may hold the bytes of another user.**
    pub(crate) fn scratch(&mut self) -> &mut [u8] {
        self.memory.as_mut().map_or(&mut [], |memory| {
            memory.written = memory.pages.len();
            &mut memory.pages
        })
    }

    /// The first bytes of [`PooledBuffer::scratch`].
    pub(crate) fn scratch_part(&self, len: usize) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| &memory.pages[..len])
    }

    /// Makes the first `len` bytes of [`PooledBuffer::scratch`] the content.
    pub(crate) fn keep_scratch(&mut self, len: usize) {
        self.len = len.min(self.capacity());
    }

    /// Adds bytes that were written into [`PooledBuffer::spare`].
    fn grow(&mut self, count: usize) {
        self.len += count;
        if let Some(memory) = &mut self.memory {
            memory.written = memory.written.max(self.len);
        }
    }
}

fn too_long() -> Error {
    Error::InvalidInput("more bytes than a buffer of the pool holds: use larger buffers")
}

impl io::Write for PooledBuffer {
    /// Appends as many bytes as fit.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.capacity() - self.len);
        self.extend_from_slice(&bytes[..count])?;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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
        self.memory.as_ref().map_or(&[], |memory| &memory.pages[..self.len])
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        self.memory.as_mut().map_or(&mut [], |memory| &mut memory.pages[..len])
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let Some(mut state) = self.pool.0.lock() else { return };
        // A buffer that a forked child has allocated while it could not lock is not counted.
        if state.idle.len() < state.allocated {
            state.idle.extend(self.memory.take());
            self.pool.0.signal_return(&state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;

    #[test]
    fn a_pool_reuses_its_buffers_and_keeps_to_its_limit() {
        let pool = BufferPool::new(5000, 2).unwrap();
        assert_eq!(pool.buffer_bytes(), 5000);
        let one = pool.take().unwrap();
        let two = pool.clone().take().unwrap();
        assert_eq!((one.len(), two.capacity(), pool.in_use()), (0, 5000, 2));
        assert!(matches!(pool.take(), Err(Error::PoolEmpty { buffers_max: 2 })));
        drop(one);
        let again = pool.take().unwrap();
        drop((two, again));
        assert_eq!((pool.in_use(), pool.0.lock().unwrap().idle.len()), (0, 2));
        assert_eq!((pool.shrink(), pool.0.lock().unwrap().allocated), (2, 0));
        assert_eq!(pool.take().unwrap().len(), 0);
    }

    #[test]
    fn a_buffer_never_shows_the_bytes_of_its_last_user() {
        let pool = BufferPool::new(100, 1).unwrap();
        let mut first = pool.take().unwrap();
        first.write_all(&[0xEE; 80]).unwrap();
        drop(first);
        let mut next = pool.take().unwrap();
        assert!(next.is_empty());
        next.extend_from_slice(b"12").unwrap();
        next.resize(100).unwrap();
        assert_eq!(&next[..2], b"12");
        assert_eq!(&next[2..], &[0; 98]);
        next.fill(0xDD);
        next.truncate(10);
        next.resize(20).unwrap();
        assert_eq!(&next[10..], &[0; 10], "bytes that were cut off do not come back either");
        next.clear();
        next.scratch().fill(0xCC);
        next.resize(100).unwrap();
        assert_eq!(&next[..], &[0; 100]);
    }

    #[test]
    fn a_reader_that_reports_more_than_it_has_written_shows_zeros() {
        struct Liar;
        impl Read for Liar {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                Ok(buffer.len())
            }
        }
        let pool = BufferPool::new(100, 1).unwrap();
        pool.take().unwrap().extend_from_slice(&[7; 100]).unwrap();
        let mut buffer = pool.take().unwrap();
        buffer.extend_from_slice(b"own").unwrap();
        buffer.read_from(Liar).unwrap();
        assert!(buffer.starts_with(b"own") && buffer[3..].iter().all(|&byte| byte == 0));
        buffer.clear();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"content").unwrap();
        io::Seek::rewind(&mut file).unwrap();
        assert_eq!((buffer.read_from_fd(&file).unwrap(), &buffer[..]), (7, &b"content"[..]));
    }

    #[test]
    fn what_does_not_fit_is_an_error_and_changes_nothing() {
        let mut buffer = BufferPool::new(4, 1).unwrap().take().unwrap();
        assert_eq!(buffer.write(b"123456").unwrap(), 4);
        assert_eq!(buffer.write(b"5").unwrap(), 0);
        assert!(matches!(buffer.extend_from_slice(b"5"), Err(Error::InvalidInput(_))));
        assert!(matches!(buffer.resize(5), Err(Error::InvalidInput(_))));
        assert_eq!(&buffer[..], b"1234");
        buffer.clear();
        assert_eq!(buffer.read_from(&b"abcdef"[..]).unwrap(), 4);
        assert_eq!((buffer.read_from(&b"g"[..]).unwrap(), &buffer[..]), (0, &b"abcd"[..]));
    }

    #[test]
    fn a_thread_waits_until_a_buffer_returns() {
        let pool = BufferPool::new(10, 1).unwrap();
        let held = pool.take().unwrap();
        let empty = pool.take_timeout(Duration::from_millis(20));
        assert!(matches!(empty, Err(Error::PoolEmpty { .. })));
        std::thread::scope(|scope| {
            let started = Instant::now();
            let waiting = scope.spawn(|| pool.take_timeout(Duration::from_secs(60)));
            while pool.0.lock().unwrap().waiting == 0 {
                std::thread::yield_now();
            }
            drop(held);
            waiting.join().unwrap().unwrap();
            assert!(started.elapsed() < Duration::from_secs(30), "it was not woken");
        });
    }

    #[test]
    fn an_empty_pool_is_an_error() {
        for (bytes, count) in [(0, 1), (1, 0), (usize::MAX, 1)] {
            assert!(
                matches!(BufferPool::new(bytes, count), Err(Error::InvalidInput(_))),
                "{bytes} {count}"
            );
        }
        let huge = BufferPool::with_huge_pages(1, 1).unwrap();
        assert_eq!(huge.take().unwrap().capacity(), 1);
    }

    proptest! {
        /// Whatever its users do, a byte that is shown was written by the present one, or is zero.
        #[test]
        fn every_byte_is_the_users_own_or_zero(
            operations in proptest::collection::vec((0u8..5, 0usize..70), 1..60)
        ) {
            let pool = BufferPool::new(64, 1).unwrap();
            let mut buffer = pool.take().unwrap();
            let (mut user, mut expected) = (1u8, Vec::<u8>::new());
            for (operation, len) in operations {
                match operation {
                    0 => {
                        drop(buffer);
                        buffer = pool.take().unwrap();
                        user = user.wrapping_add(1).max(1);
                        expected.clear();
                    }
                    1 => {
                        let bytes = vec![user; len];
                        if buffer.extend_from_slice(&bytes).is_ok() {
                            expected.extend(bytes);
                        }
                    }
                    2 => if buffer.resize(len).is_ok() {
                        expected.resize(len, 0);
                    },
                    3 => {
                        buffer.truncate(len);
                        expected.truncate(len);
                    }
                    _ => {
                        buffer.fill(user);
                        expected.fill(user);
                    }
                }
                prop_assert_eq!(&buffer[..], &expected[..]);
            }
        }
    }
}
