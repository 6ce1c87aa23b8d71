//! Errors of the library as Python's exceptions.

use haul::{Error, ErrorCode};
use pyo3::create_exception;
use pyo3::exceptions::{
    PyConnectionError, PyEOFError, PyOSError, PyRuntimeError, PyTimeoutError, PyTypeError,
    PyValueError,
};
use pyo3::prelude::*;
use std::io;

create_exception!(
    haul_io,
    FileEndedError,
    PyEOFError,
    "The file ended before the requested range did."
);
create_exception!(
    haul_io,
    LoanLimitError,
    PyOSError,
    "The limits of the outstanding loans are reached: reclaim some first."
);
create_exception!(
    haul_io,
    StreamTornError,
    PyConnectionError,
    "The stream lacks the rest of a loan, so it cannot be continued."
);

/// Converts an error. The exception has the library's message, the kernel's error number where
/// there is one, and the stable name of the error as the attribute `code`.
pub fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let (message, code) = (error.to_string(), error.code());
    let exception = match (error.raw_os_error(), code) {
        (_, ErrorCode::Ended) => FileEndedError::new_err(message),
        (_, ErrorCode::LoanLimit | ErrorCode::PoolEmpty) => LoanLimitError::new_err(message),
        (_, ErrorCode::StreamTorn) => StreamTornError::new_err(message),
        (_, ErrorCode::TimedOut) => PyTimeoutError::new_err(message),
        (_, ErrorCode::Forked) => PyRuntimeError::new_err(message),
        (_, ErrorCode::WrongSocket) => PyTypeError::new_err(message),
        (_, ErrorCode::InvalidInput | ErrorCode::LoanEmpty | ErrorCode::LoanTooLarge) => {
            PyValueError::new_err(message)
        }
        (Some(number), _) => PyOSError::new_err((number, message)),
        (None, _) => PyOSError::new_err(message),
    };
    // An exception without attributes stays useful.
    let _ = exception.value(py).setattr("code", code.name());
    exception
}

/// Adds the number of bytes that a call moved before its error, as the attribute `transferred`.
pub fn with_transferred(py: Python<'_>, error: PyErr, bytes: u64) -> PyErr {
    // An exception without attributes stays useful.
    let _ = error.value(py).setattr("transferred", bytes);
    error
}

/// Python's `OSError` for an error of the kernel, of the subclass that belongs to its number.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub fn os_error(error: io::Error) -> PyErr {
    match error.raw_os_error() {
        Some(number) => PyOSError::new_err((number, error.to_string())),
        None => PyOSError::new_err(error.to_string()),
    }
}
