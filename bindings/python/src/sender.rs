//! `Sender`: bytes, files and loans.

use crate::buffer::HeldBuffer;
use crate::descriptor::{duplicate, duplicate_socket, make_nonblocking};
use crate::error::{to_python, with_transferred};
use crate::waiting::{Patience, pause_before_unread_completions, wait, wait_for_any};
use haul::{
    Buffer, LendError, LoanLimits, LoanOutcome, MethodChoice, Response, SendMethod, SendSettings,
    Source,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use rustix::event::PollFlags;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The longest wait for a completion. Another thread may read the completion before the wait.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// The bytes after which a call on a blocking socket looks for signals.
const TURN_BYTES: u64 = 4 << 20;
/// The pause between two looks for completions after the end of the connection.
const HANG_UP_INTERVAL: Duration = Duration::from_millis(5);

type SocketSender = haul::Sender<Arc<OwnedFd>>;

/// Sends bytes, ranges of files and lent buffers over a socket, by the cheapest method.
///
/// The socket stays usable, and keeps its timeout. Close both: the sender has a duplicate of the
/// socket's descriptor.
#[pyclass(frozen, module = "haul_io")]
pub struct Sender {
    /// The Python object, which knows the timeout.
    object: Py<PyAny>,
    /// The process that created the sender. A forked child has a copy of the lock, which another
    /// thread of the parent may hold for ever in this copy.
    process: u32,
    /// `None` once it is closed. Locked only without the GIL, because a thread that holds the lock
    /// waits for the GIL at the end of its call.
    inner: Mutex<Option<SocketSender>>,
}

/// A lent buffer that came back.
#[pyclass(frozen, get_all, module = "haul_io")]
pub struct Returned {
    /// The number that `Sender.lend` returned.
    id: u64,
    /// The object that was lent.
    buffer: Py<PyAny>,
    /// Whether the kernel sent the bytes from the buffer itself.
    zero_copied: bool,
    /// The bytes that the socket accepted: all, unless the connection failed before.
    sent_bytes: usize,
}

#[pymethods]
impl Returned {
    fn __repr__(&self) -> String {
        format!(
            "Returned(id={}, zero_copied={}, sent_bytes={})",
            self.id,
            if self.zero_copied { "True" } else { "False" },
            self.sent_bytes
        )
    }
}

impl Sender {
    /// Calls the library without the GIL.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut SocketSender) -> Result<T, haul::Error> + Send,
    ) -> PyResult<Result<T, haul::Error>> {
        self.check_process(py)?;
        let result = py.detach(|| {
            let mut sender = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            sender.as_mut().map(call)
        });
        result.ok_or_else(|| PyValueError::new_err("the sender is closed"))
    }

    /// Fails in a forked child.
    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(to_python(py, &haul::Error::Forked))
    }

    /// Waits until the socket is writable, and processes the completions that arrive.
    fn wait_until_ready(&self, py: Python<'_>, patience: Patience) -> PyResult<()> {
        let socket = self.socket(py)?;
        let events = wait(py, socket.as_fd(), PollFlags::OUT.bits(), patience)?;
        if events & PollFlags::ERR.bits() != 0 {
            self.on_error_event(py)?;
            pause_before_unread_completions(py, socket.as_fd())?;
        }
        Ok(())
    }

    /// The socket. A thread that waits for the socket keeps the descriptor open.
    fn socket(&self, py: Python<'_>) -> PyResult<Arc<OwnedFd>> {
        self.check_process(py)?;
        let socket = py.detach(|| {
            let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            inner.as_ref().map(|sender| Arc::clone(sender.socket()))
        });
        socket.ok_or_else(|| PyValueError::new_err("the sender is closed"))
    }

    /// Sends the bytes from `sent` on.
    fn send_rest(
        &self,
        py: Python<'_>,
        bytes: &[u8],
        sent: &mut usize,
        patience: Patience,
    ) -> PyResult<()> {
        while *sent < bytes.len() {
            match self.call(py, |sender| sender.send(&bytes[*sent..]))? {
                Ok(count) => *sent += count,
                Err(haul::Error::WouldBlock) => self.wait_until_ready(py, patience)?,
                Err(error) => return Err(to_python(py, &error)),
            }
            py.check_signals()?;
        }
        Ok(())
    }

    /// Sends a response from the byte `reached` on. A non-blocking socket may accept a part.
    fn send_response_rest(
        &self,
        py: Python<'_>,
        response: &Response<'_>,
        reached: &mut u64,
        patience: Patience,
    ) -> PyResult<()> {
        let begin = *reached;
        while *reached < response.total_bytes() {
            let turn_end = reached.saturating_add(TURN_BYTES);
            match self.call(py, |sender| sender.send_response_until(response, reached, turn_end))? {
                Ok(()) => {}
                Err(haul::Error::WouldBlock) => {
                    if matches!(patience, Patience::Never) && *reached > begin {
                        return Ok(());
                    }
                    self.wait_until_ready(py, patience)?;
                }
                Err(error) => return Err(to_python(py, &error)),
            }
            py.check_signals()?;
        }
        Ok(())
    }

    /// The patience of the socket object, which begins now.
    fn patience(&self, py: Python<'_>) -> PyResult<Patience> {
        Patience::of(self.object.bind(py), &*self.socket(py)?)
    }

    /// Sends the rest of a loan that the socket accepted in part.
    fn flush_with(&self, py: Python<'_>, patience: Patience) -> PyResult<()> {
        loop {
            match self.call(py, haul::Sender::flush)? {
                Ok(()) => return Ok(()),
                Err(haul::Error::WouldBlock) => self.wait_until_ready(py, patience)?,
                Err(error) => return Err(to_python(py, &error)),
            }
        }
    }
}

