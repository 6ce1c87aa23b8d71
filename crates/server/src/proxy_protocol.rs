//! The PROXY protocol, versions 1 and 2: a proxy names the client before the first byte of a
//! connection.
//!
//! A header is only accepted from named networks ([`TrustedProxies`]), and is required from them.
//! From any other address the bytes belong to the message. Otherwise a client could choose its
//! address, and so escape limits and falsify logs.
//!
//! Specification: doc/proxy-protocol.txt of HAProxy.

use crate::ip_range::IpRange;
use crc_fast::{CrcAlgorithm, Digest};
use proxy_header::{ParseConfig, ProxyHeader};
use rustix::net::RecvFlags;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::AsFd;
use std::str::FromStr;

/// The longest header, in bytes. Of version 2, which allows 64 KiB of additional fields, a
/// certificate's fields need a few hundred.
const HEADER_BYTES_MAX: usize = 4096;
/// The longest header of version 1, in bytes, with its line end (specification, section 2.1).
const LINE_BYTES_MAX: usize = 107;

/// The first bytes of a header of version 1.
const SIGNATURE_1: &[u8] = b"PROXY ";

/// The first bytes of a header of version 2.
const SIGNATURE_2: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

/// The networks whose connections begin with a header.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrustedProxies(Vec<TrustedProxy>);

/// Proxies whose connections begin with a header. As text: a network, or `unix`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrustedProxy {
    /// The proxies of a network.
    Network(IpRange),
    /// All clients of Unix sockets.
    Unix,
}

impl TrustedProxies {
    /// Trusts these proxies.
    pub fn new(proxies: impl IntoIterator<Item = TrustedProxy>) -> Self {
        Self(proxies.into_iter().collect())
    }

    /// Whether a connection from this address begins with a header; `None` for a Unix socket.
    pub fn contains(&self, peer: Option<IpAddr>) -> bool {
        self.0.iter().any(|proxy| match (proxy, peer) {
            (TrustedProxy::Network(network), Some(address)) => network.contains(address),
            (TrustedProxy::Unix, None) => true,
            _ => false,
        })
    }
}

impl FromStr for TrustedProxy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "unix" { Ok(Self::Unix) } else { text.parse().map(Self::Network) }
    }
}

/// For whom a proxy opened a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// For a client with this address.
    Client(SocketAddr),
    /// For the proxy itself, as for a health check, or for a client of another protocol.
    Proxy,
}

/// The content of a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// For whom the proxy opened the connection.
    pub origin: Origin,
    /// The address that the client connected to; `None` without a client.
    pub destination: Option<SocketAddr>,
    /// The additional fields, which only version 2 has.
    pub fields: Fields,
}

/// Additional fields (TLV) of a header of version 2, as they are sent: for each a byte with its
/// type, two with the length of its value, and the value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fields(Vec<u8>);

/// The type of an additional field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FieldType(pub u8);

impl FieldType {
    /// The application protocol (`PP2_TYPE_ALPN`): a list as in the TLS extension (RFC 7301), or a
    /// protocol's name.
    pub const ALPN: Self = Self(0x01);
    /// The name of the server that the client asked for (`PP2_TYPE_AUTHORITY`).
    pub const AUTHORITY: Self = Self(0x02);
    /// The CRC-32C of the whole header, computed with zeros in its place (`PP2_TYPE_CRC32C`).
    pub const CRC32C: Self = Self(0x03);
    /// Padding (`PP2_TYPE_NOOP`).
    pub const NOOP: Self = Self(0x04);
    /// The connection's number, of at most 128 bytes (`PP2_TYPE_UNIQUE_ID`).
    pub const UNIQUE_ID: Self = Self(0x05);
}

impl Fields {
    /// The fields, in the order of the header.
    pub fn iter(&self) -> impl Iterator<Item = (FieldType, &[u8])> {
        // The fields were checked when they were received, or added one by one.
        let mut rest = &self.0[..];
        std::iter::from_fn(move || {
            let (kind, value, behind) = split_field(rest)?;
            rest = behind;
            Some((kind, value))
        })
    }

