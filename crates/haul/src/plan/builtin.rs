//! The built-in plan, used if there is no other.
//!
//! Measured on two virtual CPUs of an AMD EPYC, Linux 6.18.44, veth, MTU 9000, cubic, unpaced, on
//! 2026-11-22, by `haul plan`; docs/measurements/plan.md describes the measurement and its errors.
//! On other machines the figures differ. That methods which send pages are cheaper than those which
//! copy has held on all machines so far.

use super::Plan;
use std::sync::LazyLock;

static PLAN: LazyLock<Plan> = LazyLock::new(|| match Plan::parse(include_bytes!("builtin.json")) {
    Ok(plan) => plan,
    // A test parses it.
    Err(problem) => unreachable!("the built-in plan: {problem}"),
});

pub(super) fn plan() -> &'static Plan {
    &PLAN
}
