//! io_uring for sending a stream: one operation, or one chain of two, at a time.
//!
//! If two sends to one stream socket are submitted together, the kernel may execute them in either
//! order. This type never has two: every method waits for its operation's result. Only the second
//! completion of a zero-copy send (`IORING_CQE_F_NOTIF`) may arrive later. It reports that the
//! kernel no longer uses the memory.
//!
//! Not supported: polled rings, registered files, multishot operations, and receiving (see
//! [`crate::uring_receive`]).

use crate::fork;
use crate::region::MappedRegion;
use io_uring::{IoUring, opcode, squeue, types};
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

/// `IORING_SEND_ZC_REPORT_USAGE` (Linux 6.2): the completion reports whether the data was copied.
const SEND_ZC_REPORT_USAGE: u16 = 1 << 3;
/// `IORING_NOTIF_USAGE_ZC_COPIED` (Linux 6.2): the data was copied.
const NOTIF_USAGE_ZC_COPIED: u32 = 1 << 31;
/// Size of the submission queue. A chain has two operations.
const ENTRIES: u32 = 8;
/// Size of the completion queue. The kernel keeps completions that do not fit, so this bounds
/// memory, not correctness.
const COMPLETIONS: u32 = 1024;

/// The kernel no longer uses the memory of a zero-copy send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingCompletion {
    /// Number of the send, as returned by [`Ring::send_zerocopy`].
    pub send: u64,
    /// Whether the kernel copied the data.
    pub copied: bool,
}

/// An io_uring instance (Linux 5.6 for read and send, 6.2 for zero-copy sends that report copies).
///
/// It holds every region that the kernel may still use. If it is dropped while an operation does
/// not have a result, the region of that operation is leaked, since the kernel may still access it.
pub struct Ring {
    uring: IoUring,
    registered: Option<Arc<MappedRegion>>,
    loans: HashMap<u64, Arc<MappedRegion>>,
    results: HashMap<u64, i32>,
    completions: Vec<RingCompletion>,
    send_flags: i32,
    next: u64,
    without_result: usize,
    enters: u64,
    is_broken: bool,
    /// The process that has set it up ([`fork::generation`]).
    process: u64,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Ring").field("loans", &self.loans.len()).finish_non_exhaustive()
    }
}

impl Ring {
    /// Sets up a ring. `ENOSYS` without io_uring, `EPERM` if `kernel.io_uring_disabled` or seccomp
    /// forbids it.
    pub fn new() -> io::Result<Self> {
        let uring = IoUring::builder()
            .setup_cqsize(COMPLETIONS)
            // This thread enters the kernel to collect completions anyway: no interrupt is needed
            // (5.19).
            .setup_coop_taskrun()
            .build(ENTRIES)
            .or_else(|error| match error.raw_os_error() {
                Some(libc::EINVAL) => IoUring::builder().setup_cqsize(COMPLETIONS).build(ENTRIES),
                _ => Err(error),
            })?;
        Ok(Self {
            uring,
            registered: None,
            loans: HashMap::new(),
            results: HashMap::new(),
            completions: Vec::new(),
            send_flags: libc::MSG_NOSIGNAL | libc::MSG_WAITALL,
            next: 0,
            without_result: 0,
            enters: 0,
            is_broken: false,
            process: fork::generation(),
        })
    }

    /// Makes sends return `EAGAIN` where the socket would block.
    ///
    /// Otherwise io_uring waits for the socket, even if it is `O_NONBLOCK`.
    pub fn set_nonblocking(&mut self) {
        self.send_flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    }

    /// Probes whether the kernel supports `SEND_ZC` (Linux 6.0).
    pub fn has_send_zerocopy(&self) -> io::Result<bool> {
        let mut probe = io_uring::Probe::new();
        self.uring.submitter().register_probe(&mut probe)?;
        Ok(probe.is_supported(opcode::SendZc::CODE))
    }

