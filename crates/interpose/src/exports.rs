//! The functions that programs call instead of the C library's.
//!
//! Each function calls the next function of its name with the program's arguments, and counts what
//! the call moved if the call succeeded.

use crate::account;
use crate::descriptors;
use crate::elide::{self, Call};
use crate::errno::PreservedErrno;
use crate::lifecycle;
use crate::locks;
use crate::mappings;
use crate::next;
use crate::pieces::{elidable_message, elidable_slice, one, slice};
use crate::settings;
use crate::tally;
use haul_tally::{DescriptorKind, SendMethod};
use libc::{c_char, c_int, c_long, c_uint, c_ulong, c_void, iovec, mmsghdr, mode_t, msghdr};
use libc::{off64_t, size_t, sockaddr, socklen_t, ssize_t, timespec};

/// Defines functions under the names of the C library. The names are exported only in the library
/// that `haul-run` builds.
macro_rules! exports {
    ($(
        $(#[$attribute:meta])* fn $name:ident(
            $($argument:ident: $kind:ty),* $(,)?
        ) $(-> $result:ty)? $body:block
    )*) => {$(
        $(#[$attribute])*
        ///
        /// # Safety
        ///
        /// As for the function of the C library.
        #[cfg_attr(feature = "exports", unsafe(no_mangle))]
        pub unsafe extern "C" fn $name($($argument: $kind),*) $(-> $result)? {
            $body
        }
    )*};
}

/// Makes a call that sends, and counts its bytes.
///
/// # Safety
///
/// The pieces are memory that the program passes to the call.
unsafe fn send_call(call: Call, original: impl FnOnce() -> ssize_t) -> ssize_t {
    // SAFETY: the caller's contract.
    unsafe {
        if elide::is_on() {
            elide::send(call, original)
        } else {
            count_sent(call.fd, call.pieces, original(), call.flags)
        }
    }
}

/// Counts a call that sent, and reads the array of its pieces only if the kernel accepted the
/// array.
///
/// # Safety
///
/// `pieces` returns the memory that the program passed to the call.
unsafe fn count_after<'a>(
    fd: c_int,
    sent: ssize_t,
    flags: c_int,
    pieces: impl FnOnce() -> &'a [iovec],
) -> ssize_t {
    if sent > 0 {
        // SAFETY: the caller's contract.
        unsafe { account::sent(fd, pieces(), sent as usize, flags) };
    }
    sent
}

/// Counts a call that sent.
///
/// # Safety
///
/// `pieces` are the memory that the program passed to the call.
unsafe fn count_sent(fd: c_int, pieces: &[iovec], sent: ssize_t, flags: c_int) -> ssize_t {
    if sent > 0 {
        // SAFETY: the caller's contract.
        unsafe { account::sent(fd, pieces, sent as usize, flags) };
    }
    sent
}

/// Counts a call that read.
///
/// # Safety
///
/// `pieces` are the memory that the program passed to the call.
unsafe fn count_received(
    fd: c_int,
    pieces: &[iovec],
    received: ssize_t,
    offset: Option<off64_t>,
) -> ssize_t {
    if received > 0 {
        // A call with `MSG_TRUNC` returns more than its memory has. The rest was discarded.
        // SAFETY: the caller's contract.
        unsafe { account::received(fd, pieces, received as usize, offset) };
    }
    received
}

