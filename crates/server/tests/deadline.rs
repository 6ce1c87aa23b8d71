//! Deadlines of connections in an event loop.

use haul_server::admission::eviction::Activity;
use haul_server::event_loop::{Action, Context, Handler, Handover, Interest, LoopSettings, Side};
use haul_server::ktls::KtlsSupport;
use haul_server::listener::{Accepted, ListenAddress, ListenSettings};
use haul_server::offload::NoJob;
use haul_server::runtime::Service;
use haul_server::stream::Stream;
use haul_server::{ConnectionCounters, metrics};
use std::io::{self, Read};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Waits for each connection for two seconds, and closes it then.
#[derive(Default)]
struct Waiting(ConnectionCounters);

impl Handler for Waiting {
    type Connection = Stream;
    type Job = NoJob;

    fn counters(&self) -> &ConnectionCounters {
        &self.0
    }

    fn accept(&mut self, accepted: Accepted, context: &Context<'_>) -> io::Result<Stream> {
        let ktls = KtlsSupport::default();
        let stream = Stream::accept(accepted.socket, None, ktls, &Arc::default())?;
        context.register(&stream, Side::Client, Interest::BOTH)?;
        Ok(stream)
    }

    fn drive(&mut self, _: &mut Stream, context: &Context<'_>) -> Action<NoJob> {
        if context.is_draining() { Action::Close } else { Action::WaitUntil(context.deadline(2)) }
    }

    fn activity(&self, _: &Stream) -> Activity {
        Activity::Idle
    }
}

impl Handover for Waiting {}

#[test]
fn a_connection_is_closed_after_its_deadline_and_not_before() {
    let listen = ListenAddress { address: "127.0.0.1:0".parse().unwrap(), is_tls: false };
    let service = Service::open("waiting", &ListenSettings::new([listen]), None, 1).unwrap();
    let address = service.addresses()[0].address.to_string();
    let control = service.control();
    let registry = metrics::Registry::default();
    let running = thread::spawn(move || {
        service.run(&[], &LoopSettings::default(), registry, [Waiting::default()])
    });
    let mut client = TcpStream::connect(address).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let started = Instant::now();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    assert!(started.elapsed() >= Duration::from_secs(2));
    control.drain();
    running.join().unwrap().unwrap();
}
