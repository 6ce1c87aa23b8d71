//! CPU sampling profiler (`perf_event_open`, Linux 2.6.31): records the executed address and kernel
//! stack of a CPU at a fixed frequency.
//!
//! The clock is the software event `cpu-clock`, which every kernel has, also in virtual machines.
//! It is a timer: while interrupts are off it fires late, and the sample is attributed to the code
//! that enables interrupts again (such as `_raw_spin_unlock_irqrestore`).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Release},
};

// <linux/perf_event.h>.
const PERF_TYPE_SOFTWARE: u32 = 1;
const PERF_COUNT_SW_CPU_CLOCK: u64 = 0;
const PERF_SAMPLE_IP: u64 = 1;
const PERF_SAMPLE_TID: u64 = 1 << 1;
const PERF_SAMPLE_CALLCHAIN: u64 = 1 << 5;
/// `freq`: the period field is a frequency.
const FLAG_FREQUENCY: u64 = 1 << 10;
/// `exclude_callchain_user`.
const FLAG_NO_USER_STACK: u64 = 1 << 22;
const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 1 << 3;
const PERF_RECORD_LOST: u32 = 2;
const PERF_RECORD_SAMPLE: u32 = 9;
/// Mask of the CPU mode in the `misc` field of a record's header.
const MISC_MODE: u16 = 7;
const MISC_KERNEL: u16 = 1;
/// Call-chain values from here on are context markers, not addresses (`PERF_CONTEXT_MAX`).
const CONTEXT_MIN: u64 = u64::MAX - 4095;

/// `struct perf_event_attr` in its first version, 64 bytes; the kernel assumes zero for later
/// fields.
#[repr(C)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    frequency: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup: u32,
    breakpoint: u32,
    config1: u64,
}
const _: () = assert!(size_of::<Attributes>() == 64);

/// Offsets of the ring's head and tail in its first page (`struct perf_event_mmap_page`).
const HEAD_OFFSET: usize = 1024;
const TAIL_OFFSET: usize = 1032;

/// One sample of a CPU.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct CpuSample {
    /// Process that the CPU was running, 0 for the kernel's idle loop. Work done in interrupts is
    /// attributed to the process that they interrupted.
    pub process: u32,
    /// Thread of that process.
    pub thread: u32,
    /// Whether the CPU was in kernel mode.
    pub in_kernel: bool,
    /// The executed address.
    pub address: u64,
    /// Return addresses in the kernel, innermost first; the first entry is the executed address.
    pub kernel_stack: Vec<u64>,
}

/// Samples one CPU.
#[derive(Debug)]
pub struct Sampler {
    /// Keeps the event alive; its records are in the ring.
    _event: OwnedFd,
    ring: NonNull<u8>,
    map_bytes: usize,
    data_bytes: usize,
    lost: u64,
}

// SAFETY: the ring belongs to this value and is read through `&mut self` only.
unsafe impl Send for Sampler {}

