//! The functions of the C library, or of the next interposer, by the names that this library takes.
//!
//! The constructor of the library looks up all addresses ([`look_up_all`]), because a later call
//! can come from a signal handler, where `dlsym` is not allowed. A constructor of another library
//! may call a function earlier. Such a call looks up its address itself.

use libc::{c_char, c_int, c_long, c_uint, c_void, iovec, mmsghdr, mode_t, msghdr, off64_t};
use libc::{size_t, sockaddr, socklen_t, ssize_t, timespec};
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// The address of a function, once it was looked up.
struct Address {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Address {
    const fn of(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The address; `None` if the C library is too old for the function.
    fn get(&self) -> Option<*mut c_void> {
        let mut address = self.found.load(Relaxed);
        if address.is_null() {
            // SAFETY: the name is a C string.
            address = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
            self.found.store(address, Relaxed);
        }
        (!address.is_null()).then_some(address)
    }
}

/// Sets `errno` to `ENOSYS`, as for a system call that the kernel does not have.
fn set_unsupported() {
    // SAFETY: the C library returns a valid address for each thread.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
}

/// Defines functions that call the next function of their name.
macro_rules! next_functions {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $result:ty, else $failure:expr;)*) => {
        /// The address of each function.
        #[allow(non_upper_case_globals, reason = "names in the C library")]
        mod address {
            use super::Address;
            use std::ffi::CStr;
            $(pub static $name: Address = {
                const NAME: &CStr =
                    match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!(),
                    };
                Address::of(NAME)
            };)*
        }

        /// Looks up the addresses of all functions.
        pub fn look_up_all() {
            $(address::$name.get();)*
        }
        $(
        #[doc = concat!("Calls the next `", stringify!($name), "`.")]
        ///
        /// # Safety
        ///
        /// As for the function of the C library.
        #[allow(non_snake_case, reason = "names in the C library")]
        pub unsafe fn $name($($argument: $kind),*) -> $result {
            let Some(address) = address::$name.get() else {
                set_unsupported();
                return $failure;
            };
            // SAFETY: the C library defines the function with this type.
            let function = unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) -> $result>(
                    address,
                )
            };
            // SAFETY: the caller of this function keeps the contract of the C library's.
            unsafe { function($($argument),*) }
        }
        )*
    };
}

next_functions! {
    write(fd: c_int, buffer: *const c_void, bytes: size_t) -> ssize_t, else -1;
    writev(fd: c_int, pieces: *const iovec, count: c_int) -> ssize_t, else -1;
    send(fd: c_int, buffer: *const c_void, bytes: size_t, flags: c_int) -> ssize_t, else -1;
    sendto(
        fd: c_int, buffer: *const c_void, bytes: size_t, flags: c_int,
        address: *const sockaddr, address_bytes: socklen_t
    ) -> ssize_t, else -1;
    sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t, else -1;
    sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int, else -1;
    sendfile(to: c_int, from: c_int, offset: *mut off64_t, bytes: size_t) -> ssize_t, else -1;
    sendfile64(to: c_int, from: c_int, offset: *mut off64_t, bytes: size_t) -> ssize_t, else -1;
    splice(
        from: c_int, from_offset: *mut off64_t, to: c_int, to_offset: *mut off64_t, bytes: size_t,
        flags: c_uint
    ) -> ssize_t, else -1;
    read(fd: c_int, buffer: *mut c_void, bytes: size_t) -> ssize_t, else -1;
    readv(fd: c_int, pieces: *const iovec, count: c_int) -> ssize_t, else -1;
    pread(fd: c_int, buffer: *mut c_void, bytes: size_t, offset: off64_t) -> ssize_t, else -1;
    pread64(fd: c_int, buffer: *mut c_void, bytes: size_t, offset: off64_t) -> ssize_t, else -1;
    preadv(fd: c_int, pieces: *const iovec, count: c_int, offset: off64_t) -> ssize_t, else -1;
    preadv64(fd: c_int, pieces: *const iovec, count: c_int, offset: off64_t) -> ssize_t, else -1;
    recv(fd: c_int, buffer: *mut c_void, bytes: size_t, flags: c_int) -> ssize_t, else -1;
    recvfrom(
        fd: c_int, buffer: *mut c_void, bytes: size_t, flags: c_int, address: *mut sockaddr,
        address_bytes: *mut socklen_t
    ) -> ssize_t, else -1;
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t, else -1;
    recvmmsg(
        fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec
    ) -> c_int, else -1;
    __read_chk(fd: c_int, buffer: *mut c_void, bytes: size_t, room: size_t) -> ssize_t, else -1;
    __pread_chk(
        fd: c_int, buffer: *mut c_void, bytes: size_t, offset: off64_t, room: size_t
    ) -> ssize_t, else -1;
    __pread64_chk(
        fd: c_int, buffer: *mut c_void, bytes: size_t, offset: off64_t, room: size_t
    ) -> ssize_t, else -1;
    __recv_chk(
        fd: c_int, buffer: *mut c_void, bytes: size_t, room: size_t, flags: c_int
    ) -> ssize_t, else -1;
    __recvfrom_chk(
        fd: c_int, buffer: *mut c_void, bytes: size_t, room: size_t, flags: c_int,
        address: *mut sockaddr, address_bytes: *mut socklen_t
    ) -> ssize_t, else -1;
    mmap(
        address: *mut c_void, bytes: size_t, protection: c_int, flags: c_int, fd: c_int,
        offset: off64_t
    ) -> *mut c_void, else libc::MAP_FAILED;
    mmap64(
        address: *mut c_void, bytes: size_t, protection: c_int, flags: c_int, fd: c_int,
        offset: off64_t
    ) -> *mut c_void, else libc::MAP_FAILED;
    munmap(address: *mut c_void, bytes: size_t) -> c_int, else -1;
    connect(fd: c_int, address: *const sockaddr, address_bytes: socklen_t) -> c_int, else -1;
    listen(fd: c_int, backlog: c_int) -> c_int, else -1;
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int, else -1;
    accept(fd: c_int, address: *mut sockaddr, bytes: *mut socklen_t) -> c_int, else -1;
    accept4(
        fd: c_int, address: *mut sockaddr, bytes: *mut socklen_t, flags: c_int
    ) -> c_int, else -1;
    open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int, else -1;
    open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int, else -1;
    openat(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int, else -1;
    openat64(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int, else -1;
    close(fd: c_int) -> c_int, else -1;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int, else -1;
    closefrom(first: c_int) -> (), else Default::default();
    fclose(stream: *mut libc::FILE) -> c_int, else libc::EOF;
    dup(fd: c_int) -> c_int, else -1;
    dup2(fd: c_int, new: c_int) -> c_int, else -1;
    dup3(fd: c_int, new: c_int, flags: c_int) -> c_int, else -1;
    fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int, else -1;
    fcntl64(fd: c_int, command: c_int, argument: c_long) -> c_int, else -1;
    lockf(fd: c_int, command: c_int, bytes: off64_t) -> c_int, else -1;
    lockf64(fd: c_int, command: c_int, bytes: off64_t) -> c_int, else -1;
    prctl(
        option: c_int, a: libc::c_ulong, b: libc::c_ulong, c: libc::c_ulong, d: libc::c_ulong
    ) -> c_int, else -1;
    syscall(
        number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long
    ) -> c_long, else -1;
    _exit(code: c_int) -> (), else Default::default();
    _Exit(code: c_int) -> (), else Default::default();
}
