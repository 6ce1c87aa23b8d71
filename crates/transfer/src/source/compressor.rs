//! Compresses frames while that makes a stream faster.

use crate::error::Error;
use crate::message::ToDestination;
use crate::source::frame_writer::FrameWriter;
use std::io;
use std::time::{Duration, Instant};

/// zstd's own default.
const LEVEL: i32 = 3;
/// Data of fewer bytes is sent as it is.
const BYTES_MIN: usize = 512;
/// After so many frames that were sent as they are, one is compressed again as a try.
const TRY_INTERVAL: u32 = 16;
/// Earlier bytes count less by this share for each frame.
const KEPT_SHARE: f64 = 0.9;

/// Compresses the frames of one stream.
pub struct Compressor {
    zstd: zstd::bulk::Compressor<'static>,
    output: Vec<u8>,
    worth: Worth,
}

impl Compressor {
    /// A compressor of frames with up to so many bytes.
    pub fn new(bytes_max: usize) -> io::Result<Self> {
        let zstd = zstd::bulk::Compressor::new(LEVEL)?;
        let output = Vec::with_capacity(zstd::zstd_safe::compress_bound(bytes_max));
        Ok(Self { zstd, output, worth: Worth::default() })
    }

    /// Writes a frame, compressed if that is faster. Returns the bytes of data that were written.
    pub fn write(
        &mut self,
        to: &mut impl FrameWriter,
        message: &ToDestination,
        data: &[u8],
    ) -> Result<usize, Error> {
        let is_smaller = self.compress(data);
        let data = if is_smaller { &self.output[..] } else { data };
        let begun = Instant::now();
        if is_smaller {
            to.write_compressed_frame(message, data)?;
        } else {
            to.write_frame(message, data)?;
        }
        self.worth.record_send(data.len(), begun.elapsed());
        Ok(data.len())
    }

    /// Compresses data if that is worth a try. False if the data stays as it is.
    fn compress(&mut self, data: &[u8]) -> bool {
        if data.len() < BYTES_MIN || !self.worth.wants_compression() {
            return false;
        }
        let begun = Instant::now();
        self.output.clear();
        if self.zstd.compress_to_buffer(data, &mut self.output).is_err() {
            return false;
        }
        self.worth.record_compression(data.len(), self.output.len(), begun.elapsed());
        self.output.len() < data.len()
    }
}

/// Whether compression makes a stream faster. On a fast network or a busy CPU, compression takes
/// more time than it saves; and compressed files do not become smaller.
#[derive(Debug, Default)]
struct Worth {
    /// The seconds in which the stream took bytes.
    send: Rate,
    /// The seconds in which bytes were compressed.
    compression: Rate,
    /// The bytes that became of the compressed bytes.
    output: f64,
    /// The frames since the last one that was compressed.
    frames: u32,
}

impl Worth {
    fn record_send(&mut self, bytes: usize, time: Duration) {
        self.send.add(bytes, time);
    }

    fn record_compression(&mut self, input: usize, output: usize, time: Duration) {
        self.output = self.output * KEPT_SHARE + output as f64;
        self.compression.add(input, time);
    }

    /// Whether the next frame is compressed.
    fn wants_compression(&mut self) -> bool {
        self.frames += 1;
        let is_try = self.frames > TRY_INTERVAL || self.compression.bytes == 0.0;
        let share = self.output / self.compression.bytes;
        let send = self.send.seconds_per_byte();
        let is_faster = self.compression.seconds_per_byte() + share * send < send;
        if is_try || is_faster {
            self.frames = 0;
        }
        is_try || is_faster
    }
}

/// Bytes, and the seconds that they took. Recent frames weigh more than earlier frames.
#[derive(Debug, Default)]
struct Rate {
    seconds: f64,
    bytes: f64,
}

impl Rate {
    fn add(&mut self, bytes: usize, time: Duration) {
        self.seconds = self.seconds * KEPT_SHARE + time.as_secs_f64();
        self.bytes = self.bytes * KEPT_SHARE + bytes as f64;
    }

    fn seconds_per_byte(&self) -> f64 {
        self.seconds / self.bytes.max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of 1,000 frames are compressed, if sending and compressing a byte takes so many
    /// nanoseconds, and so many per cent of the bytes are left.
    fn compressed_frames(send_ns: u64, compression_ns: u64, share_percent: usize) -> usize {
        const BYTES: usize = 1000;
        let mut worth = Worth::default();
        let time = |ns: u64, bytes: usize| Duration::from_nanos(ns * bytes as u64);
        let frames = (0..1000).filter(|_| {
            let is_compressed = worth.wants_compression();
            let mut bytes = BYTES;
            if is_compressed {
                bytes = BYTES * share_percent / 100;
                worth.record_compression(BYTES, bytes, time(compression_ns, BYTES));
            }
            worth.record_send(bytes, time(send_ns, bytes));
            is_compressed
        });
        frames.count()
    }

    #[test]
    fn frames_are_compressed_while_that_is_faster() {
        assert_eq!(compressed_frames(100, 3, 40), 1000, "a slow network");
        assert!(compressed_frames(1, 3, 40) < 70, "a fast network");
        assert!(compressed_frames(100, 3, 100) < 70, "data that does not shrink");
        assert!(compressed_frames(100, 90, 40) < 70, "a busy CPU");
    }
}
