//! The PROXY protocol, versions 1 and 2: a proxy names the client before the first byte of a
//! connection.
//!
//! A header is only accepted from named networks ([`TrustedProxies`]), and is required from them.
//! From any other address the bytes belong to the message: otherwise a client could choose its own
//! address, and so escape limits and falsify logs.
//!
//! Additional fields (TLV) are skipped. Specification: doc/proxy-protocol.txt of HAProxy.

use crate::network::IpRange;
use proxy_header::{ParseConfig, ProxyHeader};
use rustix::net::RecvFlags;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

/// The longest header, in bytes. Version 1 has at most 107; of version 2, which allows 64 KiB of
/// additional fields, a certificate's fields need a few hundred.
const HEADER_BYTES_MAX: usize = 4096;

/// The networks whose connections begin with a header.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrustedProxies(Vec<IpRange>);

impl TrustedProxies {
    /// These networks.
    pub fn new(networks: impl IntoIterator<Item = IpRange>) -> Self {
        Self(networks.into_iter().collect())
    }

    /// Whether a connection from this address begins with a header.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(address))
    }
}

/// For whom a proxy has opened a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// For a client with this address.
    Client(SocketAddr),
    /// For itself, as for a health check, or for a client of another protocol.
    Proxy,
}

/// Takes the header off a socket, and no byte behind it. `None` if it has not arrived whole.
///
/// Never blocks. `InvalidData`: there is no header. `UnexpectedEof`: the connection has ended.
pub(crate) fn receive(socket: impl AsFd) -> io::Result<Option<Origin>> {
    let mut buffer = [0; HEADER_BYTES_MAX];
    let peeked = recv(&socket, &mut buffer, RecvFlags::PEEK);
    let count = match peeked {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        peeked => peeked?,
    };
    let Some((origin, header_bytes)) = parse(&buffer[..count])? else {
        return match count {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            HEADER_BYTES_MAX => Err(io::ErrorKind::InvalidData.into()),
            _ => Ok(None),
        };
    };
    // The bytes are there, so this takes all of them.
    let taken = recv(&socket, &mut buffer[..header_bytes], RecvFlags::empty())?;
    if taken == header_bytes { Ok(Some(origin)) } else { Err(io::ErrorKind::InvalidData.into()) }
}

fn recv(socket: impl AsFd, buffer: &mut [u8], flags: RecvFlags) -> io::Result<usize> {
    let flags = flags | RecvFlags::DONTWAIT;
    let received = rustix::io::retry_on_intr(|| rustix::net::recv(&socket, &mut *buffer, flags));
    Ok(received?.1)
}

