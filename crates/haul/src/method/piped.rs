//! The common part of `splice`, `vmsplice` and `floor`: a pipe between a source and the socket.
//!
//! Bytes that the socket did not accept stay in the pipe. If the next call continues at their
//! offset, in the same state of the same file, they are sent first. Otherwise they are discarded,
//! because the caller has moved on to other data.

use crate::call::Call;
use crate::error::{Error, failed};
use crate::pipe::Pipe;
use crate::source::{FileVersion, Source};
use rustix::pipe::SpliceFlags;
use std::os::fd::BorrowedFd;

/// A pipe, and the origin of the bytes that it holds between two calls.
#[derive(Debug)]
pub(super) struct SourcePipe {
    pipe: Pipe,
    chunk_bytes: usize,
    /// The file version and the offset of the first byte.
    origin: Option<(FileVersion, u64)>,
    /// An error of the socket that occurred after some bytes were sent; the next call returns it.
    /// The kernel reports the reason, such as a reset, only once.
    deferred_error: Option<Error>,
}

impl SourcePipe {
    /// Creates a pipe for calls of `chunk_bytes`, or as large as the kernel allows.
    pub fn new(chunk_bytes: usize) -> Result<Self, Error> {
        let pipe =
            Pipe::with_room_for(chunk_bytes).map_err(|errno| failed(Call::Pipe)(errno.into()))?;
        Ok(Self { pipe, chunk_bytes, origin: None, deferred_error: None })
    }

    /// Moves up to `len` bytes of `source` to the socket; `fill` fills the pipe if it is empty.
    ///
    /// If an error occurs after some bytes were sent, their number is returned instead, and the
    /// next call returns the error. `fill(pipe, offset, len)` returns the bytes that it added, 0 at
    /// the end of the source. `calls` counts system calls.
    pub fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        offset: u64,
        len: usize,
        calls: &mut u64,
        fill: impl FnMut(&Pipe, u64, usize) -> Result<usize, Error>,
    ) -> Result<u64, Error> {
        if let Some(error) = self.deferred_error.take() {
            return Err(error);
        }
        if self.pipe.is_inherited() {
            *self = Self::new(self.chunk_bytes)?;
        }
        if self.pipe.held_bytes() > 0 {
            let requested = (source.file_version().map_err(failed(Call::Fstat))?, offset);
            if self.origin != Some(requested) {
                *self = Self::new(self.chunk_bytes)?;
            }
        }
        let mut sent = 0;
        let result = self.fill_and_drain(socket, offset, len, calls, fill, &mut sent);
        let holds_bytes = self.pipe.held_bytes() > 0;
        let file_version = if holds_bytes { source.file_version().ok() } else { None };
        self.origin = file_version.map(|file_version| (file_version, offset + sent));
        match result {
            Err(error) if sent == 0 => Err(error),
            // An error of the source is found again by a call that reads there.
            Err(error @ Error::Failed { call: Call::SpliceIntoSocket, .. }) => {
                self.deferred_error = Some(error);
                Ok(sent)
            }
            _ => Ok(sent),
        }
    }

    /// Fills and drains the pipe until `len` bytes are sent or one end refuses; counts them in
    /// `sent`.
    fn fill_and_drain(
        &mut self,
        socket: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        calls: &mut u64,
        mut fill: impl FnMut(&Pipe, u64, usize) -> Result<usize, Error>,
        sent: &mut u64,
    ) -> Result<(), Error> {
        let pipe = &mut self.pipe;
        while *sent < len as u64 {
            let left = len - *sent as usize;
            if pipe.held_bytes() == 0 {
                *calls += 1;
                let count = fill(pipe, offset + *sent, left.min(pipe.capacity_bytes()))?;
                if count == 0 {
                    return Err(Error::Ended { at: offset + *sent });
                }
                pipe.record_filled(count);
            }
            *calls += 1;
            // If an earlier call asked for more, the pipe may hold more than this call asks for.
            let flags =
                if pipe.held_bytes() < left { SpliceFlags::MORE } else { SpliceFlags::empty() };
            let drained = pipe.drain(socket, None, left, flags);
            *sent += drained.map_err(|errno| failed(Call::SpliceIntoSocket)(errno.into()))? as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_testing::tcp_pair;
    use rustix::event::{PollFd, PollFlags};
    use rustix::io::Errno;
    use rustix::net::sockopt;

    use std::os::fd::AsFd;
    use std::time::Duration;

    /// The kernel reports the reason only once, to the call that has sent some bytes.
    #[test]
    fn the_reason_of_a_lost_connection_is_returned_by_the_next_call() {
        let ((from, to), file) = (tcp_pair(), tempfile::tempfile().unwrap());
        let (mut pipe, mut peer) = (SourcePipe::new(1 << 20).unwrap(), Some(to));
        let mut fills = 0;
        let mut fill = |pipe: &Pipe, _: u64, _: usize| {
            fills += 1;
            if let Some(peer) = peer.take_if(|_| fills == 2) {
                // Without a time to linger, closing resets the connection.
                sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
                drop(peer);
                let mut hang_up = [PollFd::new(&from, PollFlags::empty())];
                assert_eq!(rustix::event::poll(&mut hang_up, None), Ok(1));
            }
            Ok(rustix::io::write(pipe.write_end(), &[7; 1000]).unwrap())
        };
        let mut send = || pipe.send(from.as_fd(), Source::from(&file), 0, 5000, &mut 0, &mut fill);
        assert_eq!(send().unwrap(), 1000);
        assert_eq!(send().unwrap_err().raw_os_error(), Some(Errno::CONNRESET.raw_os_error()));
    }

    /// The next call may be for another file.
    #[test]
    fn an_error_of_the_source_is_not_returned_by_the_next_call() {
        let ((from, _to), file) = (tcp_pair(), tempfile::tempfile().unwrap());
        let mut pipe = SourcePipe::new(1 << 20).unwrap();
        let mut fills = 0;
        let mut fill = |pipe: &Pipe, _: u64, _: usize| {
            fills += 1;
            if fills == 2 {
                return Err(failed(Call::Splice)(Errno::IO.into()));
            }
            Ok(rustix::io::write(pipe.write_end(), &[7; 1000]).unwrap())
        };
        let mut send =
            |len| pipe.send(from.as_fd(), Source::from(&file), 0, len, &mut 0, &mut fill);
        assert_eq!(send(5000).unwrap(), 1000);
        assert_eq!(send(1000).unwrap(), 1000);
    }
}
