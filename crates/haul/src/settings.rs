//! How a sender is to work.

use crate::loan::Limits;
use crate::method::{MethodOptions, SendMethod};
use crate::plan::Plan;
use std::sync::Arc;

/// How a sender is to work.
#[derive(Debug, Clone, PartialEq)]
pub struct SendSettings {
    /// The path for files.
    pub choice: MethodChoice,
    /// How a path works that was chosen by hand; a plan has its own call sizes.
    pub options: MethodOptions,
    /// What may be lent at a time.
    pub limits: Limits,
    /// Smaller loans are copied: keeping account of pages costs more than copying few bytes.
    pub zerocopy_bytes_min: usize,
    /// Lends on where the kernel says that it copies after all, which then costs more than a plain send: for
    /// measuring that.
    pub lends_on_when_copied: bool,
}

impl Default for SendSettings {
    /// The path for files by the built-in plan; loans from 4 KiB, a page, up.
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

/// How the path is chosen.
#[derive(Debug, Clone, PartialEq)]
pub enum MethodChoice {
    /// The cheapest by the built-in plan.
    Builtin,
    /// The cheapest by this plan.
    Plan(Arc<Plan>),
    /// This one, or what it steps down to.
    Method(SendMethod),
}
