//! Message framing, persistence, timeouts and limits of connections.

use crate::common::{Client, Service, large_content, wait_until};
use haul_serve::SingleWriterCounter;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

#[test]
fn persistence_follows_the_version_and_the_connection_field() {
    let service = Service::start_default();
    let mut client = service.connect();
    for _ in 0..3 {
        client.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
        let response = client.response(false).unwrap();
        assert_eq!((response.text().as_str(), response.field("connection")), ("0123456789", None));
    }
    client.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    assert_eq!(client.response(false).unwrap().field("connection"), Some("close"));
    assert!(client.is_closed());

    let mut client = service.connect();
    client.send("GET /ten.txt HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    assert_eq!(client.response(false).unwrap().field("connection"), Some("keep-alive"));
    client.send("GET /ten.txt HTTP/1.0\r\n\r\n");
    assert_eq!(client.response(false).unwrap().field("connection"), Some("close"));
    assert!(client.is_closed());
}

#[test]
fn no_corked_response_waits_for_the_kernels_timeout() {
    const CLIENTS: usize = 64;
    const BATCHES: usize = 20;
    let service = Service::start_default();
    let response_count = || -> u64 {
        let counters = service.handle.counters().iter();
        counters.flat_map(|counters| counters.latencies.iter().map(SingleWriterCounter::get)).sum()
    };
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| service.connect()).collect();
    let mut request_count = 0;
    for batch in 0..BATCHES {
        // Some clients send several requests in one segment. The last requests close their
        // connections.
        let is_last = batch + 1 == BATCHES;
        let requests_of = |index: usize| if is_last { 1 } else { 1 + index % 3 };
        let closes = if is_last { "Connection: close\r\n" } else { "" };
        for (index, client) in clients.iter_mut().enumerate() {
            let request = format!("GET /ten.txt HTTP/1.1\r\nHost: h\r\n{closes}\r\n");
            client.send(&request.repeat(requests_of(index)));
            request_count += requests_of(index) as u64;
        }
        wait_until("every request is answered", || response_count() == request_count);
        // After this response the earlier ones must have been sent. By itself the kernel sends a
        // corked segment only after 200 ms (tcp(7)).
        assert_eq!(service.get("/ten.txt").status, 200);
        request_count += 1;
        for (index, client) in clients.iter_mut().enumerate() {
            client.stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            for _ in 0..requests_of(index) {
                assert_eq!(client.response(false).unwrap().text(), "0123456789");
            }
        }
    }
}

#[test]
fn pipelined_requests_are_answered_in_order_for_every_segmentation() {
    let service = Service::start_default();
    let large = large_content();
    let mut text = String::new();
    for index in 0..300 {
        let target = if index % 50 == 7 { "/large.bin" } else { "/ten.txt" };
        write!(text, "GET {target} HTTP/1.1\r\nHost: h\r\nRange: bytes={}-\r\n\r\n", index % 10)
            .unwrap();
    }
    for piece_bytes in [1, 7, 61, 1000, text.len()] {
        let mut client = service.connect();
        let thread = {
            let mut writer = Client::new(client.stream.try_clone().unwrap());
            let text = text.clone();
            thread::spawn(move || {
                for piece in text.as_bytes().chunks(piece_bytes) {
                    writer.send(std::str::from_utf8(piece).unwrap());
                }
            })
        };
        for index in 0..300 {
            let response = client.response(false).unwrap();
            let content = if index % 50 == 7 { &large[..] } else { b"0123456789" };
            assert_eq!(response.status, if index % 10 < content.len() { 206 } else { 416 });
            assert!(
                response.body == content[index % 10..],
                "request {index} in pieces of {piece_bytes} bytes"
            );
        }
        thread.join().unwrap();
    }
}