#[pymethods]
impl Sender {
    #[new]
    #[pyo3(signature = (socket, *, method=None, loans_max=64, loan_bytes_max=16_777_216))]
    fn new(
        socket: &Bound<'_, PyAny>,
        method: Option<&str>,
        loans_max: usize,
        loan_bytes_max: usize,
    ) -> PyResult<Self> {
        let py = socket.py();
        let limits = LoanLimits::default().with_loans_max(loans_max).with_bytes_max(loan_bytes_max);
        let mut settings = SendSettings::default().with_limits(limits);
        if let Some(name) = method {
            let method: SendMethod =
                name.parse().map_err(|error| PyValueError::new_err(format!("{error}")))?;
            settings = settings.with_choice(MethodChoice::Method(method));
        }
        let descriptor = duplicate_socket(socket)?;
        let sender = haul::Sender::with_settings(Arc::clone(&descriptor), settings)
            .map_err(|error| to_python(py, &error))?;
        make_nonblocking(socket, &descriptor)?;
        Ok(Self {
            object: socket.clone().unbind(),
            process: std::process::id(),
            inner: Mutex::new(Some(sender)),
        })
    }

    /// Sends some of the bytes and returns their number, as `socket.send` does.
    fn send(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (buffer, patience) = (HeldBuffer::of(data)?, self.patience(py)?);
        loop {
            match self.call(py, |sender| sender.send(buffer.as_ref()))? {
                Ok(sent) => return Ok(sent),
                Err(haul::Error::WouldBlock) => self.wait_until_ready(py, patience)?,
                Err(error) => return Err(to_python(py, &error)),
            }
        }
    }

    /// Sends all bytes, as `socket.sendall` does.
    fn send_all(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let (buffer, patience) = (HeldBuffer::of(data)?, self.patience(py)?);
        let mut sent = 0;
        self.send_rest(py, buffer.as_ref(), &mut sent, patience)
            .map_err(|error| with_transferred(py, error, sent as u64))
    }

    /// Sends `head`, a range of a file, and `tail`. Returns the number of bytes that this call
    /// sent.
    ///
    /// Without `count`, the range ends at the end of the file. A non-blocking socket sends what it
    /// has room for: add the result to `position`, and call again with the new position.
    #[pyo3(signature = (file, offset=0, count=None, *, head=None, tail=None, position=0))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords with a default")]
    fn send_file(
        &self,
        py: Python<'_>,
        file: &Bound<'_, PyAny>,
        offset: u64,
        count: Option<u64>,
        head: Option<&Bound<'_, PyAny>>,
        tail: Option<&Bound<'_, PyAny>>,
        position: u64,
    ) -> PyResult<u64> {
        let file = duplicate(file)?;
        let end = range_end(py, &file, offset, count)?;
        let head = head.map(|head| HeldBuffer::of(head)).transpose()?;
        let tail = tail.map(|tail| HeldBuffer::of(tail)).transpose()?;
        let (head, tail) = (head.as_ref(), tail.as_ref());
        let (head, tail) =
            (head.map_or(&[][..], AsRef::as_ref), tail.map_or(&[][..], AsRef::as_ref));
        if (end - offset).checked_add((head.len() + tail.len()) as u64).is_none() {
            return Err(PyValueError::new_err("head, range and tail have more than 2**64 bytes"));
        }
        let response = Response::new(head, file.as_fd(), offset..end).with_tail(tail);
        let patience = self.patience(py)?;
        let mut reached = position.min(response.total_bytes());
        let position = reached;
        self.send_response_rest(py, &response, &mut reached, patience)
            .map_err(|error| with_transferred(py, error, reached - position))?;
        Ok(reached - position)
    }

