//! The border to C: no panic leaves a function, and errors become -1 and `errno`.

use crate::cancellation;
use crate::error::{self, Failure};
use crate::sigpipe;
use haul_library::ErrorCode;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The code of a panic, which no [`haul_library::ErrorCode`] has.
const PANIC_CODE: u16 = u16::MAX;

/// Calls the library, and returns its value, or -1.
pub fn call<T, R, E>(call: impl FnOnce() -> Result<T, E>) -> R
where
    T: TryInto<R>,
    R: From<i8>,
    E: Into<Failure>,
{
    let guarded = || catch_unwind(AssertUnwindSafe(|| sigpipe::without(call)));
    match cancellation::without(guarded) {
        Ok(Ok(value)) => value.try_into().unwrap_or_else(|_| {
            let message = "the result is too large for the type of the function";
            error::set_message(ErrorCode::Failed.number(), message, libc::EOVERFLOW);
            R::from(-1)
        }),
        Ok(Err(error)) => {
            error::set(&error.into());
            R::from(-1)
        }
        Err(payload) => {
            // Not dropped, because the destructor of a payload can panic.
            std::mem::forget(payload);
            let message = "haul panicked: this is a bug, and the handle cannot be used any more";
            error::set_message(PANIC_CODE, message, libc::ENOTRECOVERABLE);
            R::from(-1)
        }
    }
}

/// Calls what cannot fail.
pub fn run(call: impl FnOnce()) {
    // The panic hook reported the panic. The destructor of the payload can panic, so it is not run.
    cancellation::without(|| catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(std::mem::forget));
}