// SAFETY of all calls below: the program's arguments are passed on unchanged, and the memory that
// they name was used by a call that succeeded.
exports! {
    /// Writes, and counts the bytes.
    fn write(fd: c_int, buffer: *const c_void, bytes: size_t) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let original = || next::write(fd, buffer, bytes);
            send_call(Call { fd, pieces: &one(buffer, bytes), flags: 0, is_plain: true }, original)
        }
    }

    /// Writes several pieces, and counts the bytes.
    fn writev(fd: c_int, pieces: *const iovec, count: c_int) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let original = || next::writev(fd, pieces, count);
            match elidable_slice(pieces, count as usize) {
                Some(pieces) => send_call(Call { fd, pieces, flags: 0, is_plain: true }, original),
                None => count_after(fd, original(), 0, || slice(pieces, count as usize)),
            }
        }
    }

    /// Sends, and counts the bytes.
    fn send(fd: c_int, buffer: *const c_void, bytes: size_t, flags: c_int) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let original = || next::send(fd, buffer, bytes, flags);
            send_call(Call { fd, pieces: &one(buffer, bytes), flags, is_plain: true }, original)
        }
    }

    /// Sends to an address, and counts the bytes.
    fn sendto(
        fd: c_int,
        buffer: *const c_void,
        bytes: size_t,
        flags: c_int,
        address: *const sockaddr,
        address_bytes: socklen_t,
    ) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let original = || next::sendto(fd, buffer, bytes, flags, address, address_bytes);
            let is_plain = address.is_null();
            send_call(Call { fd, pieces: &one(buffer, bytes), flags, is_plain }, original)
        }
    }

    /// Sends a message, and counts the bytes.
    fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let original = || next::sendmsg(fd, message, flags);
            if let Some((pieces, is_plain)) = elidable_message(message) {
                send_call(Call { fd, pieces, flags, is_plain }, original)
            } else {
                let pieces = || slice((*message).msg_iov, (*message).msg_iovlen);
                count_after(fd, original(), flags, pieces)
            }
        }
    }

    /// Sends several messages, and counts the bytes.
    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
        // SAFETY: the program's arguments, unchanged. The kernel set the lengths of the messages.
        unsafe {
            let sent = next::sendmmsg(fd, messages, count, flags);
            for index in 0..usize::try_from(sent).unwrap_or(0) {
                let mmsghdr { msg_hdr, msg_len } = &*messages.add(index);
                let pieces = slice(msg_hdr.msg_iov, msg_hdr.msg_iovlen);
                count_sent(fd, pieces, *msg_len as ssize_t, flags);
            }
            sent
        }
    }

    /// Sends a file, and counts the bytes.
    fn sendfile(to: c_int, from: c_int, offset: *mut off64_t, bytes: size_t) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        let sent = unsafe { next::sendfile(to, from, offset, bytes) };
        if sent > 0 {
            account::sent_inside_kernel(to, sent as usize, SendMethod::Sendfile);
        }
        sent
    }

    /// Sends a file, and counts the bytes.
    fn sendfile64(to: c_int, from: c_int, offset: *mut off64_t, bytes: size_t) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        let sent = unsafe { next::sendfile64(to, from, offset, bytes) };
        if sent > 0 {
            account::sent_inside_kernel(to, sent as usize, SendMethod::Sendfile);
        }
        sent
    }

    /// Moves bytes between a pipe and another descriptor, and counts the bytes.
    fn splice(
        from: c_int,
        from_offset: *mut off64_t,
        to: c_int,
        to_offset: *mut off64_t,
        bytes: size_t,
        flags: c_uint,
    ) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        let moved = unsafe { next::splice(from, from_offset, to, to_offset, bytes, flags) };
        if moved > 0 {
            account::received_inside_kernel(from, moved as usize);
            account::sent_inside_kernel(to, moved as usize, SendMethod::Splice);
        }
        moved
    }

    /// Reads, and counts the bytes.
    fn read(fd: c_int, buffer: *mut c_void, bytes: size_t) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe { count_received(fd, &one(buffer, bytes), next::read(fd, buffer, bytes), None) }
    }

    /// Reads into several pieces, and counts the bytes.
    fn readv(fd: c_int, pieces: *const iovec, count: c_int) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let received = next::readv(fd, pieces, count);
            if received > 0 {
                count_received(fd, slice(pieces, count as usize), received, None);
            }
            received
        }
    }

    /// Reads at an offset, and counts the bytes.
    fn pread(fd: c_int, buffer: *mut c_void, bytes: size_t, offset: off64_t) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let received = next::pread(fd, buffer, bytes, offset);
            count_received(fd, &one(buffer, bytes), received, Some(offset))
        }
    }

    /// Reads at an offset, and counts the bytes.
    fn pread64(fd: c_int, buffer: *mut c_void, bytes: size_t, offset: off64_t) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let received = next::pread64(fd, buffer, bytes, offset);
            count_received(fd, &one(buffer, bytes), received, Some(offset))
        }
    }

    /// Reads at an offset into several pieces, and counts the bytes.
    fn preadv(fd: c_int, pieces: *const iovec, count: c_int, offset: off64_t) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let received = next::preadv(fd, pieces, count, offset);
            if received > 0 {
                count_received(fd, slice(pieces, count as usize), received, Some(offset));
            }
            received
        }
    }

    /// Reads at an offset into several pieces, and counts the bytes.
    fn preadv64(fd: c_int, pieces: *const iovec, count: c_int, offset: off64_t) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let received = next::preadv64(fd, pieces, count, offset);
            if received > 0 {
                count_received(fd, slice(pieces, count as usize), received, Some(offset));
            }
            received
        }
    }

    /// Receives, and counts the received bytes. A call that only peeks is not counted.
    fn recv(fd: c_int, buffer: *mut c_void, bytes: size_t, flags: c_int) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let received = next::recv(fd, buffer, bytes, flags);
            if consumes(flags) {
                count_received(fd, &one(buffer, bytes), received, None);
            }
            received
        }
    }

    /// Receives with the sender's address, and counts the received bytes.
    fn recvfrom(
        fd: c_int,
        buffer: *mut c_void,
        bytes: size_t,
        flags: c_int,
        address: *mut sockaddr,
        address_bytes: *mut socklen_t,
    ) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let received = next::recvfrom(fd, buffer, bytes, flags, address, address_bytes);
            if consumes(flags) {
                count_received(fd, &one(buffer, bytes), received, None);
            }
            received
        }
    }

    /// Receives a message, and counts the received bytes, or the completions of
    /// `MSG_ZEROCOPY`.
    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let received = next::recvmsg(fd, message, flags);
            if received >= 0 && flags & libc::MSG_ERRQUEUE != 0 {
                account::completions(&*message);
            } else if received > 0 && consumes(flags) {
                let pieces = slice((*message).msg_iov, (*message).msg_iovlen);
                count_received(fd, pieces, received, None);
            }
            received
        }
    }

    /// Receives several messages, and counts the received bytes.
    fn recvmmsg(
        fd: c_int,
        messages: *mut mmsghdr,
        count: c_uint,
        flags: c_int,
        timeout: *mut timespec,
    ) -> c_int {
        // SAFETY: the program's arguments, unchanged. The kernel set the lengths of the messages.
        unsafe {
            let received = next::recvmmsg(fd, messages, count, flags, timeout);
            for index in 0..usize::try_from(received).unwrap_or(0) {
                let mmsghdr { msg_hdr, msg_len } = &*messages.add(index);
                if flags & libc::MSG_ERRQUEUE != 0 {
                    account::completions(msg_hdr);
                } else if consumes(flags) {
                    let pieces = slice(msg_hdr.msg_iov, msg_hdr.msg_iovlen);
                    count_received(fd, pieces, *msg_len as ssize_t, None);
                }
            }
            received
        }
    }

    /// `read` of a program that was compiled with `_FORTIFY_SOURCE`.
    fn __read_chk(fd: c_int, buffer: *mut c_void, bytes: size_t, room: size_t) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let received = next::__read_chk(fd, buffer, bytes, room);
            count_received(fd, &one(buffer, bytes), received, None)
        }
    }

    /// `pread` of a program that was compiled with `_FORTIFY_SOURCE`.
    fn __pread_chk(
        fd: c_int,
        buffer: *mut c_void,
        bytes: size_t,
        offset: off64_t,
        room: size_t,
    ) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let received = next::__pread_chk(fd, buffer, bytes, offset, room);
            count_received(fd, &one(buffer, bytes), received, Some(offset))
        }
    }

    /// `pread64` of a program that was compiled with `_FORTIFY_SOURCE`.
    fn __pread64_chk(
        fd: c_int,
        buffer: *mut c_void,
        bytes: size_t,
        offset: off64_t,
        room: size_t,
    ) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let received = next::__pread64_chk(fd, buffer, bytes, offset, room);
            count_received(fd, &one(buffer, bytes), received, Some(offset))
        }
    }

    /// `recv` of a program that was compiled with `_FORTIFY_SOURCE`.
    fn __recv_chk(
        fd: c_int,
        buffer: *mut c_void,
        bytes: size_t,
        room: size_t,
        flags: c_int,
    ) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let received = next::__recv_chk(fd, buffer, bytes, room, flags);
            if consumes(flags) {
                count_received(fd, &one(buffer, bytes), received, None);
            }
            received
        }
    }

    /// `recvfrom` of a program that was compiled with `_FORTIFY_SOURCE`.
    fn __recvfrom_chk(
        fd: c_int,
        buffer: *mut c_void,
        bytes: size_t,
        room: size_t,
        flags: c_int,
        address: *mut sockaddr,
        address_bytes: *mut socklen_t,
    ) -> ssize_t {
        // SAFETY: the program's arguments, unchanged.
        unsafe {
            let received =
                next::__recvfrom_chk(fd, buffer, bytes, room, flags, address, address_bytes);
            if consumes(flags) {
                count_received(fd, &one(buffer, bytes), received, None);
            }
            received
        }
    }

    /// Maps memory, and records a mapping of a file.
    fn mmap(
        address: *mut c_void,
        bytes: size_t,
        protection: c_int,
        flags: c_int,
        fd: c_int,
        offset: off64_t,
    ) -> *mut c_void {
        // SAFETY: the program's arguments, unchanged.
        let mapped = unsafe { next::mmap(address, bytes, protection, flags, fd, offset) };
        record_mapping(mapped, bytes, flags, fd, offset);
        mapped
    }

    /// Maps memory, and records a mapping of a file.
    fn mmap64(
        address: *mut c_void,
        bytes: size_t,
        protection: c_int,
        flags: c_int,
        fd: c_int,
        offset: off64_t,
    ) -> *mut c_void {
        // SAFETY: the program's arguments, unchanged.
        let mapped = unsafe { next::mmap64(address, bytes, protection, flags, fd, offset) };
        record_mapping(mapped, bytes, flags, fd, offset);
        mapped
    }

    /// Removes mappings.
    fn munmap(address: *mut c_void, bytes: size_t) -> c_int {
        mappings::remove(address as usize, bytes);
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::munmap(address, bytes) }
    }

    /// Creates a socket, and records a TCP socket.
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
        /// The bits of a socket's type that are not flags (`SOCK_TYPE_MASK` of `<linux/net.h>`).
        const TYPE_MASK: c_int = 0xF;
        // SAFETY: the program's arguments, unchanged.
        let fd = unsafe { next::socket(domain, kind, protocol) };
        let is_tcp = matches!(domain, libc::AF_INET | libc::AF_INET6)
            && kind & TYPE_MASK == libc::SOCK_STREAM
            && matches!(protocol, 0 | libc::IPPROTO_TCP);
        record_new(fd, is_tcp);
        fd
    }

    /// Connects, after the congestion control was set.
    fn connect(fd: c_int, address: *const sockaddr, address_bytes: socklen_t) -> c_int {
        settings::apply_congestion_control(fd);
        elide::before_connect(fd);
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::connect(fd, address, address_bytes) }
    }

    /// Sets the congestion control of the socket, and then listens. Accepted connections inherit
    /// the congestion control.
    fn listen(fd: c_int, backlog: c_int) -> c_int {
        settings::apply_congestion_control(fd);
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::listen(fd, backlog) }
    }

    /// Accepts a connection, and records a TCP socket.
    fn accept(fd: c_int, address: *mut sockaddr, bytes: *mut socklen_t) -> c_int {
        // SAFETY: the program's arguments, unchanged.
        let accepted = unsafe { next::accept(fd, address, bytes) };
        record_accepted(fd, accepted);
        accepted
    }

    /// Accepts a connection, and records a TCP socket.
    fn accept4(
        fd: c_int,
        address: *mut sockaddr,
        bytes: *mut socklen_t,
        flags: c_int,
    ) -> c_int {
        // SAFETY: the program's arguments, unchanged.
        let accepted = unsafe { next::accept4(fd, address, bytes, flags) };
        record_accepted(fd, accepted);
        accepted
    }

    /// Opens a file. The C library's function takes a variable number of arguments, which on
    /// x86-64 and AArch64 are passed in the same registers.
    fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        // SAFETY: the program's arguments, unchanged.
        let fd = unsafe { next::open(path, flags, mode) };
        descriptors::forget(fd);
        fd
    }

    /// Opens a file, as `open`.
    fn open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        // SAFETY: the program's arguments, unchanged.
        let fd = unsafe { next::open64(path, flags, mode) };
        descriptors::forget(fd);
        fd
    }

    /// Opens a file, as `open`.
    fn openat(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        // SAFETY: the program's arguments, unchanged.
        let fd = unsafe { next::openat(folder, path, flags, mode) };
        descriptors::forget(fd);
        fd
    }

    /// Opens a file, as `open`.
    fn openat64(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        // SAFETY: the program's arguments, unchanged.
        let fd = unsafe { next::openat64(folder, path, flags, mode) };
        descriptors::forget(fd);
        fd
    }

    /// Closes a descriptor, after its bytes were compared.
    fn close(fd: c_int) -> c_int {
        end(fd);
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::close(fd) }
    }

    /// Closes descriptors, after their bytes were compared.
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        /// `CLOSE_RANGE_CLOEXEC` of `<linux/close_range.h>`: the call closes nothing.
        const CLOSE_ON_EXEC: c_int = 4;
        let is_own = tally::is_active() && tally::is_own_process();
        if flags & CLOSE_ON_EXEC == 0 && first <= last && is_own {
            let _errno = PreservedErrno::read();
            descriptors::end_range(first as usize, last as usize);
            elide::before_close_range(first as usize, last as usize);
        }
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::close_range(first, last, flags) }
    }

    /// Closes descriptors, after their bytes were compared.
    fn closefrom(first: c_int) {
        if tally::is_active() && tally::is_own_process() {
            let _errno = PreservedErrno::read();
            let first = usize::try_from(first).unwrap_or(0);
            descriptors::end_range(first, usize::MAX);
            elide::before_close_range(first, usize::MAX);
        }
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::closefrom(first) }
    }

    /// Closes a stream, and clears what is known of its descriptor.
    fn fclose(stream: *mut libc::FILE) -> c_int {
        if tally::is_active() && !stream.is_null() {
            let _errno = PreservedErrno::read();
            // SAFETY: the program passes an open stream.
            let fd = unsafe { libc::fileno(stream) };
            // The C library may still have bytes to write, so nothing is compared.
            descriptors::forget(fd);
        }
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::fclose(stream) }
    }

    /// Duplicates a descriptor.
    fn dup(fd: c_int) -> c_int {
        // SAFETY: the program's arguments, unchanged.
        let new = unsafe { next::dup(fd) };
        descriptors::forget(new);
        new
    }

    /// Duplicates a descriptor, and closes the one that has the number.
    fn dup2(fd: c_int, new: c_int) -> c_int {
        if fd != new {
            end(new);
        }
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::dup2(fd, new) }
    }

    /// Duplicates a descriptor, and closes the one that has the number.
    fn dup3(fd: c_int, new: c_int, flags: c_int) -> c_int {
        if fd != new {
            end(new);
        }
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::dup3(fd, new, flags) }
    }

    /// Controls a descriptor. The C library's function takes a variable number of arguments, which
    /// on x86-64 and AArch64 are passed in the same registers.
    fn fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int {
        before_control(command);
        // SAFETY: the program's arguments, unchanged.
        let result = unsafe { next::fcntl(fd, command, argument) };
        after_control(command, result);
        result
    }

    /// `fcntl` of a program that was compiled with `_FILE_OFFSET_BITS=64`.
    fn fcntl64(fd: c_int, command: c_int, argument: c_long) -> c_int {
        before_control(command);
        // SAFETY: the program's arguments, unchanged.
        let result = unsafe { next::fcntl64(fd, command, argument) };
        after_control(command, result);
        result
    }

    /// Locks a part of a file.
    fn lockf(fd: c_int, command: c_int, bytes: off64_t) -> c_int {
        locks::before_lock();
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::lockf(fd, command, bytes) }
    }

    /// `lockf` of a program that was compiled with `_FILE_OFFSET_BITS=64`.
    fn lockf64(fd: c_int, command: c_int, bytes: off64_t) -> c_int {
        locks::before_lock();
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::lockf64(fd, command, bytes) }
    }

    /// Changes the process. After the call that installs a seccomp filter, the interposer makes no
    /// system calls.
    fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
        if option == libc::PR_SET_SECCOMP {
            lifecycle::before_filter();
        }
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::prctl(option, a, b, c, d) }
    }

    /// Makes a system call. The C library's function takes a variable number of arguments, which on
    /// x86-64 and AArch64 are passed in the same registers.
    fn syscall(
        number: c_long,
        a: c_long,
        b: c_long,
        c: c_long,
        d: c_long,
        e: c_long,
        f: c_long,
    ) -> c_long {
        match number {
            libc::SYS_seccomp => lifecycle::before_filter(),
            // libuv closes so.
            libc::SYS_close => end(a as c_int),
            _ => {}
        }
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::syscall(number, a, b, c, d, e, f) }
    }

    /// Ends the process, after its connections were compared.
    fn _exit(code: c_int) -> ! {
        lifecycle::end();
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::_exit(code) };
        std::process::abort()
    }

    /// Ends the process, after its connections were compared.
    #[allow(non_snake_case, reason = "the name in the C library")]
    fn _Exit(code: c_int) -> ! {
        lifecycle::end();
        // SAFETY: the program's arguments, unchanged.
        unsafe { next::_Exit(code) };
        std::process::abort()
    }
}

