//! An echo service over TLS, with metrics and a sandbox. It drains when its standard input ends.

use haul_server::event_loop::{Action, Handler, LoopSettings, Registry, Side};
use haul_server::listener::{Accepted, ListenAddress};
use haul_server::{ConnectionCounters, Sent, clock::Clock, ktls::KtlsSupport, metrics};
use haul_server::{resolve::Resolve, runtime, sandbox, secrets::read_secret, stream::Stream, tls};
use std::io::{self, ErrorKind, IoSlice, Read};
use std::sync::Arc;

struct Echo(Clock, Arc<ConnectionCounters>, Arc<rustls::ServerConfig>, bool);

impl Handler for Echo {
    type Connection = (Stream, Vec<u8>); // With the bytes to echo.
    type Job = Resolve; // Not used: nothing blocks.

    fn begin_turn(&mut self) -> u32 {
        self.0.tick();
        self.0.seconds()
    }
    fn counters(&self) -> &ConnectionCounters {
        &self.1
    }
    fn accept(&mut self, new: Accepted, registry: &Registry<'_>) -> io::Result<(Stream, Vec<u8>)> {
        let (tls, settings) = (Some(&self.2), Arc::default());
        let stream = Stream::accept(new.socket, tls, KtlsSupport::default(), &settings)?;
        registry.add(&stream, Side::Client)?;
        Ok((stream, Vec::with_capacity(16 << 10)))
    }
    fn drive(&mut self, echo: &mut (Stream, Vec<u8>), _: &Registry<'_>) -> Action<Resolve> {
        let (stream, bytes) = echo;
        let wait = Action::WaitUntil(self.0.seconds() + 60);
        loop {
            match stream.send(&[IoSlice::new(bytes)], false) {
                Sent::Bytes(count) => drop(bytes.drain(..count as usize)),
                Sent::Blocked if !bytes.is_empty() => return wait,
                Sent::Blocked => {}
                Sent::Ended | Sent::Broken => return Action::Close,
            }
            match stream.receive(bytes) {
                Ok(count) if count > 0 => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock && !self.3 => return wait,
                Ok(_) | Err(_) => return Action::Close,
            }
        }
    }
    fn begin_drain(&mut self) {
        self.3 = true;
    }
    fn is_idle(&self, (stream, bytes): &(Stream, Vec<u8>)) -> bool {
        bytes.is_empty() && !stream.is_handshaking()
    }
}

/// Starts the service and runs it until it has drained.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (certificate, key) = ("certificate.pem".into(), "key.pem".into());
    let tls = tls::TlsSettings { certificate, key, in_kernel: false, alpn: Vec::new() };
    let tls = tls::configure(&tls, &read_secret(&tls.certificate)?, &read_secret(&tls.key)?)?;
    let listen = ListenAddress { address: "127.0.0.1:0".parse()?, is_tls: true };
    let service = runtime::Service::open("echo", &[listen], Some("127.0.0.1:0".parse()?), 1)?;
    println!("{} {}", service.addresses()[0].address, service.metrics_address().unwrap());
    sandbox::restrict(&[])?; // No files and no new connections from here on.
    let (control, counters) = (service.control(), Arc::<ConnectionCounters>::default());
    std::thread::spawn(move || (io::stdin().read_to_end(&mut Vec::new()), control.drain()));
    let (mut registry, counted) = (metrics::Registry::default(), Arc::clone(&counters));
    registry.register(move |text: &mut metrics::Exposition| {
        text.connections(&[&counted]);
    });
    let echo = |_| Echo(Clock::new(), Arc::clone(&counters), Arc::clone(&tls), false);
    Ok(service.run(&[], LoopSettings::default(), registry, echo)?)
}
