//! Messages in a stream: four bytes with the length in little-endian order, and the message in the
//! encoding of postcard.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Read, Write};

/// Writes a message after its length.
pub fn write(stream: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let bytes = postcard::to_stdvec(message).map_err(io::Error::other)?;
    stream.write_all(&[&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat())
}

/// Reads the bytes of a message, at most so many.
pub fn read_bytes(stream: &mut impl Read, bytes_max: u32) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > bytes_max {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message that is too long"));
    }
    let mut bytes = Vec::new();
    stream.take(length.into()).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a message of at most so many bytes. `UnexpectedEof` at the end of the stream.
pub fn read<M: DeserializeOwned>(stream: &mut impl Read, bytes_max: u32) -> io::Result<M> {
    let bytes = read_bytes(stream, bytes_max)?;
    postcard::from_bytes(&bytes).map_err(|_| {
        let text = "the other rank closed the connection, or is another version of haul";
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}
