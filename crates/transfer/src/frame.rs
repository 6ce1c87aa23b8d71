//! Frames: a message and, for some messages, bytes of files.
//!
//! A frame begins with two lengths, of the message and of the bytes, as 32-bit numbers in
//! little-endian order. The message follows in the encoding of postcard, and the bytes follow the
//! message. The highest bit of the second length marks bytes that zstd compressed.

use crate::error::Error;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, IoSlice, Read, Write};

/// The most bytes of files in a frame.
pub const DATA_BYTES_MAX: usize = 1 << 20;
/// The most bytes of a message: 512 entries with the longest names and some attributes. An entry
/// with more attributes takes a whole frame.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// The bytes of the two lengths.
const HEADER_BYTES: usize = 8;
/// The bit of the second length for bytes that are compressed.
const COMPRESSED: u32 = 1 << 31;

/// The beginning of a frame with so many bytes of files: the lengths and the message.
pub fn head(message: &impl Serialize, data_bytes: usize) -> Result<Vec<u8>, Error> {
    head_with(message, data_bytes, 0)
}

fn head_with(message: &impl Serialize, data_bytes: usize, marks: u32) -> Result<Vec<u8>, Error> {
    let head = postcard::to_extend(message, vec![0; HEADER_BYTES]);
    let mut head = head.map_err(|_| Error::Protocol("a message of this end"))?;
    let message_bytes = head.len() - HEADER_BYTES;
    if message_bytes > MESSAGE_BYTES_MAX || data_bytes > DATA_BYTES_MAX {
        return Err(Error::Protocol("a frame of this end that is too large"));
    }
    head[..4].copy_from_slice(&(message_bytes as u32).to_le_bytes());
    head[4..HEADER_BYTES].copy_from_slice(&(data_bytes as u32 | marks).to_le_bytes());
    Ok(head)
}

/// Writes a frame, by one call if the stream takes the whole frame.
pub fn write(to: &mut impl Write, message: &impl Serialize, data: &[u8]) -> Result<(), Error> {
    write_parts(to, &head(message, data.len())?, data)
}

/// Writes a frame whose data zstd compressed. The data has [`DATA_BYTES_MAX`] bytes at most before
/// and after the compression.
pub fn write_compressed(
    to: &mut impl Write,
    message: &impl Serialize,
    data: &[u8],
) -> Result<(), Error> {
    write_parts(to, &head_with(message, data.len(), COMPRESSED)?, data)
}

/// Writes a frame whose beginning is encoded ([`head`]).
pub fn write_parts(to: &mut impl Write, head: &[u8], data: &[u8]) -> Result<(), Error> {
    let mut parts = &mut [IoSlice::new(head), IoSlice::new(data)][..];
    IoSlice::advance_slices(&mut parts, 0);
    while !parts.is_empty() {
        match to.write_vectored(parts) {
            Ok(0) => return Err(Error::Connection(io::ErrorKind::WriteZero.into())),
            Ok(count) => IoSlice::advance_slices(&mut parts, count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::Connection(error)),
        }
    }
    Ok(())
}

/// Reads frames from a stream, in one buffer.
pub struct FrameReader<R> {
    from: R,
    /// The lengths of the last frame.
    header: [u8; HEADER_BYTES],
    /// The message and the data of the last frame.
    buffer: Vec<u8>,
    message_bytes: usize,
    decompressor: Option<Decompressor>,
    saved_bytes: u64,
}

/// A frame as it arrived.
pub struct LastFrame<'f> {
    /// The lengths and the message.
    pub head: Vec<u8>,
    /// The data.
    pub data: &'f [u8],
    /// Whether zstd compressed the data.
    pub is_compressed: bool,
}

/// Decompresses the bytes of a frame, into one buffer.
struct Decompressor {
    zstd: zstd::bulk::Decompressor<'static>,
    buffer: Vec<u8>,
}

impl Decompressor {
    fn new() -> io::Result<Self> {
        let zstd = zstd::bulk::Decompressor::new()?;
        Ok(Self { zstd, buffer: vec![0; DATA_BYTES_MAX] })
    }

    /// What was compressed, up to [`DATA_BYTES_MAX`].
    fn decompress(&mut self, data: &[u8]) -> io::Result<&[u8]> {
        let bytes = self.zstd.decompress_to_buffer(data, &mut self.buffer[..])?;
        Ok(&self.buffer[..bytes])
    }
}

impl<R: Read> FrameReader<R> {
    /// A reader of frames.
    pub fn new(from: R) -> Self {
        let (header, buffer) = ([0; HEADER_BYTES], Vec::new());
        Self { from, header, buffer, message_bytes: 0, decompressor: None, saved_bytes: 0 }
    }

    /// The bytes that compression saved so far.
    pub fn saved_bytes(&self) -> u64 {
        self.saved_bytes
    }

    /// The number before the next frame of a chain; `None` at the end of the stream.
    pub fn next_number(&mut self) -> Result<Option<u64>, Error> {
        let mut number = [0; size_of::<u64>()];
        let is_there = read_or_end(&mut self.from, &mut number)?;
        Ok(is_there.then(|| u64::from_le_bytes(number)))
    }

    /// The last frame as it arrived.
    pub fn last_frame(&self) -> LastFrame<'_> {
        let (message, data) = self.buffer.split_at(self.message_bytes);
        let head = [&self.header[..], message].concat();
        LastFrame { head, data, is_compressed: self.header[7] & 0x80 != 0 }
    }

    /// The next frame, with the bytes of files in it; `None` at the end of the stream.
    pub fn next<M: DeserializeOwned>(&mut self) -> Result<Option<(M, &[u8])>, Error> {
        let mut header = [0; HEADER_BYTES];
        if !read_or_end(&mut self.from, &mut header)? {
            return Ok(None);
        }
        self.header = header;
        let is_compressed = header[7] & 0x80 != 0;
        header[7] &= 0x7f;
        let (message_bytes, data_bytes) = (length(header, 0), length(header, 4));
        if message_bytes > MESSAGE_BYTES_MAX || data_bytes > DATA_BYTES_MAX {
            return Err(Error::Protocol("a frame that is too large"));
        }
        self.buffer.resize(message_bytes + data_bytes, 0);
        self.message_bytes = message_bytes;
        self.from.read_exact(&mut self.buffer).map_err(Error::Connection)?;
        let (message, mut data) = self.buffer.split_at(message_bytes);
        if is_compressed {
            let decompressor = match &mut self.decompressor {
                Some(decompressor) => decompressor,
                none => none.insert(Decompressor::new().map_err(Error::Connection)?),
            };
            let decompressed = decompressor.decompress(data);
            let decompressed =
                decompressed.map_err(|_| Error::Protocol("compressed bytes that are damaged"))?;
            self.saved_bytes += decompressed.len().saturating_sub(data.len()) as u64;
            data = decompressed;
        }
        let message = postcard::from_bytes(message);
        Ok(Some((message.map_err(|_| Error::Protocol("a message that it does not have"))?, data)))
    }
}

/// One of the two lengths of a frame.
fn length(header: [u8; HEADER_BYTES], at: usize) -> usize {
    let bytes = [header[at], header[at + 1], header[at + 2], header[at + 3]];
    u32::from_le_bytes(bytes) as usize
}

/// Fills the buffer; false if the stream ended before the first byte.
fn read_or_end(from: &mut impl Read, buffer: &mut [u8]) -> Result<bool, Error> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..]) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(Error::Connection(io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::Connection(error)),
        }
    }
    Ok(true)
}
