//! The proxy between real sockets: it runs on one host of the lab, clients and upstreams on the
//! other.

mod bulk;
mod common;
mod control;
mod ends;
mod failures;
mod greeting;
mod handshake;
mod header;
mod keep_alive;
mod pauses;
mod queue;
mod random_streams;
mod rate;
mod reload;
mod routing;
mod source;
mod streams;
mod upgrade;
mod upgrade_failures;
mod upgrade_queue;
mod upgrade_relay;
mod upgrade_search;