/// The content and the length of the header at the start of these bytes; `None` if it is not
/// complete. `InvalidData` if it is no header.
pub fn parse(bytes: &[u8]) -> io::Result<Option<(Origin, usize)>> {
    match ProxyHeader::parse(bytes, ParseConfig::default()) {
        Ok((header, len)) => {
            let client = header.proxied_address().map(|address| Origin::Client(address.source));
            Ok(Some((client.unwrap_or(Origin::Proxy), len)))
        }
        Err(proxy_header::Error::BufferTooShort) if is_beginning(bytes) => Ok(None),
        Err(_) => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Whether a header may begin with these bytes.
fn is_beginning(bytes: &[u8]) -> bool {
    let signatures: [&[u8]; 2] = [b"PROXY ", b"\r\n\r\n\0\r\nQUIT\n"];
    signatures.iter().any(|signature| {
        let len = signature.len().min(bytes.len());
        signature[..len] == bytes[..len]
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    const CLIENT: &str = "192.0.2.7:51234";

    /// A header of version 2 with an additional field of so many bytes.
    fn version_2(field_bytes: u16) -> Vec<u8> {
        let mut header = b"\r\n\r\n\0\r\nQUIT\n\x21\x11".to_vec();
        header.extend((12 + 3 + field_bytes).to_be_bytes());
        header.extend([192, 0, 2, 7, 10, 0, 0, 1]);
        header.extend(51234u16.to_be_bytes());
        header.extend(443u16.to_be_bytes());
        header.push(4);
        header.extend(field_bytes.to_be_bytes());
        header.extend(vec![0; field_bytes.into()]);
        header
    }

    fn headers() -> Vec<(Vec<u8>, Origin)> {
        let client = Origin::Client(CLIENT.parse().unwrap());
        let local = b"\r\n\r\n\0\r\nQUIT\n\x20\x00\0\0".to_vec();
        vec![
            (b"PROXY TCP4 192.0.2.7 10.0.0.1 51234 443\r\n".to_vec(), client),
            (
                b"PROXY TCP6 2001:db8::1 2001:db8::2 1 2\r\n".to_vec(),
                Origin::Client("[2001:db8::1]:1".parse().unwrap()),
            ),
            (b"PROXY UNKNOWN ffff:: 1 2 3\r\n".to_vec(), Origin::Proxy),
            (version_2(0), client),
            (version_2(3000), client),
            (local, Origin::Proxy),
        ]
    }

    #[test]
    fn a_header_is_taken_off_whole_and_nothing_behind_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        for (header, origin) in headers() {
            let mut from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (mut to, _) = listener.accept().unwrap();
            let (first, rest) = header.split_at(header.len() / 2);
            assert!(receive(&to).unwrap().is_none());
            from.write_all(first).unwrap();
            assert_eq!(to.peek(&mut [0]).unwrap(), 1);
            assert!(receive(&to).unwrap().is_none(), "half a header");
            from.write_all(&[rest, b"GET"].concat()).unwrap();
            let found = loop {
                if let Some(found) = receive(&to).unwrap() {
                    break found;
                }
            };
            assert_eq!(found, origin);
            let mut message = [0; 3];
            to.read_exact(&mut message).unwrap();
            assert_eq!(&message, b"GET");
        }
    }

    #[test]
    fn other_bytes_and_too_long_headers_are_refused_and_an_end_is_reported() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let too_long = version_2(5000);
        for (bytes, kind) in [
            (&b"GET / HTTP/1.1\r\n"[..], io::ErrorKind::InvalidData),
            (b"PROXX", io::ErrorKind::InvalidData),
            (b"PROXY TCP4 1.2.3.4 x 1 2\r\n", io::ErrorKind::InvalidData),
            (&too_long, io::ErrorKind::InvalidData),
            (b"", io::ErrorKind::UnexpectedEof),
        ] {
            let mut from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (to, _) = listener.accept().unwrap();
            from.write_all(bytes).unwrap();
            drop(from);
            let error = loop {
                match receive(&to) {
                    Ok(None) => {}
                    Ok(found) => panic!("{found:?}"),
                    Err(error) => break error,
                }
            };
            assert_eq!(error.kind(), kind, "{bytes:?}");
        }
    }

    #[test]
    fn only_named_networks_are_trusted() {
        let networks = ["10.0.0.0/8", "2001:db8::/32"].map(|network| network.parse().unwrap());
        let proxies = TrustedProxies::new(networks);
        for (address, is_trusted) in [
            ("10.1.2.3", true),
            ("::ffff:10.1.2.3", true),
            ("11.1.2.3", false),
            ("2001:db8:1::9", true),
            ("2001:db9::9", false),
        ] {
            assert_eq!(proxies.contains(address.parse().unwrap()), is_trusted, "{address}");
        }
        assert!(!TrustedProxies::default().contains("127.0.0.1".parse().unwrap()));
    }

    proptest! {
        /// No bytes make it panic, and a header's end does not depend on what follows.
        #[test]
        fn the_end_of_a_header_is_its_own(
            which in 0usize..6,
            changes in proptest::collection::vec(
                (any::<proptest::sample::Index>(), any::<u8>()), 0..3),
            behind in proptest::collection::vec(any::<u8>(), 0..20),
        ) {
            let (mut bytes, _) = headers().swap_remove(which);
            for (index, byte) in changes {
                let at = index.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.extend(behind);
            if let Ok(Some((origin, len))) = parse(&bytes) {
                prop_assert!(len <= bytes.len());
                prop_assert_eq!(parse(&bytes[..len]).unwrap(), Some((origin, len)));
                for shorter in 0..len {
                    prop_assert!(!matches!(parse(&bytes[..shorter]), Ok(Some(_))));
                }
            }
        }
    }
}