impl Sampler {
    /// Starts sampling `cpu` `hertz` times a second, into a ring of `ring_bytes`, rounded up to a
    /// power of two.
    ///
    /// `EACCES` or `EPERM` if `kernel.perf_event_paranoid` is above 0 and the caller lacks
    /// `CAP_PERFMON`. `EPERM` also if the ring is larger than `kernel.perf_event_mlock_kb` allows.
    pub fn start(cpu: usize, hertz: u64, ring_bytes: usize) -> io::Result<Self> {
        let attributes = Attributes {
            kind: PERF_TYPE_SOFTWARE,
            size: size_of::<Attributes>() as u32,
            config: PERF_COUNT_SW_CPU_CLOCK,
            frequency: hertz,
            sample_type: PERF_SAMPLE_IP | PERF_SAMPLE_TID | PERF_SAMPLE_CALLCHAIN,
            read_format: 0,
            flags: FLAG_FREQUENCY | FLAG_NO_USER_STACK,
            wakeup: 0,
            breakpoint: 0,
            config1: 0,
        };
        // SAFETY: the kernel reads `size` bytes of the attributes, which are that long. The
        // descriptor is new and has no other owner.
        let event = unsafe {
            let any_process: libc::pid_t = -1;
            let no_group: libc::c_int = -1;
            let fd = libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attributes,
                any_process,
                cpu as libc::c_int,
                no_group,
                PERF_FLAG_FD_CLOEXEC,
            );
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd as libc::c_int)
        };
        let data_bytes = ring_bytes.next_power_of_two().max(haul_sys::region::page_bytes());
        let map_bytes = data_bytes + haul_sys::region::page_bytes();
        // SAFETY: a null hint lets the kernel choose the address, so no existing mapping is
        // replaced.
        let ring = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                map_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                event.as_raw_fd(),
                0,
            )
        };
        if ring == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let ring =
            NonNull::new(ring.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { _event: event, ring, map_bytes, data_bytes, lost: 0 })
    }

    /// Takes the samples recorded since the last call. The ring must not overflow between two
    /// calls.
    pub fn take(&mut self) -> Vec<CpuSample> {
        let head = self.position(HEAD_OFFSET).load(Acquire);
        let tail = self.position(TAIL_OFFSET).load(Acquire);
        let len = usize::try_from(head.wrapping_sub(tail)).unwrap_or(0).min(self.data_bytes);
        let start = tail as usize % self.data_bytes;
        let mut records = Vec::with_capacity(len);
        let first = len.min(self.data_bytes - start);
        // SAFETY: both pieces lie in the data pages after the first page. The kernel has written
        // them, which the load of the head acquired, and writes them again only after the tail has
        // passed them.
        unsafe {
            let data = self.ring.as_ptr().add(self.map_bytes - self.data_bytes);
            records.extend_from_slice(std::slice::from_raw_parts(data.add(start), first));
            records.extend_from_slice(std::slice::from_raw_parts(data, len - first));
        }
        self.position(TAIL_OFFSET).store(head, Release);
        let (ticks, lost) = parse(&records);
        self.lost = self.lost.saturating_add(lost);
        ticks
    }

    /// Number of samples dropped because the ring was full.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    fn position(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the first page holds a `struct perf_event_mmap_page`, whose head and tail are
        // aligned 64-bit numbers at these offsets; the kernel accesses them atomically too.
        unsafe { AtomicU64::from_ptr(self.ring.as_ptr().add(offset).cast()) }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in this type and is unmapped once; an error would only leak
        // it.
        unsafe { libc::munmap(self.ring.as_ptr().cast(), self.map_bytes) };
    }
}

