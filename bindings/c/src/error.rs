//! The latest error of each thread, and `errno`.

use haul_library::{Error, ErrorCode};
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::io;

thread_local! {
    static LATEST: RefCell<(u16, CString)> = RefCell::new((0, CString::default()));
}

/// `ENOTSUPP` of the kernel's include/linux/errno.h.
const ENOTSUPP: c_int = 524;

/// Why a function failed.
pub enum Failure {
    /// The library refused the call, or the call failed.
    Library(Error),
    /// A descriptor was not duplicated.
    Descriptor(io::Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

/// The error number of C for an error.
fn errno_of(error: &Error) -> c_int {
    match error.code() {
        ErrorCode::WouldBlock => libc::EAGAIN,
        ErrorCode::LoanLimit | ErrorCode::PoolEmpty => libc::ENOBUFS,
        ErrorCode::Ended => libc::ENODATA,
        ErrorCode::StreamTorn => libc::ESTALE,
        ErrorCode::Forked => libc::EOWNERDEAD,
        ErrorCode::WrongSocket => libc::EPROTOTYPE,
        ErrorCode::TimedOut => libc::ETIMEDOUT,
        ErrorCode::Unsupported => libc::EOPNOTSUPP,
        ErrorCode::NotASocket => libc::ENOTSOCK,
        // The kernel lacks memory for a loan. The number of the kernel would ask for a poll.
        ErrorCode::Refused if error.raw_os_error() == Some(libc::EAGAIN) => libc::ENOMEM,
        // The kernel's number 524, which C does not have.
        ErrorCode::Refused if error.raw_os_error() == Some(ENOTSUPP) => libc::EOPNOTSUPP,
        _ => error.raw_os_error().unwrap_or(libc::EINVAL),
    }
}

/// Keeps an error for the thread, and sets `errno`.
pub fn set(failure: &Failure) {
    match failure {
        Failure::Library(error) => {
            set_message(error.code().number(), &error.to_string(), errno_of(error));
        }
        Failure::Descriptor(error) => {
            let message = format!("the descriptor was not duplicated: {error}");
            let errno = error.raw_os_error().unwrap_or(libc::EBADF);
            set_message(ErrorCode::Failed.number(), &message, errno);
        }
    }
}

/// Keeps a message for the thread, and sets `errno`.
pub fn set_message(code: u16, message: &str, errno: c_int) {
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    // The place for the message is gone if the thread ends.
    let _ = LATEST.try_with(|latest| latest.replace((code, message)));
    // SAFETY: the C library returns a valid pointer to the thread's `errno`.
    unsafe { *libc::__errno_location() = errno };
}

/// `haul_error_code` of the header.
#[unsafe(no_mangle)]
pub extern "C" fn haul_error_code() -> c_int {
    LATEST.try_with(|latest| c_int::from(latest.borrow().0)).unwrap_or_default()
}

/// `haul_error` of the header.
#[unsafe(no_mangle)]
pub extern "C" fn haul_error() -> *const c_char {
    LATEST.try_with(|latest| latest.borrow().1.as_ptr()).unwrap_or(c"".as_ptr())
}