    /// The value of the first field of a type.
    pub fn get(&self, wanted: FieldType) -> Option<&[u8]> {
        self.iter().find_map(|(kind, value)| (kind == wanted).then_some(value))
    }

    /// Adds a field. Leaves the field out and returns false if its value or all fields together
    /// exceed 64 KiB.
    pub fn push(&mut self, kind: FieldType, value: &[u8]) -> bool {
        let Ok(len) = u16::try_from(value.len()) else { return false };
        let fits = self.0.len() + FIELD_HEAD_BYTES + value.len() <= FIELDS_BYTES_MAX;
        if fits {
            self.0.push(kind.0);
            self.0.extend(len.to_be_bytes());
            self.0.extend(value);
        }
        fits
    }

    /// The fields as they are sent.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The fields in these bytes. `InvalidData` if one of them is not complete.
    pub fn parse(bytes: &[u8]) -> io::Result<Self> {
        let mut rest = bytes;
        while !rest.is_empty() {
            rest = split_field(rest).ok_or(io::ErrorKind::InvalidData)?.2;
        }
        Ok(Self(bytes.to_vec()))
    }
}

/// Type and length of a field.
const FIELD_HEAD_BYTES: usize = 3;
/// The length of a header behind its 16 fixed bytes has two bytes, and IPv6 addresses need 36.
const FIELDS_BYTES_MAX: usize = u16::MAX as usize - 36;

/// The first field and the bytes after it; `None` without a complete field.
fn split_field(bytes: &[u8]) -> Option<(FieldType, &[u8], &[u8])> {
    let (&[kind, high, low], rest) = bytes.split_first_chunk::<FIELD_HEAD_BYTES>()?;
    let (value, rest) = rest.split_at_checked(u16::from_be_bytes([high, low]).into())?;
    Some((FieldType(kind), value, rest))
}

/// Puts the checksum of a whole header of version 2 into its checksum field, if it has one.
pub fn set_checksum(header: &mut [u8]) {
    if let Some(place) = checksum_place(header).filter(|place| place.len() == CHECKSUM_BYTES) {
        let checksum = checksum(header, &place);
        header[place].copy_from_slice(&checksum);
    }
}

/// The checksum of a header, with zeros in its place.
fn checksum(header: &[u8], place: &Range<usize>) -> [u8; CHECKSUM_BYTES] {
    // CRC-32C, as iSCSI has it (RFC 3720).
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(&header[..place.start]);
    digest.update(&[0; CHECKSUM_BYTES]);
    digest.update(&header[place.end..]);
    (digest.finalize() as u32).to_be_bytes()
}

/// Whether the checksum of a whole header of version 2 is right; true without a checksum.
fn is_checksum_right(header: &[u8]) -> bool {
    match checksum_place(header) {
        Some(place) if place.len() == CHECKSUM_BYTES => {
            header[place.clone()] == checksum(header, &place)
        }
        place => place.is_none(),
    }
}

/// Whether a header that the parser accepted is written as the specification asks for. The parser
/// is more tolerant, and two readers of one header must not find two clients in it.
fn is_strict(header: &[u8]) -> bool {
    if header.starts_with(SIGNATURE_2) {
        // Version and command, and the family of the addresses and the transport: a client of a
        // connection did not come by datagrams. Another command has addresses that are not read.
        return !matches!(header[12..], [PROXY_COMMAND, kind, ..] if kind & 0x0f == DATAGRAM);
    }
    let Some(line) = header.strip_prefix(SIGNATURE_1) else { return false };
    if header.len() > LINE_BYTES_MAX {
        return false;
    }
    let line = line.strip_suffix(b"\r\n").unwrap_or(line);
    let mut words = line.split(|byte| *byte == b' ');
    if words.next() == Some(b"UNKNOWN") {
        return true;
    }
    let is_port = |word: &[u8]| {
        let is_number = !word.is_empty() && word.iter().all(u8::is_ascii_digit);
        is_number && (word.len() == 1 || word[0] != b'0')
    };
    let is_address = |word: &[u8]| !word.iter().any(u8::is_ascii_whitespace);
    let words: Vec<_> = words.collect();
    matches!(words[..], [source, destination, source_port, destination_port]
        if [source, destination].into_iter().all(is_address)
            && [source_port, destination_port].into_iter().all(is_port))
}

