//! `Receiver`: bytes into memory and into files.

use crate::buffer::HeldBuffer;
use crate::descriptor::{duplicate, duplicate_socket, make_nonblocking};
use crate::error::{to_python, with_transferred};
use crate::waiting::{Patience, wait_until_readable};
use pyo3::exceptions::{PyEOFError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

type SocketReceiver = haul::Receiver<Arc<OwnedFd>>;

/// Receives bytes from a socket into memory or into files, by the cheapest method.
///
/// The socket stays usable, and keeps its timeout. Close both: the receiver has a duplicate of the
/// socket's descriptor.
#[pyclass(frozen, module = "haul_io")]
pub struct Receiver {
    /// The Python object, which knows the timeout.
    object: Py<PyAny>,
    /// The process that created the receiver. A forked child has a copy of the lock, which another
    /// thread of the parent may hold for ever in this copy.
    process: u32,
    /// `None` once it is closed. Locked only without the GIL.
    inner: Mutex<Option<SocketReceiver>>,
}

impl Receiver {
    /// Calls the library without the GIL until the socket has bytes, or ended.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        patience: Patience,
        mut call: impl FnMut(&mut SocketReceiver) -> Result<T, haul::Error> + Send,
    ) -> PyResult<T> {
        self.check_process(py)?;
        loop {
            let result = py.detach(|| {
                let mut receiver = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
                receiver.as_mut().map(&mut call)
            });
            match result.ok_or_else(|| PyValueError::new_err("the receiver is closed"))? {
                Ok(value) => return Ok(value),
                Err(haul::Error::WouldBlock) => {
                    wait_until_readable(py, self.socket(py)?.as_fd(), patience)?;
                }
                Err(error) => return Err(to_python(py, &error)),
            }
        }
    }

    /// The socket. A thread that waits for the socket keeps the descriptor open.
    fn socket(&self, py: Python<'_>) -> PyResult<Arc<OwnedFd>> {
        self.check_process(py)?;
        let socket = py.detach(|| {
            let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            inner.as_ref().map(|receiver| Arc::clone(receiver.socket()))
        });
        socket.ok_or_else(|| PyValueError::new_err("the receiver is closed"))
    }

    /// Fails in a forked child.
    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(to_python(py, &haul::Error::Forked))
    }

    /// Repeats a call until it returns 0 at the end of the stream, or until `count` bytes were
    /// moved. A non-blocking socket may move fewer bytes.
    fn repeat(
        &self,
        py: Python<'_>,
        count: u64,
        mut call: impl FnMut(&mut SocketReceiver, u64) -> Result<u64, haul::Error> + Send,
    ) -> PyResult<u64> {
        let patience = self.patience(py)?;
        let mut moved = 0;
        while moved < count {
            let moved_before = moved;
            let result = self
                .call(py, patience, |receiver| call(receiver, moved_before))
                .and_then(|bytes| py.check_signals().map(|()| bytes));
            match result {
                Ok(0) => break,
                Ok(bytes) => moved += bytes,
                Err(_) if matches!(patience, Patience::Never) && moved > 0 => break,
                Err(error) => return Err(with_transferred(py, error, moved)),
            }
        }
        Ok(moved)
    }

    /// The patience of the socket object, which begins now.
    fn patience(&self, py: Python<'_>) -> PyResult<Patience> {
        Patience::of(self.object.bind(py), &*self.socket(py)?)
    }
}

#[pymethods]
impl Receiver {
    #[new]
    fn new(socket: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = socket.py();
        let descriptor = duplicate_socket(socket)?;
        let receiver =
            haul::Receiver::new(Arc::clone(&descriptor)).map_err(|error| to_python(py, &error))?;
        make_nonblocking(socket, &descriptor)?;
        Ok(Self {
            object: socket.clone().unbind(),
            process: std::process::id(),
            inner: Mutex::new(Some(receiver)),
        })
    }

    /// Receives some bytes into a writable buffer, as `socket.recv_into` does. Returns their
    /// number, 0 at the end of the stream.
    fn receive_into(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (mut buffer, patience) = (HeldBuffer::of_writable(buffer)?, self.patience(py)?);
        self.call(py, patience, |receiver| receiver.receive_into(buffer.as_mut()))
    }

    /// Fills a writable buffer. `EOFError` if the stream ends before the buffer is full. The
    /// attribute `transferred` of an exception has the bytes that were received before.
    fn receive_exactly_into(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        let (mut buffer, patience) = (HeldBuffer::of_writable(buffer)?, self.patience(py)?);
        let len = buffer.as_ref().len();
        let mut received = 0;
        while received < len {
            let result = self
                .call(py, patience, |receiver| {
                    receiver.receive_into(&mut buffer.as_mut()[received..])
                })
                .and_then(|count| match count {
                    0 => Err(PyEOFError::new_err(format!(
                        "the stream ended after {received} of {len} bytes"
                    ))),
                    count => Ok(count),
                });
            received += result.map_err(|error| with_transferred(py, error, received as u64))?;
            py.check_signals().map_err(|error| with_transferred(py, error, received as u64))?;
        }
        Ok(())
    }

    /// Receives up to `count` bytes into a file at `offset`. Returns their number, which is smaller
    /// if the stream ended before, or if a non-blocking socket is empty.
    fn receive_into_file(
        &self,
        py: Python<'_>,
        file: &Bound<'_, PyAny>,
        offset: u64,
        count: u64,
    ) -> PyResult<u64> {
        let file = duplicate(file)?;
        let end = offset.checked_add(count).ok_or_else(|| {
            PyValueError::new_err("offset and count together are beyond the largest file")
        })?;
        self.repeat(py, count, |receiver, moved| {
            receiver.receive_into_file(&file, offset + moved..end)
        })
    }

    /// Discards up to `count` bytes without copying them. Returns their number, which is smaller if
    /// the stream ended before, or if a non-blocking socket is empty.
    fn discard(&self, py: Python<'_>, count: u64) -> PyResult<u64> {
        self.repeat(py, count, |receiver, moved| receiver.discard(count - moved))
    }

    /// What the receiver did so far: bytes and system calls by method, and each fallback with its
    /// reason.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = self.call(py, Patience::Never, |receiver| Ok(receiver.report().clone()))?;
        let dict = PyDict::new(py);
        for (name, counts) in [
            ("mapped", &report.mapped),
            ("read", &report.read),
            ("into_file", &report.into_file),
            ("discarded", &report.discarded),
        ] {
            let entry = PyDict::new(py);
            entry.set_item("bytes", counts.bytes)?;
            entry.set_item("calls", counts.calls)?;
            dict.set_item(name, entry)?;
        }
        let fallbacks: Vec<_> =
            report.fallbacks.iter().map(|one| (one.from, one.to, one.reason.clone())).collect();
        dict.set_item("fallbacks", fallbacks)?;
        Ok(dict)
    }

    /// The descriptor of the receiver's duplicate of the socket.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.socket(py)?.as_raw_fd())
    }

    /// Closes the receiver.
    fn close(&self, py: Python<'_>) {
        if self.check_process(py).is_err() {
            return;
        }
        py.detach(|| {
            drop(self.inner.lock().unwrap_or_else(PoisonError::into_inner).take());
        });
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }
}
