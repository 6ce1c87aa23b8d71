//! A client's first bytes: the TLS greeting (ClientHello), by which a connection is routed without
//! being decrypted.
//!
//! The bytes are kept, and go to the upstream unchanged. A greeting may arrive in any number of
//! segments and TLS records. The heads of the record and of the message decide whether the bytes
//! are a greeting. The upstream ends the TLS session, so the upstream judges version and ciphers.
//! What follows the heads can only add a server name and application protocols (RFC 6066 section 3,
//! RFC 7301 section 3.1).

use rustix::io::{Errno, retry_on_intr};
use rustix::net::RecvFlags;
use std::fmt;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;

/// The first byte of a TLS connection: a record with a handshake message (RFC 8446 section 5.1).
const HANDSHAKE_RECORD: u8 = 22;
/// The first byte of the version of every record since SSL 3.0.
const VERSION_MAJOR: u8 = 3;
const RECORD_HEAD_BYTES: usize = 5;
/// The largest content of a record (RFC 8446 section 5.1).
const RECORD_BYTES_MAX: usize = 1 << 14;
/// The type of the greeting among the handshake messages (RFC 8446 section 4).
const CLIENT_HELLO: u8 = 1;
const MESSAGE_HEAD_BYTES: usize = 4;
/// The longest greeting. Post-quantum keys make one of 2 KiB.
const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// The most bytes that a greeting has together with the heads of its records.
const RECEIVED_BYTES_MAX: usize = 128 << 10;
const SERVER_NAME: u16 = 0;
const HOST_NAME: u8 = 0;
const APPLICATION_PROTOCOLS: u16 = 16;
/// Bytes that one call receives; a usual greeting has 500 to 2,000.
const CALL_BYTES: usize = 4096;

/// The meaning of a client's first bytes.
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
#[derive(Default)]
pub struct GreetingReader {
    received: Vec<u8>,
    /// The number of received bytes that were examined.
    examined: usize,
    /// The bytes that are missing of the record being examined.
    left_in_record: usize,
    /// The head of the message, as far as it was examined.
    message_head: [u8; MESSAGE_HEAD_BYTES],
    /// The number of the message's bytes that were examined.
    message_bytes: usize,
}

impl fmt::Debug for GreetingReader {
    /// Prints the number of bytes, never their content.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "GreetingReader({} bytes)", self.received.len())
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
                // The client ended its stream, and may still wait for a response.
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
        loop {
            if self.left_in_record == 0 {
                match RecordHead::at(&self.received[self.examined..]) {
                    RecordHead::Incomplete => return None,
                    RecordHead::Handshake(len) if self.examined < RECEIVED_BYTES_MAX => {
                        self.left_in_record = len;
                        self.examined += RECORD_HEAD_BYTES;
                    }
                    RecordHead::Handshake(_) | RecordHead::Other => return Some(Greeting::Other),
                }
            }
            let content = &self.received[self.examined..];
            let content = &content[..content.len().min(self.left_in_record)];
            if content.is_empty() && self.left_in_record > 0 {
                return None;
            }
            let missing = self.message_head.iter_mut().skip(self.message_bytes);
            missing.zip(content).for_each(|(head, byte)| *head = *byte);
            self.examined += content.len();
            self.left_in_record -= content.len();
            self.message_bytes += content.len();
            if let Some(greeting) = self.judge() {
                return Some(greeting);
            }
        }
    }

    /// The meaning of the examined bytes; `None` if more bytes are needed.
    fn judge(&self) -> Option<Greeting> {
        let [kind, length @ ..] = self.message_head;
        if self.message_bytes > 0 && kind != CLIENT_HELLO {
            return Some(Greeting::Other);
        }
        if self.message_bytes < MESSAGE_HEAD_BYTES {
            return None;
        }
        let length = length.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
        if length > MESSAGE_BYTES_MAX {
            return Some(Greeting::Other);
        }
        let end = MESSAGE_HEAD_BYTES + length;
        if self.message_bytes < end {
            return None;
        }
        let message = self.message();
        let extensions = extensions(&message[MESSAGE_HEAD_BYTES..end]).unwrap_or_default();
        let find = |wanted| extensions.iter().find(|(kind, _)| *kind == wanted);
        Some(Greeting::Tls {
            server_name: find(SERVER_NAME).and_then(|(_, content)| server_name(content)),
            protocols: find(APPLICATION_PROTOCOLS)
                .and_then(|(_, content)| protocols(content))
                .unwrap_or_default(),
        })
    }

    /// The contents of the examined records, whose heads were found valid.
    fn message(&self) -> Vec<u8> {
        let mut message = Vec::with_capacity(self.message_bytes);
        let mut rest = &self.received[..self.examined];
        while let RecordHead::Handshake(len) = RecordHead::at(rest) {
            let content = &rest[RECORD_HEAD_BYTES..];
            let (content, behind) = content.split_at(len.min(content.len()));
            message.extend_from_slice(content);
            rest = behind;
        }
        message
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

/// The head of a record.
enum RecordHead {
    /// The head is incomplete, and the received bytes are valid.
    Incomplete,
    /// The record has so many bytes of handshake messages.
    Handshake(usize),
    /// Another type of record, or bytes that are not the head of a record.
    Other,
}

impl RecordHead {
    fn at(bytes: &[u8]) -> Self {
        let valid = [HANDSHAKE_RECORD, VERSION_MAJOR];
        if bytes.iter().zip(valid).any(|(byte, valid)| *byte != valid) {
            return Self::Other;
        }
        match bytes {
            [_, _, _, high, low, ..] => {
                let len = usize::from(u16::from_be_bytes([*high, *low]));
                if len <= RECORD_BYTES_MAX { Self::Handshake(len) } else { Self::Other }
            }
            _ => Self::Incomplete,
        }
    }
}

/// The extensions of a greeting, each with its type. `None` if the greeting ends early, as a
/// greeting without extensions does.
fn extensions(greeting: &[u8]) -> Option<Vec<(u16, &[u8])>> {
    let mut rest = greeting;
    // The version and the random bytes.
    take(&mut rest, 2 + 32)?;
    // The session, the ciphers and the compressions.
    take_vector(&mut rest, 1)?;
    take_vector(&mut rest, 2)?;
    take_vector(&mut rest, 1)?;
    let mut list = take_vector(&mut rest, 2)?;
    let mut extensions = Vec::new();
    while let Some(kind) = take(&mut list, 2) {
        let Some(content) = take_vector(&mut list, 2) else { break };
        extensions.push((u16::from_be_bytes([kind[0], kind[1]]), content));
    }
    Some(extensions)
}

/// The host name in the extension `server_name`. An address is not a host name.
fn server_name(mut extension: &[u8]) -> Option<String> {
    let mut list = take_vector(&mut extension, 2)?;
    while let Some(kind) = take(&mut list, 1) {
        let name = take_vector(&mut list, 2)?;
        if kind == [HOST_NAME] {
            let name = std::str::from_utf8(name).ok()?.to_ascii_lowercase();
            let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            let is_name = !name.is_empty() && name.bytes().all(is_part);
            return (is_name && name.parse::<Ipv4Addr>().is_err()).then_some(name);
        }
    }
    None
}

/// The names in the extension `application_layer_protocol_negotiation`.
fn protocols(mut extension: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut list = take_vector(&mut extension, 2)?;
    let mut names = Vec::new();
    while let Some(name) = take_vector(&mut list, 1) {
        names.push(name.to_vec());
    }
    Some(names)
}

/// Takes bytes off the front; `None` if there are fewer.
fn take<'b>(bytes: &mut &'b [u8], count: usize) -> Option<&'b [u8]> {
    let (taken, rest) = bytes.split_at_checked(count)?;
    *bytes = rest;
    Some(taken)
}

