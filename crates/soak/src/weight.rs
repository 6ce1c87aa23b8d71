//! CPU weights of groups, in the scheduler's unit (`sched_prio_to_weight` of kernel/sched/core.c).

/// The least weight of a group, which a spinner's session has: nice 19.
pub(crate) const SPINNER_WEIGHT: f64 = 15.0;
/// An ordinary group's: nice 0.
pub(crate) const ORDINARY_WEIGHT: f64 = 1024.0;
