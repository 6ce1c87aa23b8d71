//! [`SendSettings`]: the settings of a sender.

use crate::loan::LoanLimits;
use crate::method::{MethodOptions, SendMethod};
use crate::plan::Plan;
use std::sync::Arc;

/// Settings of a [`crate::Sender`].
///
/// ```
/// use haul::{LoanLimits, SendMethod, SendSettings};
/// let settings = SendSettings::default()
///     .with_choice(SendMethod::Sendfile)
///     .with_limits(LoanLimits::default().with_loans_max(8));
/// assert_eq!(settings.limits.loans_max, 8);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct SendSettings {
    /// The choice of the send method for files.
    pub choice: MethodChoice,
    /// Options of the send method. A plan has call sizes of its own, so `chunk_bytes` applies only
    /// to a method that was chosen by hand.
    pub options: MethodOptions,
    /// Limits on outstanding loans.
    pub limits: LoanLimits,
    /// Loans of fewer bytes are copied: tracking pages costs more than copying few bytes.
    pub zerocopy_bytes_min: usize,
    /// Continues to lend if the kernel reports that it copies everything, which then costs more
    /// than a plain send. For measuring that cost.
    pub lend_when_copied: bool,
}

impl Default for SendSettings {
    /// The method for files by the built-in plan; zero-copy loans from 10 KiB up, the size from
    /// which they pay according to the kernel's documentation (`networking/msg_zerocopy`).
    fn default() -> Self {
        Self {
            choice: MethodChoice::Builtin,
            options: MethodOptions::default(),
            limits: LoanLimits::default(),
            zerocopy_bytes_min: 10 << 10,
            lend_when_copied: false,
        }
    }
}

impl SendSettings {
    /// Sets the choice of the send method for files.
    #[must_use]
    pub fn with_choice(mut self, choice: impl Into<MethodChoice>) -> Self {
        self.choice = choice.into();
        self
    }

    /// Sets the options of the send method.
    #[must_use]
    pub fn with_options(mut self, options: MethodOptions) -> Self {
        self.options = options;
        self
    }

    /// Sets the limits on outstanding loans.
    #[must_use]
    pub fn with_limits(mut self, limits: LoanLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets the size from which loans are sent without a copy, in bytes.
    #[must_use]
    pub fn with_zerocopy_bytes_min(mut self, zerocopy_bytes_min: usize) -> Self {
        self.zerocopy_bytes_min = zerocopy_bytes_min;
        self
    }

    /// Sets whether to lend on when the kernel copies.
    #[must_use]
    pub fn with_lend_when_copied(mut self, lend_when_copied: bool) -> Self {
        self.lend_when_copied = lend_when_copied;
        self
    }
}

impl From<Plan> for MethodChoice {
    fn from(plan: Plan) -> Self {
        Self::Plan(Arc::new(plan))
    }
}

impl From<SendMethod> for MethodChoice {
    fn from(method: SendMethod) -> Self {
        Self::Method(method)
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
