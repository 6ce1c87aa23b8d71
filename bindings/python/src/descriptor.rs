//! Descriptors of Python's sockets and files.
//!
//! Each descriptor is duplicated, so that a Python program that closes its object in another thread
//! does not let a call use the number of another file.

use crate::error::os_error;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyInt;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

/// The timeout that a blocking socket object gets, in seconds. Python's limit is 2³¹ ms.
pub const FOREVER_SECONDS: f64 = 2_000_000.0;

/// A duplicate of the descriptor of a file or socket: an object with `fileno()`, or a number.
pub fn duplicate(object: &Bound<'_, PyAny>) -> PyResult<OwnedFd> {
    let number: RawFd = if object.is_instance_of::<PyInt>() {
        object.extract()?
    } else {
        object.call_method0("fileno")?.extract()?
    };
    if number < 0 {
        return Err(PyValueError::new_err("the file or socket is closed"));
    }
    // SAFETY: the descriptor is used for one system call only, which fails with `EBADF` if the
    // number is not open. The GIL is held, so Python does not close the file during the call.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    borrowed.try_clone_to_owned().map_err(os_error)
}

/// A duplicate of the descriptor of a connected socket. Nothing of the socket changes.
pub fn duplicate_socket(object: &Bound<'_, PyAny>) -> PyResult<Arc<OwnedFd>> {
    if object.hasattr("selected_alpn_protocol")? {
        return Err(PyTypeError::new_err(
            "a TLS socket encrypts in the program, so its bytes cannot be sent from a file: pass \
             the plain socket",
        ));
    }
    let socket = duplicate(object)?;
    let is_listening =
        rustix::net::sockopt::socket_acceptconn(&socket).map_err(|errno| os_error(errno.into()))?;
    if is_listening {
        return Err(PyValueError::new_err("the socket listens: pass a connected socket"));
    }
    Ok(Arc::new(socket))
}

/// Makes a socket non-blocking. A socket object without a timeout gets a timeout of 23 days, so
/// that its own methods still wait.
pub fn make_nonblocking(object: &Bound<'_, PyAny>, socket: &OwnedFd) -> PyResult<()> {
    if object.hasattr("gettimeout")? && object.call_method0("gettimeout")?.is_none() {
        object.call_method1("settimeout", (FOREVER_SECONDS,))?;
    }
    let flags = rustix::fs::fcntl_getfl(socket).map_err(|errno| os_error(errno.into()))?;
    rustix::fs::fcntl_setfl(socket, flags | rustix::fs::OFlags::NONBLOCK)
        .map_err(|errno| os_error(errno.into()))
}
