//! Name resolution: the addresses of a host name, and their time to live.
//!
//! The addresses come from the machine's resolver (`getaddrinfo`), which knows `/etc/hosts` and the
//! names of containers as well as DNS. `getaddrinfo` does not return a TTL, so the name servers are
//! asked for the TTL.

use haul_sys::dns::{self, RecordType};
use std::ffi::CString;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

/// Resolves a host name. Blocks. The addresses are in the order of RFC 6724, at least one.
pub fn addresses(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let addresses: Vec<_> = (host, port).to_socket_addrs()?.collect();
    if addresses.is_empty() {
        let message = format!("{host} has no address");
        return Err(io::Error::new(io::ErrorKind::NotFound, message));
    }
    Ok(addresses)
}

/// The time to live (TTL) that the name servers state for the addresses of a name; `None` if the
/// name servers know no address of the name, or do not answer. Blocks.
///
/// Ask for the TTL first and for the addresses after it, because addresses that are older than the
/// TTL may be out of date already.
pub fn time_to_live(host: &str) -> Option<Duration> {
    let host = CString::new(host).ok()?;
    let mut shortest = None;
    for record_type in [RecordType::A, RecordType::Aaaa] {
        match dns::search(&host, record_type) {
            Ok(answer) => {
                let time_to_live = answer.and_then(|answer| answer_time_to_live(&answer));
                shortest = shortest.into_iter().chain(time_to_live).min();
            }
            // The name servers would be waited for once more. Some answer only for addresses of one
            // family.
            Err(_) => break,
        }
    }
    shortest
}

/// The shortest time to live of the records of an answer (RFC 1035 section 4), aliases included;
/// `None` if it has none, or is invalid.
pub fn answer_time_to_live(answer: &[u8]) -> Option<Duration> {
    let answer = simple_dns::Packet::parse(answer).ok()?;
    // A number with the highest bit means 0 (RFC 2181 section 8).
    let seconds = |ttl: u32| i32::try_from(ttl).map_or(0, |_| u64::from(ttl));
    answer.answers.iter().map(|record| Duration::from_secs(seconds(record.ttl))).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use simple_dns::rdata::{A, CNAME, RData};
    use simple_dns::{CLASS, Name, Packet, ResourceRecord};

    #[test]
    fn names_and_addresses_resolve() {
        let loopback = addresses("localhost", 80).unwrap();
        assert!(loopback.iter().all(|address| address.ip().is_loopback()));
        assert_eq!(addresses("192.0.2.1", 80).unwrap(), ["192.0.2.1:80".parse().unwrap()]);
        assert!(addresses("no such host", 80).is_err());
        assert_eq!(time_to_live("a\0b"), None);
    }

    /// An alias and its addresses.
    fn answer(alias_ttl: u32, ttls: &[u32]) -> Vec<u8> {
        let name = |text| Name::new(text).unwrap();
        let mut packet = Packet::new_reply(1);
        let alias = RData::CNAME(CNAME(name("b.example")));
        packet.answers.push(ResourceRecord::new(name("a.example"), CLASS::IN, alias_ttl, alias));
        for &ttl in ttls {
            let address = RData::A(A { address: 0x0a00_0001 });
            packet.answers.push(ResourceRecord::new(name("b.example"), CLASS::IN, ttl, address));
        }
        packet.build_bytes_vec_compressed().unwrap()
    }

    #[test]
    fn the_highest_bit_means_no_time() {
        for (ttl, seconds) in [(0, 0), (60, 60), (i32::MAX as u32, 60), (1 << 31, 0), (!0, 0)] {
            let expected = Some(Duration::from_secs(seconds));
            assert_eq!(answer_time_to_live(&answer(ttl, &[60])), expected, "{ttl}");
        }
        assert_eq!(answer_time_to_live(&Packet::new_reply(1).build_bytes_vec().unwrap()), None);
    }

    proptest! {
        #[test]
        fn the_shortest_time_counts(
            alias_ttl in 0..100_000u32,
            ttls in prop::collection::vec(0..100_000u32, 0..9),
        ) {
            let shortest = ttls.iter().copied().chain([alias_ttl]).min().unwrap();
            let found = answer_time_to_live(&answer(alias_ttl, &ttls));
            prop_assert_eq!(found, Some(Duration::from_secs(shortest.into())));
        }

        /// The network may have cut it or changed it.
        #[test]
        fn invalid_answers_are_no_failure(at in 0..200usize, byte: u8, length in 0..200usize) {
            let mut bytes = answer(7, &[5, 6]);
            if let Some(changed) = bytes.get_mut(at) {
                *changed = byte;
            }
            bytes.truncate(length);
            answer_time_to_live(&bytes);
        }
    }
}
