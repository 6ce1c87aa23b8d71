//! The served files: lookup below the root, the cache of open files, and directory listings.

pub mod cache;
pub mod history;
pub mod listing;
pub mod object;
pub mod opener;
pub mod resource;
pub mod served_root;
pub mod service;
pub mod watch;
