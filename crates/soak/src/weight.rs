//! CPU weights of scheduling groups, in the scheduler's unit (`sched_prio_to_weight` of
//! kernel/sched/core.c).

/// Weight of a spinner's session, the least that a session can have: nice 19.
pub(crate) const SPINNER_WEIGHT: f64 = 15.0;
/// Weight of an ordinary group: nice 0.
pub(crate) const ORDINARY_WEIGHT: f64 = 1024.0;