/// Takes a vector off the front: its length in so many bytes, and its content.
fn take_vector<'b>(bytes: &mut &'b [u8], length_bytes: usize) -> Option<&'b [u8]> {
    let length = take(bytes, length_bytes)?;
    take(bytes, length.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)))
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

    /// A greeting of TLS 1.0 as OpenSSL 0.9.8 writes it: without signature algorithms. `rest`
    /// follows the ciphers and compressions.
    fn old_hello(rest: &[u8]) -> Vec<u8> {
        let mut message = vec![3, 1];
        message.extend([7; 32]);
        message.extend([0, 0, 2, 0, 0x2f, 1, 0]);
        message.extend(rest);
        let length = (message.len() as u32).to_be_bytes();
        let message = [&[CLIENT_HELLO], &length[1..], &message[..]].concat();
        let length = (message.len() as u16).to_be_bytes();
        [&[HANDSHAKE_RECORD, 3, 1], &length[..], &message].concat()
    }

    #[test]
    fn a_greeting_that_a_tls_library_would_refuse_has_its_name() {
        let name = b"\0\x10\0\0\0\x0c\0\x0a\0\0\x07Old.Net";
        let tls = |server_name: Option<&str>| {
            Some(Greeting::Tls { server_name: server_name.map(Into::into), protocols: Vec::new() })
        };
        assert_eq!(parse(&old_hello(name)), tls(Some("old.net")));
        // No extensions; extensions that end early; an address in place of a name.
        let address = b"\0\x10\0\0\0\x0c\0\x0a\0\0\x071.2.3.4";
        for rest in [&b""[..], b"\0\x10\0\0\0\xff", b"\xff", address] {
            assert_eq!(parse(&old_hello(rest)), tls(None), "{rest:?}");
        }
        // The message itself is cut: two of the random bytes are all.
        let cut = [22, 3, 1, 0, 8, 1, 0, 0, 4, 3, 1, 7, 7];
        assert_eq!(parse(&cut), tls(None));
    }

    #[test]
    fn other_bytes_are_no_greeting() {
        let server_hello = &[22, 3, 1, 0, 4, 2, 0, 0, 0][..];
        let too_large = &[22, 3, 1, 0, 4, 1, 2, 0, 0][..];
        let another_record = &[22, 3, 1, 0, 4, 1, 0, 0, 9, 21, 3, 1, 0, 2, 1, 0][..];
        let texts = [&b"SSH-2.0-x\r\n"[..], b"GET / HTTP/1.1\r\n"];
        for bytes in texts.into_iter().chain([server_hello, too_large, another_record, &[0]]) {
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
