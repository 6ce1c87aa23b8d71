//! The PROXY protocol header that names the client to an upstream.

use proxy_header::{ProxiedAddress, ProxyHeader};
use std::net::SocketAddr;

/// A version of the PROXY protocol (doc/proxy-protocol.txt of HAProxy).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderVersion {
    /// Version 1, a line of text.
    V1,
    /// Version 2, binary.
    V2,
}

/// The header of a connection from `client` to `destination`, the address at which it was accepted.
/// Without them (a Unix socket) it names no client: `UNKNOWN`, `LOCAL`.
pub fn header(
    version: HeaderVersion,
    client: Option<SocketAddr>,
    destination: Option<SocketAddr>,
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
    bytes
}

/// Both addresses as IPv4 or both as IPv6: a proxy in front may name a client of the other family.
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
            let bytes = header(HeaderVersion::V1, address(client), address(destination));
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

    proptest! {
        #[test]
        fn what_is_sent_can_be_parsed(
            client in any::<Option<SocketAddr>>(),
            destination in any::<SocketAddr>(),
        ) {
            let client = client.map(|client| SocketAddr::new(client.ip(), client.port()));
            for version in [HeaderVersion::V1, HeaderVersion::V2] {
                let bytes = header(version, client, Some(destination));
                let (origin, len) = parse(&bytes).unwrap().unwrap();
                prop_assert_eq!(len, bytes.len());
                match (client, origin) {
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