/// Whether a receiving call with these flags takes the bytes out of the socket.
fn consumes(flags: c_int) -> bool {
    flags & (libc::MSG_PEEK | libc::MSG_ERRQUEUE) == 0
}

fn end(fd: c_int) {
    if tally::is_active() {
        let _errno = PreservedErrno::read();
        // The child of `vfork` closes descriptors that stay open in the parent.
        if (descriptors::is_known(fd) || elide::may_own(fd)) && tally::is_own_process() {
            descriptors::end(fd);
            elide::before_close(fd);
        }
    }
}

/// A process that locks files with `fcntl` loses its locks of a file when any of its descriptors of
/// the file is closed, so the interposer stops to open files there.
fn before_control(command: c_int) {
    if matches!(command, libc::F_SETLK | libc::F_SETLKW) {
        locks::before_lock();
    }
}

fn after_control(command: c_int, result: c_int) {
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
        descriptors::forget(result);
    }
}

fn record_new(fd: c_int, is_tcp: bool) {
    if is_tcp && tally::is_active() {
        descriptors::enter_new_tcp(fd);
    } else {
        descriptors::forget(fd);
    }
}

fn record_accepted(listening: c_int, accepted: c_int) {
    if accepted < 0 || !tally::is_active() {
        return;
    }
    let _errno = PreservedErrno::read();
    record_new(accepted, descriptors::kind(listening, 0) == DescriptorKind::Tcp);
}

fn record_mapping(mapped: *mut c_void, bytes: size_t, flags: c_int, fd: c_int, offset: off64_t) {
    if mapped == libc::MAP_FAILED || !tally::is_active() {
        return;
    }
    mappings::remove(mapped as usize, bytes);
    if fd >= 0 && flags & libc::MAP_ANONYMOUS == 0 {
        let _errno = PreservedErrno::read();
        mappings::add(mapped as usize, bytes, fd, offset);
    }
}
