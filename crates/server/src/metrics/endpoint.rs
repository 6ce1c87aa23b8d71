//! The metrics endpoint: answers scrapes on a separate thread, so that they delay no event loop of
//! the service.
//!
//! It is an event loop too, so a slow client delays no other scrape. Each connection has one
//! request and a few seconds; beyond a number of connections, the longest idle one is closed.

use super::Registry;
use crate::address::Address;
use crate::admission::Admission;
use crate::admission::eviction::Activity;
use crate::control::Control;
use crate::counter::ConnectionCounters;
use crate::error::Error;
use crate::event_loop::{
    Action, Context, EventLoop, Handler, Handover, Interest, LoopSettings, Side,
};
use crate::listener::{Accepted, Listener};
use crate::offload::{NoJob, Offload};
use haul_http::request::{self, Method, Parsed, Request};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// The time of a connection, for its request, its response and its end, in seconds.
const SCRAPE_SECONDS_MAX: u32 = 2;
/// The most connections at a time.
const CONNECTIONS_MAX: usize = 64;
/// The connections that may wait for others to end.
const WAITING_MAX: usize = 64;
/// The longest request head of a scrape, in bytes.
const HEAD_BYTES_MAX: usize = 8 << 10;

/// A metrics endpoint. Dropping it ends its thread.
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Serves `/metrics` on a listening socket.
    pub fn start(listener: TcpListener, registry: Registry) -> Result<Self, Error> {
        let failed = || Error::at("starting the metrics' thread");
        let address =
            listener.local_addr().map_err(Error::at("asking for the metrics' address"))?;
        let control = Control::new(1)?;
        let settings = LoopSettings::default()
            .with_admission(Admission::WaitingRoom {
                connections_max: CONNECTIONS_MAX,
                waiting_max: WAITING_MAX,
            })
            .with_drain_timeout(Duration::ZERO);
        let offload = Offload::start(&[]).map_err(failed())?;
        let handler = Endpoint { registry, counters: ConnectionCounters::default() };
        let listeners = vec![Listener::from_tcp(listener).map_err(failed())?];
        let event_loop = EventLoop::new(0, listeners, &offload, &control, settings, handler)?;
        let thread = std::thread::Builder::new().name("haul-metrics".into());
        let thread = thread.spawn(move || {
            if let Err(error) = event_loop.run() {
                tracing::warn!(%error, "metrics are not served any more: {error}");
            }
        });
        Ok(Self { address, control, thread: Some(thread.map_err(failed())?) })
    }

    /// The address that the endpoint listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.control.drain();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Listens for scrapes.
pub fn listen(address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address)
        .map_err(|error| Error::Listen { address: Address::Tcp(address), error })
}

/// The handler of the endpoint's connections.
#[derive(Debug)]
struct Endpoint {
    registry: Registry,
    counters: ConnectionCounters,
}

/// One connection: a request, then a response.
struct Scrape {
    socket: TcpStream,
    head: Vec<u8>,
    /// Empty until the request is complete.
    response: Vec<u8>,
    sent_bytes: usize,
    /// In seconds of the loop's clock.
    deadline: u32,
}

impl Handler for Endpoint {
    type Connection = Scrape;
    type Job = NoJob;

    fn counters(&self) -> &ConnectionCounters {
        &self.counters
    }

    fn accept(&mut self, accepted: Accepted, context: &Context<'_>) -> io::Result<Scrape> {
        let socket = TcpStream::from(accepted.socket);
        context.register(&socket, Side::Client, Interest::BOTH)?;
        let deadline = context.deadline(SCRAPE_SECONDS_MAX);
        Ok(Scrape { socket, head: Vec::new(), response: Vec::new(), sent_bytes: 0, deadline })
    }

    fn drive(&mut self, scrape: &mut Scrape, context: &Context<'_>) -> Action<NoJob> {
        if context.is_draining() {
            return Action::Close;
        }
        match self.advance(scrape) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                Action::WaitUntil(scrape.deadline)
            }
            // The end, or a failure, which is the client's loss alone.
            Ok(()) | Err(_) => Action::Close,
        }
    }

    /// Each may make room: an honest scrape takes a turn or two.
    fn activity(&self, _: &Scrape) -> Activity {
        Activity::Idle
    }
}

impl Handover for Endpoint {}

