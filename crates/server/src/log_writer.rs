//! Writes log lines to a file on a separate thread, so that a slow disk or a full pipe does not
//! delay an event loop.
//!
//! Each loop collects lines in a [`LogBuffer`]. If the thread falls far behind, batches are dropped
//! and counted.

use crate::counter::SingleWriterCounter;
use crate::error::Error;
use crate::join::join_with_timeout;
use crate::privileges;
use crate::start_check::check_creation;
use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, accessat};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tracing::warn;

/// A batch is handed over at this size, in bytes, and by [`LogBuffer::flush`].
const BATCH_BYTES: usize = 32 << 10;
/// The time in which the thread takes a new file.
const REOPEN_TIMEOUT: Duration = Duration::from_secs(2);
/// Batches that may wait for the thread.
const BATCHES_MAX: usize = 256;

/// A log file with its writing thread.
#[derive(Debug)]
pub struct LogWriter {
    tx: SyncSender<Message>,
    /// `None` is standard output.
    path: Option<PathBuf>,
    unwritten: Arc<SingleWriterCounter>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The lines of one event loop that were not handed to the writer yet.
#[derive(Debug, Default)]
pub struct LogBuffer {
    lines: Vec<u8>,
    count: u64,
    dropped: u64,
    tx: Option<SyncSender<Message>>,
}

#[derive(Debug)]
enum Message {
    /// Whole lines.
    Write(Vec<u8>),
    /// The new file, and where the thread reports that it writes to the new file.
    Reopen(File, SyncSender<()>),
    End,
}

/// A log file that is open for appending.
#[derive(Debug)]
pub struct LogFile {
    file: File,
    /// Whether this process created the file.
    is_new: bool,
    path: Option<PathBuf>,
}

impl LogFile {
    /// Opens or creates a log file; `None` is standard output.
    pub fn open(path: Option<&Path>) -> Result<Self, Error> {
        let file = match path {
            None => rustix::io::fcntl_dupfd_cloexec(io::stdout(), 0).map(|file| (file, false)),
            Some(path) => open_or_create(path)
                .and_then(|(file, is_new)| set_blocking(&file).map(|()| (file, is_new))),
        };
        let (file, is_new) = file.map_err(|errno| failed(path, errno))?;
        Ok(Self { file: file.into(), is_new, path: path.map(Path::to_owned) })
    }

    /// Checks whether [`LogFile::open`] will succeed, without creating a file.
    pub fn check(path: Option<&Path>) -> Result<(), Error> {
        let Some(path) = path else { return Ok(()) };
        let is_fifo = path.metadata().is_ok_and(|file| file.file_type().is_fifo());
        let checked = match path.read_link() {
            _ if path.as_os_str().as_bytes().ends_with(b"/") => Err(Errno::ISDIR),
            // The end of a writer would end the reader.
            _ if is_fifo => accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS),
            link => match rustix::fs::open(path, LOG_FLAGS, Mode::empty()) {
                Err(Errno::NOENT) => {
                    let folder = path.parent().unwrap_or(Path::new("."));
                    let target = link.map_or(path.to_owned(), |target| folder.join(target));
                    check_creation(&target)
                }
                opened => opened.map(drop),
            },
        };
        checked.map_err(|errno| failed(Some(path), errno))
    }

    /// Gives a file that this process created to the user that the process becomes, who opens the
    /// file again for a reload.
    pub fn give_to(&self, user: Option<&str>) -> Result<(), Error> {
        match user {
            Some(user) if self.is_new => privileges::give_file(&self.file, user),
            _ => Ok(()),
        }
    }
}

/// The flags by which a log is opened. A FIFO without a reader would keep `open` waiting without
/// `NONBLOCK`.
const LOG_FLAGS: OFlags = OFlags::WRONLY
    .union(OFlags::APPEND)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOCTTY)
    .union(OFlags::NONBLOCK);

fn failed(path: Option<&Path>, errno: Errno) -> Error {
    let path = path.map_or_else(|| "-".into(), Path::to_owned);
    let error = match errno {
        Errno::NXIO => {
            io::Error::other("it is a FIFO that no program reads: start the reader first")
        }
        _ => errno.into(),
    };
    Error::Log { path, error }
}

/// Opens a log for appending. True if it did not exist.
fn open_or_create(path: &Path) -> rustix::io::Result<(OwnedFd, bool)> {
    let flags = LOG_FLAGS | OFlags::CREATE;
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP;
    match rustix::fs::open(path, flags | OFlags::EXCL, mode) {
        Err(Errno::EXIST) => Ok((rustix::fs::open(path, flags, mode)?, false)),
        opened => Ok((opened?, true)),
    }
}