#[test]
fn a_half_closed_client_receives_all_responses() {
    let service = Service::start_default();
    let mut client = service.connect();
    client
        .send("GET /large.bin HTTP/1.1\r\nHost: h\r\n\r\nGET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
    client.stream.shutdown(Shutdown::Write).unwrap();
    assert!(client.response(false).unwrap().body == large_content());
    assert_eq!(client.response(false).unwrap().text(), "0123456789");
    assert!(client.is_closed());
}

#[test]
fn a_request_with_uncertain_framing_closes_the_connection() {
    let service = Service::start_default();
    for (text, status) in [
        ("GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n", 400),
        ("GET /ten.txt HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        ("POST /ten.txt HTTP/1.1\r\nHost: h\r\nContent-Length: 50\r\n\r\n", 405),
        (
            "GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
        ),
        ("GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost : h\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\n\r\n", 400),
        ("GET  / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        ("GET / HTTP/2.0\r\nHost: h\r\n\r\n", 505),
        ("nonsense\r\n\r\n", 400),
        ("\u{16}\u{3}\u{1}\u{2}", 400),
    ] {
        let mut client = service.connect();
        // The bytes that follow must not be parsed as a request.
        client.send(&format!("{text}GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n"));
        let response = client.response(false).unwrap();
        assert_eq!(
            (response.status, response.field("connection")),
            (status, Some("close")),
            "{text:?}"
        );
        client.stream.shutdown(Shutdown::Write).unwrap();
        assert!(client.is_closed(), "{text:?}");
    }
    let mut client = service.connect();
    client.send(&format!("GET /{} HTTP/1.1\r\nHost: h\r\n\r\n", "a".repeat(20_000)));
    assert_eq!(client.response(false).unwrap().status, 431);
    let mut client = service.connect();
    client.send(&format!("GET / HTTP/1.1\r\nHost: h\r\n{}\r\n", "A: b\r\n".repeat(150)));
    assert_eq!(client.response(false).unwrap().status, 431);
}

#[test]
fn an_error_response_reaches_a_client_that_is_still_sending() {
    let service = Service::start_default();
    let mut client = service.connect();
    client.send("POST /ten.txt HTTP/1.1\r\nHost: h\r\nContent-Length: 600000\r\n\r\n");
    for _ in 0..60 {
        client.send(&"x".repeat(10_000));
    }
    assert_eq!(client.response(false).unwrap().status, 405);
    client.stream.shutdown(Shutdown::Write).unwrap();
    assert!(client.is_closed());
}

#[test]
fn head_idle_and_send_timeouts_close_connections() {
    let service = Service::start(
        |_| {},
        |config| {
            config.limits.head_timeout = Duration::from_secs(1);
            config.limits.idle_timeout = Duration::from_secs(1);
            config.limits.send_timeout = Duration::from_secs(1);
        },
    );
    let mut silent = service.connect();
    let mut slow = service.connect();
    slow.send("GET / HTTP/1.1\r\nHo");
    let mut idle = service.connect();
    idle.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(idle.response(false).unwrap().status, 200);
    let mut stalled = service.connect();
    for _ in 0..10 {
        stalled.send("GET /large.bin HTTP/1.1\r\nHost: h\r\n\r\n");
    }
    assert!(silent.is_closed());
    assert_eq!(slow.response(false).unwrap().status, 408);
    assert!(idle.is_closed());
    wait_until("two connections timed out", || {
        service.handle.counters()[0].connections.timed_out.get() >= 2
    });
    // Bytes in the socket buffers may still arrive. The responses stay incomplete, and the
    // connection ends with a reset.
    let mut received = Vec::new();
    let end = stalled.stream.read_to_end(&mut received);
    assert!(
        end.is_err() && received.len() < 10 * large_content().len(),
        "{end:?} after {} bytes",
        received.len()
    );
}

#[test]
fn a_client_that_trickles_its_head_times_out() {
    let service =
        Service::start(|_| {}, |config| config.limits.head_timeout = Duration::from_secs(2));
    let mut client = service.connect();
    let mut writer = Client::new(client.stream.try_clone().unwrap());
    let trickle = thread::spawn(move || {
        let text = "GET / HTTP/1.1\r\nX: ".to_owned() + &"y".repeat(1000);
        for byte in text.bytes() {
            if writer.try_send(&[byte]).is_err() {
                return true;
            }
            thread::sleep(Duration::from_millis(20));
        }
        false
    });
    assert_eq!(client.response(false).unwrap().status, 408);
    drop(client);
    assert!(trickle.join().unwrap(), "the connection outlived the head timeout");
}

#[test]
fn input_does_not_extend_the_send_timeout() {
    let service =
        Service::start(|_| {}, |config| config.limits.send_timeout = Duration::from_secs(1));
    let mut stalled = service.connect();
    for _ in 0..10 {
        stalled.send("GET /large.bin HTTP/1.1\r\nHost: h\r\n\r\n");
    }
    let mut writer = Client::new(stalled.stream.try_clone().unwrap());
    for _ in 0..500 {
        if writer.try_send(b"x").is_err() {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    panic!("the connection is still open after ten send timeouts");
}

#[test]
fn at_the_limit_the_longest_idle_connection_is_evicted() {
    let service = Service::start(|_| {}, |config| config.limits.connections_max = 3);
    let mut clients: Vec<_> = (0..3).map(|_| service.connect()).collect();
    let request = |client: &mut Client| {
        client.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(client.response(false).unwrap().status, 200);
    };
    for index in [1, 2, 0] {
        request(&mut clients[index]);
    }
    assert_eq!(service.get("/ten.txt").status, 200, "the fourth connection is served");
    assert!(clients[1].is_closed(), "the longest idle connection is evicted");
    request(&mut clients[2]);
    request(&mut clients[0]);
    assert_eq!(service.handle.counters()[0].connections.evicted.get(), 1);
}

/// Sets a flag when it is dropped.
struct FinishOnDrop<'a>(&'a AtomicBool);

impl Drop for FinishOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// At the limit of connections, those that only occupy their place make room within seconds, long
/// before a timeout closes them.
#[test]
fn connections_that_only_occupy_their_place_make_room() {
    const PLACES: usize = 20;
    let large = "GET /large.bin HTTP/1.1\r\nHost: h\r\n\r\n";
    let upload = "PUT /upload HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\nx";
    for (attack, is_read) in [("G", false), (large, false), (large, true), (upload, false)] {
        let service = Service::start(
            |_| {},
            |config| {
                config.limits.connections_max = PLACES;
                config.put_bytes_max = Some(1 << 20);
            },
        );
        let mut attackers: Vec<_> = (0..PLACES).map(|_| service.connect()).collect();
        for attacker in &mut attackers {
            attacker.send(attack);
        }
        let handle = service.handle.clone();
        let connections = || handle.counters()[0].connections.open.get();
        // The last sixteenth is for others.
        wait_until("all places but the reserve are taken", || {
            connections() == (PLACES - PLACES / 16) as u64
        });
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            // Also if a client panics: the scope waits for the thread.
            let _end = FinishOnDrop(&is_over);
            // A byte now and then is not a reason to keep the place.
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    for attacker in &attackers {
                        if is_read {
                            let _ = (&attacker.stream).read(&mut [0]);
                        } else {
                            let _ = (&attacker.stream).write(b"x");
                        }
                    }
                    thread::sleep(Duration::from_millis(100));
                }
            });
            // A response in time: a timeout would take half a minute at least.
            for _ in 0..PLACES {
                assert_eq!(service.get("/ten.txt").status, 200, "beside {attack:?}");
            }
        });
        assert!(handle.counters()[0].connections.evicted.get() > 0);
        assert_eq!(handle.counters()[0].connections.timed_out.get(), 0);
    }
}

