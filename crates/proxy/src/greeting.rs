//! A client's first bytes: the TLS greeting (ClientHello), by which a connection is routed without
//! being decrypted.
//!
//! The bytes are kept, and go to the upstream unchanged. A greeting may arrive in any number of
//! segments and TLS records, up to 64 KiB, the parser's limit.

use rustix::io::{Errno, retry_on_intr};
use rustix::net::RecvFlags;
use rustls::server::Acceptor;
use std::fmt;
use std::io;
use std::os::fd::AsFd;

/// The first byte of a TLS connection: a record with a handshake message.
const HANDSHAKE_RECORD: u8 = 22;
/// Bytes that one call receives; a usual greeting has 500 to 2,000.
const CALL_BYTES: usize = 4096;

/// What the first bytes of a client are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Greeting {
    /// A TLS greeting.
    Tls {
        /// The server's name, in lower case, if the client states one (SNI).
        server_name: Option<String>,
        /// The application protocols that the client offers (ALPN).
        protocols: Vec<Vec<u8>>,
    },
    /// Anything else, or nothing within the time limit: the server may speak first.
    #[default]
    Other,
}

/// Receives a greeting.
pub struct GreetingReader {
    acceptor: Acceptor,
    received: Vec<u8>,
}

impl fmt::Debug for GreetingReader {
    /// Prints the number of bytes, never their content.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "GreetingReader({} bytes)", self.received.len())
    }
}

impl Default for GreetingReader {
    /// A reader that has received nothing.
    fn default() -> Self {
        Self { acceptor: Acceptor::default(), received: Vec::new() }
    }
}

impl GreetingReader {
    /// Receives what has arrived; `None` if the greeting is not complete. Never blocks.
    pub fn receive(&mut self, socket: impl AsFd) -> io::Result<Option<Greeting>> {
        let mut buffer = [0; CALL_BYTES];
        loop {
            let received =
                retry_on_intr(|| rustix::net::recv(&socket, &mut buffer[..], RecvFlags::DONTWAIT));
            match received {
                // The client has ended its stream, and may still wait for a response.
                Ok((_, 0)) => return Ok(Some(Greeting::Other)),
                Ok((_, count)) => {
                    if let Some(greeting) = self.push(&buffer[..count]) {
                        return Ok(Some(greeting));
                    }
                }
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Takes the next bytes; `None` if the greeting is not complete.
    pub fn push(&mut self, bytes: &[u8]) -> Option<Greeting> {
        self.received.extend_from_slice(bytes);
        if self.received.first().is_some_and(|&first| first != HANDSHAKE_RECORD) {
            return Some(Greeting::Other);
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            // It takes some bytes at least, until it has a whole message or an error.
            if !matches!(self.acceptor.read_tls(&mut rest), Ok(1..)) {
                return Some(Greeting::Other);
            }
            match self.acceptor.accept() {
                Ok(None) => {}
                Ok(Some(accepted)) => {
                    let hello = accepted.client_hello();
                    let protocols = hello.alpn().into_iter().flatten().map(Into::into).collect();
                    let server_name = hello.server_name().map(str::to_ascii_lowercase);
                    return Some(Greeting::Tls { server_name, protocols });
                }
                Err(_) => return Some(Greeting::Other),
            }
        }
        None
    }

    /// The bytes that were received.
    pub fn into_received(self) -> Vec<u8> {
        self.received
    }
}

/// The greeting at the start of these bytes; `None` if they are not all of it.
pub fn parse(bytes: &[u8]) -> Option<Greeting> {
    GreetingReader::default().push(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rustls::pki_types::ServerName;
    use rustls::{ClientConfig, ClientConnection, RootCertStore};
    use std::sync::Arc;

    /// The greeting of a TLS client with this many application protocols.
    fn hello(protocols: usize) -> Vec<u8> {
        let mut config = ClientConfig::builder()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        config.alpn_protocols = (0..protocols).map(|at| format!("proto-{at}").into()).collect();
        let name = ServerName::try_from("DB.example.com").unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        bytes
    }

    /// The same message in records of so many bytes.
    fn in_records(hello: &[u8], record_bytes: usize) -> Vec<u8> {
        let message = records(hello).concat();
        let record = |piece: &[u8]| {
            let mut record = hello[..3].to_vec();
            record.extend((piece.len() as u16).to_be_bytes());
            record.extend_from_slice(piece);
            record
        };
        message.chunks(record_bytes).flat_map(record).collect()
    }

    /// The contents of the records.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut contents = Vec::new();
        while let [_, _, _, high, low, rest @ ..] = bytes {
            let (content, behind) = rest.split_at(usize::from(u16::from_be_bytes([*high, *low])));
            contents.push(content.to_vec());
            bytes = behind;
        }
        contents
    }

    fn expected(protocols: usize) -> Greeting {
        Greeting::Tls {
            server_name: Some("db.example.com".into()),
            protocols: (0..protocols).map(|at| format!("proto-{at}").into()).collect(),
        }
    }

    #[test]
    fn a_greeting_is_found_however_it_is_cut() {
        // The second one is larger than a TLS record.
        for protocols in [2, 3000] {
            let hello = hello(protocols);
            assert!(protocols == 2 || hello.len() > 24 << 10);
            let bytewise = in_records(&hello, 1);
            for bytes in [hello.clone(), in_records(&hello, 100), in_records(&hello, 16 << 10)]
                .into_iter()
                .chain((protocols == 2).then_some(bytewise))
            {
                assert_eq!(parse(&bytes), Some(expected(protocols)));
                assert_eq!(parse(&bytes[..bytes.len() - 1]), None);
                let mut reader = GreetingReader::default();
                let (last, first) = bytes.split_last().unwrap();
                assert!(first.chunks(7).all(|piece| reader.push(piece).is_none()));
                assert_eq!(reader.push(&[*last]), Some(expected(protocols)));
                assert_eq!(reader.into_received(), bytes);
            }
        }
    }

    #[test]
    fn other_bytes_are_no_greeting() {
        let server_hello = &[22, 3, 1, 0, 4, 2, 0, 0, 0][..];
        let too_large = &[22, 3, 1, 0, 4, 1, 2, 0, 0][..];
        for bytes in [&b"SSH-2.0-x\r\n"[..], b"GET / HTTP/1.1\r\n", server_hello, too_large, &[0]] {
            assert_eq!(parse(bytes), Some(Greeting::Other), "{bytes:?}");
        }
        assert_eq!(parse(&[22, 3]), None);
    }

    proptest! {
        /// No bytes make it panic, and a decision does not depend on what follows.
        #[test]
        fn what_follows_changes_nothing(
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = hello(2);
            for (index, byte) in changes {
                let at = index.index(bytes.len());
                bytes[at] = byte;
            }
            let cut = cut.index(bytes.len());
            if let Some(greeting) = parse(&bytes[..cut]) {
                prop_assert_eq!(parse(&bytes), Some(greeting));
            }
        }
    }
}
