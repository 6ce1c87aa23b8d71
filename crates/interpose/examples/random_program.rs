//! A program that does random things with mapped files and sends from them: the program of a test
//! of `haul run`, which compares what the program sends with and without the interposer.
//!
//! `random_program SEED PORT DIRECTORY` connects to the port once for each thread. What each
//! connection receives depends on the seed alone. Many calls are made as raw system calls, which
//! the interposer does not see.

use libc::{c_int, c_void, iovec, off_t, size_t};
use std::ffi::CString;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::ptr;

const PAGE: usize = 4096;
/// Length of each file in pages.
const FILE_PAGES: usize = 512;
/// Files of a thread. The last one is also written to.
const FILES: usize = 3;
/// Memory of a thread in which files are mapped over each other.
const ARENA_PAGES: usize = 1024;
const STEPS: usize = 60;

/// A generator of random numbers (splitmix64), so that the program needs no crate.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn one_in(&mut self, number: usize) -> bool {
        self.below(number) == 0
    }
}

/// A part of the arena with pages of a file, or anonymous memory.
#[derive(Clone, Copy)]
struct Region {
    page: usize,
    pages: usize,
    is_writable: bool,
}

/// The state of a thread.
struct Thread {
    random: Random,
    socket: TcpStream,
    files: Vec<c_int>,
    last_path: CString,
    arena: *mut u8,
    regions: Vec<Region>,
    is_nonblocking: bool,
    /// Whether no other thread runs: only then are descriptors closed that the program did not
    /// open.
    is_alone: bool,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().expect("SEED PORT DIRECTORY");
    let seed: u64 = next().parse().expect("a seed");
    let port: u16 = next().parse().expect("a port");
    let directory = next();
    let threads = 1 + (seed % 3) as usize;
    if seed.is_multiple_of(4) {
        interrupt_often();
    }
    // Connected one after the other, so that the receiver can tell them apart.
    let sockets: Vec<TcpStream> = (0..threads)
        .map(|index| {
            let socket = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
            send_all(socket.as_raw_fd(), &[index as u8], false);
            socket
        })
        .collect();
    let running: Vec<_> = sockets
        .into_iter()
        .enumerate()
        .map(|(index, socket)| {
            let directory = directory.clone();
            std::thread::spawn(move || {
                let seed = seed ^ ((index as u64) << 32);
                let mut thread = Thread::new(seed, socket, &directory, index);
                thread.is_alone = threads == 1;
                for _ in 0..STEPS {
                    thread.step();
                }
            })
        })
        .collect();
    for thread in running {
        thread.join().expect("the thread");
    }
}

/// Lets a timer interrupt system calls, without restarting them.
fn interrupt_often() {
    extern "C" fn ignore(_: c_int) {}
    // SAFETY: the handler does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as *const () as usize;
        libc::sigaction(libc::SIGALRM, &raw const action, ptr::null_mut());
        let interval = libc::timeval { tv_sec: 0, tv_usec: 700 };
        let timer = libc::itimerval { it_interval: interval, it_value: interval };
        libc::setitimer(libc::ITIMER_REAL, &raw const timer, ptr::null_mut());
    }
}

/// Sends everything, by the call that the caller chose before.
fn send_all(fd: c_int, bytes: &[u8], is_silent: bool) {
    send_pieces(fd, &[bytes], if is_silent { libc::MSG_NOSIGNAL } else { 0 }, 0);
}

/// Sends pieces. `kind` selects the call.
fn send_pieces(fd: c_int, pieces: &[&[u8]], flags: c_int, kind: usize) {
    let mut left: Vec<&[u8]> = pieces.iter().copied().filter(|piece| !piece.is_empty()).collect();
    while let Some(first) = left.first().copied() {
        let vectors: Vec<iovec> = left
            .iter()
            .map(|piece| iovec { iov_base: piece.as_ptr() as *mut c_void, iov_len: piece.len() })
            .collect();
        // SAFETY: the pieces are mapped memory of the caller.
        let sent = unsafe {
            match kind % 5 {
                0 => libc::write(fd, first.as_ptr().cast(), first.len()),
                1 => libc::send(fd, first.as_ptr().cast(), first.len(), flags),
                2 => libc::writev(fd, vectors.as_ptr(), vectors.len() as c_int),
                3 => libc::sendto(fd, first.as_ptr().cast(), first.len(), flags, ptr::null(), 0),
                _ => {
                    let mut message: libc::msghdr = std::mem::zeroed();
                    message.msg_iov = vectors.as_ptr().cast_mut();
                    message.msg_iovlen = vectors.len();
                    libc::sendmsg(fd, &raw const message, flags)
                }
            }
        };
        if sent < 0 {
            let error = std::io::Error::last_os_error();
            match error.kind() {
                std::io::ErrorKind::Interrupted => {}
                std::io::ErrorKind::WouldBlock => wait_until_writable(fd),
                _ => panic!("sending: {error}"),
            }
            continue;
        }
        let mut sent = sent as usize;
        while sent > 0 {
            let taken = left[0].len().min(sent);
            left[0] = &left[0][taken..];
            sent -= taken;
            if left[0].is_empty() {
                left.remove(0);
            }
        }
    }
}

