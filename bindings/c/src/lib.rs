//! `libhaul`: [`haul_library`] for C. The header is `include/haul.h`.
//!
//! These rules hold for every function. A panic does not leave the function ([`guard`]). `SIGPIPE`
//! does not reach the program ([`sigpipe`]), and the thread is not cancelled ([`cancellation`]). An
//! error sets `errno`, and its message is kept for the thread ([`error`]).

mod arguments;
mod cancellation;
mod error;
mod forward;
mod guard;
mod loan;
mod receiver;
mod sender;
mod sigpipe;
