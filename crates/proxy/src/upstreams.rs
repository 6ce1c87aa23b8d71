//! The upstreams: their groups, the routes that lead to the groups, and the choice among them.

pub mod candidates;
pub mod closing;
pub mod group;
pub mod reserved_slots;
pub mod retired;
pub mod route_order;
pub mod routing;
pub mod selection;
pub mod upstream;