fn wait_until_writable(fd: c_int) {
    let mut waited = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one entry.
    unsafe { libc::poll(&raw mut waited, 1, -1) };
}

impl Thread {
    fn new(seed: u64, socket: TcpStream, directory: &str, index: usize) -> Self {
        let mut random = Random(seed);
        let mut files = Vec::new();
        let mut last_path = CString::default();
        for file in 0..FILES {
            let path = format!("{directory}/{index}-{file}");
            let bytes: Vec<u8> =
                (0..FILE_PAGES * PAGE / 8).flat_map(|_| random.next().to_ne_bytes()).collect();
            std::fs::write(&path, bytes).expect("a file");
            last_path = CString::new(path).expect("a path");
            // SAFETY: the path is a C string.
            files.push(unsafe { libc::open(last_path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) });
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory.
        let arena =
            unsafe { libc::mmap(ptr::null_mut(), ARENA_PAGES * PAGE, protection, flags, -1, 0) };
        if random.one_in(2) {
            let bytes: c_int = 64 << 10;
            // SAFETY: an integer option.
            unsafe {
                libc::setsockopt(
                    socket.as_raw_fd(),
                    libc::SOL_SOCKET,
                    libc::SO_SNDBUF,
                    (&raw const bytes).cast(),
                    4,
                )
            };
        }
        let is_nonblocking = random.one_in(2);
        socket.set_nonblocking(is_nonblocking).expect("a socket");
        let regions = Vec::new();
        let arena = arena.cast();
        Self { random, socket, files, last_path, arena, regions, is_nonblocking, is_alone: false }
    }

    fn step(&mut self) {
        match self.random.below(16) {
            0..=4 => self.map_file(),
            5..=10 => self.send_region(),
            11 => self.change_private_pages(),
            12 => self.replace_by_memory(),
            13 if self.random.one_in(2) => self.write_to_file(),
            14 if self.random.one_in(2) => self.send_in_child(),
            15 => self.play_with_descriptors(),
            _ => self.move_pages(),
        }
    }

    fn address(&self, page: usize) -> *mut u8 {
        self.arena.wrapping_add(page * PAGE)
    }

    /// `mmap` at a fixed place, by the C library or as a raw system call.
    fn map(
        &mut self,
        page: usize,
        pages: usize,
        protection: c_int,
        flags: c_int,
        fd: c_int,
        offset: off_t,
    ) {
        let address = self.address(page).cast::<c_void>();
        let bytes: size_t = pages * PAGE;
        let flags = flags | libc::MAP_FIXED;
        // SAFETY: the range is inside of this thread's arena, which only this thread uses.
        unsafe {
            if self.random.one_in(2) {
                libc::mmap(address, bytes, protection, flags, fd, offset);
            } else {
                raw_mmap(address, bytes, protection, flags, fd, offset);
            }
        }
        self.regions
            .retain(|region| region.page + region.pages <= page || page + pages <= region.page);
    }

    fn map_file(&mut self) {
        let file = self.random.below(FILES);
        let pages = 1 + self.random.below(FILE_PAGES / 2);
        let page = self.random.below(ARENA_PAGES - pages);
        let offset = self.random.below(FILE_PAGES - pages);
        let is_private = self.random.one_in(2);
        let flags = if is_private { libc::MAP_PRIVATE } else { libc::MAP_SHARED };
        let is_writable = is_private && self.random.one_in(4);
        let write = if is_writable { libc::PROT_WRITE } else { 0 };
        let (fd, offset) = (self.files[file], (offset * PAGE) as off_t);
        self.map(page, pages, libc::PROT_READ | write, flags, fd, offset);
        self.regions.push(Region { page, pages, is_writable });
    }

    /// A part of a region as bytes. Shared mappings of the thread's own file change only between
    /// two sends.
    fn part(&mut self) -> Option<&'static [u8]> {
        let region = *self.regions.get(self.random.below(self.regions.len().max(1)))?;
        let bytes = region.pages * PAGE;
        let start = if self.random.one_in(2) { 0 } else { self.random.below(bytes) };
        let whole = bytes - start;
        let length = if self.random.one_in(2) { whole } else { 1 + self.random.below(whole) };
        let address = self.address(region.page).wrapping_add(start);
        // SAFETY: the region is mapped, and only this thread changes it.
        Some(unsafe { std::slice::from_raw_parts(address, length) })
    }