    /// Lends a buffer to the kernel, which sends the buffer itself and not a copy. Returns the
    /// number of the loan. The buffer is kept, unchanged, until `reclaim` returns it.
    ///
    /// A buffer that Python code could change is a `TypeError`, unless `allow_mutable` is true.
    #[pyo3(signature = (buffer, *, allow_mutable=false))]
    fn lend(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        allow_mutable: bool,
    ) -> PyResult<u64> {
        let held =
            if allow_mutable { HeldBuffer::of(buffer)? } else { HeldBuffer::of_constant(buffer)? };
        let patience = self.patience(py)?;
        let mut buffer = Buffer::owned(held);
        loop {
            // A refused loan comes back with its buffer.
            let result = self.call(py, |sender| Ok(sender.lend(buffer)))?;
            let LendError { error, buffer: refused, .. } = match result {
                Ok(Ok(id)) => {
                    if !matches!(patience, Patience::Never) {
                        self.flush_with(py, patience)
                            .map_err(|error| of_taken_loan(py, error, id.number()))?;
                    }
                    return Ok(id.number());
                }
                Ok(Err(refused)) => refused,
                Err(error) => return Err(to_python(py, &error)),
            };
            buffer = refused;
            match error {
                haul::Error::WouldBlock => self.wait_until_ready(py, patience)?,
                haul::Error::LoanLimit if !matches!(patience, Patience::Never) => {
                    // Another thread may read the last completion before this wait begins.
                    let until = Some(Instant::now() + LOOK_INTERVAL);
                    let socket = self.socket(py)?;
                    let sockets = [(socket.as_fd(), PollFlags::ERR.bits())];
                    wait_for_any(py, &sockets, patience, until)?;
                    self.on_error_event(py)?;
                    if self.call(py, |sender| Ok(sender.has_returned_buffers()))?.unwrap_or(false) {
                        return Err(to_python(py, &haul::Error::LoanLimit));
                    }
                }
                error => return Err(to_python(py, &error)),
            }
        }
    }

    /// The lent buffers that came back since the last call.
    fn reclaim(&self, py: Python<'_>) -> PyResult<Vec<Returned>> {
        let returned = self.call(py, |sender| Ok(sender.reclaim()?.collect::<Vec<_>>()))?;
        let returned = returned.map_err(|error| to_python(py, &error))?;
        Ok(returned
            .into_iter()
            .filter_map(|one| {
                let (id, outcome, sent_bytes) = (one.id.number(), one.outcome, one.sent_bytes);
                let held = one.buffer.into_owner::<HeldBuffer>().ok()?;
                let buffer = held.object(py)?;
                let zero_copied = outcome == LoanOutcome::ZeroCopied;
                Some(Returned { id, buffer, zero_copied, sent_bytes })
            })
            .collect())
    }

