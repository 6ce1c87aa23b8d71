//! What is sent: many files, one file, or memory.

use crate::quantity::{ParseQuantityError, Size};
use haul::{Memory, Source, SourceError, file_len};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::str::FromStr;

/// The most that a workload may take of the machine's memory or temporary space.
const TOTAL_MAX: u64 = 16 << 30;

/// What is to be sent, over and over.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Workload {
    /// Files made for the run, unnamed, of exponentially spread sizes: most are small, a few are several
    /// times the average.
    Files {
        /// How many.
        count: usize,
        /// Their average size.
        average: Size,
    },
    /// Files made for the run, unnamed, all of one size.
    Equal {
        /// How many.
        count: usize,
        /// The size of each.
        size: Size,
    },
    /// One file that exists.
    File(PathBuf),
    /// Memory of the program.
    Memory(Size),
}

/// Why a workload cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// Not a workload.
    #[error(
        "unknown workload {0:?}: write COUNTxSIZE (63x350KB), COUNT=SIZE (64=64KiB), file:PATH or memory:SIZE"
    )]
    Unknown(String),
    /// A size that is none.
    #[error("workload {workload:?}: {source}")]
    Size {
        /// As it was given.
        workload: String,
        /// What is wrong with it.
        source: ParseQuantityError,
    },
    /// Too much of it.
    #[error("workload {0} comes to more than {max}", max = Size(TOTAL_MAX))]
    TooLarge(String),
    /// A file that is not there or cannot be read.
    #[error("cannot open {path}: {source}", path = path.display())]
    Open {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file that cannot be sent from.
    #[error("cannot send {workload}: {source}")]
    Source {
        /// Which workload.
        workload: String,
        /// Why.
        source: SourceError,
    },
    /// The temporary files could not be made.
    #[error("cannot make the files of workload {workload} in {folder}: {source} (set TMPDIR to a folder with room)", folder = folder.display())]
    Make {
        /// Which workload.
        workload: String,
        /// Where.
        folder: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

impl FromStr for Workload {
    type Err = WorkloadError;

    fn from_str(text: &str) -> Result<Self, WorkloadError> {
        let size = |part: &str| {
            part.parse::<Size>()
                .map_err(|source| WorkloadError::Size { workload: text.into(), source })
        };
        let workload = if let Some(path) = text.strip_prefix("file:") {
            return if path.is_empty() {
                Err(WorkloadError::Unknown(text.into()))
            } else {
                Ok(Self::File(path.into()))
            };
        } else if let Some(part) = text.strip_prefix("memory:") {
            Self::Memory(size(part)?)
        } else {
            let unknown = || WorkloadError::Unknown(text.into());
            let count = |count: &str| count.parse().map_err(|_| unknown());
            match (text.split_once('x'), text.split_once('=')) {
                (Some((number, average)), _) => {
                    Self::Files { count: count(number)?, average: size(average)? }
                }
                (None, Some((number, each))) => {
                    Self::Equal { count: count(number)?, size: size(each)? }
                }
                (None, None) => return Err(unknown()),
            }
        };
        let total = match &workload {
            Self::Files { count, average: size } | Self::Equal { count, size } => {
                (*count as u64).saturating_mul(size.0)
            }
            Self::Memory(size) => size.0,
            Self::File(_) => 1,
        };
        match total {
            0 => Err(WorkloadError::Unknown(text.into())),
            1..=TOTAL_MAX => Ok(workload),
            _ => Err(WorkloadError::TooLarge(text.into())),
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Files { count, average } => write!(formatter, "{count}x{average}"),
            Self::Equal { count, size } => write!(formatter, "{count}={size}"),
            Self::File(path) => write!(formatter, "file:{}", path.display()),
            Self::Memory(size) => write!(formatter, "memory:{size}"),
        }
    }
}

/// A workload that is ready to be sent.
#[derive(Debug)]
pub struct Opened {
    /// As it is called in reports.
    pub name: String,
    /// What to send, in order, then again from the beginning.
    pub pieces: Vec<Piece>,
}

/// A file or a stretch of memory to send.
#[derive(Debug)]
pub enum Piece {
    /// A file and its length in bytes.
    File(File, u64),
    /// Memory.
    Memory(Memory),
}

impl Piece {
    fn of_file(file: File) -> Result<Self, SourceError> {
        let len = file_len(&file)?;
        Ok(Self::File(file, len))
    }

    /// What to send.
    pub(crate) fn source(&self) -> Source<'_> {
        match self {
            Self::File(file, _) => file.into(),
            Self::Memory(memory) => memory.into(),
        }
    }

    /// How many bytes.
    #[expect(clippy::len_without_is_empty, reason = "an empty piece cannot be made")]
    pub fn len(&self) -> u64 {
        match self {
            Self::File(_, len) => *len,
            Self::Memory(memory) => memory.len(),
        }
    }
}

impl Opened {
    /// The size of the largest piece.
    pub fn largest(&self) -> Size {
        Size(self.pieces.iter().map(Piece::len).max().unwrap_or(0))
    }
}

/// A piece on its way to another process of the same user: it is opened again through `/proc`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct HandedOver {
    path: PathBuf,
    is_memory: bool,
}

