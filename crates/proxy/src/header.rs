//! The PROXY protocol header that names the client to an upstream.

use crate::greeting::Greeting;
use haul_server::proxy_protocol::{FieldType, Fields, set_checksum};
use proxy_header::{ProxiedAddress, ProxyHeader};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::ops::Range;

/// A version of the PROXY protocol (doc/proxy-protocol.txt of HAProxy).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum HeaderVersion {
    /// Version 1, a line of text.
    V1,
    /// Version 2, binary.
    V2,
}

/// An additional field of a header of version 2 that this proxy adds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderField {
    /// The name of the server in the client's TLS greeting (`PP2_TYPE_AUTHORITY`).
    Authority,
    /// The application protocols that the greeting offers (`PP2_TYPE_ALPN`), as the extension has
    /// them.
    Alpn,
    /// The connection's id, as in the log (`PP2_TYPE_UNIQUE_ID`).
    UniqueId,
    /// The checksum of the header (`PP2_TYPE_CRC32C`).
    Crc32c,
}

impl HeaderField {
    /// Whether the field needs the client's greeting.
    pub fn needs_greeting(self) -> bool {
        matches!(self, Self::Authority | Self::Alpn)
    }
}

/// The sources of the additional fields.
#[derive(Debug)]
pub struct FieldSources<'c> {
    /// The fields that a proxy in front sent.
    pub received: &'c Fields,
    pub greeting: &'c Greeting,
    pub unique_id: &'c str,
}

impl FieldSources<'_> {
    /// The fields to send: the received fields without checksum and padding, and the fields of
    /// `added` that were not received.
    pub fn fields(&self, added: &[HeaderField]) -> Fields {
        let mut fields = Fields::default();
        for (kind, value) in self.received.iter() {
            if !matches!(kind, FieldType::CRC32C | FieldType::NOOP) {
                fields.push(kind, value);
            }
        }
        for field in added {
            let (kind, value) = match (field, self.greeting) {
                (HeaderField::UniqueId, _) => {
                    (FieldType::UNIQUE_ID, self.unique_id.as_bytes().to_vec())
                }
                // The value is computed when the header is complete.
                (HeaderField::Crc32c, _) => (FieldType::CRC32C, vec![0; 4]),
                (HeaderField::Authority, Greeting::Tls { server_name: Some(name), .. }) => {
                    (FieldType::AUTHORITY, name.clone().into_bytes())
                }
                (HeaderField::Alpn, Greeting::Tls { protocols, .. }) if !protocols.is_empty() => {
                    (FieldType::ALPN, protocol_list(protocols))
                }
                _ => continue,
            };
            if fields.get(kind).is_none() {
                fields.push(kind, &value);
            }
        }
        fields
    }
}

/// A list of protocols as in the TLS extension: its length, and each with its length before it (RFC
/// 7301 section 3.1).
fn protocol_list(protocols: &[Vec<u8>]) -> Vec<u8> {
    // A greeting's protocols have at most 255 bytes each, and its extension 65,535.
    let names = protocols.iter().flat_map(|name| [&[name.len() as u8][..], name].concat());
    let names: Vec<u8> = names.collect();
    [&(names.len() as u16).to_be_bytes()[..], &names].concat()
}

/// The header of a connection from `client` to `destination`, the address at which it was accepted.
/// Without the two addresses (a Unix socket) the header does not name a client: `UNKNOWN`, `LOCAL`.
/// Version 1 does not have fields.
pub fn header(
    version: HeaderVersion,
    client: Option<SocketAddr>,
    destination: Option<SocketAddr>,
    fields: &Fields,
) -> Vec<u8> {
    let addresses =
        client.zip(destination).map(|(client, destination)| same_family(client, destination));
    let mut bytes = Vec::new();
    let encoded = match (addresses, version) {
        (None, HeaderVersion::V1) => {
            bytes.extend_from_slice(b"PROXY UNKNOWN\r\n");
            Ok(())
        }
        (None, HeaderVersion::V2) => ProxyHeader::with_local().encode_v2(&mut bytes),
        (Some((client, destination)), _) => {
            let header = ProxyHeader::with_address(ProxiedAddress::stream(client, destination));
            match version {
                HeaderVersion::V1 => header.encode_v1(&mut bytes),
                HeaderVersion::V2 => header.encode_v2(&mut bytes),
            }
        }
    };
    debug_assert!(encoded.is_ok(), "both addresses are of one family, and there are no fields");
    if version == HeaderVersion::V2 {
        append(&mut bytes, fields);
    }
    bytes
}

/// The header of a connection of the proxy itself, such as a check.
pub fn header_without_client(version: HeaderVersion) -> Vec<u8> {
    header(version, None, None, &Fields::default())
}

/// Appends fields to a header of version 2.
fn append(header: &mut Vec<u8>, fields: &Fields) {
    /// Signature, version and family. Behind them is the length of the rest.
    const LENGTH_PLACE: Range<usize> = 14..16;
    header.extend_from_slice(fields.as_bytes());
    let rest_bytes = header.len() - LENGTH_PLACE.end;
    // The fields leave room for the addresses.
    header[LENGTH_PLACE].copy_from_slice(&(rest_bytes as u16).to_be_bytes());
    set_checksum(header);
}

