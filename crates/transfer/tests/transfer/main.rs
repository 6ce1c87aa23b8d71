//! The protocol of transfers, with both ends in one process.

mod common;
mod delta;
mod direct;
mod fan_out;
mod habits;
mod hostile;
mod resume;
mod rsync;
mod trees;
