//! Workloads: the data that is sent, which is many files, one file, or memory.

use crate::page_cache::{self, Folios};
use haul::{Memory, Source, SourceError, file_len};
use haul_units::{ParseQuantityError, Size};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::str::FromStr;

/// Maximum total size of a workload, in memory or temporary space.
const TOTAL_MAX: u64 = 16 << 30;

/// A workload, which is sent repeatedly.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Workload {
    /// Temporary unnamed files with exponentially distributed sizes: most are small, a few are
    /// several times the average.
    Files {
        /// Number of files.
        count: usize,
        /// Their average size.
        average: Size,
    },
    /// Temporary unnamed files of equal size.
    Equal {
        /// Number of files.
        count: usize,
        /// The size of each.
        size: Size,
    },
    /// A temporary unnamed file that is only in the page cache (tmpfs).
    PageCache {
        /// Its size.
        size: Size,
        /// The size of its folios.
        folios: Folios,
    },
    /// An existing file.
    File(PathBuf),
    /// The program's memory, of this size.
    Memory(Size),
}

/// A workload is invalid or could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkloadError {
    /// The text is not a workload.
    #[error(
        "unknown workload {0:?}: write COUNTxSIZE (63x350KB), COUNT=SIZE (64=64KiB), file:PATH, \
         memory:SIZE, tmpfs:SIZE or tmpfs-huge:SIZE"
    )]
    Unknown(String),
    /// The size is invalid.
    #[error("workload {workload:?}: {error}")]
    Size {
        /// The workload, as it was given.
        workload: String,
        /// The cause.
        error: ParseQuantityError,
    },
    /// The workload is too large.
    #[error("workload {0} is larger than {max} in total", max = Size(TOTAL_MAX))]
    TooLarge(String),
    /// The file is missing or cannot be read.
    #[error("cannot open {path}: {error}", path = path.display())]
    Open {
        /// Path of the file.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// The workload cannot be used as a source.
    #[error("cannot send {workload}: {error}")]
    Source {
        /// The workload.
        workload: String,
        /// The cause.
        error: SourceError,
    },
    /// The file in the page cache could not be created.
    #[error("cannot make workload {workload}: {error} ({advice})")]
    PageCache {
        /// The workload.
        workload: String,
        /// The kernel's error.
        error: io::Error,
        /// What may be missing.
        advice: &'static str,
    },
    /// The temporary files could not be created.
    #[error(
        "cannot make the files of workload {workload} in {folder}: {error} ({advice})",
        folder = folder.display(),
        advice = advice_for_files(error)
    )]
    Make {
        /// The workload.
        workload: String,
        /// The folder of the files.
        folder: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
}

/// Returns what the user can do when temporary files cannot be created.
fn advice_for_files(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
        Some(rustix::io::Errno::MFILE) => "raise the limit: ulimit -n",
        _ => "set TMPDIR to a folder with enough space",
    }
}

impl Workload {
    /// Parses a workload. The path of `file:PATH` may be any bytes.
    pub fn parse(text: &OsStr) -> Result<Self, WorkloadError> {
        match text.as_bytes().strip_prefix(b"file:") {
            Some(path) if !path.is_empty() => Ok(Self::File(OsStr::from_bytes(path).into())),
            _ => text.to_string_lossy().parse(),
        }
    }
}

impl FromStr for Workload {
    type Err = WorkloadError;

    fn from_str(text: &str) -> Result<Self, WorkloadError> {
        let size = |part: &str| {
            part.parse::<Size>()
                .map_err(|error| WorkloadError::Size { workload: text.into(), error })
        };
        let workload = if let Some(path) = text.strip_prefix("file:") {
            return if path.is_empty() {
                Err(WorkloadError::Unknown(text.into()))
            } else {
                Ok(Self::File(path.into()))
            };
        } else if let Some(part) = text.strip_prefix("memory:") {
            Self::Memory(size(part)?)
        } else if let Some(part) = text.strip_prefix("tmpfs:") {
            Self::PageCache { size: size(part)?, folios: Folios::Small }
        } else if let Some(part) = text.strip_prefix("tmpfs-huge:") {
            Self::PageCache { size: size(part)?, folios: Folios::Huge }
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
            Self::Memory(size) | Self::PageCache { size, .. } => size.0,
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
            Self::PageCache { size, folios } => {
                write!(formatter, "{}:{size}", folios.prefix())
            }
        }
    }
}

/// An open workload, ready to be sent.
#[derive(Debug)]
pub struct Opened {
    /// Its name in reports.
    pub name: String,
    /// The pieces, which are sent in order and then again from the first.
    pub pieces: Vec<Piece>,
}

/// A file or a block of memory to send.
#[derive(Debug)]
pub enum Piece {
    /// A file and its length in bytes.
    File(File, u64),
    /// Memory from which the bytes are sent.
    Memory(Memory),
}

impl Piece {
    fn of_file(file: File) -> Result<Self, SourceError> {
        let len = file_len(&file)?;
        if len == 0 {
            return Err(SourceError::Empty);
        }
        Ok(Self::File(file, len))
    }

    /// The piece as a source of the library.
    pub fn source(&self) -> Source<'_> {
        match self {
            Self::File(file, _) => file.into(),
            Self::Memory(memory) => memory.into(),
        }
    }

    /// The file, or the memory file.
    pub fn file(&self) -> &File {
        match self {
            Self::File(file, _) => file,
            Self::Memory(memory) => memory.file(),
        }
    }

    /// Length in bytes.
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