    /// Waits until the kernel released all lent buffers, at most `timeout` seconds. Returns the
    /// number of sends that are still in flight.
    #[pyo3(signature = (timeout=None))]
    fn wait_for_completions(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<usize> {
        let timeout = timeout.map(Duration::try_from_secs_f64).transpose();
        let timeout = timeout.map_err(|error| PyValueError::new_err(error.to_string()))?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let in_flight = self.call(py, |sender| sender.wait_for_completions(Duration::ZERO))?;
            let in_flight = in_flight.map_err(|error| to_python(py, &error))?;
            py.check_signals()?;
            if in_flight == 0 || deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Ok(in_flight);
            }
            // Outside of the lock, so that other threads can use the sender.
            let (socket, wants) = (self.socket(py)?, self.wants(py)?);
            let sockets = [(socket.as_fd(), wants)];
            // Another thread may read the last completion before this wait begins.
            let look_at = Instant::now() + LOOK_INTERVAL;
            let until = deadline.map_or(look_at, |deadline| deadline.min(look_at));
            let events = wait_for_any(py, &sockets, Patience::Forever, Some(until))?;
            if events.iter().any(|events| events & PollFlags::HUP.bits() != 0) {
                // The end of the connection wakes every poll at once. The completions follow.
                py.detach(|| std::thread::sleep(HANG_UP_INTERVAL));
            }
        }
    }

    /// Sends the rest of a loan that a non-blocking socket accepted in part.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let patience = self.patience(py)?;
        self.flush_with(py, patience)
    }

    /// The events to poll the socket for: `select.POLLOUT`, `select.POLLERR`, both or 0.
    fn wants(&self, py: Python<'_>) -> PyResult<u16> {
        let events = self.call(py, |sender| Ok(sender.wants().poll_events()))?;
        events.map_err(|error| to_python(py, &error))
    }

    /// Handles `POLLERR`: reads the completions that arrived, and raises the error of the socket.
    fn on_error_event(&self, py: Python<'_>) -> PyResult<()> {
        let result = self.call(py, haul::Sender::on_error_event)?;
        result.map_err(|error| to_python(py, &error))
    }

    /// What the sender did so far: bytes and system calls by method, loans, and each fallback with
    /// its reason.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = self.call(py, |sender| Ok(sender.report()))?;
        let report = report.map_err(|error| to_python(py, &error))?;
        let counts = |counts: &haul::Counts| -> PyResult<Bound<'py, PyDict>> {
            let dict = PyDict::new(py);
            dict.set_item("bytes", counts.bytes)?;
            dict.set_item("calls", counts.calls)?;
            dict.set_item("zero_copied_bytes", counts.zero_copied_bytes)?;
            dict.set_item("copied_bytes", counts.copied_bytes)?;
            Ok(dict)
        };
        let dict = PyDict::new(py);
        dict.set_item("sent", counts(&report.sent)?)?;
        let files = PyDict::new(py);
        for (method, method_counts) in &report.files {
            files.set_item(method.name(), counts(method_counts)?)?;
        }
        dict.set_item("files", files)?;
        dict.set_item("loans", counts(&report.loans)?)?;
        dict.set_item("outstanding_loans", report.outstanding_loans)?;
        let fallbacks: Vec<_> =
            report.fallbacks.iter().map(|one| (one.from, one.to, one.reason.clone())).collect();
        dict.set_item("fallbacks", fallbacks)?;
        Ok(dict)
    }

    /// The descriptor of the sender's duplicate of the socket.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.socket(py)?.as_raw_fd())
    }

    /// Resets the connection, so that the kernel releases all lent buffers at once.
    fn abort(&self, py: Python<'_>) {
        if self.check_process(py).is_err() {
            return;
        }
        py.detach(|| {
            if let Some(sender) = self.take() {
                sender.abort();
            }
        });
    }

    /// Closes the sender. The kernel may still use lent buffers, which are kept until it released
    /// them.
    fn close(&self, py: Python<'_>) {
        if self.check_process(py).is_ok() {
            py.detach(|| drop(self.take()));
        }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }
}

impl Sender {
    fn take(&self) -> Option<SocketSender> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Adds the number of a loan that was taken before the error, so that the program does not lend the
/// buffer again.
fn of_taken_loan(py: Python<'_>, error: PyErr, loan: u64) -> PyErr {
    let value = error.value(py);
    // An exception without attributes stays useful.
    let _ = value.setattr("loan", loan);
    let _ = value.call_method1("add_note", ("the loan was taken: call flush to send its rest",));
    error
}

/// The end of a range of a file.
pub fn range_end(py: Python<'_>, file: &OwnedFd, offset: u64, count: Option<u64>) -> PyResult<u64> {
    if let Some(count) = count {
        return offset.checked_add(count).ok_or_else(|| {
            PyValueError::new_err("offset and count together are beyond the largest file")
        });
    }
    let file = std::fs::File::from(file.try_clone().map_err(crate::error::os_error)?);
    let len = py.detach(|| haul::file_len(&file));
    let len = len.map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(len.max(offset))
}

/// Whether a range of a file is in memory, so that sending it does not wait for the disk.
#[pyfunction]
pub fn is_resident(
    py: Python<'_>,
    file: &Bound<'_, PyAny>,
    offset: u64,
    count: u64,
) -> PyResult<bool> {
    let file = duplicate(file)?;
    let range = offset..offset.saturating_add(count);
    Ok(py.detach(|| Source::from(&file).is_resident(range)))
}

/// Reads a range of a file into memory. It waits for the disk: call it in a thread that may.
#[pyfunction]
pub fn prefetch(py: Python<'_>, file: &Bound<'_, PyAny>, offset: u64, count: u64) -> PyResult<()> {
    let file = duplicate(file)?;
    let range = offset..offset.saturating_add(count);
    py.detach(|| Source::from(&file).prefetch(range)).map_err(|error| to_python(py, &error))
}
