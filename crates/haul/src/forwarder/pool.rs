//! [`ForwardPool`]: the settings of forwarders, and the pipes and buffers that they share.

use crate::call::Call;
use crate::error::{Error, failed};
use crate::pipe::{Pipe, SOCKET_PIPE_BYTES};
use crate::pipe_pool::PipePool;
use crate::pool::{BufferPool, PooledBuffer};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The most bytes that are copied at a time: a message of 16 KiB with its header, such as a full
/// record of TLS, in one call and one packet (docs/measurements/forward.md).
const BUFFER_BYTES: usize = 20 << 10;

/// The time for which sockets are expected to refuse bytes after TCP was short of memory.
const SHORTAGE_LASTS: Duration = Duration::from_secs(10);

/// The default of [`ForwardSettings::held_pipes_max`]: 8 MiB of pipes.
const HELD_PIPES_MAX: usize = 32;

/// Pipes and buffers for many forwarders, which hold them only while they need them.
///
/// Clones share one pool. A pipe returns to the pool only when it is empty, so that no connection
/// ever receives another's bytes; a pipe that is not empty is closed. A forked child does not use
/// the pipes of its parent.
#[derive(Debug, Clone)]
pub struct ForwardPool(Arc<ForwardPoolInner>);

#[derive(Debug)]
struct ForwardPoolInner {
    pipes: PipePool,
    /// Pipes that hold bytes between steps.
    held_pipes: AtomicUsize,
    settings: ForwardSettings,
    buffers: BufferPool,
    created_at: Instant,
    /// When [`ForwardPool::is_short_of_memory`] ends, in milliseconds after `created_at`; 0 before
    /// the first shortage.
    shortage_ends_ms: AtomicU64,
}

/// A permit for a pipe to hold bytes between steps. Dropping it gives it back.
#[derive(Debug)]
pub(super) struct HeldPipePermit(ForwardPool);

impl Drop for HeldPipePermit {
    fn drop(&mut self) {
        self.0.0.held_pipes.fetch_sub(1, Relaxed);
    }
}

/// Settings of forwarders, which share them through their pool ([`ForwardPool::with_settings`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForwardSettings {
    /// The forward method.
    pub method: ForwardMethod,
    /// The most idle pipes that are kept. Each takes two descriptors.
    pub idle_pipes_max: usize,
    /// The capacity of a pipe, in bytes. An unprivileged user may have 64 MiB of pipes in all
    /// (`fs.pipe-user-pages-soft`).
    pub pipe_bytes: usize,
    /// The most pipes that hold bytes between steps, because a peer does not read. Once there are
    /// as many, a pipe is filled only with what the other socket has room for, and the few bytes
    /// that it does not accept then are kept in memory.
    pub held_pipes_max: usize,
    /// The most bytes that are copied at a time.
    pub buffer_bytes: usize,
    /// How long no byte may move in either direction; `None` for ever.
    pub idle_timeout: Option<Duration>,
    /// Like `idle_timeout`, after one of the streams ended. Without it, a peer that ends its
    /// stream and never closes keeps both sockets.
    pub half_closed_timeout: Option<Duration>,
}

/// The method by which a forwarder moves data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForwardMethod {
    /// Copies small pieces and splices large ones.
    Adaptive,
    /// Copies everything.
    Copy,
    /// Splices everything, where that works.
    Splice,
}

impl Default for ForwardSettings {
    /// Adaptive; pipes of 256 KiB, of which an unprivileged user may have 256, and 32 hold bytes
    /// between steps; copies of 20 KiB; no timeouts.
    fn default() -> Self {
        Self {
            method: ForwardMethod::Adaptive,
            idle_pipes_max: 2,
            pipe_bytes: SOCKET_PIPE_BYTES,
            held_pipes_max: HELD_PIPES_MAX,
            buffer_bytes: BUFFER_BYTES,
            idle_timeout: None,
            half_closed_timeout: None,
        }
    }
}

impl ForwardSettings {
    /// Sets the forward method.
    #[must_use]
    pub fn with_method(mut self, method: ForwardMethod) -> Self {
        self.method = method;
        self
    }

    /// Sets the most idle pipes that are kept.
    #[must_use]
    pub fn with_idle_pipes_max(mut self, idle_pipes_max: usize) -> Self {
        self.idle_pipes_max = idle_pipes_max;
        self
    }

    /// Sets the capacity of a pipe, in bytes.
    #[must_use]
    pub fn with_pipe_bytes(mut self, pipe_bytes: usize) -> Self {
        self.pipe_bytes = pipe_bytes;
        self
    }

