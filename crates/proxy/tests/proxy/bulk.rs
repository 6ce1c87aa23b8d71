//! Bulk data through an established connection, and the path that the log names for it.

use crate::common::{LIMIT, pattern};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;

const LEN: usize = 8 << 20;

/// Sends bulk data in both directions at a time, and checks it.
pub fn exchange_bulk(client: &TcpStream, server: &TcpStream) {
    let [to_server, to_client] = [3, 4].map(|seed| pattern(seed, LEN));
    for socket in [client, server] {
        socket.set_write_timeout(Some(LIMIT)).unwrap();
    }
    let receive = |mut from: &TcpStream, expected: &[u8]| {
        let mut received = vec![0; LEN];
        from.read_exact(&mut received).unwrap();
        assert!(received == expected, "the bytes have changed");
    };
    thread::scope(|scope| {
        scope.spawn(|| (&*client).write_all(&to_server).unwrap());
        scope.spawn(|| (&*server).write_all(&to_client).unwrap());
        scope.spawn(|| receive(client, &to_client));
        receive(server, &to_server);
    });
}

/// Checks that bulk data has passed in both directions, and that it was spliced but for a tenth.
pub fn assert_bulk_is_spliced(line: &Value) {
    for direction in ["to_upstream", "to_client"] {
        let spliced = line[direction]["spliced_bytes"].as_u64().unwrap();
        assert!(spliced >= LEN as u64 / 10 * 9, "{line}");
    }
}