impl LogWriter {
    /// Starts the writing thread.
    pub fn start(log: LogFile) -> Result<Self, Error> {
        let unwritten: Arc<SingleWriterCounter> = Arc::default();
        let counter = Arc::clone(&unwritten);
        let (tx, rx) = sync_channel(BATCHES_MAX);
        let thread = std::thread::Builder::new()
            .name("haul-log".into())
            .spawn(move || write_batches(&rx, log.file, &counter))
            .map_err(Error::at("starting the log's thread"))?;
        Ok(Self { tx, path: log.path, unwritten, thread: Mutex::new(Some(thread)) })
    }

    /// A buffer for one event loop.
    pub fn buffer(&self) -> LogBuffer {
        LogBuffer { tx: Some(self.tx.clone()), ..LogBuffer::default() }
    }

    /// Opens the file again by its name, after a log rotation moved the file.
    pub fn reopen(&self) -> Result<(), Error> {
        let log = LogFile::open(self.path.as_deref())?;
        let (tx, rx) = sync_channel(1);
        let is_taken = self.tx.try_send(Message::Reopen(log.file, tx)).is_ok()
            && rx.recv_timeout(REOPEN_TIMEOUT).is_ok();
        if is_taken {
            return Ok(());
        }
        let path = self.path.as_deref().map_or_else(|| "-".into(), Path::to_owned);
        let problem = "lines wait for a slow disk or pipe, and go to the old file: reload again";
        Err(Error::Log { path, error: io::Error::other(problem) })
    }

    /// The path; `None` for standard output.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Lines that could not be written, because the disk is full or the pipe lacks a reader.
    pub fn unwritten(&self) -> &Arc<SingleWriterCounter> {
        &self.unwritten
    }

    /// Writes all batches and ends the thread. A thread that is stuck is left behind after two
    /// seconds, with its lines.
    pub fn end(&self) {
        let _ = self.tx.try_send(Message::End);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            join_with_timeout(thread);
        }
    }
}

/// Writes batches to the file until the end.
fn write_batches(rx: &Receiver<Message>, mut file: File, unwritten: &SingleWriterCounter) {
    let mut is_failing = false;
    // The rest of a line whose beginning is in the file. The rest is written first when the disk
    // has room again.
    let mut rest = Vec::new();
    for message in rx {
        match message {
            Message::Write(lines) => {
                let is_mid_line = !rest.is_empty();
                let lines =
                    if is_mid_line { [std::mem::take(&mut rest), lines].concat() } else { lines };
                let (written, result) = write_all(&mut file, &lines);
                // A full disk costs log lines and nothing else.
                let Err(error) = result else {
                    is_failing = false;
                    continue;
                };
                let ends_mid_line =
                    if written == 0 { is_mid_line } else { lines[written - 1] != b'\n' };
                let lost = if ends_mid_line {
                    let end = lines[written..].iter().position(|&byte| byte == b'\n');
                    let end = end.map_or(lines.len(), |at| written + at + 1);
                    rest = lines[written..end].to_vec();
                    &lines[end..]
                } else {
                    &lines[written..]
                };
                // The batch ends with a line, as every batch does.
                unwritten.add(lost.split_inclusive(|&byte| byte == b'\n').count() as u64);
                if !std::mem::replace(&mut is_failing, true) {
                    let message = "the access log cannot be written, its lines are lost";
                    warn!(%error, "{message}: {error}");
                }
            }
            Message::Reopen(reopened, taken) => {
                file = reopened;
                // The reload may have stopped waiting.
                let _ = taken.try_send(());
                unwritten.add(u64::from(!rest.is_empty()));
                rest.clear();
            }
            Message::End => break,
        }
    }
    unwritten.add(u64::from(!rest.is_empty()));
}

/// Writes all bytes. Returns how many were written, even if the write fails.
fn write_all(file: &mut File, bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut written = 0;
    while written < bytes.len() {
        match file.write(&bytes[written..]) {
            Ok(0) => return (written, Err(io::ErrorKind::WriteZero.into())),
            Ok(count) => written += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (written, Err(error)),
        }
    }
    (written, Ok(()))
}

/// Clears `O_NONBLOCK`.
fn set_blocking(file: impl AsFd) -> rustix::io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)
}

impl LogBuffer {
    /// Whether a writer takes the lines. [`LogBuffer::default`] lacks a writer.
    pub fn is_on(&self) -> bool {
        self.tx.is_some()
    }

