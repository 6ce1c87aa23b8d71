//! `haul_forwarder`: two joined sockets.

use crate::arguments::{clear, duplicate, handle};
use crate::error::Failure;
use crate::guard;
use haul_library::{Error, Forwarder, Readiness, Step};
use std::ffi::{c_int, c_short};
use std::os::fd::OwnedFd;

const DONE: c_int = 0;
const WAIT: c_int = 1;
const YIELD: c_int = 2;

/// A forwarder of C.
pub struct HaulForwarder {
    forwarder: Forwarder<OwnedFd, OwnedFd>,
    is_done: bool,
}

/// `haul_forwarder_new` of the header.
///
/// # Safety
///
/// `forwarder` must be null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_forwarder_new(
    a: c_int,
    b: c_int,
    forwarder: *mut *mut HaulForwarder,
) -> c_int {
    guard::call(|| {
        // SAFETY: the caller promises a valid pointer.
        unsafe { clear(forwarder) }?;
        let joined = Forwarder::new(duplicate(a)?, duplicate(b)?)?;
        let handle = Box::new(HaulForwarder { forwarder: joined, is_done: false });
        // SAFETY: the pointer is valid.
        unsafe { forwarder.write(Box::into_raw(handle)) };
        Ok::<_, Failure>(0)
    })
}

/// `haul_forwarder_step` of the header.
///
/// # Safety
///
/// `forwarder` must be a handle, and `events` must point at two values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_forwarder_step(
    forwarder: *mut HaulForwarder,
    events: *mut c_short,
) -> c_int {
    guard::call(|| {
        // SAFETY: the caller promises a handle and two values.
        let (handle, events) =
            unsafe { (handle(forwarder)?, handle(events.cast::<[c_short; 2]>())?) };
        let ready = events.map(|events| Readiness::from_poll_events(events.cast_unsigned()));
        let wanted = |readiness: Readiness| readiness.poll_events().cast_signed();
        match handle.forwarder.step_ready(ready[0], ready[1])? {
            Step::Done => {
                handle.is_done = true;
                Ok::<_, Error>(DONE)
            }
            Step::Wait { a, b } => {
                *events = [wanted(a), wanted(b)];
                Ok(WAIT)
            }
            Step::Yield => {
                *events = [wanted(Readiness { read: true, write: true }); 2];
                Ok(YIELD)
            }
        }
    })
}

/// `haul_forwarder_free` of the header.
///
/// # Safety
///
/// `forwarder` must be null or a handle, which is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_forwarder_free(forwarder: *mut HaulForwarder) {
    guard::run(|| {
        if forwarder.is_null() {
            return;
        }
        // SAFETY: the caller promises a handle, which `haul_forwarder_new` made from a box.
        let HaulForwarder { forwarder, is_done } = *unsafe { Box::from_raw(forwarder) };
        if !is_done {
            forwarder.abort();
        }
    });
}
