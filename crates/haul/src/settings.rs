//! [`SendSettings`]: the settings of a sender.

use crate::loan::Limits;
use crate::method::{MethodOptions, SendMethod};
use crate::plan::Plan;
use std::sync::Arc;

/// Settings of a [`crate::Sender`].
#[derive(Debug, Clone, PartialEq)]
pub struct SendSettings {
    /// The choice of the send method for files.
    pub choice: MethodChoice,
    /// Options of the send method. A plan has call sizes of its own, so `chunk_bytes` applies only
    /// to a method that was chosen by hand.
    pub options: MethodOptions,
    /// Limits on outstanding loans.
    pub limits: Limits,
    /// Loans of fewer bytes are copied: tracking pages costs more than copying few bytes.
    pub zerocopy_bytes_min: usize,
    /// Continues to lend if the kernel reports that it copies everything, which then costs more
    /// than a plain send. For measuring that cost.
    pub lends_on_when_copied: bool,
}

impl Default for SendSettings {
    /// The method for files by the built-in plan; zero-copy loans from 4 KiB, a page, up.
    fn default() -> Self {
        Self {
            choice: MethodChoice::Builtin,
            options: MethodOptions::default(),
            limits: Limits::default(),
            zerocopy_bytes_min: 4096,
            lends_on_when_copied: false,
        }
    }
}

/// How the send method is chosen.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum MethodChoice {
    /// The cheapest method by the built-in plan.
    Builtin,
    /// The cheapest method by this plan.
    Plan(Arc<Plan>),
    /// This method, or its fallbacks.
    Method(SendMethod),
}
