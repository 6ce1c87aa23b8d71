//! Receiving by mapping a TCP socket's pages (`TCP_ZEROCOPY_RECEIVE`, Linux 4.18).
//!
//! A socket is mapped like a file, which reserves addresses and nothing else. Each call then moves whole
//! pages of what has arrived into that window, read-only, and takes them off the socket. Only pages that are
//! filled with payload, aligned, no part of a larger one and of no file can move; where the stream's next
//! bytes do not lie in such a page, the kernel says how many must be read the ordinary way first.

use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

/// `TCP_ZEROCOPY_RECEIVE` in `<linux/tcp.h>`.
pub(crate) const TCP_ZEROCOPY_RECEIVE: libc::c_int = 35;

/// The first fields of `struct tcp_zerocopy_receive` of `<linux/tcp.h>`, those of Linux 4.18. Later ones are not asked
/// for: for `err` the kernel takes the socket's pending error away, and a reset would look like an end.
#[repr(C)]
struct Request {
    address: u64,
    length: u32,
    recv_skip_hint: u32,
}
const _: () = assert!(size_of::<Request>() == 16);

/// Addresses into which a TCP socket's pages are moved. It belongs to the socket it was made for.
#[derive(Debug)]
pub struct ReceiveWindow {
    start: NonNull<u8>,
    len: usize,
    mapped: usize,
}

// SAFETY: the window owns its addresses; its pages are read through & and replaced through &mut.
unsafe impl Send for ReceiveWindow {}
// SAFETY: as above.
unsafe impl Sync for ReceiveWindow {}

/// What a call has moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moved {
    /// This many bytes stand in the window: whole pages, more than none.
    Mapped(usize),
    /// The next bytes, at least one and at most so many, must be read.
    MustRead(usize),
    /// Nothing has arrived, or an urgent byte comes next, which only `recv` passes by.
    Nothing,
    /// The peer has ended the stream, and all of it was taken up to an urgent byte, if there is one.
    Ended,
}

impl ReceiveWindow {
    /// Reserves `len` bytes of addresses, rounded up to pages, for `socket`.
    ///
    /// `ENODEV` or `EINVAL` where the socket or the kernel cannot do it.
    pub fn new(socket: impl AsFd, len: usize) -> io::Result<Self> {
        let len = len.checked_next_multiple_of(crate::region::page_bytes());
        let len = len.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: a null hint lets the kernel choose the address, so no existing mapping is replaced.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ,
                MapFlags::SHARED,
                socket,
                0,
            )
        }?;
        let start =
            NonNull::new(start.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { start, len, mapped: 0 })
    }

    /// Moves up to `limit` bytes of what has arrived into the window, replacing what stood there. Never blocks.
    ///
    /// `InvalidInput` for a limit below a page, which nothing fits; `EINVAL` where the socket is no TCP socket. A
    /// reset is not told here but by the `recv` that follows [`Moved::Nothing`].
    pub fn receive(&mut self, socket: impl AsFd, limit: usize) -> io::Result<Moved> {
        self.mapped = 0;
        let wanted =
            limit.min(self.len) / crate::region::page_bytes() * crate::region::page_bytes();
        if wanted == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "less than a page cannot be mapped",
            ));
        }
        let mut request = Request {
            address: self.start.as_ptr() as u64,
            length: u32::try_from(wanted).unwrap_or(1 << 30),
            recv_skip_hint: 0,
        };
        let mut len = size_of::<Request>() as libc::socklen_t;
        // SAFETY: the kernel reads and writes at most `len` bytes of `request`, and maps pages only inside
        // a mapping of a TCP socket at that address (else EINVAL), which this window owns. `&mut self`
        // says that nobody looks at the pages that are replaced.
        let result = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_TCP,
                TCP_ZEROCOPY_RECEIVE,
                (&raw mut request).cast(),
                &raw mut len,
            )
        };
        if result != 0 {
            let error = io::Error::last_os_error();
            // EIO is how it says that the stream has ended and nothing is left of it.
            return if error.raw_os_error() == Some(libc::EIO) {
                Ok(Moved::Ended)
            } else {
                Err(error)
            };
        }
        let moved = interpret(wanted, request.length, request.recv_skip_hint);
        if let Moved::Mapped(mapped) = moved {
            self.mapped = mapped;
        }
        Ok(moved)
    }

    /// What the last call has moved in.
    ///
    /// The pages are the network stack's own, filled before they were queued. The kernel moves neither a
    /// file's pages nor a process's (`page->mapping` must be clear; that of a page which a file has given up
    /// is), so nobody is left who could write them, short of a process on this very machine that has had such a page
    /// pinned since before.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the kernel has mapped pages over the first `mapped` bytes of this window, readable, and
        // only `receive`, which takes `&mut self`, replaces them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.mapped) }
    }
}

/// What the kernel's answer to a request for `wanted` bytes means, whatever it says.
pub fn interpret(wanted: usize, length: u32, recv_skip_hint: u32) -> Moved {
    // With a length and a hint both: so many bytes are mapped, and what follows must be read.
    match (length as usize, recv_skip_hint as usize) {
        (0, 0) => Moved::Nothing,
        (0, hint) => Moved::MustRead(hint),
        // More than was asked for cannot stand in the window.
        (mapped, _) => Moved::Mapped(mapped.min(wanted)),
    }
}

impl Drop for ReceiveWindow {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in this type and is unmapped once; an error would leak it, no more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn what_cannot_be_mapped_must_be_read_and_the_end_is_told() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut to = listener.accept().unwrap().0;
        let page = crate::region::page_bytes();
        let mut window = match ReceiveWindow::new(&to, 4 * page) {
            Ok(window) => window,
            Err(error) => {
                return eprintln!("SKIPPED: received pages cannot be mapped here: {error}");
            }
        };
        assert_eq!(window.receive(&to, page).unwrap(), Moved::Nothing);
        assert_eq!(window.receive(&to, page - 1).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        from.write_all(b"short").unwrap();
        let mut bytes = [0; 5];
        assert_eq!(to.peek(&mut bytes).unwrap(), 5);
        assert_eq!(window.receive(&to, page).unwrap(), Moved::MustRead(5));
        assert_eq!(window.bytes(), b"");
        to.read_exact(&mut bytes).unwrap();
        drop(from);
        assert_eq!(to.read(&mut bytes).unwrap(), 0);
        assert_eq!(window.receive(&to, page).unwrap(), Moved::Ended);
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let error = window.receive(&other, page);
        assert!(matches!(error, Err(_) | Ok(Moved::Nothing)), "{error:?}");
    }
}
