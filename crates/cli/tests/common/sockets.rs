//! Clients of this machine's addresses, and the servers that accept them, with time limits.

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// The longest wait of a test.
const LIMIT: Duration = Duration::from_secs(120);

/// This machine's addresses of both protocols.
pub const LOCALHOSTS: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

/// Connects to a port of this machine from an address.
pub fn connect_from(source: IpAddr, port: u16) -> TcpStream {
    let (family, to) = match source {
        IpAddr::V4(_) => (AddressFamily::INET, LOCALHOSTS[0]),
        IpAddr::V6(_) => (AddressFamily::INET6, LOCALHOSTS[1]),
    };
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::new(source, 0)).unwrap();
    rustix::net::connect(&socket, &SocketAddr::new(to, port)).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// Accepts a connection.
pub fn accept(listener: &TcpListener) -> TcpStream {
    let deadline = Instant::now() + LIMIT;
    listener.set_nonblocking(true).unwrap();
    let server = loop {
        match listener.accept() {
            Ok((server, _)) => break server,
            Err(error) => assert!(Instant::now() < deadline, "no connection arrives: {error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    server.set_nonblocking(false).unwrap();
    server.set_read_timeout(Some(LIMIT)).unwrap();
    server.set_write_timeout(Some(LIMIT)).unwrap();
    server
}

/// The port of an address in text.
pub fn port(address: &str) -> u16 {
    address.parse::<SocketAddr>().unwrap().port()
}
