//! The examples that send, receive and relay, as programs.

use haul_testing::programs;
use std::process::Command;

/// The library has examples too, so the names of the examples of this crate begin with `tokio_`.
fn example(name: &str) -> Command {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().parent().unwrap().join("examples").join(name);
    assert!(path.exists(), "cargo test -p haul-tokio builds the examples too, unlike with --test");
    Command::new(path)
}

#[test]
fn the_examples_send_receive_and_relay() {
    programs::check_sending(&mut example("tokio_send_file"));
    programs::check_sending(&mut example("tokio_send_memory"));
    programs::check_receiving(&mut example("tokio_receive_file"));
    programs::check_relaying(&mut example("tokio_relay"));
}
