//! The served files: lookup below the root, the cache of open files, and directory listings.

pub mod cache;
pub mod listing;
pub mod object;
mod pattern;
pub mod resource;
pub mod service;