    /// Registers `region`, so that zero-copy sends from it need not look up its pages each time.
    ///
    /// `ENOMEM` when `RLIMIT_MEMLOCK` is reached, `EOPNOTSUPP` or `EFAULT` for a mapping that
    /// cannot be pinned for long (a file's), `EBUSY` if a region is registered already.
    pub fn register(&mut self, region: Arc<MappedRegion>) -> io::Result<()> {
        let (start, len) = region.slice(&(0..region.len()))?;
        let buffer = libc::iovec { iov_base: start, iov_len: len };
        // SAFETY: the region stays mapped while it is registered: `registered` holds it until the
        // ring is gone.
        unsafe { self.uring.submitter().register_buffers(&[buffer]) }?;
        self.registered = Some(region);
        Ok(())
    }

    /// Reads from `file` at `offset` into `range` of `region`; returns the bytes read, 0 at the end
    /// of the file.
    pub fn read(
        &mut self,
        file: impl AsFd,
        offset: u64,
        region: &Arc<MappedRegion>,
        range: Range<usize>,
    ) -> io::Result<usize> {
        let id = self.next_id();
        let entry = read_entry(file, offset, region, range)?.user_data(id);
        self.run(&[(entry, region)])?;
        self.result(id)
    }

    /// Sends `range` of `region` to `socket`; returns the bytes accepted, which is all of them on a
    /// blocking socket.
    pub fn send(
        &mut self,
        socket: impl AsFd,
        region: &Arc<MappedRegion>,
        range: Range<usize>,
    ) -> io::Result<usize> {
        let id = self.next_id();
        let entry = send_entry(socket, region, range, self.send_flags)?.user_data(id);
        self.run(&[(entry, region)])?;
        self.result(id)
    }

    /// Reads from `file` into `range` and sends it to `socket`, as one chain and one system call.
    ///
    /// Returns the results of both. A short read breaks the chain: the send's result is then
    /// `ECANCELED`.
    pub fn read_then_send(
        &mut self,
        file: impl AsFd,
        offset: u64,
        socket: impl AsFd,
        region: &Arc<MappedRegion>,
        range: Range<usize>,
    ) -> io::Result<(io::Result<usize>, io::Result<usize>)> {
        let (read, send) = (self.next_id(), self.next_id());
        let first = read_entry(file, offset, region, range.clone())?
            .flags(squeue::Flags::IO_LINK)
            .user_data(read);
        let second = send_entry(socket, region, range, self.send_flags)?.user_data(send);
        self.run(&[(first, region), (second, region)])?;
        Ok((self.result(read), self.result(send)))
    }

    /// Sends `range` of `region` without copying it, if the device can; returns the send's number
    /// and the bytes accepted.
    ///
    /// The region is held until the send's completion arrives. `EOPNOTSUPP` if the protocol does
    /// not support it, `ENOMEM` when `RLIMIT_MEMLOCK` is reached.
    pub fn send_zerocopy(
        &mut self,
        socket: impl AsFd,
        region: &Arc<MappedRegion>,
        range: Range<usize>,
    ) -> io::Result<(u64, usize)> {
        let id = self.next_id();
        let (start, len) = region.slice(&range)?;
        let is_registered = self.registered.as_ref().is_some_and(|held| Arc::ptr_eq(held, region));
        let entry = opcode::SendZc::new(
            types::Fd(socket.as_fd().as_raw_fd()),
            start.cast::<u8>().cast_const(),
            entry_len(len),
        )
        .buf_index(is_registered.then_some(0))
        .flags(self.send_flags)
        .zc_flags(SEND_ZC_REPORT_USAGE)
        .build()
        .user_data(id);
        self.run(&[(entry, region)])?;
        Ok((id, self.result(id)?))
    }

    /// Number of system calls made so far.
    pub fn enters(&self) -> u64 {
        self.enters
    }

    /// Takes the zero-copy completions that have arrived.
    pub fn take_completions(&mut self) -> Vec<RingCompletion> {
        self.collect();
        std::mem::take(&mut self.completions)
    }

    /// Waits until at least one zero-copy completion has arrived; returns at once if nothing is in
    /// flight.
    pub fn wait(&mut self) -> io::Result<()> {
        self.collect();
        if self.loans.is_empty() || !self.completions.is_empty() {
            return Ok(());
        }
        self.enter(1)
    }

