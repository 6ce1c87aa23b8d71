//! Tests of the file service on the real kernel; each test starts a separate service.

mod changing_files;
mod common;
mod connections;
mod content;
mod metrics;
mod passwords;
mod proxied;
mod rfc9110;
mod tls;
mod tools;
mod uploads;
