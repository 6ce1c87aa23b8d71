//! What an operator sees and changes while the proxy runs.

pub mod control;
pub mod metrics;
pub mod process;
pub mod reload;
pub mod status;
