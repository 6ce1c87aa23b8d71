//! Responses: what is said to a request, and what follows.

pub mod answer;
pub mod body;
pub mod head;
