//! The rates at which the proxy sends.

use crate::common::{accept, start_proxy};
use crate::upgrade::Succession;
use haul_lab::Lab;
use std::io::{ErrorKind, Read, Write};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Clients that read without a pause get the whole rate, and no more; what some leave is the
/// others'. Bytes are spliced at any rate.
#[test]
fn a_rate_is_divided_among_all_clients() {
    const RATE: u64 = 32 * MIB;
    const CLIENTS: usize = 4;
    let (proxy, listener) = start_proxy(|config| {
        config.process.workers = Some(2);
        config.limits.total_rate_bytes_per_second = Some(RATE);
        config.limits.timeouts.drain = Duration::ZERO;
    });
    let received = [const { AtomicU64::new(0) }; CLIENTS];
    let (are_paused, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let total = || received.iter().map(|bytes| bytes.load(Relaxed)).sum::<u64>();
    let rate_of = |bytes: &dyn Fn() -> u64, seconds: u64| {
        let (before, started) = (bytes(), Instant::now());
        thread::sleep(Duration::from_secs(seconds));
        (bytes() - before) as f64 / started.elapsed().as_secs_f64()
    };
    thread::scope(|scope| {
        for (index, received) in received.iter().enumerate() {
            let mut client = proxy.connect();
            let server = accept(&listener);
            let (are_paused, is_over) = (&are_paused, &is_over);
            scope.spawn(move || {
                let content = vec![7; 1 << 20];
                while !is_over.load(Relaxed) && (&server).write_all(&content).is_ok() {}
            });
            scope.spawn(move || {
                let mut buffer = vec![0; 1 << 18];
                client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
                while !is_over.load(Relaxed) {
                    if index > 0 && are_paused.load(Relaxed) {
                        thread::sleep(Duration::from_millis(10));
                        continue;
                    }
                    match client.read(&mut buffer) {
                        Ok(count) => drop(received.fetch_add(count as u64, Relaxed)),
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                        Err(_) => return,
                    }
                }
            });
        }
        // The first bytes are in the buffers before the rates are divided.
        thread::sleep(Duration::from_secs(2));
        let rate = rate_of(&total, 3);
        let shares: Vec<_> = received.iter().map(|bytes| bytes.load(Relaxed)).collect();
        are_paused.store(true, Relaxed);
        thread::sleep(Duration::from_secs(3));
        let rate_alone = rate_of(&|| received[0].load(Relaxed), 2);
        is_over.store(true, Relaxed);
        assert!(rate < 1.2 * RATE as f64, "{rate} of {RATE}");
        assert!(rate > 0.5 * RATE as f64, "{rate} of {RATE}");
        let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
        assert!(least * 2 > *most, "{shares:?}");
        assert!(rate_alone > 0.5 * RATE as f64, "alone {rate_alone} of {RATE}");
        assert!(rate_alone < 1.2 * RATE as f64, "alone {rate_alone} of {RATE}");
        // Writers that wait for the proxy end with it.
        proxy.handle.drain();
    });
    let log = proxy.finish();
    let sum = |field: &str| {
        log.iter().map(|line| line["to_client"][field].as_u64().unwrap()).sum::<u64>()
    };
    assert!(sum("spliced_bytes") > 9 * sum("copied_bytes"), "{log:?}");
}

/// The rates to which the established connections of the proxy's host are limited, in bytes per
/// second: `ss` writes them in bits.
fn rates(lab: &Lab) -> Vec<Option<u64>> {
    let ss = || Command::new("ss").args(["-Htin", "state", "established"]).output().unwrap();
    let text = String::from_utf8(lab.sender.run(ss).unwrap().stdout).unwrap();
    let words: Vec<_> = text.split_whitespace().collect();
    let values = words.windows(2).filter(|two| two[0] == "pacing_rate").map(|two| two[1]);
    let limit = |value: &str| {
        let bits = value.split_once('/')?.1.strip_suffix("bps").unwrap();
        Some(bits.parse::<u64>().unwrap() / 8)
    };
    values.map(limit).collect()
}

/// The client's and the upstream's socket of an established connection get the rate of the process
/// that takes over.
#[test]
fn an_upgrade_changes_the_rates_of_established_connections() {
    let folder = tempfile::tempdir().unwrap();
    let (proxy, listener) = start_proxy(|config| {
        config.reporting.control = Some(folder.path().join("control"));
        config.limits.rate_bytes_per_second = Some(2 * MIB);
    });
    if !proxy.is_alone() {
        return;
    }
    if Command::new("ss").arg("-V").output().is_err() {
        eprintln!("SKIPPED: no rate is read, ss (iproute2) is missing");
        return;
    }
    let (client, server) = (proxy.connect(), accept(&listener));
    let exchange = || {
        for (from, to) in [(&client, &server), (&server, &client)] {
            (&mut &*from).write_all(b"x").unwrap();
            (&mut &*to).read_exact(&mut [0]).unwrap();
        }
    };
    exchange();
    assert_eq!(rates(&proxy.lab), [Some(2 * MIB); 2]);
    let mut succession = Succession::new(proxy);
    for (rate, total_rate) in
        [(Some(3 * MIB), None), (None, None), (None, Some(5 * MIB)), (None, None)]
    {
        succession.config.limits.rate_bytes_per_second = rate;
        succession.config.limits.total_rate_bytes_per_second = total_rate;
        succession.upgrade(|_| ());
        exchange();
        assert_eq!(rates(succession.lab()), [rate.or(total_rate); 2]);
    }
    drop((client, server));
    succession.finish();
}