    fn next_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Submits the entries and waits until each has a result.
    ///
    /// If entering the kernel fails, an entry may stay in the queue, with a descriptor that its
    /// caller is free to close. The ring is then never entered again: every later call returns
    /// `EBADFD`.
    fn run(&mut self, entries: &[(squeue::Entry, &Arc<MappedRegion>)]) -> io::Result<()> {
        if self.is_broken {
            return Err(io::Error::from_raw_os_error(libc::EBADFD));
        }
        for (entry, region) in entries {
            self.loans.insert(entry.get_user_data(), Arc::clone(region));
            // SAFETY: the entry's memory belongs to `region`, which `loans` holds until the kernel
            // has completed the operation (and leaks if it never does). The caller borrows the
            // descriptors until this returns, with the result or with a ring that submits nothing
            // any more.
            unsafe { self.uring.submission().push(entry) }
                .map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))?;
            self.without_result += 1;
        }
        let last = entries.last().map_or(0, |(entry, _)| entry.get_user_data());
        while !self.results.contains_key(&last) {
            self.enter(1)?;
        }
        Ok(())
    }

    fn enter(&mut self, completions_min: usize) -> io::Result<()> {
        self.enters += 1;
        match self.uring.submit_and_wait(completions_min) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                self.is_broken = true;
                return Err(error);
            }
        }
        self.collect();
        Ok(())
    }

    /// Sorts completions into results and zero-copy completions, and drops regions that the kernel
    /// no longer uses.
    fn collect(&mut self) {
        for completion in self.uring.completion() {
            let (id, result, flags) =
                (completion.user_data(), completion.result(), completion.flags());
            if io_uring::cqueue::notif(flags) {
                self.loans.remove(&id);
                self.completions.push(RingCompletion {
                    send: id,
                    copied: result as u32 & NOTIF_USAGE_ZC_COPIED != 0,
                });
                continue;
            }
            self.without_result -= 1;
            self.results.insert(id, result);
            if !io_uring::cqueue::more(flags) {
                self.loans.remove(&id);
            }
        }
    }

    fn result(&mut self, id: u64) -> io::Result<usize> {
        // A chain's results arrive in order, so the first is present when the last is.
        let result = self.results.remove(&id).unwrap_or(-libc::ECANCELED);
        usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.process != fork::generation() {
            // A forked child shares the queues, and would take its parent's completions. Its copy
            // of the memory is its own.
            return;
        }
        self.collect();
        if self.without_result > 0 {
            // The kernel may still write to this memory, so it is leaked. Zero-copy sends that only
            // lack their completion need no such care, because the kernel holds their pages by
            // reference.
            for (_, region) in self.loans.drain() {
                std::mem::forget(region);
            }
        }
    }
}

/// The length of an operation. An entry has 32 bits for it, and 4 GiB would be 0.
fn entry_len(len: usize) -> u32 {
    const LEN_MAX: usize = 1 << 30;
    len.min(LEN_MAX) as u32
}

fn read_entry(
    file: impl AsFd,
    offset: u64,
    region: &MappedRegion,
    range: Range<usize>,
) -> io::Result<squeue::Entry> {
    let (start, len) = region.slice(&range)?;
    let fd = types::Fd(file.as_fd().as_raw_fd());
    Ok(opcode::Read::new(fd, start.cast(), entry_len(len)).offset(offset).build())
}

fn send_entry(
    socket: impl AsFd,
    region: &MappedRegion,
    range: Range<usize>,
    flags: i32,
) -> io::Result<squeue::Entry> {
    let (start, len) = region.slice(&range)?;
    let fd = types::Fd(socket.as_fd().as_raw_fd());
    Ok(opcode::Send::new(fd, start.cast::<u8>().cast_const(), entry_len(len)).flags(flags).build())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_an_operation_does_not_wrap() {
        assert_eq!(entry_len(4096), 4096);
        assert_eq!((entry_len(4 << 30), entry_len((4 << 30) + 5)), (1 << 30, 1 << 30));
    }
}