/// Parses ring records into samples and the number of lost samples.
///
/// Any input is safe: unknown records are skipped, and a truncated record ends the parse.
pub fn parse(mut records: &[u8]) -> (Vec<CpuSample>, u64) {
    let (mut ticks, mut lost) = (Vec::new(), 0);
    while let Some((header, _)) = records.split_first_chunk::<8>() {
        let kind = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]);
        let misc = u16::from_ne_bytes([header[4], header[5]]);
        let size = usize::from(u16::from_ne_bytes([header[6], header[7]]));
        let Some(body) = records.get(8..size) else { break };
        records = &records[size..];
        let field = |index: usize| {
            let bytes = body.get(8 * index..8 * index + 8)?;
            Some(u64::from_ne_bytes(bytes.try_into().ok()?))
        };
        match kind {
            PERF_RECORD_SAMPLE => {
                let (Some(address), Some(ids), Some(depth)) = (field(0), field(1), field(2)) else {
                    continue;
                };
                let stack =
                    (0..depth.min(body.len() as u64)).map_while(|index| field(3 + index as usize));
                ticks.push(CpuSample {
                    // Two 32-bit numbers in memory order: process, thread.
                    process: if cfg!(target_endian = "little") {
                        ids as u32
                    } else {
                        (ids >> 32) as u32
                    },
                    thread: if cfg!(target_endian = "little") {
                        (ids >> 32) as u32
                    } else {
                        ids as u32
                    },
                    in_kernel: misc & MISC_MODE == MISC_KERNEL,
                    address,
                    kernel_stack: stack.filter(|&address| address < CONTEXT_MIN).collect(),
                });
            }
            // The count comes from the record and may be any number.
            PERF_RECORD_LOST => lost = u64::saturating_add(lost, field(1).unwrap_or(0)),
            _ => {}
        }
    }
    (ticks, lost)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: u32, misc: u16, words: &[u64]) -> Vec<u8> {
        let mut bytes = kind.to_ne_bytes().to_vec();
        bytes.extend(misc.to_ne_bytes());
        bytes.extend((8 + 8 * words.len() as u16).to_ne_bytes());
        bytes.extend(words.iter().flat_map(|field| field.to_ne_bytes()));
        bytes
    }

    #[test]
    fn samples_and_losses_are_parsed_and_other_records_are_skipped() {
        let ids = u64::from(7u32) | u64::from(9u32) << 32;
        let kernel_marker = u64::MAX - 127;
        assert_eq!(
            parse(
                &[
                    record(PERF_RECORD_LOST, 0, &[1, u64::MAX]),
                    record(PERF_RECORD_LOST, 0, &[1, 2])
                ]
                .concat()
            )
            .1,
            u64::MAX
        );
        let mut records =
            record(PERF_RECORD_SAMPLE, MISC_KERNEL, &[100, ids, 3, kernel_marker, 100, 200]);
        records.extend(record(3, 0, &[1, 2]));
        records.extend(record(PERF_RECORD_LOST, 0, &[1, 5]));
        records.extend(record(PERF_RECORD_SAMPLE, 2, &[300, ids, 0]));
        let whole = records.len();
        records.extend(&record(PERF_RECORD_SAMPLE, 0, &[1, 2, 3])[..12]);
        let (ticks, lost) = parse(&records);
        assert_eq!(lost, 5);
        let expected = CpuSample {
            process: 7,
            thread: 9,
            in_kernel: true,
            address: 100,
            kernel_stack: vec![100, 200],
        };
        assert_eq!(ticks[0], expected);
        assert_eq!(
            ticks[1],
            CpuSample {
                process: 7,
                thread: 9,
                in_kernel: false,
                address: 300,
                kernel_stack: vec![]
            }
        );
        assert_eq!(ticks.len(), 2);
        for end in 0..whole {
            parse(&records[..end]);
        }
        // A record of size 0 must not cause an endless loop.
        assert_eq!(parse(&[0; 64]).0, []);
    }

    #[test]
    fn a_busy_cpu_yields_samples() {
        let cpu = rustix::thread::sched_getcpu();
        // Otherwise the thread may go to another CPU, and this one is idle.
        let mut set = rustix::thread::CpuSet::new();
        set.set(cpu);
        rustix::thread::sched_setaffinity(None, &set).unwrap();
        let mut sampler = match Sampler::start(cpu, 999, 1 << 18) {
            Ok(sampler) => sampler,
            Err(error) => return eprintln!("SKIPPED: CPUs cannot be sampled here: {error}"),
        };
        let until = std::time::Instant::now() + std::time::Duration::from_millis(300);
        while std::time::Instant::now() < until {}
        let ticks = sampler.take();
        assert!(ticks.len() > 20, "{} ticks in 300 ms", ticks.len());
        assert!(ticks.iter().all(|tick| tick.in_kernel == (tick.address >> 63 == 1)), "{ticks:?}");
        assert!(ticks.iter().any(|tick| !tick.in_kernel), "no sample is in the loop");
        assert_eq!(sampler.lost(), 0);
    }
}
