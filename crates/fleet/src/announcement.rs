//! What a rank tells the other ranks about its host.

use crate::error::Error;
use crate::pmi::VALUE_BYTES_MAX;
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// The beginning of an announcement, with the version of its format.
const PREFIX: &str = "haul1:";

/// What a rank tells the other ranks about its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announcement {
    /// The name of the host.
    pub host_name: String,
    /// The identity of this start of the host (`/proc/sys/kernel/random/boot_id`). Two ranks with
    /// the same name and identity run on one host.
    pub boot_id: String,
    /// The addresses of the host, without loopback and link-local addresses.
    pub addresses: Vec<IpAddr>,
    /// The version of haul.
    pub version: String,
    /// The port at which rank 0 listens; 0 for the other ranks.
    pub port: u16,
    /// The public key that the rank made for this job.
    pub key: Vec<u8>,
}

impl Announcement {
    /// The announcement of this process, without addresses if the interfaces cannot be read.
    pub fn new(port: u16, key: Vec<u8>) -> Self {
        let interfaces = if_addrs::get_if_addrs().unwrap_or_default().into_iter();
        let usable = interfaces.filter(|found| !(found.is_loopback() || found.is_link_local()));
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        Self {
            host_name: haul_version::host_name(),
            boot_id: boot_id.unwrap_or_default().trim().to_owned(),
            addresses: usable.map(|interface| interface.ip()).collect(),
            version: haul_version::VERSION.to_owned(),
            port,
            key,
        }
    }

    /// Whether two ranks run on one host.
    pub fn is_same_host(&self, other: &Self) -> bool {
        self.host_name == other.host_name && self.boot_id == other.boot_id
    }

    /// The announcement as a word without spaces, of at most [`VALUE_BYTES_MAX`] bytes.
    pub fn encode(&self) -> Result<String, Error> {
        let bytes = postcard::to_stdvec(self).unwrap_or_default();
        let text = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes));
        if text.len() > VALUE_BYTES_MAX {
            return Err(Error::TooLong { bytes: text.len(), max: VALUE_BYTES_MAX });
        }
        Ok(text)
    }

    /// Reads the announcement of a rank.
    pub fn decode(rank: u32, text: &str) -> Result<Self, Error> {
        let read = || {
            let bytes = URL_SAFE_NO_PAD.decode(text.strip_prefix(PREFIX)?).ok()?;
            let (announcement, left) = postcard::take_from_bytes(&bytes).ok()?;
            left.is_empty().then_some(announcement)
        };
        read().ok_or(Error::Announcement { rank })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_announcement_that_is_too_long_is_refused() {
        let address = IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]);
        let own = Announcement { addresses: vec![address; 60], ..Announcement::new(0, Vec::new()) };
        assert!(matches!(own.encode(), Err(Error::TooLong { .. })));
    }

    proptest! {
        #[test]
        fn an_announcement_arrives(
            host_name in "[a-z0-9.-]{0,60}",
            boot_id in "[0-9a-f-]{36}",
            addresses in prop::collection::vec(any::<IpAddr>(), 0..8),
            port in any::<u16>(),
            key in prop::collection::vec(any::<u8>(), 0..92),
        ) {
            let version = haul_version::VERSION.to_owned();
            let sent = Announcement { host_name, boot_id, addresses, version, port, key };
            prop_assert_eq!(Announcement::decode(0, &sent.encode().unwrap()).unwrap(), sent);
        }

        #[test]
        fn any_text_is_read_or_refused(text in "(haul1:)?[0-9a-zA-Z_-]{0,80}\\PC{0,3}") {
            let _ = Announcement::decode(0, &text);
        }
    }
}
