//! From a socket into a file: spliced through a pipe, one copy into the page cache.
//!
//! Bytes in the pipe have left the socket, so they are never dropped: bytes that a file did not
//! accept are kept for the next call.

use crate::call::Call;
use crate::error::{Error, failed};
use crate::method::Counts;
use crate::pipe::{Pipe, SOCKET_PIPE_BYTES};
use crate::pipe_pool::PipePool;
use haul_sys::fork;
use rustix::io::{Errno, retry_on_intr};
use rustix::pipe::SpliceFlags;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// The most idle pipes that the receivers of the process keep, two descriptors each.
const IDLE_PIPES_MAX: usize = 16;

/// The idle pipes of the process.
static PIPES: PipePool = PipePool::new(IDLE_PIPES_MAX, SOCKET_PIPE_BYTES);

/// The pipe between a socket and files, and the bytes that a file did not accept.
#[derive(Debug, Default)]
pub(super) struct IntoFile {
    pipe: Option<Pipe>,
    is_disabled: bool,
    /// Bytes that were read and that a file did not accept.
    unwritten: Vec<u8>,
    /// The process that has read them ([`fork::generation`]).
    process: u64,
}

impl IntoFile {
    /// The bytes that it holds, which come before the socket's.
    pub fn held_bytes(&self) -> usize {
        self.unwritten.len() + self.pipe.as_ref().map_or(0, Pipe::held_bytes)
    }

    /// Disables splicing.
    pub fn disable(&mut self) {
        self.is_disabled = true;
    }

    /// Moves a prefix of `range`; returns the number of bytes, or `None` if the caller must read
    /// instead, as at the end of the stream.
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        file: BorrowedFd<'_>,
        range: &Range<u64>,
        counts: &mut Counts,
    ) -> Result<Option<u64>, Error> {
        if self.is_disabled || !self.unwritten.is_empty() {
            return Ok(None);
        }
        self.leave_pipe_to_parent()?;
        let pipe = match &mut self.pipe {
            Some(pipe) => pipe,
            none => none.insert(PIPES.acquire().map_err(|errno| failed(Call::Pipe)(errno.into()))?),
        };
        let wanted =
            usize::try_from(range.end - range.start).unwrap_or(usize::MAX).min(SOCKET_PIPE_BYTES);
        if pipe.held_bytes() == 0 {
            counts.calls += 1;
            let filled = pipe.fill(socket, wanted, SpliceFlags::empty());
            if !matches!(filled, Ok(1..)) {
                self.release_pipe();
            }
            match filled {
                // The end of the stream, no data, or what splicing stops before. `recv`
                // distinguishes them, and skips an urgent byte.
                Ok(0) | Err(Errno::AGAIN) => return Ok(None),
                Ok(_) => {}
                Err(errno) => return Err(failed(Call::SpliceFromSocket)(errno.into())),
            }
        }
        let Some(pipe) = &mut self.pipe else { return Ok(None) };
        let mut moved = 0;
        // An earlier call may have left more in the pipe than this range takes.
        while pipe.held_bytes() > 0 && moved < wanted {
            counts.calls += 1;
            let offset = range.start + moved as u64;
            match pipe.drain(file, Some(offset), wanted - moved, SpliceFlags::empty()) {
                Ok(0) => break,
                Ok(count) => moved += count,
                Err(_) if moved > 0 => break,
                Err(errno) => return Err(failed(Call::SpliceIntoFile)(errno.into())),
            }
        }
        counts.bytes += moved as u64;
        Ok(Some(moved as u64))
    }

    /// Leaves an empty pipe to the next receiver: one whose non-blocking socket is empty holds
    /// none.
    fn release_pipe(&mut self) {
        if let Some(pipe) = self.pipe.take_if(|pipe| pipe.held_bytes() == 0) {
            PIPES.release(pipe);
        }
    }

    /// Gives up a pipe that the parent of a forked child uses. Bytes in it were received by the
    /// parent.
    fn leave_pipe_to_parent(&mut self) -> Result<(), Error> {
        match self.pipe.take_if(|pipe| pipe.is_inherited()) {
            Some(pipe) if pipe.held_bytes() > 0 => {
                self.pipe = Some(pipe);
                Err(Error::Forked)
            }
            _ => Ok(()),
        }
    }

    /// Writes bytes that were read; bytes that the file does not accept are kept.
    pub fn write(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: &[u8],
        counts: &mut Counts,
    ) -> Result<u64, Error> {
        let mut written = 0;
        while written < bytes.len() {
            counts.calls += 1;
            match retry_on_intr(|| {
                rustix::io::pwrite(file, &bytes[written..], offset + written as u64)
            }) {
                Ok(count) if count > 0 => written += count,
                stopped => {
                    let error =
                        stopped.map_or_else(Into::into, |_| io::ErrorKind::WriteZero.into());
                    // Before the bytes already kept: these were taken from there, or none are kept.
                    self.unwritten.splice(..0, bytes[written..].iter().copied());
                    self.process = fork::generation();
                    if written == 0 {
                        return Err(failed(Call::Pwrite)(error));
                    }
                    break;
                }
            }
        }
        counts.bytes += written as u64;
        Ok(written as u64)
    }

    /// Takes bytes that come before the socket's; returns how many, 0 if there are none.
    pub fn take_held(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        if !self.unwritten.is_empty() {
            if self.process != fork::generation() {
                return Err(Error::Forked);
            }
            let count = buffer.len().min(self.unwritten.len());
            buffer[..count].copy_from_slice(&self.unwritten[..count]);
            self.unwritten.drain(..count);
            return Ok(count);
        }
        self.leave_pipe_to_parent()?;
        let held = self.pipe.as_mut().map_or(Ok(0), |pipe| pipe.read(buffer));
        held.map_err(|errno| failed(Call::ReadPipe)(errno.into()))
    }
}

impl Drop for IntoFile {
    fn drop(&mut self) {
        self.release_pipe();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_stalled_socket_holds_no_pipe() {
        let (mut from, to) = UnixStream::pair().unwrap();
        to.set_nonblocking(true).unwrap();
        let file = tempfile::tempfile().unwrap();
        let (mut into_file, mut counts) = (IntoFile::default(), Counts::default());
        let mut receive = |into_file: &mut IntoFile| {
            into_file.receive(to.as_fd(), file.as_fd(), &(0..9), &mut counts).unwrap()
        };
        assert_eq!(receive(&mut into_file), None);
        assert!(into_file.pipe.is_none());
        from.write_all(b"content").unwrap();
        assert_eq!(receive(&mut into_file), Some(7));
        assert_eq!(receive(&mut into_file), None);
        assert!(into_file.pipe.is_none());
    }
}
