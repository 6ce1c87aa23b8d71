//! Clients behind a proxy that names them (PROXY protocol).

use crate::common::{Client, Service, wait_until};
use haul_serve::{AccessLog, LogFormat, TrustedProxies};
use std::fs;
use std::net::TcpStream;
use std::num::NonZeroUsize;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A service that trusts the clients' host and no other.
fn start(configure: impl FnOnce(&mut haul_serve::Config)) -> Service {
    Service::start(
        |_| {},
        |config| {
            config.trusted_proxies = TrustedProxies::new(["10.77.0.2".parse().unwrap()]);
            configure(config);
        },
    )
}

/// Connects as the proxy of a client.
fn connect_for(service: &Service, client: &str) -> Client {
    let mut connection = service.connect();
    connection.send(&format!("PROXY TCP4 {client} 10.77.0.1 50000 80\r\n"));
    connection
}

fn status(connection: &mut Client) -> u16 {
    connection.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
    connection.response(false).unwrap().status
}

#[test]
fn limits_and_logs_are_those_of_the_named_client() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let path = log.clone();
    let mut service = start(|config| {
        config.limits.connections_per_address_max = NonZeroUsize::new(1);
        config.access_log = Some(AccessLog::new(Some(path), LogFormat::Combined));
    });
    let mut one = connect_for(&service, "192.0.2.1");
    let mut other = connect_for(&service, "192.0.2.2");
    assert_eq!((status(&mut one), status(&mut other)), (200, 200));
    assert!(connect_for(&service, "192.0.2.1").is_closed(), "its second connection");
    // A health check of the proxy itself, and a header that arrives in pieces.
    let mut check = service.connect();
    check.send("PROXY UNKNOWN\r");
    check.send("\nGET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(check.response(false).unwrap().status, 200);
    drop((one, other, check));
    service.stop();
    let log = fs::read_to_string(log).unwrap();
    for client in ["192.0.2.1", "192.0.2.2", "10.77.0.2"] {
        assert!(log.lines().any(|line| line.starts_with(&format!("{client} "))), "{client}: {log}");
    }
}

#[test]
fn a_proxy_that_names_no_client_is_closed_and_a_silent_one_times_out() {
    let service = start(|_| {});
    let mut without = service.connect();
    without.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(without.try_response(), None);
    let mut silent = service.connect();
    silent.send("PROXY TCP4 192.0.2.1");
    let counters = &service.handle.counters()[0].connections;
    wait_until("the connection timed out", || counters.timed_out.get() == 1);
    assert_eq!(silent.try_response(), None);
    assert_eq!(counters.refused.get(), 1);
    assert_eq!(status(&mut connect_for(&service, "192.0.2.1")), 200);
}

/// A client that is not trusted could choose its own address.
#[test]
fn the_header_of_another_client_is_no_header() {
    let service = start(|_| {});
    let connect = || TcpStream::connect(service.address).unwrap();
    let mut client = Client::new(service.lab.sender.run(connect).unwrap());
    assert_eq!(status(&mut client), 200);
    client.send("PROXY TCP4 192.0.2.1 10.77.0.1 50000 80\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(client.response(false).unwrap().status, 400);
}

/// Versions 1 and 2 of the header, as HAProxy writes them, and its health checks.
#[test]
fn haproxy_names_its_clients() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let path = log.clone();
    let mut service =
        start(|config| config.access_log = Some(AccessLog::new(Some(path), LogFormat::Combined)));
    let (server, own) = (service.address, service.lab.receiver.address());
    // It has the clients' host, where no other port is in use. The client has the server's.
    let configuration = format!(
        "defaults\n  mode http\n  timeout connect 9s\n  timeout client 9s\n  timeout server 9s\n\
         listen one\n  bind {own}:8001\n  server one {server} send-proxy check\n\
         listen two\n  bind {own}:8002\n  server two {server} send-proxy-v2 check\n"
    );
    fs::write(folder.path().join("haproxy.cfg"), configuration).unwrap();
    let mut command = Command::new("haproxy");
    command.arg("-db").arg("-f").arg(folder.path().join("haproxy.cfg")).stderr(Stdio::null());
    let haproxy = match service.lab.receiver.start_program(command) {
        Err(error) if error.to_string().contains("No such file") => {
            return eprintln!("SKIPPED: no test with haproxy, which is missing (ci/install)");
        }
        started => started.unwrap(),
    };
    for port in [8001, 8002] {
        let deadline = Instant::now() + Duration::from_secs(120);
        let connect = || service.lab.sender.run(|| TcpStream::connect((own, port))).unwrap();
        let mut client = loop {
            match connect() {
                Ok(stream) => break Client::new(stream),
                Err(error) => {
                    assert!(Instant::now() < deadline, "haproxy does not listen: {error}");
                }
            }
            thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(status(&mut client), 200);
    }
    drop(haproxy);
    service.stop();
    let log = fs::read_to_string(log).unwrap();
    let client = format!("{} ", server.ip());
    let named = log.lines().filter(|line| line.starts_with(&client));
    assert_eq!(named.count(), 2, "{log}");
}
