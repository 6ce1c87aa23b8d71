//! Responses: built from a request and what its target stands for, then sent.

pub mod body;
pub mod builder;
pub mod head;
pub mod writer;