impl Opened {
    /// Its pieces, for a child of this process. They stay valid as long as this does.
    pub(crate) fn handed_over(&self) -> Vec<HandedOver> {
        let process = std::process::id();
        let hand_over = |piece: &Piece| {
            let (file, is_memory) = match piece {
                Piece::File(file, _) => (file, false),
                Piece::Memory(memory) => (memory.file(), true),
            };
            HandedOver {
                path: format!("/proc/{process}/fd/{}", file.as_raw_fd()).into(),
                is_memory,
            }
        };
        self.pieces.iter().map(hand_over).collect()
    }
}

impl HandedOver {
    /// The piece again.
    pub(crate) fn take(&self) -> Result<Piece, WorkloadError> {
        let open = |source| WorkloadError::Open { path: self.path.clone(), source };
        let unsuited =
            |source| WorkloadError::Source { workload: self.path.display().to_string(), source };
        if self.is_memory {
            let file = File::options().read(true).write(true).open(&self.path).map_err(open)?;
            Memory::of_file(file).map(Piece::Memory).map_err(unsuited)
        } else {
            Piece::of_file(File::open(&self.path).map_err(open)?).map_err(unsuited)
        }
    }
}

impl Workload {
    /// What is sent unless told otherwise: 63 files averaging 350 kB, more than a core's own caches hold.
    pub const USUAL: Self = Self::Files { count: 63, average: Size(350_000) };

    /// The sizes of what it will consist of, where that is known before it is made.
    pub(crate) fn sizes(&self) -> Vec<u64> {
        match self {
            Self::Files { count, average } => exponential_sizes(*count, average.0).collect(),
            Self::Equal { count, size } => vec![size.0; *count],
            Self::Memory(size) => vec![size.0],
            Self::File(_) => Vec::new(),
        }
    }

    /// Makes it ready. Files made for the run have no name and vanish with the process, however it ends.
    pub fn open(&self) -> Result<Opened, WorkloadError> {
        let name = self.to_string();
        let unsuited = |source| WorkloadError::Source { workload: name.clone(), source };
        let pieces = match self {
            Self::Files { .. } | Self::Equal { .. } => {
                let folder = std::env::temp_dir();
                let make = |bytes| {
                    random_file(bytes).map_err(|source| WorkloadError::Make {
                        workload: name.clone(),
                        folder: folder.clone(),
                        source,
                    })
                };
                self.sizes()
                    .into_iter()
                    .map(|bytes| Piece::of_file(make(bytes)?).map_err(unsuited))
                    .collect::<Result<_, _>>()?
            }
            Self::File(path) => {
                let file = File::open(path)
                    .map_err(|source| WorkloadError::Open { path: path.clone(), source })?;
                vec![Piece::of_file(file).map_err(unsuited)?]
            }
            Self::Memory(size) => {
                vec![Piece::Memory(Memory::new(Noise::new(), size.0 as usize).map_err(unsuited)?)]
            }
        };
        Ok(Opened { name, pieces })
    }
}

/// Sizes spread as those of real files are: the quantiles of an exponential distribution with this mean, the
/// same every time, in an order that mixes large and small.
fn exponential_sizes(count: usize, average_bytes: u64) -> impl Iterator<Item = u64> {
    // A step that has no factor in common with the count visits every quantile once.
    let step = (count / 3..count).find(|&step| step > 0 && gcd(step, count) == 1).unwrap_or(1);
    (0..count).map(move |index| {
        let quantile = ((index * step) % count) as f64 + 0.5;
        let bytes = -(average_bytes as f64) * (1.0 - quantile / count as f64).ln();
        (bytes as u64).max(1)
    })
}

fn gcd(one: usize, other: usize) -> usize {
    if other == 0 { one } else { gcd(other, one % other) }
}

fn random_file(bytes: u64) -> io::Result<File> {
    let mut file = tempfile::tempfile()?;
    io::copy(&mut io::Read::take(Noise::new(), bytes), &mut file)?;
    // Pages that are still to be written back would be, while something is measured.
    file.sync_all()?;
    Ok(file)
}

/// Endless bytes that do not repeat, so that no layer can save work on them.
struct Noise(fastrand::Rng);

impl Noise {
    fn new() -> Self {
        Self(fastrand::Rng::with_seed(1))
    }
}

impl io::Read for Noise {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.fill(buffer);
        Ok(buffer.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads_read_and_print() {
        for text in ["63x350KB", "64=64KiB", "file:/tmp/a=b x", "memory:16MiB"] {
            assert_eq!(text.parse::<Workload>().unwrap().to_string(), text);
        }
        for bad in [
            "",
            "x",
            "0x1MiB",
            "63x",
            "63x0B",
            "memory:",
            "memory:0B",
            "file:",
            "disk:1",
            "9999999x1GiB",
            "=1MiB",
            "3=",
            "0=1MiB",
        ] {
            assert!(bad.parse::<Workload>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_files_have_the_average_they_are_named_for() {
        let sizes: Vec<u64> = exponential_sizes(63, 350_000).collect();
        let average = sizes.iter().sum::<u64>() / 63;
        assert!((345_000..=351_000).contains(&average), "{average}");
        assert!(*sizes.iter().max().unwrap() > 1 << 20);
        let mut sorted = sizes.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), 63);
    }
}
