//! What the server has done, as Prometheus reads it, at an address of its own.
//!
//! A thread of its own answers, one asker at a time: nobody who is served waits for it, and whoever must not see this does not
//! reach its address.

use crate::config::Address;
use crate::counters::{Counter, Counters, LATENCY_CLASSES_US, Way};
use crate::error::Error;
use haul_http::request::{self, Parsed};
use rustix::net::Shutdown;
use std::fmt::Write as _;
use std::io::{self, Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// How long an asker may take to ask, and to take the answer.
const ASKER_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest head of a question.
const HEAD_BYTES_MAX: usize = 8 << 10;

/// A listening metrics page; its thread ends when this does.
#[derive(Debug)]
pub struct Metrics {
    listener: Arc<TcpListener>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Metrics {
    /// Answers there what these loops have done.
    pub fn start(
        listener: TcpListener,
        counters: Vec<Arc<Counters>>,
        unwritten: Option<Arc<Counter>>,
    ) -> Result<Self, Error> {
        let failed = |source| Error::Failed { step: "asking for the metrics' address", source };
        let bound = listener.local_addr().map_err(failed)?;
        let listener = Arc::new(listener);
        let answering = Arc::clone(&listener);
        let thread = std::thread::Builder::new()
            .name("haul-metrics".into())
            .spawn(move || {
                for stream in answering.incoming() {
                    match stream {
                        // One asker who goes away in the middle is nobody's loss.
                        Ok(stream) => drop(answer(stream, &counters, unwritten.as_deref())),
                        Err(error) if error.kind() == io::ErrorKind::InvalidInput => break,
                        // No descriptors: perhaps there are some later.
                        Err(_) => std::thread::sleep(Duration::from_millis(100)),
                    }
                }
            })
            .map_err(|source| Error::Failed { step: "starting the metrics' thread", source })?;
        Ok(Self { listener, address: bound, thread: Some(thread) })
    }

    /// Where it answers.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        // Wakes the thread with EINVAL.
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Listens for those who ask.
pub fn listen(address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address)
        .map_err(|source| Error::Listen { address: Address::Tcp(address), source })
}

fn answer(
    mut stream: TcpStream,
    counters: &[Arc<Counters>],
    unwritten: Option<&Counter>,
) -> io::Result<()> {
    stream.set_read_timeout(Some(ASKER_TIMEOUT))?;
    stream.set_write_timeout(Some(ASKER_TIMEOUT))?;
    let mut head = Vec::new();
    let status = loop {
        match request::parse(&head, HEAD_BYTES_MAX) {
            Parsed::Whole(request, _) if request.target == "/metrics" => break "200 OK",
            Parsed::Whole(..) => break "404 Not Found",
            Parsed::Refused(_) => break "400 Bad Request",
            Parsed::Partial => {
                let mut buffer = [0; 1024];
                match stream.read(&mut buffer)? {
                    0 => return Ok(()),
                    count => head.extend_from_slice(&buffer[..count]),
                }
            }
        }
    };
    let body = if status == "200 OK" {
        text(counters, unwritten)
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

/// A metric that is one counter.
type Single = (&'static str, &'static str, &'static str, fn(&Counters) -> &Counter);

const SINGLES: [Single; 8] = [
    ("haul_connections_accepted_total", "counter", "Connections accepted.", |counters| {
        &counters.accepted
    }),
    ("haul_connections", "gauge", "Connections open now.", |counters| &counters.open),
    (
        "haul_connections_crowded_out_total",
        "counter",
        "Idle connections ended to make room for others.",
        |counters| &counters.crowded_out,
    ),
    (
        "haul_connections_timed_out_total",
        "counter",
        "Connections ended because their client was too slow.",
        |counters| &counters.timed_out,
    ),
    (
        "haul_responses_cut_short_total",
        "counter",
        "Responses ended because their file changed while it was sent.",
        |counters| &counters.cut_short,
    ),
    (
        "haul_fallbacks_total",
        "counter",
        "Send methods that the kernel refused and that were replaced by another.",
        |counters| &counters.fallbacks,
    ),
    ("haul_disk_waits_total", "counter", "Times that the disk was waited for.", |counters| {
        &counters.disk_waits
    }),
    (
        "haul_log_lines_dropped_total",
        "counter",
        "Lines of the access log dropped because they could not be written fast enough.",
        |counters| &counters.log_dropped,
    ),
];

/// A metric of each path.
type ByWay = (&'static str, &'static str, fn(&Counters, Way) -> f64);

fn text(loops: &[Arc<Counters>], unwritten: Option<&Counter>) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = write_text(&mut text, loops);
    if let Some(unwritten) = unwritten {
        let name = "haul_log_lines_unwritten_total";
        let help = "Lines of the access log that could not be written: no space, or nobody reads them any more.";
        let _ = write!(
            text,
            "# HELP {name} {help}\n# TYPE {name} counter\n{name} {}\n",
            unwritten.get()
        );
    }
    text
}

fn write_text(text: &mut String, loops: &[Arc<Counters>]) -> std::fmt::Result {
    let sum = |of: &dyn Fn(&Counters) -> u64| {
        loops.iter().map(|counters| of(counters)).fold(0, u64::wrapping_add)
    };
    let about = |text: &mut String, name: &str, kind: &str, help: &str| {
        writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}")
    };
    for (name, kind, help, of) in SINGLES {
        about(text, name, kind, help)?;
        writeln!(text, "{name} {}", sum(&|counters| of(counters).get()))?;
    }
    about(text, "haul_responses_total", "counter", "Responses by the class of their status.")?;
    for class in 0..5 {
        let count = sum(&|counters| counters.responses[class].get());
        writeln!(text, "haul_responses_total{{class=\"{}xx\"}} {count}", class + 1)?;
    }
    let ways: Vec<Way> =
        Way::all().filter(|&way| sum(&|counters| counters.by(way).bytes.get()) > 0).collect();
    let by_way: [ByWay; 3] = [
        (
            "haul_sent_bytes_total",
            "Bytes that sockets took, by the path they took.",
            |counters, way| counters.by(way).bytes.get() as f64,
        ),
        (
            "haul_timed_bytes_total",
            "Of those, the bytes whose sending was timed.",
            |counters, way| counters.by(way).timed_bytes.get() as f64,
        ),
        (
            "haul_timed_cpu_microseconds_total",
            "CPU time of the event loop for the timed bytes, interrupts not included.",
            |counters, way| counters.by(way).timed_ns.get() as f64 / 1000.0,
        ),
    ];
    for (name, help, of) in by_way {
        about(text, name, "counter", help)?;
        for &way in &ways {
            let total: f64 = loops.iter().map(|counters| of(counters, way)).sum();
            writeln!(text, "{name}{{path=\"{}\"}} {total}", way.name())?;
        }
    }
    about(
        text,
        "haul_cpu_us_per_mib",
        "gauge",
        "CPU time of the event loop for each MiB sent, since the start.",
    )?;
    for &way in &ways {
        let bytes = sum(&|counters| counters.by(way).timed_bytes.get()) as f64;
        let us = sum(&|counters| counters.by(way).timed_ns.get()) as f64 / 1000.0;
        if bytes > 0.0 {
            writeln!(
                text,
                "haul_cpu_us_per_mib{{path=\"{}\"}} {:.1}",
                way.name(),
                us / (bytes / 1_048_576.0)
            )?;
        }
    }
    let name = "haul_response_seconds";
    about(
        text,
        name,
        "histogram",
        "From a request's head to the last byte of its response with the kernel.",
    )?;
    let mut count = 0;
    for (class, end) in LATENCY_CLASSES_US.iter().enumerate() {
        count += sum(&|counters| counters.latencies[class].get());
        writeln!(text, "{name}_bucket{{le=\"{}\"}} {count}", *end as f64 / 1e6)?;
    }
    count += sum(&|counters| counters.latencies[LATENCY_CLASSES_US.len()].get());
    writeln!(text, "{name}_bucket{{le=\"+Inf\"}} {count}")?;
    writeln!(text, "{name}_sum {}", sum(&|counters| counters.latency_us.get()) as f64 / 1e6)?;
    writeln!(text, "{name}_count {count}")
}
