//! The protocol of transfers, with both ends in one process.

mod common;
mod direct;
mod hostile;
mod rsync;
mod trees;