    fn send_region(&mut self) {
        let Some(part) = self.part() else { return };
        let flags = if self.random.one_in(2) { libc::MSG_NOSIGNAL } else { 0 };
        let dont_wait = if self.is_nonblocking { libc::MSG_DONTWAIT } else { 0 };
        let kind = self.random.below(5);
        let header = vec![kind as u8; self.random.below(300)];
        let trailer = if self.random.one_in(3) { self.part() } else { None };
        let trailer = trailer.unwrap_or_default();
        let pieces: &[&[u8]] =
            if self.random.one_in(2) { &[part] } else { &[&header, part, trailer] };
        send_pieces(self.socket.as_raw_fd(), pieces, flags | dont_wait, kind);
    }

    /// Makes private pages writable, changes some, and makes them read-only again.
    fn change_private_pages(&mut self) {
        let Some(index) = self.regions.iter().position(|region| region.is_writable) else { return };
        let region = self.regions[index];
        for _ in 0..=self.random.below(4) {
            let at = self.random.below(region.pages * PAGE);
            let value = self.random.next() as u8;
            // SAFETY: the region is mapped and writable.
            unsafe { self.address(region.page).wrapping_add(at).write_volatile(value) };
        }
        let address = self.address(region.page).cast();
        // SAFETY: the region is mapped.
        unsafe {
            if self.random.one_in(2) {
                libc::mprotect(address, region.pages * PAGE, libc::PROT_READ);
            } else {
                raw_mprotect(address, region.pages * PAGE, libc::PROT_READ);
            }
        }
        self.regions[index].is_writable = false;
    }