    /// Appends one line, which `write` writes without its newline.
    pub fn line(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.lines);
        self.lines.push(b'\n');
        self.count += 1;
        if self.lines.len() >= BATCH_BYTES {
            self.dropped = self.flush();
        }
    }

    /// Hands the lines to the writer. Returns the number of lines dropped since the last call
    /// because the writer's queue was full.
    pub fn flush(&mut self) -> u64 {
        let lines = std::mem::take(&mut self.lines);
        let count = std::mem::take(&mut self.count);
        if let Some(tx) = self.tx.as_ref().filter(|_| !lines.is_empty()) {
            self.lines.reserve(BATCH_BYTES + 1024);
            if let Err(TrySendError::Full(_)) = tx.try_send(Message::Write(lines)) {
                self.dropped += count;
            }
        }
        std::mem::take(&mut self.dropped)
    }

    /// The lines that were not handed over yet.
    pub fn pending(&self) -> &[u8] {
        &self.lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::PipeFlags;

    #[test]
    fn lines_go_to_the_file_and_after_a_rotation_to_the_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let writer = LogWriter::start(LogFile::open(Some(&path)).unwrap()).unwrap();
        let mut buffer = writer.buffer();
        buffer.line(|out| out.extend_from_slice(b"one"));
        assert_eq!(buffer.pending(), b"one\n");
        assert_eq!(buffer.flush(), 0);
        let moved = folder.path().join("log.1");
        std::fs::rename(&path, &moved).unwrap();
        writer.reopen().unwrap();
        buffer.line(|out| out.extend_from_slice(b"two"));
        buffer.flush();
        writer.end();
        assert_eq!(std::fs::read(moved).unwrap(), b"one\n");
        assert_eq!(std::fs::read(path).unwrap(), b"two\n");
        assert_eq!(writer.unwritten().get(), 0);
    }

    #[test]
    fn lines_that_a_full_disk_refuses_are_counted() {
        let full = LogFile::open(Some(Path::new("/dev/full"))).unwrap();
        let writer = LogWriter::start(full).unwrap();
        let mut buffer = writer.buffer();
        for _ in 0..3 {
            buffer.line(|out| out.extend_from_slice(b"lost"));
        }
        buffer.flush();
        writer.end();
        assert_eq!(writer.unwritten().get(), 3);
    }

    /// A file that is full takes the beginning of a line. Its rest follows once there is room.
    #[test]
    fn no_line_is_cut_in_two() {
        const LINE_BYTES: usize = 100;
        let (reader, pipe) = rustix::pipe::pipe_with(PipeFlags::NONBLOCK).unwrap();
        let room = rustix::pipe::fcntl_setpipe_size(&pipe, 4096).unwrap();
        let batch = |letter: u8| [vec![letter; LINE_BYTES - 1], vec![b'\n']].concat().repeat(100);
        let (tx, rx) = sync_channel(8);
        let unwritten = SingleWriterCounter::default();
        let received = std::thread::scope(|scope| {
            let counter = &unwritten;
            scope.spawn(move || write_batches(&rx, pipe.into(), counter));
            let mut received = vec![0; room];
            let mut reader = File::from(reader);
            tx.send(Message::Write(batch(b'a'))).unwrap();
            while unwritten.get() == 0 {
                std::thread::yield_now();
            }
            io::Read::read_exact(&mut reader, &mut received).unwrap();
            assert_ne!(received.last(), Some(&b'\n'), "the file ends within a line");
            tx.send(Message::Write(batch(b'b')[..1000].to_vec())).unwrap();
            tx.send(Message::End).unwrap();
            while io::Read::read_to_end(&mut reader, &mut received).is_err() {
                std::thread::yield_now();
            }
            received
        });
        let lines: Vec<_> = received.split_inclusive(|&byte| byte == b'\n').collect();
        let is_whole = |line: &&[u8]| {
            line.len() == LINE_BYTES && line[..LINE_BYTES - 1].iter().all(|&byte| byte == line[0])
        };
        assert!(lines.iter().all(is_whole));
        assert_eq!(lines.len() as u64 + unwritten.get(), 110);
    }

    #[test]
    fn a_fifo_without_a_reader_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fifo");
        rustix::fs::mknodat(CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
            .unwrap();
        // Opening it must not wait for a reader.
        let (tx, rx) = std::sync::mpsc::channel();
        let fifo = path.clone();
        std::thread::spawn(move || tx.send(LogFile::open(Some(&fifo)).map(|_| ())));
        let error = rx.recv_timeout(Duration::from_secs(20)).expect("it waits").unwrap_err();
        assert!(error.to_string().contains("no program reads"), "{error}");
        let _reader = rustix::fs::open(&path, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty());
        let log = LogFile::open(Some(&path)).unwrap();
        let flags = rustix::fs::fcntl_getfl(&log.file).unwrap();
        assert!(!flags.contains(OFlags::NONBLOCK), "a full pipe would lose lines");
    }

    #[test]
    fn a_writer_that_is_stuck_costs_lines_and_no_time() {
        let (reader, pipe) = rustix::pipe::pipe().unwrap();
        let log = LogFile { file: pipe.into(), is_new: false, path: None };
        let writer = LogWriter::start(log).unwrap();
        let mut buffer = writer.buffer();
        // A pipe of 64 KiB, the batch that is being written, and the queue.
        let batches = BATCHES_MAX + 8;
        for _ in 0..batches {
            buffer.line(|out| out.resize(BATCH_BYTES, b'x'));
        }
        assert!(buffer.flush() > 0);
        drop(reader);
        writer.end();
    }
}
