//! Responses: built from a request and the lookup of its target, then sent.

pub mod body;
pub mod builder;
pub mod head;
pub mod writer;