/// Half requests are closed as soon as others come: were each to keep its place for a second, the
/// last of these would wait for fifty.
#[test]
fn half_requests_do_not_delay_those_who_come_after_them() {
    const PLACES: usize = 20;
    let service = Service::start(|_| {}, |config| config.limits.connections_max = PLACES);
    let attackers: Vec<_> = (0..50 * PLACES)
        .map(|_| {
            let mut attacker = service.connect();
            attacker.send("G");
            attacker
        })
        .collect();
    assert_eq!(service.get("/ten.txt").status, 200);
    let evicted = service.handle.counters()[0].connections.evicted.get();
    assert!(evicted as usize > attackers.len() - PLACES, "{evicted}");
    assert!(evicted as usize <= attackers.len(), "{evicted}");
}

/// One address that has all places, and whose connections wait for more, delays neither others nor
/// its own new ones until all of those that wait have had their turn.
#[test]
fn a_flood_of_one_address_does_not_delay_others() {
    const PLACES: usize = 32;
    const FLOOD: usize = 20 * PLACES;
    let upload = "PUT /upload HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\nx";
    for waiting_max in [FLOOD, PLACES] {
        let service = Service::start(
            |_| {},
            |config| {
                config.limits.connections_max = PLACES;
                config.limits.waiting_max = waiting_max;
                config.put_bytes_max = Some(1 << 20);
            },
        );
        let _flood: Vec<_> = (0..FLOOD)
            .map(|_| {
                let mut client = service.connect();
                client.send(upload);
                client
            })
            .collect();
        let counters = service.handle.clone();
        let connections = || &counters.counters()[0].connections;
        let get = |host: &haul_lab::Host| {
            let connect = || std::net::TcpStream::connect(service.address).unwrap();
            let mut client = Client::new(host.run(connect).unwrap());
            client.stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
            client.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
            assert_eq!(client.response(false).unwrap().status, 200);
            assert!(connections().waiting.get() > 0);
            client
        };
        let for_others = PLACES / 16;
        let _other = get(&service.lab.sender);
        let open = connections().open.get() as usize;
        assert_eq!(open, PLACES - for_others + 1, "the flood does not get the places of others");
        drop(get(&service.lab.receiver));
        // Without room for all that wait, the oldest are closed.
        let refused = connections().refused.get() as usize;
        assert_eq!(refused > 0, waiting_max < FLOOD, "{refused} refused");
    }
}

