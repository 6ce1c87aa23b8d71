//! [`OsSocket`]: loans over a real socket.

use super::ZeroCopySocket;
use crate::call::Call;
use crate::error::{Error, failed};
use haul_sys::error_queue::{self, Completion};
use haul_sys::sendmsg::{self, SendOptions};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SocketType;
use rustix::net::sockopt::Timeout;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The poll interval of a wait on a connection that has ended.
const HANG_UP_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A socket, of any kind that can be sent from.
pub(crate) struct OsSocket<'a> {
    socket: BorrowedFd<'a>,
    kind: SocketType,
}

impl<'a> OsSocket<'a> {
    pub fn of(socket: BorrowedFd<'a>, kind: SocketType) -> Self {
        Self { socket, kind }
    }
}

impl ZeroCopySocket for OsSocket<'_> {
    fn send(
        &mut self,
        bytes: &[u8],
        segment_bytes: Option<u16>,
        zerocopy: bool,
    ) -> io::Result<usize> {
        sendmsg::send(self.socket, bytes, SendOptions { segment_bytes, zerocopy })
    }

    fn enable_zerocopy(&mut self) -> Result<(), Error> {
        // The kernel numbers a socket's sends from its first one. If the option is set already,
        // other code may have sent some.
        if haul_sys::sockopt::zerocopy(self.socket).map_err(failed(Call::GetZerocopy))? {
            return Err(Error::Unsuited(
                "SO_ZEROCOPY was set on this socket before: other code may have sent with it",
            ));
        }
        haul_sys::sockopt::set_zerocopy(self.socket, true).map_err(failed(Call::SetZerocopy))
    }

    fn next_completion(&mut self) -> io::Result<Option<Completion>> {
        error_queue::next_completion(self.socket)
    }

    fn wait_for_completion(&mut self) -> io::Result<bool> {
        if rustix::fs::fcntl_getfl(self.socket)?.contains(rustix::fs::OFlags::NONBLOCK) {
            return Ok(false);
        }
        let timeout = rustix::net::sockopt::socket_timeout(self.socket, Timeout::Send)?;
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        // No event is requested: `POLLERR`, which reports a non-empty error queue, is always
        // reported.
        let mut descriptors = [PollFd::new(&self.socket, PollFlags::empty())];
        match rustix::event::poll(&mut descriptors, timeout.as_ref()) {
            Ok(0) => Ok(false),
            Ok(_) => {
                if !descriptors[0].revents().contains(PollFlags::ERR) {
                    // A connection that has ended wakes every poll at once; its completions follow
                    // shortly.
                    std::thread::sleep(HANG_UP_POLL_INTERVAL);
                }
                Ok(true)
            }
            Err(rustix::io::Errno::INTR) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }

    /// TCP takes the number of a failed send back. UDP does so only before the packet is built. If
    /// a segment is larger than the MTU or a firewall refuses it, the send fails after that and
    /// gets a completion.
    fn numbers_failed_sends(&self) -> bool {
        self.kind != SocketType::STREAM
    }
}
