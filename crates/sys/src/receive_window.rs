//! Zero-copy receive: maps the pages of a TCP socket's receive queue (`TCP_ZEROCOPY_RECEIVE`, Linux
//! 4.18).
//!
//! The socket is mapped like a file, which only reserves addresses. Each call then moves whole
//! pages of received data into that window, read-only, and removes them from the socket.
//!
//! A page can be moved if payload fills it, the payload is page-aligned, and the page belongs to no
//! larger page and no file. If the next bytes do not lie in such a page, the kernel returns how
//! many must be read with `recv` first.

use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

/// `TCP_ZEROCOPY_RECEIVE` in `<linux/tcp.h>`.
pub(crate) const TCP_ZEROCOPY_RECEIVE: libc::c_int = 35;

/// The first fields of `struct tcp_zerocopy_receive` of `<linux/tcp.h>`, as in Linux 4.18.
///
/// Later fields are not requested: to fill `err`, the kernel clears the socket's pending error, and
/// a reset would look like the end of the stream.
#[repr(C)]
struct ZerocopyReceive {
    address: u64,
    length: u32,
    recv_skip_hint: u32,
}
const _: () = assert!(size_of::<ZerocopyReceive>() == 16);

/// An address range into which a TCP socket's pages are mapped. It belongs to the socket it was
/// made for.
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

/// Result of [`ReceiveWindow::receive`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiveOutcome {
    /// This many bytes are mapped in the window: whole pages, at least one.
    Mapped(usize),
    /// The next bytes, at least one and at most this many, must be read with `recv`.
    MustRead(usize),
    /// No data is queued, or the next byte is urgent; only `recv` can skip an urgent byte.
    Nothing,
    /// The peer has ended the stream, and all bytes (up to an urgent byte, if there is one) were
    /// consumed.
    Ended,
}

impl ReceiveWindow {
    /// Reserves `len` bytes of addresses, rounded up to pages, for `socket`.
    ///
    /// `ENODEV` or `EINVAL` if the socket or the kernel does not support it.
    pub fn new(socket: impl AsFd, len: usize) -> io::Result<Self> {
        let len = len.checked_next_multiple_of(crate::region::page_bytes());
        let len = len.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: a null hint lets the kernel choose the address, so no existing mapping is
        // replaced.
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

    /// Maps up to `limit` bytes of received data into the window, replacing its previous content.
    ///
    /// Never blocks. `InvalidInput` for a limit below a page, since only whole pages are mapped;
    /// `EINVAL` if the socket is not a TCP socket. A reset is not reported here but by the `recv`
    /// that follows [`ReceiveOutcome::Nothing`].
    pub fn receive(&mut self, socket: impl AsFd, limit: usize) -> io::Result<ReceiveOutcome> {
        self.mapped = 0;
        let wanted =
            limit.min(self.len) / crate::region::page_bytes() * crate::region::page_bytes();
        if wanted == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a limit below a page maps nothing",
            ));
        }
        let mut request = ZerocopyReceive {
            address: self.start.as_ptr() as u64,
            length: u32::try_from(wanted).unwrap_or(1 << 30),
            recv_skip_hint: 0,
        };
        let mut len = size_of::<ZerocopyReceive>() as libc::socklen_t;
        // SAFETY: the kernel reads and writes at most `len` bytes of `request`. It maps pages only
        // inside a mapping of a TCP socket at that address (else EINVAL), which this window owns.
        // `&mut self` guarantees that no reference to the replaced pages exists.
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
            // EIO: the stream has ended and no byte of it is left.
            return if error.raw_os_error() == Some(libc::EIO) {
                Ok(ReceiveOutcome::Ended)
            } else {
                Err(error)
            };
        }
        let moved = interpret(wanted, request.length, request.recv_skip_hint);
        if let ReceiveOutcome::Mapped(mapped) = moved {
            self.mapped = mapped;
        }
        Ok(moved)
    }

    /// The bytes that the last call of [`Self::receive`] mapped.
    ///
    /// The pages belong to the network stack and were filled before they were queued. The kernel
    /// moves neither a file's pages nor a process's: `page->mapping` must be clear, as it is for a
    /// page that a file has released. So no writer is left, except a process on this machine that
    /// had such a page pinned before.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the kernel has mapped pages over the first `mapped` bytes of this window,
        // readable, and only `receive`, which takes `&mut self`, replaces them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.mapped) }
    }
}

/// Interprets the kernel's result of a request for `wanted` bytes; any values are safe.
pub fn interpret(wanted: usize, length: u32, recv_skip_hint: u32) -> ReceiveOutcome {
    // If both length and hint are set, `length` bytes are mapped and the bytes after them must be
    // read.
    match (length as usize, recv_skip_hint as usize) {
        (0, 0) => ReceiveOutcome::Nothing,
        (0, hint) => ReceiveOutcome::MustRead(hint),
        // The window cannot hold more than was requested.
        (mapped, _) => ReceiveOutcome::Mapped(mapped.min(wanted)),
    }
}

impl Drop for ReceiveWindow {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in this type and is unmapped once; an error would only leak
        // it.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn unmappable_bytes_must_be_read_and_the_end_is_reported() {
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
        assert_eq!(window.receive(&to, page).unwrap(), ReceiveOutcome::Nothing);
        assert_eq!(window.receive(&to, page - 1).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        from.write_all(b"short").unwrap();
        let mut bytes = [0; 5];
        assert_eq!(to.peek(&mut bytes).unwrap(), 5);
        assert_eq!(window.receive(&to, page).unwrap(), ReceiveOutcome::MustRead(5));
        assert_eq!(window.bytes(), b"");
        to.read_exact(&mut bytes).unwrap();
        drop(from);
        assert_eq!(to.read(&mut bytes).unwrap(), 0);
        assert_eq!(window.receive(&to, page).unwrap(), ReceiveOutcome::Ended);
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let error = window.receive(&other, page);
        assert!(matches!(error, Err(_) | Ok(ReceiveOutcome::Nothing)), "{error:?}");
    }
}
