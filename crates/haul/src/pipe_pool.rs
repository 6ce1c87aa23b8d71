//! [`PipePool`]: empty pipes that are kept for the next user.

use crate::pipe::Pipe;
use rustix::io::Result;
use std::sync::{Mutex, TryLockError};

/// Empty pipes that are kept for the next user, so that a connection holds a pipe's two descriptors
/// only while it moves bytes.
///
/// A forked child does not use the pipes of its parent, and no user waits for another: the lock may
/// have been held by another thread when the process was forked.
#[derive(Debug)]
pub(crate) struct PipePool {
    idle: Mutex<Vec<Pipe>>,
    idle_max: usize,
    pipe_bytes: usize,
}

impl PipePool {
    /// Creates a pool that keeps at most `idle_max` pipes with a capacity of `pipe_bytes`.
    pub const fn new(idle_max: usize, pipe_bytes: usize) -> Self {
        Self { idle: Mutex::new(Vec::new()), idle_max, pipe_bytes }
    }

    /// An idle pipe, or a new one.
    pub fn acquire(&self) -> Result<Pipe> {
        let idle = self.with_idle(Vec::pop).flatten();
        idle.map_or_else(|| Pipe::new(self.pipe_bytes), Ok)
    }

    /// Keeps a pipe for the next user. A pipe that holds bytes is closed, like one that is smaller
    /// than the pool's because the user had too many pipes when it was created.
    pub fn release(&self, pipe: Pipe) {
        let is_whole = pipe.held_bytes() == 0 && pipe.has_capacity(self.pipe_bytes);
        self.with_idle(|idle| {
            if is_whole && !pipe.is_inherited() && idle.len() < self.idle_max {
                idle.push(pipe);
            }
        });
    }

    /// The number of idle pipes.
    pub fn idle(&self) -> usize {
        self.with_idle(|idle| idle.len()).unwrap_or(0)
    }

    /// Uses the idle pipes; `None` if another thread holds the lock, or held it at the fork.
    fn with_idle<T>(&self, action: impl FnOnce(&mut Vec<Pipe>) -> T) -> Option<T> {
        let mut idle = match self.idle.try_lock() {
            Ok(idle) => idle,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        idle.retain(|pipe| !pipe.is_inherited());
        Some(action(&mut idle))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipe::SOCKET_PIPE_BYTES;

    #[test]
    fn empty_pipes_are_kept_up_to_the_limit() {
        let pool = PipePool::new(2, SOCKET_PIPE_BYTES);
        let mut pipes: Vec<_> = (0..4).map(|_| pool.acquire().unwrap()).collect();
        assert_eq!(pool.idle(), 0);
        rustix::io::write(pipes[0].write_end(), b"held").unwrap();
        pipes[0].record_filled(4);
        for (pipe, kept) in pipes.into_iter().zip([0, 1, 2, 2]) {
            pool.release(pipe);
            assert_eq!(pool.idle(), kept);
        }
        drop(pool.acquire().unwrap());
        assert_eq!(pool.idle(), 1, "an idle pipe is used first");
    }

    /// Bytes that one process puts into such a pipe would reach the other's connection.
    #[test]
    fn a_forked_child_does_not_take_the_idle_pipes_of_its_parent() {
        let pool = PipePool::new(2, SOCKET_PIPE_BYTES);
        pool.release(pool.acquire().unwrap());
        let code = haul_lab_sys::child::in_forked_child(|| {
            i32::from(pool.idle() > 0 || pool.acquire().unwrap().is_inherited())
        });
        assert_eq!(code.unwrap(), Some(0));
        assert_eq!(pool.idle(), 1);
    }

    #[test]
    fn a_pipe_that_is_smaller_than_the_pools_is_not_kept() {
        let pool = PipePool::new(2, SOCKET_PIPE_BYTES);
        pool.release(Pipe::new(8 << 10).unwrap());
        assert_eq!(pool.idle(), 0);
    }
}