const CHECKSUM_BYTES: usize = 4;
/// The version and the command of a header of version 2 that names a client.
const PROXY_COMMAND: u8 = 0x21;
/// The transport of datagrams in a header of version 2.
const DATAGRAM: u8 = 2;

/// The place of the value of the first checksum field of a header of version 2, of any length.
fn checksum_place(header: &[u8]) -> Option<Range<usize>> {
    let mut start = fields_start(header)?;
    while let Some((kind, value, _)) = split_field(header.get(start..)?) {
        start += FIELD_HEAD_BYTES;
        if kind == FieldType::CRC32C {
            return Some(start..start + value.len());
        }
        start += value.len();
    }
    None
}

/// The place of the first field in a header of version 2, by the family of its addresses; `None`
/// for version 1.
fn fields_start(header: &[u8]) -> Option<usize> {
    /// Signature, version, family, length.
    const FIXED_BYTES: usize = 16;
    if !header.starts_with(SIGNATURE_2) {
        return None;
    }
    let address_bytes = match header.get(13)? >> 4 {
        1 => 12,
        2 => 36,
        3 => 216,
        _ => 0,
    };
    Some(FIXED_BYTES + address_bytes)
}

/// Takes the header off a socket, and no byte behind it. `None` if it has not arrived whole.
///
/// Never blocks. `InvalidData` if the bytes are not a header. `UnexpectedEof` if the connection
/// ended.
pub(crate) fn receive(socket: impl AsFd) -> io::Result<Option<Header>> {
    let mut buffer = [0; HEADER_BYTES_MAX];
    let peeked = recv(&socket, &mut buffer, RecvFlags::PEEK);
    let count = match peeked {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        peeked => peeked?,
    };
    let Some((header, header_bytes)) = parse(&buffer[..count])? else {
        return match count {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            HEADER_BYTES_MAX => Err(io::ErrorKind::InvalidData.into()),
            _ => Ok(None),
        };
    };
    // The bytes arrived, so this call takes all bytes of the header.
    let taken = recv(&socket, &mut buffer[..header_bytes], RecvFlags::empty())?;
    if taken == header_bytes { Ok(Some(header)) } else { Err(io::ErrorKind::InvalidData.into()) }
}

fn recv(socket: impl AsFd, buffer: &mut [u8], flags: RecvFlags) -> io::Result<usize> {
    let flags = flags | RecvFlags::DONTWAIT;
    let received = rustix::io::retry_on_intr(|| rustix::net::recv(&socket, &mut *buffer, flags));
    Ok(received?.1)
}

