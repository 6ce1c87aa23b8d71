//! [`OsSocket`]: loans over a real socket.

use super::ZeroCopySocket;
use crate::claim::Claim;
use crate::error::Error;
use crate::socket;
use haul_sys::error_queue::{self, Completion};
use haul_sys::sendmsg::{self, SendOptions};
use haul_sys::sockopt;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::SocketType;
use rustix::net::sockopt::{self as net_sockopt, Timeout};
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// The poll interval of a wait on a connection that has ended.
const HANG_UP_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A socket, of any kind that can be sent from.
pub(crate) struct OsSocket<'a> {
    socket: BorrowedFd<'a>,
    kind: SocketType,
    /// Whether sends return at once, also on a blocking socket.
    nonblocking: bool,
    /// The bytes that the sender itself has sent, so that the rest of what is in the socket is
    /// other code's.
    own_bytes: u64,
    /// The start of the first wait of this call.
    waiting_since: Option<Instant>,
    /// Whether the error queue woke the last wait and has had no completion since.
    was_woken_in_vain: bool,
}

impl<'a> OsSocket<'a> {
    pub fn of(socket: BorrowedFd<'a>, kind: SocketType) -> Self {
        Self {
            socket,
            kind,
            nonblocking: false,
            own_bytes: 0,
            waiting_since: None,
            was_woken_in_vain: false,
        }
    }

    /// Makes sends return at once, also on a blocking socket.
    pub fn nonblocking(mut self) -> Self {
        self.nonblocking = true;
        self
    }

    /// Sets the bytes that the sender itself has sent.
    pub fn with_own_bytes(mut self, own_bytes: u64) -> Self {
        self.own_bytes = own_bytes;
        self
    }

    /// Whether an error means that the kernel, the device or the route has no UDP segmentation
    /// offload. `EINVAL` may also mean that a segment does not fit the MTU.
    fn lacks_segmentation(&self, error: &io::Error, segment_bytes: u16) -> bool {
        /// The headers of IPv6 and UDP.
        const HEADER_BYTES: u32 = 48;
        match Errno::from_io_error(error) {
            Some(Errno::IO | Errno::NOPROTOOPT | Errno::OPNOTSUPP) => true,
            Some(Errno::INVAL) => sockopt::path_mtu(self.socket)
                .is_ok_and(|mtu| u32::from(segment_bytes) + HEADER_BYTES <= mtu),
            _ => false,
        }
    }
}

impl ZeroCopySocket for OsSocket<'_> {
    fn send(
        &mut self,
        parts: &[IoSlice<'_>],
        segment_bytes: Option<u16>,
        zerocopy: bool,
    ) -> io::Result<usize> {
        let options = SendOptions { segment_bytes, zerocopy, nonblocking: self.nonblocking };
        let sent = sendmsg::send(self.socket, parts, options);
        match (sent, segment_bytes, parts) {
            // A loan that is segmented is one buffer.
            (Err(error), Some(segment_bytes), [bytes])
                if !zerocopy && self.lacks_segmentation(&error, segment_bytes) =>
            {
                let segment_bytes = usize::from(segment_bytes);
                let nonblocking = self.nonblocking;
                let datagrams =
                    sendmsg::send_group(self.socket, bytes, segment_bytes, nonblocking)?;
                Ok(bytes.len().min(datagrams * segment_bytes))
            }
            (sent, ..) => sent,
        }
    }

    fn claim(&mut self) -> Option<Claim> {
        Claim::of(self.socket)
    }

    fn enable_zerocopy(&mut self) -> Result<bool, Error> {
        socket::enable_zerocopy(self.socket, self.own_bytes)
    }

    fn next_completion(&mut self) -> io::Result<Option<Completion>> {
        let completion = error_queue::next_completion(self.socket)?;
        self.was_woken_in_vain &= completion.is_none();
        Ok(completion)
    }

    fn wait_for_completion(&mut self) -> io::Result<bool> {
        if rustix::fs::fcntl_getfl(self.socket)?.contains(rustix::fs::OFlags::NONBLOCK) {
            return Ok(false);
        }
        if self.was_woken_in_vain {
            // An error of the socket itself also wakes every poll, and so does the end of both
            // streams.
            if socket::pending_events(self.socket)
                .is_ok_and(|events| events.contains(PollFlags::ERR))
            {
                net_sockopt::socket_error(self.socket)??;
            }
            std::thread::sleep(HANG_UP_POLL_INTERVAL);
        }
        // Signals and other events do not prolong the timeout.
        let waited = self.waiting_since.get_or_insert_with(Instant::now).elapsed();
        let timeout = net_sockopt::socket_timeout(self.socket, Timeout::Send)?;
        let left = timeout.map(|timeout| timeout.saturating_sub(waited));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(false);
        }
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        // No event is requested: `POLLERR`, which reports a non-empty error queue, is always
        // reported.
        let mut descriptors = [PollFd::new(&self.socket, PollFlags::empty())];
        match rustix::event::poll(&mut descriptors, left.as_ref()) {
            Ok(0) => Ok(false),
            Ok(_) => {
                self.was_woken_in_vain = descriptors[0].revents().contains(PollFlags::ERR);
                if !self.was_woken_in_vain {
                    // A connection that has ended wakes every poll at once; its completions follow
                    // shortly.
                    std::thread::sleep(HANG_UP_POLL_INTERVAL);
                }
                Ok(true)
            }
            Err(Errno::INTR) => Ok(true),
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
