//! What is served: files opened below the root and nowhere else, kept while they are unchanged, listed, written.

pub mod cache;
pub mod listing;
pub mod object;
pub mod resource;
pub mod service;
