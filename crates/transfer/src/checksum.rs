//! The checksum of each chunk and each small file.

use crate::options::Verify;
use serde::{Deserialize, Serialize};

/// A checksum of content on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Checksum {
    /// CRC-64/NVMe.
    Crc64(u64),
    /// BLAKE3.
    Blake3([u8; 32]),
}

impl Checksum {
    /// The checksum of content.
    pub fn of(content: &[u8], verify: Verify) -> Self {
        match verify {
            Verify::Crc64 => Self::Crc64(crc(content)),
            Verify::Blake3 => Self::Blake3(*blake3::hash(content).as_bytes()),
        }
    }

    /// Whether content has this checksum, of the kind that the user asked for.
    pub fn fits(self, content: &[u8], verify: Verify) -> bool {
        self == Self::of(content, verify)
    }
}

/// CRC-64/NVMe.
pub fn crc(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}
