//! Loans over a real socket.

use super::Wire;
use crate::error::{Error, failed};
use haul_sys::datagram::{self, Datagrams};
use haul_sys::error_queue::{self, Notice};
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::os::fd::BorrowedFd;

/// A socket, of any kind that can be sent from.
pub(crate) struct SocketWire<'a> {
    socket: BorrowedFd<'a>,
}

impl<'a> SocketWire<'a> {
    pub fn of(socket: BorrowedFd<'a>) -> Self {
        Self { socket }
    }
}

impl Wire for SocketWire<'_> {
    fn send(&mut self, bytes: &[u8], segment_bytes: Option<u16>, zerocopy: bool) -> io::Result<usize> {
        datagram::send(self.socket, bytes, Datagrams { segment_bytes, zerocopy })
    }

    fn enable_zerocopy(&mut self) -> Result<(), Error> {
        // The kernel numbers a socket's sends from its first: whoever switched this on may have sent already.
        if haul_sys::sockopt::zerocopy(self.socket).map_err(failed("getsockopt SO_ZEROCOPY"))? {
            return Err(Error::Unsuited(
                "SO_ZEROCOPY was set on this socket before: somebody else counts its sends",
            ));
        }
        haul_sys::sockopt::set_zerocopy(self.socket, true).map_err(failed("setsockopt SO_ZEROCOPY"))
    }

    fn next_notice(&mut self) -> io::Result<Option<Notice>> {
        error_queue::next_notice(self.socket)
    }

    fn wait_for_notice(&mut self) -> io::Result<bool> {
        if rustix::fs::fcntl_getfl(self.socket)?.contains(rustix::fs::OFlags::NONBLOCK) {
            return Ok(false);
        }
        // No event is asked for: POLLERR, which says that the error queue holds something, always comes.
        let mut descriptors = [PollFd::new(&self.socket, PollFlags::empty())];
        match rustix::event::poll(&mut descriptors, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }
}
