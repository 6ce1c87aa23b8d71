//! The arguments of a program: handles, descriptors, bytes and files.

use crate::error::Failure;
use haul_library::Error;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr;

/// A duplicate of a descriptor of the program. A number that is not open fails with `EBADF`.
pub fn duplicate(descriptor: c_int) -> Result<OwnedFd, Failure> {
    if descriptor < 0 {
        return Err(Error::InvalidInput("the descriptor is negative").into());
    }
    // SAFETY: the descriptor is used for one system call only.
    let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
    borrowed.try_clone_to_owned().map_err(Failure::Descriptor)
}

/// The handle behind a pointer of the program.
///
/// # Safety
///
/// The pointer must be null, or a handle that was not freed.
pub unsafe fn handle<'h, T>(pointer: *mut T) -> Result<&'h mut T, Error> {
    // SAFETY: the caller promises a valid handle, which one thread at a time uses.
    unsafe { pointer.as_mut() }.ok_or(Error::InvalidInput("the handle is NULL"))
}

/// Sets the place of a new handle to null.
///
/// # Safety
///
/// The pointer must be null or valid.
pub unsafe fn clear<T>(place: *mut *mut T) -> Result<(), Error> {
    if place.is_null() {
        return Err(Error::InvalidInput("the place for the handle is NULL"));
    }
    // SAFETY: the caller promises a valid pointer, which may point at uninitialised memory.
    unsafe { place.write(ptr::null_mut()) };
    Ok(())
}

/// Bytes of the program.
///
/// # Safety
///
/// `data` must point at `length` bytes that stay during the call.
pub unsafe fn bytes<'d>(data: *const c_void, length: usize) -> Result<&'d [u8], Error> {
    if length == 0 {
        return Ok(&[]);
    }
    if data.is_null() || isize::try_from(length).is_err() {
        return Err(Error::InvalidInput("data is NULL, or length is beyond the address space"));
    }
    // SAFETY: the caller promises the bytes.
    Ok(unsafe { std::slice::from_raw_parts(data.cast(), length) })
}

/// A file and a range of this file.
///
/// # Safety
///
/// The file must be used during one call of the program only, because the program may close the
/// descriptor afterwards. A number that is not open fails with `EBADF`.
pub unsafe fn file_part<'f>(
    file: c_int,
    offset: u64,
    length: usize,
) -> Result<(BorrowedFd<'f>, Range<u64>), Error> {
    if file < 0 {
        return Err(Error::InvalidInput("the descriptor of the file is negative"));
    }
    let end = offset
        .checked_add(length as u64)
        .ok_or(Error::InvalidInput("offset and length together are too large"))?;
    // SAFETY: the number is not -1, and the caller uses the file during one call.
    Ok((unsafe { BorrowedFd::borrow_raw(file) }, offset..end))
}
