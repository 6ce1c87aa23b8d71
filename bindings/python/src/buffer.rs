//! Python buffers: memory of `bytes`, `bytearray`, `memoryview`, numpy arrays and others.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use std::mem::ManuallyDrop;

/// A contiguous buffer of a Python object. The object cannot move or free the memory as long as
/// this value exists. The object can still change the bytes, unless the buffer is read-only.
pub struct HeldBuffer {
    /// Released in `drop`, which needs the interpreter.
    buffer: ManuallyDrop<PyUntypedBuffer>,
    start: *mut u8,
    len: usize,
}

// SAFETY: the exporter keeps the memory in place until the buffer is released, and `drop` attaches
// to the interpreter before it releases the buffer. The pointer is only read through `as_ref`, and
// only written by a caller of `as_mut`, which has the exclusive borrow.
unsafe impl Send for HeldBuffer {}
// SAFETY: see above.
unsafe impl Sync for HeldBuffer {}

impl HeldBuffer {
    /// The buffer of an object. `TypeError` for an object without a buffer, and `BufferError` for a
    /// buffer that is not contiguous.
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            let problem = "the buffer is not contiguous: copy it first, such as by bytes(...)";
            return Err(PyBufferError::new_err(problem));
        }
        let (start, len) = (buffer.buf_ptr().cast::<u8>(), buffer.len_bytes());
        Ok(Self { buffer: ManuallyDrop::new(buffer), start, len })
    }

    /// The buffer of an object that does not change. `TypeError` for a writable buffer.
    pub fn of_constant(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let held = Self::of(object)?;
        if held.buffer.readonly() {
            return Ok(held);
        }
        Err(PyTypeError::new_err(
            "the buffer is writable, and a change during the loan would reach the peer: lend \
             bytes, a read-only memoryview, or pass allow_mutable=True",
        ))
    }

    /// The buffer of an object, for writing. `TypeError` for a read-only buffer.
    pub fn of_writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let held = Self::of(object)?;
        if held.buffer.readonly() {
            return Err(PyTypeError::new_err("the buffer is read-only: pass a bytearray or array"));
        }
        Ok(held)
    }

    /// The object that was passed to [`HeldBuffer::of`].
    pub fn object(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.buffer.obj(py).map(|object| object.clone().unbind())
    }

    /// The memory, for the kernel to write into.
    pub fn as_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: the exporter guarantees `len` bytes at `start` until the buffer is released.
        // Other Python threads can access the bytes, as with `socket.recv_into`; this crate passes
        // the slice to the kernel only.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl AsRef<[u8]> for HeldBuffer {
    fn as_ref(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the exporter guarantees `len` bytes at `start` until the buffer is released. The
        // kernel reads the bytes; a change by Python during the call reaches the peer, as with
        // `socket.send`.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Drop for HeldBuffer {
    /// Releases the buffer. A thread of the library may drop a loan after the interpreter ended.
    /// The memory is leaked then, because the object cannot be reached any more.
    fn drop(&mut self) {
        // SAFETY: `buffer` is not used after this, because the value is being dropped.
        let buffer = unsafe { ManuallyDrop::take(&mut self.buffer) };
        let mut kept = Some(buffer);
        Python::try_attach(|py| {
            if let Some(buffer) = kept.take() {
                buffer_release(buffer, py);
            }
        });
        std::mem::forget(kept);
    }
}

fn buffer_release(buffer: PyUntypedBuffer, _: Python<'_>) {
    drop(buffer);
}