impl Endpoint {
    /// Continues a connection until it ends; `WouldBlock` if the socket is not ready.
    fn advance(&self, scrape: &mut Scrape) -> io::Result<()> {
        let Scrape { socket, head, response, sent_bytes, .. } = scrape;
        let mut buffer = [0; 1024];
        while response.is_empty() {
            match retry(|| socket.read(&mut buffer))? {
                0 => return Ok(()),
                count => head.extend_from_slice(&buffer[..count]),
            }
            match request::parse(head, HEAD_BYTES_MAX) {
                Parsed::Partial => {}
                Parsed::Whole(request, _) => *response = self.respond(&request),
                Parsed::Refused(_) => *response = error_response("400 Bad Request", "", true),
            }
        }
        while *sent_bytes < response.len() {
            *sent_bytes += retry(|| socket.write(&response[*sent_bytes..]))?;
            if *sent_bytes == response.len() {
                socket.shutdown(Shutdown::Write)?;
            }
        }
        // Closing with unread data would reset the connection, and the response be lost.
        while retry(|| socket.read(&mut buffer))? > 0 {}
        Ok(())
    }

    fn respond(&self, request: &Request<'_>) -> Vec<u8> {
        let has_body = match request.method {
            Method::Get => true,
            Method::Head => false,
            _ => return error_response("405 Method Not Allowed", "Allow: GET, HEAD\r\n", true),
        };
        let path = request.target.split('?').next();
        if path != Some("/metrics") {
            return error_response("404 Not Found", "", has_body);
        }
        let fields = "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n";
        response("200 OK", fields, &self.registry.render(), has_body)
    }
}

fn error_response(status: &str, fields: &str, has_body: bool) -> Vec<u8> {
    let fields = format!("Content-Type: text/plain; charset=utf-8\r\n{fields}");
    response(status, &fields, &format!("{status}: ask for /metrics\n"), has_body)
}

fn response(status: &str, fields: &str, body: &str, has_body: bool) -> Vec<u8> {
    let len = body.len();
    let head =
        format!("HTTP/1.1 {status}\r\n{fields}Content-Length: {len}\r\nConnection: close\r\n\r\n");
    [head.as_bytes(), if has_body { body.as_bytes() } else { &[] }].concat()
}

/// Repeats a call that a signal interrupted.
fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Exposition;
    use super::*;
    use std::time::Instant;

    fn start() -> MetricsServer {
        let mut registry = Registry::default();
        registry.register(|text: &mut Exposition| text.counter("a_total", "A.", 1));
        registry.register(|text: &mut Exposition| text.gauge("b", "B.", 2.5));
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        MetricsServer::start(listener, registry).unwrap()
    }

    fn ask(server: &MetricsServer, method: &str, target: &str) -> String {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        write!(stream, "{method} {target} HTTP/1.1\r\nHost: h\r\n\r\n").unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    #[test]
    fn a_scrape_returns_every_source() {
        let server = start();
        let page = ask(&server, "GET", "/metrics");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
        assert!(page.ends_with("a_total 1\n# HELP b B.\n# TYPE b gauge\nb 2.5\n"), "{page}");
        assert!(ask(&server, "GET", "/metrics?name=a_total").starts_with("HTTP/1.1 200"));
        assert!(ask(&server, "GET", "/").starts_with("HTTP/1.1 404"));
        let head = ask(&server, "HEAD", "/metrics");
        assert!(head.starts_with("HTTP/1.1 200") && head.ends_with("\r\n\r\n"), "{head}");
        let refused = ask(&server, "POST", "/metrics");
        assert!(refused.starts_with("HTTP/1.1 405") && refused.contains("Allow: GET, HEAD\r\n"));
        assert!(ask(&server, "nonsense ", "").starts_with("HTTP/1.1 400"));
    }

    /// Clients that trickle their requests, or say nothing, delay neither a scrape nor the end.
    #[test]
    fn slow_clients_delay_neither_a_scrape_nor_the_end() {
        let server = start();
        let mut slow: Vec<TcpStream> = (0..2 * CONNECTIONS_MAX)
            .map(|_| TcpStream::connect(server.address()).unwrap())
            .collect();
        for (number, stream) in slow.iter_mut().enumerate() {
            // Some were closed to make room.
            let _ = stream.write_all(&b"GET /metrics"[..number % 8]);
        }
        assert!(ask(&server, "GET", "/metrics").starts_with("HTTP/1.1 200"));
        // Well before the clients' time is over.
        let started = Instant::now();
        drop(server);
        assert!(started.elapsed() < Duration::from_secs(u64::from(SCRAPE_SECONDS_MAX)));
    }

    #[test]
    fn a_client_has_its_time_and_no_longer() {
        let server = start();
        let mut slow = TcpStream::connect(server.address()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while slow.write_all(b"x").is_ok() {
            assert!(Instant::now() < deadline, "the connection stays open");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}
