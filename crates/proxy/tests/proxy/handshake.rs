//! The end of the handshake with an upstream shares a packet with the first bytes.

use crate::common::{accept, start_proxy};
use haul_lab::Host;
use haul_proxy::HeaderVersion;
use haul_sys::tcp_info::tcp_info;
use std::fs;
use std::io::{Read, Write};

/// A thread that gets no CPU for 200 ms lets the kernel acknowledge: not each time.
const TIMES: usize = 5;

/// The acknowledgements that a host's kernel has delayed for a time, and then sent alone.
fn delayed_acks(host: &Host) -> usize {
    let text = host.run(|| fs::read_to_string("/proc/thread-self/net/netstat")).unwrap().unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt:"));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let mut counters = names.split_whitespace().zip(values.split_whitespace());
    counters.find(|(name, _)| *name == "DelayedACKs").unwrap().1.parse().unwrap()
}

#[test]
fn the_first_bytes_share_a_packet_with_the_end_of_the_handshake() {
    let segments_in = |version: Option<HeaderVersion>| {
        let (proxy, listener) = start_proxy(|config| config.groups[0].send_header = version);
        let mut least = u32::MAX;
        for _ in 0..TIMES {
            // The client is silent: only a header can be sent.
            let client = proxy.connect();
            let mut server = accept(&listener);
            if version.is_some() {
                server.read_exact(&mut [0; 5]).unwrap();
            }
            least = least.min(tcp_info(&server).unwrap().segments_in);
            drop((client, server));
        }
        proxy.finish();
        least
    };
    let without_bytes = segments_in(None);
    assert_eq!(segments_in(Some(HeaderVersion::V1)), without_bytes);
}

#[test]
fn a_server_that_speaks_first_does_not_wait_for_the_client() {
    let (proxy, listener) = start_proxy(|_| {});
    if !proxy.is_alone() {
        return;
    }
    for _ in 0..TIMES {
        let mut client = proxy.connect();
        let mut server = accept(&listener);
        server.write_all(b"220").unwrap();
        client.read_exact(&mut [0; 3]).unwrap();
    }
    let delayed = delayed_acks(&proxy.lab.sender);
    assert!(delayed < TIMES, "{delayed}");
    proxy.finish();
}
