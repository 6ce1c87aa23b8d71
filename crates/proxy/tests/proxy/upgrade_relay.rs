//! Connections on their way between two processes: the test is in between, and delays or changes
//! what the old process sends.

use crate::common::{LIMIT, accept};
use crate::ends::{fill, read_rest};
use crate::upgrade::{Successor, Upgradable, ask, listen_at_a_unix_socket, read_log};
use crate::upgrade_failures::{ON_WAY_MAX, connect};
use haul_server::fd_channel::FdChannel;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

const CONNECTION: &str = "connection";

/// Starts a proxy that takes over from another one, and calls `on_way` with the message and the
/// sockets of each connection. When it breaks off, both see the end of the other one.
fn upgrade_through(
    upgradable: &Upgradable,
    on_way: impl FnMut(&mut Value, &[OwnedFd]) -> ControlFlow<()> + Send + 'static,
) -> Successor {
    let path = upgradable.folder.path().join("relay");
    let control = UnixListener::bind(&path).unwrap();
    let mut config = upgradable.proxy.config.clone();
    config.reporting.control = Some(path);
    let old_control = upgradable.control.clone();
    thread::spawn(move || {
        let mut command = BufReader::new(control.accept().unwrap().0);
        command.read_line(&mut String::new()).unwrap();
        let old = ask(&old_control);
        let (new, other_end) = FdChannel::pair().unwrap();
        other_end.send_through(command.get_ref()).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| relay(&new, &old, |_, _| ControlFlow::Continue(())));
            relay(&old, &new, on_way);
            // The new process sees that the old one has ended.
            let _ = new.refuse();
        });
    });
    Successor::start(&upgradable.proxy.lab, &config)
}

fn relay(
    from: &FdChannel,
    to: &FdChannel,
    mut on_way: impl FnMut(&mut Value, &[OwnedFd]) -> ControlFlow<()>,
) {
    while let Some(mut message) = from.receive().unwrap() {
        if let Ok(Value::Object(mut json)) = serde_json::from_slice(&message.bytes)
            && let Some(connection) = json.get_mut(CONNECTION)
        {
            if on_way(connection, &message.descriptors).is_break() {
                break;
            }
            message.bytes = serde_json::to_vec(&json).unwrap();
        }
        let descriptors: Vec<_> = message.descriptors.iter().map(AsFd::as_fd).collect();
        // The receiver may have ended.
        let _ = to.send(&message.bytes, &descriptors);
    }
    let _ = to.end_messages();
}

/// The response is complete, and the server resets the connection because of the upload that it has
/// not read. The new process finds the reset as it sends the part of the upload that it was handed.
#[test]
fn a_response_that_is_complete_before_a_reset_on_the_way_is_delivered() {
    const LEN: usize = 1_500_000;
    let upgradable = Upgradable::start(|_| {});
    let client = upgradable.proxy.connect();
    let mut server = accept(&upgradable.listener);
    fill(&client);
    server.write_all(&vec![7; LEN]).unwrap();
    // The proxy's host has all of it.
    while haul_sys::sockopt::bytes_to_send(&server).unwrap() > 0 {
        thread::sleep(Duration::from_millis(1));
    }
    let mut server = Some(server);
    let successor = upgrade_through(&upgradable, move |message, sockets| {
        assert!(message["to_upstream"]["unsent_len"].as_u64() > Some(0), "{message}");
        server.take().unwrap().shutdown(Shutdown::Write).unwrap();
        let mut upstream = [PollFd::new(&sockets[1], PollFlags::empty())];
        let limit = Timespec::try_from(LIMIT).unwrap();
        assert_eq!(poll(&mut upstream, Some(&limit)).unwrap(), 1);
        assert!(upstream[0].revents().contains(PollFlags::ERR));
        ControlFlow::Continue(())
    });
    let (_, _lab, log_folder) = upgradable.proxy.join();
    assert_eq!(read_rest(&client), (LEN, true));
    drop(client);
    successor.finish();
    let log = read_log(&log_folder.path().join("log"));
    assert_eq!(log[0]["end"], "upstream-failed", "{log:?}");
}

/// Each process adds to what the log says of a connection.
#[test]
fn the_log_has_the_bytes_and_fallbacks_of_all_processes() {
    let upgradable = Upgradable::start(|_| {});
    let mut client = upgradable.proxy.connect();
    let mut server = accept(&upgradable.listener);
    let second = upgrade_through(&upgradable, |message, _| {
        message["to_upstream"]["bytes"] =
            json!({"spliced_bytes": 70, "copied_bytes": 5, "fallbacks": ["no pipe"]});
        ControlFlow::Continue(())
    });
    let config = upgradable.proxy.config.clone();
    let (_, lab, log_folder) = upgradable.proxy.join();
    client.write_all(&[7; 4]).unwrap();
    server.read_exact(&mut [0; 4]).unwrap();
    let third = Successor::start(&lab, &config);
    second.join();
    client.write_all(&[7; 3]).unwrap();
    drop(client);
    assert_eq!(read_rest(&server), (3, true));
    drop(server);
    third.finish();
    let log = read_log(&log_folder.path().join("log"));
    let to_upstream = json!({"spliced_bytes": 70, "copied_bytes": 12, "fallbacks": ["no pipe"]});
    assert_eq!(log[0]["to_upstream"], to_upstream, "{log:?}");
    assert_eq!(log[0]["end"], "complete", "{log:?}");
}

/// A new process that ends in order during the handover: the files of the sockets are still the old
/// one's, which goes on.
#[test]
fn a_process_that_ends_during_the_handover_leaves_the_unix_sockets() {
    let upgradable = Upgradable::start(|config| {
        listen_at_a_unix_socket(config);
        config.limits.timeouts.drain = Duration::ZERO;
    });
    let path = upgradable.folder.path().join("listen");
    let pairs = connect(&upgradable, 2 * ON_WAY_MAX);
    let ((arrived_tx, arrived), (release, released)) = (mpsc::channel(), mpsc::channel::<()>());
    let successor = upgrade_through(&upgradable, move |_, _| {
        let _ = arrived_tx.send(());
        // Fails once there is none to send it.
        let _ = released.recv();
        ControlFlow::Break(())
    });
    arrived.recv_timeout(LIMIT).unwrap();
    successor.finish();
    drop(release);
    let mut client = UnixStream::connect(&path).unwrap();
    let mut server = accept(&upgradable.listener);
    client.write_all(b"x").unwrap();
    server.read_exact(&mut [0]).unwrap();
    drop((client, server, pairs));
    upgradable.proxy.finish();
    assert!(!path.exists() && !upgradable.control.exists());
}