/// A download that makes progress keeps its place while clients open more and more connections.
#[test]
fn a_download_under_way_is_not_evicted() {
    let service = Service::start(|_| {}, |config| config.limits.connections_max = 4);
    let mut download = service.connect();
    download.send("GET /large.bin HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut crowd = Vec::new();
    for _ in 0..40 {
        let mut client = service.connect();
        client.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(client.response(false).unwrap().status, 200);
        crowd.push(client);
    }
    assert!(download.response(false).unwrap().body == large_content());
}

#[test]
fn an_address_has_at_most_its_share_of_connections() {
    let service = Service::start(
        |_| {},
        |config| {
            config.limits.connections_per_address_max = NonZeroUsize::new(3);
            config.workers = Some(2);
        },
    );
    let request = |client: &mut Client| {
        client.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
        client.response(false).unwrap().status
    };
    let mut clients: Vec<_> = (0..3).map(|_| service.connect()).collect();
    assert!(clients.iter_mut().all(|client| request(client) == 200));
    assert!(service.connect().is_closed(), "a fourth connection");
    // A client of another address has its own share.
    let connect = || std::net::TcpStream::connect(service.address).unwrap();
    let mut other = Client::new(service.lab.sender.run(connect).unwrap());
    assert_eq!(request(&mut other), 200);
    drop(clients.pop());
    let open =
        || service.handle.counters().iter().map(|all| all.connections.open.get()).sum::<u64>();
    wait_until("three connections are open", || open() == 3);
    assert_eq!(request(&mut service.connect()), 200);
}

#[test]
fn a_final_response_survives_requests_that_follow_it() {
    let service = Service::start_default();
    for _ in 0..5 {
        let mut client = service.connect();
        client.send("GET /large.bin HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
        for _ in 0..200 {
            client.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
        }
        assert!(client.response(false).unwrap().body == large_content());
        client.stream.shutdown(Shutdown::Write).unwrap();
        assert!(client.is_closed());
    }
}

#[test]
fn urgent_data_hides_no_bytes() {
    let service = Service::start_default();
    // A read stops at urgent data even if more bytes have arrived after it. The repetitions cover
    // both orders: those bytes arrive before the read, or after it.
    for _ in 0..500 {
        let mut client = service.connect();
        client.send("GET /ten");
        rustix::net::send(&client.stream, b".", rustix::net::SendFlags::OOB).unwrap();
        client.send("txt HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(client.response(false).unwrap().text(), "0123456789");
    }
}

#[test]
fn a_drain_finishes_open_responses() {
    let mut service = Service::start_default();
    let mut idle = service.connect();
    idle.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(idle.response(false).unwrap().status, 200);
    let mut busy = service.connect();
    let requests = 5;
    for _ in 0..requests {
        busy.send("GET /large.bin HTTP/1.1\r\nHost: h\r\n\r\n");
    }
    // The first response has begun. It is larger than the socket buffers.
    let mut first = [0];
    assert_eq!(busy.stream.peek(&mut first).unwrap(), 1);
    let handle = service.handle.clone();
    handle.drain();
    assert!(idle.is_closed(), "an idle connection is closed");
    let response = busy.response(false).unwrap();
    assert!(response.body == large_content(), "the open response is finished");
    while let Some(response) = busy.response(false) {
        assert!(response.body == large_content());
    }
    service.stop();
    let connected =
        service.lab.receiver.run(|| std::net::TcpStream::connect(service.address)).unwrap();
    assert!(connected.is_err(), "the listener is closed");
}

/// A client sends its next request when it has read a response, which may be after the drain began.
#[test]
fn a_drain_answers_the_next_request_of_a_connection_that_was_busy() {
    const TEN: &str = "GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n";
    let mut service = Service::start_default();
    let [mut idle, mut busy, mut slow, mut beginning] = [(); 4].map(|()| service.connect());
    let request = |client: &mut Client| {
        client.send(TEN);
        let response = client.response(false).expect("the request is answered");
        assert_eq!(response.text(), "0123456789");
        response.field("connection") == Some("close")
    };
    assert!(!request(&mut idle));
    thread::sleep(Duration::from_millis(3100));
    assert!(!request(&mut busy));
    // The response has begun. It is larger than the socket buffers, and ends after the time that
    // `busy` has.
    slow.send("GET /large.bin HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(slow.stream.peek(&mut [0]).unwrap(), 1);
    beginning.send("GET /ten.txt HTTP/1.1\r\nHost: ");
    service.handle.drain();
    assert!(idle.is_closed());
    assert!(request(&mut busy) && busy.is_closed());
    // In the middle of a second, so that the loop's clock advances while the client waits.
    thread::sleep(Duration::from_millis(3500));
    assert!(slow.response(false).unwrap().body == large_content());
    // Its time counts from the end of its response.
    for _ in 0..12 {
        // The loop does not sleep at this time.
        beginning.send("h");
        thread::sleep(Duration::from_millis(50));
    }
    assert!(request(&mut slow) && slow.is_closed());
    drop((idle, busy, slow, beginning));
    service.stop();
}

#[test]
fn a_connection_is_paced_at_the_configured_rate() {
    let rate = 2 << 20;
    let service = Service::start(|_| {}, |config| config.limits.rate_bytes_per_second = Some(rate));
    let started = std::time::Instant::now();
    assert!(service.get("/large.bin").body == large_content());
    // 3 MiB at 2 MiB/s; the kernel sends a first burst unpaced. The time has only a lower bound,
    // because a busy machine makes it longer and nothing makes it shorter.
    assert!(started.elapsed() > Duration::from_millis(900), "{:?}", started.elapsed());
}

#[test]
fn a_unix_socket_is_served_and_removed_at_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let address = format!("unix:{}", path.display());
    let mut service = Service::start(|_| {}, |config| config.listen.push(address.parse().unwrap()));
    for target in ["/ten.txt", "/large.bin"] {
        let mut stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let request = format!("GET {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        let body = if target == "/ten.txt" { b"0123456789".to_vec() } else { large_content() };
        assert!(received.starts_with(b"HTTP/1.1 200") && received.ends_with(&body), "{target}");
    }
    service.stop();
    assert!(!path.exists());
}

#[test]
fn slow_clients_delay_no_others_and_are_served() {
    /// Slow senders, and as many slow receivers.
    const CLIENTS: usize = 150;
    let service = Service::start_default();
    let connect = |request: &str| {
        let mut client = service.connect();
        client.send(request);
        client
    };
    let mut slow_senders: Vec<_> =
        (0..CLIENTS).map(|_| connect("GET /ten.txt HTTP/1.1\r\nHost: h")).collect();
    let mut slow_receivers: Vec<_> =
        (0..CLIENTS).map(|_| connect("GET /large.bin HTTP/1.1\r\nHost: h\r\n\r\n")).collect();
    let mut quick = service.connect();
    for _ in 0..100 {
        quick.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(quick.response(false).unwrap().text(), "0123456789");
        for client in &mut slow_senders {
            client.send(".");
        }
    }
    for client in &mut slow_senders {
        client.send("\r\n\r\n");
        assert_eq!(client.response(false).unwrap().text(), "0123456789");
    }
    let large = large_content();
    for client in &mut slow_receivers {
        assert!(client.response(false).unwrap().body == large);
    }
}