/// The content and the length of the header at the start of these bytes; `None` if it is not
/// complete. `InvalidData` if the bytes are not a header, or if the checksum is wrong.
pub fn parse(bytes: &[u8]) -> io::Result<Option<(Header, usize)>> {
    match ProxyHeader::parse(bytes, ParseConfig::default()) {
        Ok((header, len)) => {
            let whole = &bytes[..len];
            if !is_checksum_right(whole) || !is_strict(whole) {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let fields = fields_start(whole).and_then(|start| whole.get(start..));
            let address = header.proxied_address();
            let client = address.map(|address| Origin::Client(address.source));
            let fields = match Fields::parse(fields.unwrap_or_default()) {
                // Without a client the addresses do not count, whatever their length.
                Err(_) if client.is_none() => Fields::default(),
                fields => fields?,
            };
            let origin = client.unwrap_or(Origin::Proxy);
            let destination = address.map(|address| address.destination);
            Ok(Some((Header { origin, destination, fields }, len)))
        }
        Err(proxy_header::Error::BufferTooShort) if is_beginning(bytes) => Ok(None),
        Err(_) => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Whether a header may begin with these bytes.
fn is_beginning(bytes: &[u8]) -> bool {
    if bytes.starts_with(SIGNATURE_1) && bytes.len() >= LINE_BYTES_MAX {
        return false;
    }
    [SIGNATURE_1, SIGNATURE_2].iter().any(|signature| {
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
            assert_eq!(found.origin, origin);
            let mut message = [0; 3];
            to.read_exact(&mut message).unwrap();
            assert_eq!(&message, b"GET");
        }
    }

    #[test]
    fn a_header_is_read_as_strictly_as_the_specification_asks_for() {
        let line = |line: &str| format!("PROXY {line}\r\n").into_bytes();
        let long = |count| line(&format!("UNKNOWN {}", "x".repeat(count)));
        let mut datagram = version_2(0);
        datagram[13] = 0x12;
        // A checksum of three bytes.
        let mut checksum = version_2(3);
        checksum[28] = FieldType::CRC32C.0;
        for refused in [
            line("TCP4\t192.0.2.7 10.0.0.1 51234 443"),
            b"PROXY\tTCP4 10.0.0.1 10.0.0.2 1 2\r\n".to_vec(),
            line("TCP4 192.0.2.7 10.0.0.1\t51234 443"),
            line("TCP4  192.0.2.7 10.0.0.1 51234 443"),
            line("TCP4 192.0.2.7 10.0.0.1 +1111 443"),
            line("TCP4 192.0.2.7 10.0.0.1 01111 443"),
            long(92),
            // The end of such a line is not waited for.
            b"PROXY UNKNOWN ".iter().copied().chain([b'x'; 93]).collect(),
            datagram,
            checksum,
        ] {
            let parsed = parse(&refused);
            assert!(parsed.is_err(), "{parsed:?}: {}", refused.escape_ascii());
        }
        let longest = long(91);
        assert_eq!(longest.len(), LINE_BYTES_MAX);
        assert_eq!(parse(&longest).unwrap().unwrap().0.origin, Origin::Proxy);
        assert_eq!(parse(&longest[..106]).unwrap(), None);
        assert!(parse(&line("TCP4 192.0.2.7 10.0.0.1 0 443")).unwrap().is_some());
        // A check of the proxy itself, whose addresses are not read.
        let mut local = version_2(0);
        (local[12], local[13]) = (0x20, 0x12);
        assert_eq!(parse(&local).unwrap().unwrap().0.origin, Origin::Proxy);
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
    fn fields_are_found_and_a_wrong_checksum_is_refused() {
        let mut fields = Fields::default();
        assert!(fields.push(FieldType::CRC32C, &[0; 4]));
        assert!(fields.push(FieldType::UNIQUE_ID, b"unique"));
        assert!(fields.push(FieldType(0xEA), b""));
        assert!(!fields.push(FieldType(0xEA), &vec![0; 70_000]));
        let mut header = b"\r\n\r\n\0\r\nQUIT\n\x21\x11".to_vec();
        header.extend(u16::try_from(12 + fields.as_bytes().len()).unwrap().to_be_bytes());
        header.extend([192, 0, 2, 7, 10, 0, 0, 1, 0, 80, 1, 187]);
        header.extend(fields.as_bytes());
        assert!(parse(&header).is_err(), "a checksum of 0");
        set_checksum(&mut header);
        let (parsed, len) = parse(&header).unwrap().unwrap();
        assert_eq!(len, header.len());
        assert_eq!(parsed.destination, Some("10.0.0.1:443".parse().unwrap()));
        assert_eq!(parsed.fields.get(FieldType::UNIQUE_ID), Some(&b"unique"[..]));
        assert_eq!(parsed.fields.iter().count(), 3);
        header[16] ^= 1;
        assert!(parse(&header).is_err(), "another address");
        let mut cut = version_2(10);
        let last_length = cut.len() - 11;
        cut[last_length] += 1;
        assert!(parse(&cut).is_err(), "the last field exceeds the header");
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
            assert_eq!(proxies.contains(Some(address.parse().unwrap())), is_trusted, "{address}");
        }
        assert!(!TrustedProxies::default().contains(Some("127.0.0.1".parse().unwrap())));
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
            if let Ok(Some((header, len))) = parse(&bytes) {
                prop_assert!(len <= bytes.len());
                prop_assert_eq!(parse(&bytes[..len]).unwrap(), Some((header, len)));
                for shorter in 0..len {
                    prop_assert!(!matches!(parse(&bytes[..shorter]), Ok(Some(_))));
                }
            }
        }
    }
}
