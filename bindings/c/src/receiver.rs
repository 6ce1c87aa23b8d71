//! `haul_receiver`: bytes into memory and into files.

use crate::arguments::{clear, duplicate, file_part, handle};
use crate::error::Failure;
use crate::guard;
use haul_library::{Error, Receiver};
use std::ffi::{c_int, c_void};
use std::os::fd::OwnedFd;

/// A receiver of C.
pub struct HaulReceiver(Receiver<OwnedFd>);

/// `haul_receiver_new` of the header.
///
/// # Safety
///
/// `receiver` must be null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_receiver_new(
    socket: c_int,
    receiver: *mut *mut HaulReceiver,
) -> c_int {
    guard::call(|| {
        // SAFETY: the caller promises a valid pointer.
        unsafe { clear(receiver) }?;
        let handle = Box::new(HaulReceiver(Receiver::new(duplicate(socket)?)?));
        // SAFETY: the pointer is valid.
        unsafe { receiver.write(Box::into_raw(handle)) };
        Ok::<_, Failure>(0)
    })
}

/// `haul_receive` of the header.
///
/// # Safety
///
/// `receiver` must be a handle, and `data` must point at `length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_receive(
    receiver: *mut HaulReceiver,
    data: *mut c_void,
    length: usize,
) -> isize {
    guard::call(|| {
        // SAFETY: the caller promises a handle.
        let HaulReceiver(receiver) = unsafe { handle(receiver) }?;
        if length == 0 {
            return Ok(0);
        }
        if data.is_null() || isize::try_from(length).is_err() {
            return Err(Error::InvalidInput("data is NULL, or length is beyond the address space"));
        }
        // SAFETY: the caller promises the bytes. The kernel writes them, and nothing reads them
        // before.
        let bytes = unsafe { std::slice::from_raw_parts_mut(data.cast(), length) };
        receiver.receive_into(bytes)
    })
}

/// `haul_receive_file` of the header.
///
/// # Safety
///
/// `receiver` must be a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_receive_file(
    receiver: *mut HaulReceiver,
    file: c_int,
    offset: u64,
    length: usize,
) -> isize {
    guard::call(|| {
        // SAFETY: the caller promises a handle.
        let HaulReceiver(receiver) = unsafe { handle(receiver) }?;
        // SAFETY: the file is used during this call only.
        let (file, range) = unsafe { file_part(file, offset, length) }?;
        receiver.receive_into_file(file, range)
    })
}

/// `haul_discard` of the header.
///
/// # Safety
///
/// `receiver` must be a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_discard(receiver: *mut HaulReceiver, length: usize) -> isize {
    // SAFETY: the caller promises a handle.
    guard::call(|| unsafe { handle(receiver) }?.0.discard(length as u64))
}

/// `haul_receiver_held_bytes` of the header.
///
/// # Safety
///
/// `receiver` must be a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_receiver_held_bytes(receiver: *mut HaulReceiver) -> isize {
    // SAFETY: the caller promises a handle.
    guard::call(|| unsafe { handle(receiver) }.map(|handle| handle.0.held_bytes()))
}

/// `haul_receiver_free` of the header.
///
/// # Safety
///
/// `receiver` must be null or a handle, which is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_receiver_free(receiver: *mut HaulReceiver) {
    guard::run(|| {
        if !receiver.is_null() {
            // SAFETY: the caller promises a handle, which `haul_receiver_new` made from a box.
            drop(unsafe { Box::from_raw(receiver) });
        }
    });
}
