//! A fixed piece of work whose CPU time shows how fast the machine is at the moment: copies through
//! a pipe, as a program that moves bytes makes them.
//!
//! The CPU time of such a program changes with the frequency of the CPU and with the neighbours
//! that share its caches. Divided by the time of this work, it can be compared with an earlier
//! day's.

use crate::error::SoakError;
use haul_lab_sys::clock::ThreadClock;
use std::io::{self, Read, Write};
use std::time::Duration;

/// The bytes of one write to the pipe: a pipe's default capacity.
const CHUNK_BYTES: usize = 64 << 10;
/// The bytes of all writes.
const TOTAL_BYTES: usize = 192 << 20;
/// The memory that is written, in turn: several times a second-level cache.
const SOURCE_BYTES: usize = 8 << 20;

/// Does the work once and returns the CPU time of this thread that it took: about 60 ms.
pub fn cpu_time() -> Result<Duration, SoakError> {
    let failed = |error| SoakError::Process { step: "measuring the speed of this machine", error };
    let clock = ThreadClock::for_current_thread().map_err(failed)?;
    let source = vec![7u8; SOURCE_BYTES];
    let mut buffer = vec![0u8; CHUNK_BYTES];
    let (mut reader, mut writer) = io::pipe().map_err(failed)?;
    let before = clock.read().map_err(failed)?;
    for index in 0..TOTAL_BYTES / CHUNK_BYTES {
        let start = index * CHUNK_BYTES % SOURCE_BYTES;
        writer.write_all(&source[start..start + CHUNK_BYTES]).map_err(failed)?;
        reader.read_exact(&mut buffer).map_err(failed)?;
    }
    Ok(clock.read().map_err(failed)?.saturating_sub(before))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_work_takes_cpu_time() {
        assert!(super::cpu_time().unwrap() > std::time::Duration::from_millis(1));
    }
}