/// Both addresses as IPv4 or both as IPv6, because a proxy in front may name a client of the other
/// family.
fn same_family(client: SocketAddr, destination: SocketAddr) -> (SocketAddr, SocketAddr) {
    let canonical =
        |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
    match (canonical(client), canonical(destination)) {
        (SocketAddr::V4(client), SocketAddr::V6(destination)) => {
            (mapped(client.into()), destination.into())
        }
        (SocketAddr::V6(client), SocketAddr::V4(destination)) => {
            (client.into(), mapped(destination.into()))
        }
        both => both,
    }
}

fn mapped(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) => SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()),
        SocketAddr::V6(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_server::proxy_protocol::{Origin, parse};
    use proptest::prelude::*;

    #[test]
    fn version_1_is_a_line_of_text() {
        let text = |client: Option<&str>, destination: Option<&str>| {
            let address = |text: Option<&str>| text.map(|text| text.parse().unwrap());
            let (client, destination) = (address(client), address(destination));
            let bytes = header(HeaderVersion::V1, client, destination, &Fields::default());
            String::from_utf8(bytes).unwrap()
        };
        assert_eq!(
            text(Some("192.0.2.1:1000"), Some("10.0.0.1:80")),
            "PROXY TCP4 192.0.2.1 10.0.0.1 1000 80\r\n"
        );
        assert_eq!(
            text(Some("[2001:db8::1]:1000"), Some("10.0.0.1:80")),
            "PROXY TCP6 2001:db8::1 ::ffff:10.0.0.1 1000 80\r\n"
        );
        assert_eq!(text(None, None), "PROXY UNKNOWN\r\n");
    }

    #[test]
    fn received_fields_are_passed_on_and_missing_ones_added() {
        let mut received = Fields::default();
        for (kind, value) in [
            (FieldType::CRC32C, &b"1234"[..]),
            (FieldType::UNIQUE_ID, b"of the front"),
            (FieldType::NOOP, b"   "),
            (FieldType(0xEA), b"endpoint"),
        ] {
            assert!(received.push(kind, value));
        }
        let greeting = Greeting::Tls {
            server_name: Some("example.com".into()),
            protocols: vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        };
        let sources = FieldSources { received: &received, greeting: &greeting, unique_id: "mine" };
        let all =
            [HeaderField::Authority, HeaderField::Alpn, HeaderField::UniqueId, HeaderField::Crc32c];
        let fields = sources.fields(&all);
        let expected: [(FieldType, &[u8]); 5] = [
            (FieldType::UNIQUE_ID, b"of the front"),
            (FieldType(0xEA), b"endpoint"),
            (FieldType::AUTHORITY, b"example.com"),
            (FieldType::ALPN, b"\0\x0c\x02h2\x08http/1.1"),
            (FieldType::CRC32C, &[0; 4]),
        ];
        assert!(fields.iter().eq(expected), "{fields:?}");
        let other = FieldSources {
            received: &Fields::default(),
            greeting: &Greeting::Other,
            unique_id: "mine",
        };
        let fields = other.fields(&all);
        assert_eq!(fields.get(FieldType::UNIQUE_ID), Some(&b"mine"[..]));
        assert_eq!(fields.iter().count(), 2, "{fields:?}");
    }

    proptest! {
        #[test]
        fn what_is_sent_can_be_parsed(
            client in any::<Option<SocketAddr>>(),
            destination in any::<SocketAddr>(),
            values in proptest::collection::vec(
                (any::<u8>(), proptest::collection::vec(any::<u8>(), 0..300)), 0..4),
            has_checksum in any::<bool>(),
        ) {
            let mut fields = Fields::default();
            for (kind, value) in values {
                // A checksum of another length does not count as a checksum.
                prop_assume!(FieldType(kind) != FieldType::CRC32C);
                prop_assert!(fields.push(FieldType(kind), &value));
            }
            if has_checksum {
                prop_assert!(fields.push(FieldType::CRC32C, &[0; 4]));
            }
            let client = client.map(|client| SocketAddr::new(client.ip(), client.port()));
            for version in [HeaderVersion::V1, HeaderVersion::V2] {
                let bytes = header(version, client, Some(destination), &fields);
                let (parsed, len) = parse(&bytes).unwrap().unwrap();
                if version == HeaderVersion::V2 {
                    let sent = &bytes[bytes.len() - fields.as_bytes().len()..];
                    prop_assert_eq!(parsed.fields.as_bytes(), sent);
                    prop_assert_eq!(parsed.fields.iter().count(), fields.iter().count());
                }
                prop_assert_eq!(len, bytes.len());
                match (client, parsed.origin) {
                    (None, Origin::Proxy) => {}
                    (Some(client), Origin::Client(named)) => {
                        prop_assert_eq!(named.ip().to_canonical(), client.ip().to_canonical());
                        prop_assert_eq!(named.port(), client.port());
                    }
                    other => prop_assert!(false, "{:?}", other),
                }
            }
        }
    }
}
