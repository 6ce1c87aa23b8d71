//! Metrics in the Prometheus text format, served on an address of their own.
//!
//! A thread of its own answers one scrape at a time, so that scrapes delay no event loop. The
//! address is the access control: it should be reachable by the monitoring alone.

use crate::address::Address;
use crate::counter::{ConnectionCounters, Counter};
use crate::error::Error;
use haul_http::request::{self, Parsed};
use rustix::net::Shutdown;
use std::fmt::{Display, Write as _};
use std::io::{self, Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time limit of a scrape's request, and of its response.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest request head of a scrape, in bytes.
const HEAD_BYTES_MAX: usize = 8 << 10;

/// A source of metrics.
pub trait Collect: Send {
    /// Appends the current values.
    fn collect(&self, text: &mut Exposition);
}

impl<F: Fn(&mut Exposition) + Send> Collect for F {
    fn collect(&self, text: &mut Exposition) {
        self(text);
    }
}

/// The metrics of a service: its sources in the order of the page.
#[derive(Default)]
pub struct Registry {
    sources: Vec<Box<dyn Collect>>,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Registry").field("sources", &self.sources.len()).finish()
    }
}

impl Registry {
    /// Adds a source.
    pub fn register(&mut self, source: impl Collect + 'static) {
        self.sources.push(Box::new(source));
    }

    /// Adds the connections of all event loops.
    pub fn register_connections(&mut self, loops: Vec<Arc<ConnectionCounters>>) {
        self.register(move |text: &mut Exposition| {
            text.connections(&loops.iter().map(Arc::as_ref).collect::<Vec<_>>());
        });
    }

    /// The page with the current values.
    pub fn render(&self) -> String {
        let mut text = Exposition::default();
        for source in &self.sources {
            source.collect(&mut text);
        }
        text.0
    }
}

/// A page in the Prometheus text format (version 0.0.4).
#[derive(Debug, Default)]
pub struct Exposition(String);

impl Exposition {
    /// A counter without labels.
    pub fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "counter", help);
        self.sample(name, "", value);
    }

    /// A gauge without labels.
    pub fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "gauge", help);
        self.sample(name, "", value);
    }

    /// The head of a metric family; its samples follow.
    pub fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a String does not fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// A sample of the last family. `labels` is empty or like `class="2xx"`.
    pub fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = match labels {
            "" => writeln!(self.0, "{name} {value}"),
            labels => writeln!(self.0, "{name}{{{labels}}} {value}"),
        };
    }

    /// A histogram: the upper bounds, the counts of the classes (one more than bounds), the sum.
    pub fn histogram(&mut self, name: &str, help: &str, bounds: &[f64], counts: &[u64], sum: f64) {
        self.family(name, "histogram", help);
        let mut total = 0;
        for (bound, count) in bounds.iter().zip(counts) {
            total += count;
            self.sample(&format!("{name}_bucket"), &format!("le=\"{bound}\""), total);
        }
        total += counts.iter().skip(bounds.len()).sum::<u64>();
        self.sample(&format!("{name}_bucket"), "le=\"+Inf\"", total);
        self.sample(&format!("{name}_sum"), "", sum);
        self.sample(&format!("{name}_count"), "", total);
    }

    /// The connections of all event loops.
    pub fn connections(&mut self, loops: &[&ConnectionCounters]) {
        let sum = |of: fn(&ConnectionCounters) -> &Counter| {
            loops.iter().map(|counters| of(counters).get()).fold(0, u64::wrapping_add)
        };
        self.counter(
            "haul_connections_accepted_total",
            "Connections accepted.",
            sum(|counters| &counters.accepted),
        );
        self.gauge("haul_connections", "Connections open now.", sum(|counters| &counters.open));
        self.counter(
            "haul_connections_evicted_total",
            "Idle connections closed to make room for others.",
            sum(|counters| &counters.evicted),
        );
        self.counter(
            "haul_connections_timed_out_total",
            "Connections closed because their client was too slow.",
            sum(|counters| &counters.timed_out),
        );
    }
}

