//! `forward`: joins two sockets.

use crate::descriptor::{duplicate_socket, make_nonblocking};
use crate::error::to_python;
use crate::waiting::{Patience, UNREAD_PAUSE, wait_for_any};
use haul::{ForwardMethod, ForwardPool, ForwardSettings, Forwarder, Readiness, Step};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use rustix::event::PollFlags;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

type SocketForwarder = Forwarder<Arc<OwnedFd>, Arc<OwnedFd>>;

/// Forwards bytes in both directions until both streams ended: spliced, or copied where copies are
/// cheaper. Returns the bytes of each direction.
///
/// After an error or a signal both connections are reset, so that no peer takes a truncated stream
/// for a whole one.
#[pyfunction]
#[pyo3(signature = (a, b, *, idle_timeout=None, half_closed_timeout=None, method="adaptive"))]
pub fn forward<'py>(
    a: &Bound<'py, PyAny>,
    b: &Bound<'py, PyAny>,
    idle_timeout: Option<f64>,
    half_closed_timeout: Option<f64>,
    method: &str,
) -> PyResult<Bound<'py, PyDict>> {
    let py = a.py();
    let method = match method {
        "adaptive" => ForwardMethod::Adaptive,
        "copy" => ForwardMethod::Copy,
        "splice" => ForwardMethod::Splice,
        _ => {
            let message = format!("unknown method {method:?}: write adaptive, copy or splice");
            return Err(PyValueError::new_err(message));
        }
    };
    let settings = ForwardSettings::default()
        .with_method(method)
        .with_idle_timeout(duration(idle_timeout)?)
        .with_half_closed_timeout(duration(half_closed_timeout)?);
    let library = |error: haul::Error| to_python(py, &error);
    let pool = ForwardPool::with_settings(settings).map_err(library)?;
    let objects = [a, b];
    let (a, b) = (duplicate_socket(a)?, duplicate_socket(b)?);
    let mut forwarder =
        Forwarder::with_pool(Arc::clone(&a), Arc::clone(&b), pool).map_err(library)?;
    for (object, socket) in objects.into_iter().zip([&a, &b]) {
        make_nonblocking(object, socket)?;
    }
    match run(py, &mut forwarder, &a, &b) {
        Ok(()) => report(py, &forwarder),
        Err(error) => {
            py.detach(|| forwarder.abort());
            Err(error)
        }
    }
}

fn run(py: Python<'_>, forwarder: &mut SocketForwarder, a: &OwnedFd, b: &OwnedFd) -> PyResult<()> {
    let both = Readiness { read: true, write: true };
    let mut ready = [both, both];
    loop {
        match py.detach(|| forwarder.step_ready(ready[0], ready[1])) {
            Ok(Step::Done) => return Ok(()),
            Ok(Step::Yield) => {
                ready = [both, both];
                py.check_signals()?;
            }
            Ok(Step::Wait { a: wants_a, b: wants_b }) => {
                let sockets =
                    [(a.as_fd(), wants_a.poll_events()), (b.as_fd(), wants_b.poll_events())];
                let until = forwarder.deadline();
                let events = wait_for_any(py, &sockets, Patience::Forever, until)?;
                let error = PollFlags::ERR.bits();
                if events.contains(&error) && events.iter().all(|&events| events & !error == 0) {
                    // Unread completions of a sender of the program wake every poll.
                    py.detach(|| std::thread::sleep(UNREAD_PAUSE));
                }
                ready = [0, 1].map(|side| Readiness::from_poll_events(events[side]));
            }
            Err(error) => return Err(to_python(py, &error)),
        }
    }
}

fn duration(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    seconds
        .map(Duration::try_from_secs_f64)
        .transpose()
        .map_err(|error| PyValueError::new_err(error.to_string()))
}

fn report<'py>(py: Python<'py>, forwarder: &SocketForwarder) -> PyResult<Bound<'py, PyDict>> {
    let report = forwarder.report();
    let dict = PyDict::new(py);
    for (name, direction) in [("a_to_b", &report.a_to_b), ("b_to_a", &report.b_to_a)] {
        let entry = PyDict::new(py);
        entry.set_item("spliced_bytes", direction.spliced.bytes)?;
        entry.set_item("copied_bytes", direction.copied.bytes)?;
        let fallbacks: Vec<_> =
            direction.fallbacks.iter().map(|one| (one.from, one.to, one.reason.clone())).collect();
        entry.set_item("fallbacks", fallbacks)?;
        dict.set_item(name, entry)?;
    }
    Ok(dict)
}
