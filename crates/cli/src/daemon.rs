//! The process side of a network service: signals, limits, readiness and messages.

pub mod limits;
pub mod messages;
pub mod readiness;
pub mod signals;
