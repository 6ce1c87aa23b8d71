//! What the kernel answers about a piece of memory: which file is mapped there, and whether the
//! memory still holds the file's pages.
//!
//! `PROCMAP_QUERY` needs Linux 6.11, `PAGEMAP_SCAN` Linux 6.7. An older kernel answers neither, and
//! nothing is elided.

use crate::high_descriptor::KeptDescriptor;
use crate::kernel;
use crate::next;
use haul_tally::NotElided;
use libc::{c_int, c_ulong, off64_t};
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// `/proc/self/maps`, which belongs to the memory of the process that opened it.
static MAPS: KeptDescriptor = KeptDescriptor::none();
/// `/proc/self/pagemap`.
static PAGEMAP: KeptDescriptor = KeptDescriptor::none();
/// Whether the kernel does not have the questions.
static IS_OLD: AtomicBool = AtomicBool::new(false);

/// A mapping of a file, as the kernel has it.
pub struct Mapping {
    /// Device of the file.
    pub device: u64,
    /// Inode of the file.
    pub inode: u64,
    /// Position of the first byte in the file.
    pub offset: off64_t,
    /// Bytes from there to the end of the mapping.
    pub bytes: usize,
}

/// `struct procmap_query` of `<linux/fs.h>`.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_address: u64,
    start: u64,
    end: u64,
    flags: u64,
    page_bytes: u64,
    offset: u64,
    inode: u64,
    device_major: u32,
    device_minor: u32,
    name_bytes: u32,
    build_id_bytes: u32,
    name_address: u64,
    build_id_address: u64,
}
const _: () = assert!(size_of::<ProcmapQuery>() == 104);

/// `struct pm_scan_arg` of `<linux/fs.h>`.
#[repr(C)]
#[derive(Default)]
struct PagemapScan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_count: u64,
    pages_max: u64,
    category_inverted: u64,
    category_mask: u64,
    category_any_mask: u64,
    return_mask: u64,
}
const _: () = assert!(size_of::<PagemapScan>() == 96);

/// `struct page_region` of `<linux/fs.h>`.
#[repr(C)]
#[derive(Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: c_ulong = 0xC068_6611;
/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: c_ulong = 0xC060_6610;

/// Flags of a mapping.
mod vma {
    pub const READABLE: u64 = 1;
    pub const WRITABLE: u64 = 2;
    pub const SHARED: u64 = 8;
}

/// Categories of a page.
mod page {
    pub const FILE: u64 = 1 << 2;
    pub const PRESENT: u64 = 1 << 3;
    pub const SWAPPED: u64 = 1 << 4;
}

/// Asks which file is mapped at an address, and whether the memory holds its pages.
pub fn confirm(address: usize, bytes: usize) -> Result<Mapping, NotElided> {
    if IS_OLD.load(Relaxed) {
        return Err(NotElided::OldKernel);
    }
    let maps = opened(&MAPS, c"/proc/self/maps").ok_or(NotElided::Busy)?;
    let mut query = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        query_address: address as u64,
        ..ProcmapQuery::default()
    };
    // SAFETY: the kernel reads and writes the structure, whose length it knows.
    let result = unsafe { libc::ioctl(maps, PROCMAP_QUERY, &raw mut query) };
    if result != 0 {
        return Err(failure(&MAPS));
    }
    let is_right = query.flags & vma::READABLE != 0
        && query.flags & vma::WRITABLE == 0
        && query.inode != 0
        && query.start <= address as u64
        && (address as u64) < query.end;
    if !is_right {
        return Err(NotElided::Mapping);
    }
    let bytes = bytes.min((query.end - address as u64) as usize);
    if query.flags & vma::SHARED == 0 {
        check_pages(address, bytes)?;
    }
    Ok(Mapping {
        device: libc::makedev(query.device_major, query.device_minor),
        inode: query.inode,
        offset: (query.offset + (address as u64 - query.start)) as off64_t,
        bytes,
    })
}

/// The error of a question: the kernel does not know the question, or nothing is mapped there.
fn failure(asked: &KeptDescriptor) -> NotElided {
    // SAFETY: the C library returns a valid address for each thread.
    let errno = unsafe { *libc::__errno_location() };
    if !asked.is_own() {
        // The program closed the descriptor. The next call opens the file again.
        asked.close();
        NotElided::Busy
    } else if matches!(errno, libc::ENOTTY | libc::EINVAL | libc::EOPNOTSUPP) {
        IS_OLD.store(true, Relaxed);
        NotElided::OldKernel
    } else {
        NotElided::Mapping
    }
}

/// Asks whether a private mapping has a page that is not the file's. A program can make the memory
/// writable, change it, and make it read-only again.
fn check_pages(address: usize, bytes: usize) -> Result<(), NotElided> {
    const PAGE_BYTES: usize = 4096;
    let pagemap = opened(&PAGEMAP, c"/proc/self/pagemap").ok_or(NotElided::Busy)?;
    let mut region = PageRegion::default();
    let start = address & !(PAGE_BYTES - 1);
    let mut scan = PagemapScan {
        size: size_of::<PagemapScan>() as u64,
        start: start as u64,
        end: (address + bytes).next_multiple_of(PAGE_BYTES) as u64,
        regions: (&raw mut region) as u64,
        regions_count: 1,
        pages_max: 1,
        // Pages that are present or swapped, and are not a file's.
        category_inverted: page::FILE,
        category_mask: page::FILE,
        category_any_mask: page::PRESENT | page::SWAPPED,
        return_mask: page::FILE,
        ..PagemapScan::default()
    };
    // SAFETY: the kernel reads and writes the structure and one region.
    match unsafe { libc::ioctl(pagemap, PAGEMAP_SCAN, &raw mut scan) } {
        0 => Ok(()),
        found if found > 0 => Err(NotElided::PrivatePages),
        _ => Err(failure(&PAGEMAP)),
    }
}

/// The file and the offset by the program's own call, without the kernel's confirmation. Wrong as
/// soon as the program maps something else there; a test shows that.
pub fn unconfirmed(address: usize, bytes: usize, fd: c_int) -> Result<Mapping, NotElided> {
    let status = kernel::status(fd).ok_or(NotElided::NoFile)?;
    let offset = crate::mappings::offset_of(address).ok_or(NotElided::Mapping)?;
    Ok(Mapping { device: status.st_dev, inode: status.st_ino, offset, bytes })
}

/// A file of `/proc/self`, opened at the first use.
fn opened(place: &KeptDescriptor, path: &CStr) -> Option<c_int> {
    if let Some(known) = place.get() {
        return Some(known);
    }
    // SAFETY: the path is a C string.
    let fd = unsafe { next::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC, 0) };
    place.keep(fd)
}

/// Closes the files, which belong to the memory of the parent.
pub fn forget() {
    MAPS.close();
    PAGEMAP.close();
}

/// Forgets the descriptors of a range that the program is about to close.
pub fn before_close_range(first: usize, last: usize) {
    MAPS.before_close_range(first, last);
    PAGEMAP.before_close_range(first, last);
}
