//! The native module of `haul_io`: [`haul`] for Python.
//!
//! The module adds three things to the library: it waits for sockets as Python does (timeouts of
//! the socket object, signals, the GIL released), it keeps Python buffers alive while the kernel
//! uses them, and it translates errors. Everything else is in the crate `haul`.

mod buffer;
mod descriptor;
mod error;
mod forward;
mod receiver;
mod sender;
mod waiting;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::error::{FileEndedError, LoanLimitError, StreamTornError};
    #[pymodule_export]
    use crate::forward::forward;
    #[pymodule_export]
    use crate::receiver::Receiver;
    #[pymodule_export]
    use crate::sender::{Returned, Sender, is_resident, prefetch};
}