    /// Sets the most pipes that hold bytes between steps.
    #[must_use]
    pub fn with_held_pipes_max(mut self, held_pipes_max: usize) -> Self {
        self.held_pipes_max = held_pipes_max;
        self
    }

    /// Sets the most bytes that are copied at a time.
    #[must_use]
    pub fn with_buffer_bytes(mut self, buffer_bytes: usize) -> Self {
        self.buffer_bytes = buffer_bytes;
        self
    }

    /// Sets how long no byte may move in either direction.
    #[must_use]
    pub fn with_idle_timeout(mut self, idle_timeout: Option<Duration>) -> Self {
        self.idle_timeout = idle_timeout;
        self
    }

    /// Sets how long no byte may move after one of the streams ended.
    #[must_use]
    pub fn with_half_closed_timeout(mut self, half_closed_timeout: Option<Duration>) -> Self {
        self.half_closed_timeout = half_closed_timeout;
        self
    }
}

impl ForwardPool {
    /// Creates a pool that keeps up to `idle_pipes_max` pipes, with [`ForwardSettings::default`]
    /// otherwise.
    pub fn new(idle_pipes_max: usize) -> Result<Self, Error> {
        Self::with_settings(ForwardSettings { idle_pipes_max, ..ForwardSettings::default() })
    }

    /// Creates a pool whose forwarders have the given settings.
    pub fn with_settings(settings: ForwardSettings) -> Result<Self, Error> {
        /// A buffer is in use only during a step, so at most one per thread is in use.
        const BUFFERS_MAX: usize = 4096;
        if settings.pipe_bytes == 0 || settings.buffer_bytes == 0 {
            return Err(Error::InvalidInput("pipe_bytes and buffer_bytes must be at least 1"));
        }
        let buffers = BufferPool::new(settings.buffer_bytes, BUFFERS_MAX)?;
        let pipes = PipePool::new(settings.idle_pipes_max, settings.pipe_bytes);
        Ok(Self(Arc::new(ForwardPoolInner {
            pipes,
            held_pipes: AtomicUsize::new(0),
            settings,
            buffers,
            created_at: Instant::now(),
            shortage_ends_ms: AtomicU64::new(0),
        })))
    }

    /// The number of idle pipes.
    pub fn idle_pipes(&self) -> usize {
        self.0.pipes.idle()
    }

    pub(super) fn settings(&self) -> &ForwardSettings {
        &self.0.settings
    }

    /// A buffer to copy through.
    pub(super) fn take_buffer(&self) -> Result<PooledBuffer, Error> {
        self.0.buffers.take()
    }

    pub(super) fn acquire_pipe(&self) -> Result<Pipe, Error> {
        self.0.pipes.acquire().map_err(|errno| failed(Call::Pipe)(errno.into()))
    }

    /// A permit for a pipe to hold bytes between steps; `None` if as many hold bytes as may.
    pub(super) fn acquire_held_pipe(&self) -> Option<HeldPipePermit> {
        let add = |held: usize| (held < self.0.settings.held_pipes_max).then_some(held + 1);
        let added = self.0.held_pipes.fetch_update(Relaxed, Relaxed, add);
        added.is_ok().then(|| HeldPipePermit(self.clone()))
    }

    /// Notes that TCP has used up the memory that the host allows (`tcp_mem`).
    pub(super) fn note_memory_shortage(&self) {
        let end = self.0.created_at.elapsed() + SHORTAGE_LASTS;
        self.0.shortage_ends_ms.store(end.as_millis() as u64, Relaxed);
    }

    /// Whether TCP was short of memory a short time ago.
    pub(super) fn is_short_of_memory(&self) -> bool {
        let end = self.0.shortage_ends_ms.load(Relaxed);
        end > 0 && self.0.created_at.elapsed() < Duration::from_millis(end)
    }

    pub(super) fn release_pipe(&self, pipe: Pipe) {
        self.0.pipes.release(pipe);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_of_memory_ends() {
        let pool = ForwardPool::new(0).unwrap();
        assert!(!pool.is_short_of_memory());
        pool.note_memory_shortage();
        assert!(pool.is_short_of_memory());
        // A shortage that ended as long ago as the pool is old.
        pool.0.shortage_ends_ms.store(1, Relaxed);
        std::thread::sleep(Duration::from_millis(2));
        assert!(!pool.is_short_of_memory());
    }
}
