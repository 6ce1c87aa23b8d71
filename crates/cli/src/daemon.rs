//! The process side of a network service: signals, readiness and messages.

pub mod background;
pub mod config_file;
pub mod control;
pub mod messages;
pub mod options;
pub mod readiness;
pub mod signals;
