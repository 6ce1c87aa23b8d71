//! The grammar of a host with an optional port (RFC 9112 section 3.2, RFC 3986 section 3.2).
//!
//! Two servers that disagree about the host of a request can be played off against each other, so
//! what is not a host is refused, also by a server that ignores it.

use std::net::Ipv6Addr;

/// Whether the bytes are a host and an optional port: a name, an IPv4 address, or an IPv6 address
/// in brackets. The host may be empty only if there is no port.
pub fn is_host(bytes: &[u8]) -> bool {
    let (host, port) = if bytes.first() == Some(&b'[') {
        let Some(end) = bytes.iter().position(|&byte| byte == b']') else { return false };
        if !is_ip_literal(&bytes[1..end]) {
            return false;
        }
        bytes.split_at(end + 1)
    } else {
        let end = bytes.iter().position(|&byte| byte == b':').unwrap_or(bytes.len());
        let (name, port) = bytes.split_at(end);
        if !is_name(name) || (name.is_empty() && !port.is_empty()) {
            return false;
        }
        (name, port)
    };
    debug_assert!(host.len() + port.len() == bytes.len());
    port.strip_prefix(b":").map_or(port.is_empty(), |port| port.iter().all(u8::is_ascii_digit))
}

/// Whether the bytes are an IPv6 address, or one of a later version.
fn is_ip_literal(bytes: &[u8]) -> bool {
    if let [b'v' | b'V', rest @ ..] = bytes {
        let Some(dot) = rest.iter().position(|&byte| byte == b'.') else { return false };
        let (version, address) = (&rest[..dot], &rest[dot + 1..]);
        let is_address_byte = |&byte: &u8| is_unreserved_or_delimiter(byte) || byte == b':';
        return !version.is_empty()
            && version.iter().all(u8::is_ascii_hexdigit)
            && !address.is_empty()
            && address.iter().all(is_address_byte);
    }
    std::str::from_utf8(bytes).is_ok_and(|text| text.parse::<Ipv6Addr>().is_ok())
}

/// Whether the bytes are a registered name: unreserved characters, delimiters and escapes.
fn is_name(mut bytes: &[u8]) -> bool {
    loop {
        bytes = match bytes {
            [] => return true,
            [b'%', high, low, rest @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                rest
            }
            [byte, rest @ ..] if is_unreserved_or_delimiter(*byte) => rest,
            _ => return false,
        }
    }
}

fn is_unreserved_or_delimiter(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_host_follows_its_grammar() {
        for good in [
            "",
            "h",
            "h:80",
            "h:",
            ".",
            "a..b",
            "192.0.2.1:99999",
            "[::1]",
            "[::1]:80",
            "[2001:db8::]",
            "%41",
            "[v1.a:b]",
            "xn--bcher-kva.example",
        ] {
            assert!(is_host(good.as_bytes()), "{good:?}");
        }
        for bad in [
            "h:port",
            "h:80:80",
            "::1",
            "[::1",
            "x[::1]",
            "[zz]",
            "%zz",
            "%4",
            "h/",
            "a b",
            "u@h",
            ":80",
            "[]",
            "[::1]x",
            "[fe80::1%25eth0]",
            "[v.a]",
            "[v1.]",
            "h\\",
            "\u{e4}",
        ] {
            assert!(!is_host(bad.as_bytes()), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn no_host_has_a_byte_that_ends_an_authority(
            bytes in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            if is_host(&bytes) {
                prop_assert!(bytes.iter().all(|byte| !b"/?#@\\ \r\n".contains(byte)));
            }
        }
    }
}
