//! An echo service: TLS, metrics, a sandbox, draining. `cargo run -p haul-server --example echo`

use haul_server::admission::eviction::Activity;
use haul_server::event_loop::{Action, Context, Handler, Handover, Interest, LoopSettings, Side};
use haul_server::listener::{Accepted, ListenAddress, ListenSettings};
use haul_server::{ConnectionCounters, Sent, ktls::KtlsSupport, metrics, offload::NoJob};
use haul_server::{runtime::Service, sandbox, stream::Stream, tls::TlsSettings};
use std::io::{self, ErrorKind, Read};
use std::sync::Arc;

struct Echo(Arc<ConnectionCounters>, Arc<rustls::ServerConfig>);

impl Handler for Echo {
    type Connection = (Stream, Vec<u8>); // With the bytes to echo.
    type Job = NoJob;
    fn counters(&self) -> &ConnectionCounters {
        &self.0
    }
    fn accept(&mut self, new: Accepted, context: &Context<'_>) -> io::Result<(Stream, Vec<u8>)> {
        let (tls, settings) = (Some(&self.1), Arc::default());
        let stream = Stream::accept(new.socket, tls, KtlsSupport::default(), &settings)?;
        context.register(&stream, Side::Client, Interest::BOTH)?;
        Ok((stream, Vec::with_capacity(16 << 10)))
    }
    fn drive(&mut self, echo: &mut (Stream, Vec<u8>), context: &Context<'_>) -> Action<NoJob> {
        let (stream, bytes) = echo;
        let wait = Action::WaitUntil(context.deadline(60));
        loop {
            match stream.send_buffer(bytes) {
                Sent::Bytes(_) => {}
                Sent::Blocked => return wait,
                Sent::Ended | Sent::Broken => return Action::Close,
            }
            match stream.receive(bytes).map_err(|error| error.kind()) {
                Ok(1..) => {}
                Err(ErrorKind::WouldBlock) if !context.is_draining() => return wait,
                Err(ErrorKind::Interrupted) => return Action::Yield,
                _ if stream.send_close_notify() == Sent::Blocked => return wait,
                Ok(_) | Err(_) => return Action::Close,
            }
        }
    }
    fn activity(&self, (stream, bytes): &(Stream, Vec<u8>)) -> Activity {
        let is_idle = bytes.is_empty() && !stream.is_handshaking();
        if is_idle { Activity::Idle } else { Activity::Working }
    }
}

impl Handover for Echo {}

/// Serves with certificate.pem and key.pem of the folder until standard input ends and all is
/// drained.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let tls = TlsSettings::new("certificate.pem", "key.pem").load()?;
    let listen = ListenAddress { address: "127.0.0.1:0".parse()?, is_tls: true };
    let service =
        Service::open("echo", &ListenSettings::new([listen]), Some("127.0.0.1:0".parse()?), 1)?;
    println!("{} {}", service.addresses()[0].address, service.metrics_address().unwrap());
    // No files and no new connections from here on.
    sandbox::restrict(&[], sandbox::PortRights::default())?;
    let control = service.control();
    std::thread::spawn(move || (io::stdin().read_to_end(&mut Vec::new()), control.drain()));
    let (counters, mut metrics) = (Arc::default(), metrics::Registry::default());
    metrics.register_connections(vec![Arc::clone(&counters)]);
    let echo = [Echo(counters, tls)];
    Ok(service.run(&[], &LoopSettings::default(), metrics, echo)?)
}
