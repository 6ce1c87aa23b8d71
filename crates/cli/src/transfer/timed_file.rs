//! A pipe or a socket whose reads have a time limit.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::io::{self, Read};
use std::time::Duration;

/// A pipe or a socket whose reads may have a time limit.
#[derive(Debug)]
pub struct TimedFile {
    file: File,
    silence_max: Option<Duration>,
    /// The limit after the next read.
    later: Option<Duration>,
}

impl TimedFile {
    /// A file whose reads wait without a limit.
    pub fn new(file: File) -> Self {
        Self { file, silence_max: None, later: None }
    }

    /// Makes a read fail (`TimedOut`) if nothing arrives: the next read after one time, and later
    /// reads after another time.
    pub fn set_silence_max(&mut self, first: Duration, later: Duration) {
        (self.silence_max, self.later) = (Some(first), Some(later));
    }
}

impl Read for TimedFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(time) = self.silence_max {
            let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: 0 };
            if poll(&mut [PollFd::new(&self.file, PollFlags::IN)], Some(&time))? == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.silence_max = self.later;
        }
        self.file.read(buffer)
    }
}