/// A metrics endpoint. Dropping it ends its thread.
#[derive(Debug)]
pub struct MetricsServer {
    listener: Arc<TcpListener>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Serves `/metrics` on a listening socket.
    pub fn start(listener: TcpListener, registry: Registry) -> Result<Self, Error> {
        let address =
            listener.local_addr().map_err(Error::at("asking for the metrics' address"))?;
        let listener = Arc::new(listener);
        let accepting = Arc::clone(&listener);
        let thread = std::thread::Builder::new()
            .name("haul-metrics".into())
            .spawn(move || {
                for stream in accepting.incoming() {
                    match stream {
                        // A scrape that fails is the client's loss alone.
                        Ok(stream) => drop(respond(stream, &registry)),
                        Err(error) if error.kind() == io::ErrorKind::InvalidInput => break,
                        // No descriptors: there may be some later.
                        Err(_) => std::thread::sleep(Duration::from_millis(100)),
                    }
                }
            })
            .map_err(Error::at("starting the metrics' thread"))?;
        Ok(Self { listener, address, thread: Some(thread) })
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        // accept() then fails with EINVAL.
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
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

fn respond(mut stream: TcpStream, registry: &Registry) -> io::Result<()> {
    let deadline = Instant::now() + SCRAPE_TIMEOUT;
    stream.set_write_timeout(Some(SCRAPE_TIMEOUT))?;
    let mut head = Vec::new();
    let status = loop {
        match request::parse(&head, HEAD_BYTES_MAX) {
            Parsed::Whole(request, _) if request.target == "/metrics" => break "200 OK",
            Parsed::Whole(..) => break "404 Not Found",
            Parsed::Refused(_) => break "400 Bad Request",
            Parsed::Partial => {
                let left = deadline.saturating_duration_since(Instant::now());
                // A timeout of zero would be none.
                stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
                if left.is_zero() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                let mut buffer = [0; 1024];
                match stream.read(&mut buffer)? {
                    0 => return Ok(()),
                    count => head.extend_from_slice(&buffer[..count]),
                }
            }
        }
    };
    let body = if status == "200 OK" {
        registry.render()
    } else {
        format!("{status}: ask for /metrics\n")
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_is_cumulative() {
        let mut text = Exposition::default();
        text.histogram("h", "Help.", &[0.1, 0.3], &[2, 1, 4], 5.5);
        let expected = "# HELP h Help.\n# TYPE h histogram\nh_bucket{le=\"0.1\"} 2\n\
                        h_bucket{le=\"0.3\"} 3\nh_bucket{le=\"+Inf\"} 7\nh_sum 5.5\nh_count 7\n";
        assert_eq!(text.0, expected);
    }

    #[test]
    fn a_scrape_returns_every_source() {
        let mut registry = Registry::default();
        registry.register(|text: &mut Exposition| text.counter("a_total", "A.", 1));
        registry.register(|text: &mut Exposition| text.gauge("b", "B.", 2.5));
        let server =
            MetricsServer::start(listen("127.0.0.1:0".parse().unwrap()).unwrap(), registry)
                .unwrap();
        let get = |target: &str| {
            let mut stream = TcpStream::connect(server.address()).unwrap();
            write!(stream, "GET {target} HTTP/1.1\r\nHost: h\r\n\r\n").unwrap();
            let mut response = String::new();
            stream.read_to_string(&mut response).unwrap();
            response
        };
        let page = get("/metrics");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
        assert!(page.ends_with("a_total 1\n# HELP b B.\n# TYPE b gauge\nb 2.5\n"), "{page}");
        assert!(get("/").starts_with("HTTP/1.1 404"));

        // A client that trickles its request occupies the endpoint for its time and no longer.
        let mut slow = TcpStream::connect(server.address()).unwrap();
        let trickle = std::thread::spawn(move || {
            while slow.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        assert!(get("/metrics").starts_with("HTTP/1.1 200"));
        trickle.join().unwrap();
    }
}