/// A handle of a piece for another process of the same user, which opens it through `/proc`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PieceHandle {
    path: PathBuf,
    is_memory: bool,
}

impl Opened {
    /// Handles of the pieces for a child of this process. They are valid for the lifetime of
    /// `self`.
    pub fn handed_over(&self) -> Vec<PieceHandle> {
        let process = std::process::id();
        let handle_of = |piece: &Piece| PieceHandle {
            path: format!("/proc/{process}/fd/{}", piece.file().as_raw_fd()).into(),
            is_memory: matches!(piece, Piece::Memory(_)),
        };
        self.pieces.iter().map(handle_of).collect()
    }
}

impl PieceHandle {
    /// Opens the piece.
    pub fn open(&self) -> Result<Piece, WorkloadError> {
        let open = |error| WorkloadError::Open { path: self.path.clone(), error };
        let source_error =
            |error| WorkloadError::Source { workload: self.path.display().to_string(), error };
        if self.is_memory {
            let file = File::options().read(true).write(true).open(&self.path).map_err(open)?;
            Memory::of_file(file).map(Piece::Memory).map_err(source_error)
        } else {
            Piece::of_file(File::open(&self.path).map_err(open)?).map_err(source_error)
        }
    }
}

impl Workload {
    /// The default workload: 63 files averaging 350 kB, which exceed the private caches of a core.
    pub const USUAL: Self = Self::Files { count: 63, average: Size(350_000) };

    /// The sizes of its pieces, as far as they are known before it is opened.
    pub fn sizes(&self) -> Vec<u64> {
        match self {
            Self::Files { count, average } => exponential_sizes(*count, average.0).collect(),
            Self::Equal { count, size } => vec![size.0; *count],
            Self::Memory(size) | Self::PageCache { size, .. } => vec![size.0],
            Self::File(_) => Vec::new(),
        }
    }

    /// Opens the workload. Temporary files have no name and disappear with the process, however it
    /// ends.
    pub fn open(&self) -> Result<Opened, WorkloadError> {
        let name = self.to_string();
        let source_error = |error| WorkloadError::Source { workload: name.clone(), error };
        let pieces = match self {
            Self::Files { .. } | Self::Equal { .. } => {
                let folder = std::env::temp_dir();
                let make = |bytes| {
                    random_file(bytes).map_err(|error| WorkloadError::Make {
                        workload: name.clone(),
                        folder: folder.clone(),
                        error,
                    })
                };
                self.sizes()
                    .into_iter()
                    .map(|bytes| Piece::of_file(make(bytes)?).map_err(source_error))
                    .collect::<Result<_, _>>()?
            }
            Self::File(path) => {
                // A named pipe would wait for a writer, and is refused below.
                let file = File::options()
                    .read(true)
                    .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
                    .open(path)
                    .map_err(|error| WorkloadError::Open { path: path.clone(), error })?;
                vec![Piece::of_file(file).map_err(source_error)?]
            }
            Self::PageCache { size, folios } => {
                let make = || {
                    let mut file = page_cache::file(*folios)?;
                    io::copy(&mut io::Read::take(RandomBytes::new(), size.0), &mut file)?;
                    Ok(file)
                };
                let file = make().map_err(|error| WorkloadError::PageCache {
                    workload: name.clone(),
                    error,
                    advice: match folios {
                        Folios::Small => "is there enough memory?",
                        Folios::Huge => "huge folios need root, and Linux 5.2",
                    },
                })?;
                vec![Piece::of_file(file).map_err(source_error)?]
            }
            Self::Memory(size) => {
                let memory = Memory::new(RandomBytes::new(), size.0 as usize);
                vec![Piece::Memory(memory.map_err(source_error)?)]
            }
        };
        Ok(Opened { name, pieces })
    }
}

/// Sizes distributed like the sizes of real files: the quantiles of an exponential distribution
/// with this mean. The sizes are the same every time, in an order that mixes large and small.
fn exponential_sizes(count: usize, average_bytes: u64) -> impl Iterator<Item = u64> {
    // A step that is coprime to the count visits every quantile once.
    let step = (count / 3..count).find(|&step| step > 0 && gcd(step, count) == 1).unwrap_or(1);
    (0..count).map(move |index| {
        let quantile = ((index * step) % count) as f64 + 0.5;
        let bytes = -(average_bytes as f64) * (1.0 - quantile / count as f64).ln();
        (bytes as u64).max(1)
    })
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn random_file(bytes: u64) -> io::Result<File> {
    let mut file = tempfile::tempfile()?;
    io::copy(&mut io::Read::take(RandomBytes::new(), bytes), &mut file)?;
    // Otherwise dirty pages would be written back during a measurement.
    file.sync_all()?;
    Ok(file)
}

/// Endless random bytes, which no layer can compress or deduplicate.
struct RandomBytes(fastrand::Rng);

impl RandomBytes {
    fn new() -> Self {
        Self(fastrand::Rng::with_seed(1))
    }
}

impl io::Read for RandomBytes {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.fill(buffer);
        Ok(buffer.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads_parse_and_format() {
        for text in [
            "63x350KB",
            "64=64KiB",
            "file:/tmp/a=b x",
            "memory:16MiB",
            "tmpfs:4MiB",
            "tmpfs-huge:4MiB",
        ] {
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
    fn exponential_sizes_have_the_requested_average() {
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