    /// Puts anonymous memory in the place of a mapping, and fills it.
    fn replace_by_memory(&mut self) {
        let pages = 1 + self.random.below(64);
        let page = self.random.below(ARENA_PAGES - pages);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        self.map(page, pages, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
        let value = self.random.next() as u8;
        // SAFETY: the memory is mapped and writable.
        unsafe { self.address(page).write_bytes(value, pages * PAGE) };
        self.regions.push(Region { page, pages, is_writable: true });
    }

    /// Writes to the last file, whose pages may be in flight, or shortens it for a moment.
    fn write_to_file(&mut self) {
        let bytes = vec![self.random.next() as u8; 1 + self.random.below(8 * PAGE)];
        let offset = self.random.below(FILE_PAGES * PAGE - bytes.len()) as off_t;
        // SAFETY: the path is a C string, and the descriptor is closed.
        unsafe {
            let fd = loop {
                let fd = libc::open(self.last_path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
                // The timer interrupts the wait for the lease.
                let errno = std::io::Error::last_os_error().raw_os_error();
                if fd >= 0 || errno != Some(libc::EINTR) {
                    break fd;
                }
            };
            assert!(fd >= 0, "opening for writing");
            let written = libc::pwrite(fd, bytes.as_ptr().cast(), bytes.len(), offset);
            assert_eq!(written, bytes.len() as isize);
            if self.random.one_in(3) {
                let length = (FILE_PAGES * PAGE) as off_t;
                assert_eq!(libc::ftruncate(fd, length - PAGE as off_t), 0);
                assert_eq!(libc::ftruncate(fd, length), 0);
            }
            libc::close(fd);
        }
    }

    /// Sends from a child, which has the parent's mappings.
    fn send_in_child(&mut self) {
        let Some(part) = self.part() else { return };
        // Another thread may hold the lock of the allocator, which only `fork` of the C library
        // resets.
        let is_raw = self.random.one_in(3) && self.is_alone;
        // SAFETY: the child only makes system calls, and ends by `_exit`.
        unsafe {
            let child = if is_raw { raw_fork() } else { libc::fork() };
            if child == 0 {
                send_pieces(self.socket.as_raw_fd(), &[part], 0, 1);
                libc::_exit(0);
            }
            assert!(child > 0, "no child");
            let mut status = 0;
            while libc::waitpid(child, &raw mut status, 0) < 0 {}
            assert_eq!(status, 0, "the child failed");
        }
    }

    /// Closes and duplicates descriptors, also high ones, which the interposer uses.
    fn play_with_descriptors(&mut self) {
        let file = self.random.below(FILES);
        let high = 512 + self.random.below(8) as c_int;
        // SAFETY: only descriptors of this thread, and high numbers, are closed.
        unsafe {
            match self.random.below(4) {
                0 => {
                    let duplicate = libc::dup(self.files[file]);
                    if self.random.one_in(2) {
                        libc::close(self.files[file]);
                    } else {
                        raw_close(self.files[file]);
                    }
                    self.files[file] = duplicate;
                }
                1 if self.is_alone => drop(libc::close(high)),
                2 if self.is_alone => drop(raw_close(high)),
                _ if !self.is_alone => {}
                _ => {
                    // Another file under a number that the interposer uses.
                    libc::dup2(self.files[file], high);
                }
            }
        }
    }

    /// Moves pages to another place of the arena (`mremap`).
    fn move_pages(&mut self) {
        if self.regions.is_empty() {
            return;
        }
        let region = self.regions.swap_remove(self.random.below(self.regions.len()));
        let page = self.random.below(ARENA_PAGES - region.pages);
        let overlaps = page < region.page + region.pages && region.page < page + region.pages;
        if overlaps {
            return self.regions.push(region);
        }
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let bytes = region.pages * PAGE;
        // SAFETY: both ranges are inside of this thread's arena and do not overlap.
        let moved = unsafe {
            libc::mremap(
                self.address(region.page).cast(),
                bytes,
                bytes,
                flags,
                self.address(page).cast::<c_void>(),
            )
        };
        self.regions
            .retain(|other| other.page + other.pages <= page || page + region.pages <= other.page);
        if moved != libc::MAP_FAILED {
            self.regions.push(Region { page, ..region });
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        self.map(region.page, region.pages, protection, anonymous, -1, 0);
    }
}

// System calls without the C library, as a program in another language makes them.

#[cfg(target_arch = "x86_64")]
unsafe fn raw(number: i64, arguments: [usize; 6]) -> isize {
    let result;
    // SAFETY: the caller keeps the contract of the system call.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            in("r10") arguments[3],
            in("r8") arguments[4],
            in("r9") arguments[5],
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

#[cfg(target_arch = "aarch64")]
unsafe fn raw(number: i64, arguments: [usize; 6]) -> isize {
    let result;
    // SAFETY: the caller keeps the contract of the system call.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") arguments[0] => result,
            in("x1") arguments[1],
            in("x2") arguments[2],
            in("x3") arguments[3],
            in("x4") arguments[4],
            in("x5") arguments[5],
        );
    }
    result
}

unsafe fn raw_mmap(
    address: *mut c_void,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) {
    let arguments = [
        address as usize,
        bytes,
        protection as usize,
        flags as usize,
        fd as usize,
        offset as usize,
    ];
    // SAFETY: the caller's contract.
    unsafe { raw(libc::SYS_mmap, arguments) };
}

unsafe fn raw_mprotect(address: *mut c_void, bytes: usize, protection: c_int) {
    // SAFETY: the caller's contract.
    unsafe { raw(libc::SYS_mprotect, [address as usize, bytes, protection as usize, 0, 0, 0]) };
}

unsafe fn raw_close(fd: c_int) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { raw(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]) as c_int }
}

/// `fork` without the handlers of the C library.
unsafe fn raw_fork() -> c_int {
    // SAFETY: the caller's contract.
    unsafe { raw(libc::SYS_clone, [libc::SIGCHLD as usize, 0, 0, 0, 0, 0]) as c_int }
}
