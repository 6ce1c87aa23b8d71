//! Output of results, and the errors that end a run.

use haul_bench::{BenchError, Progress};
use haul_soak::SoakError;
use indicatif::{ProgressBar, ProgressStyle};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fmt::{self, Display};
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

/// The exit code of a valid request that could not be answered, because nothing could be measured
/// or compared. The code differs from 0, so that a check in a script does not pass, and from 1, so
/// that the script can tell it from a failed check.
pub const UNMEASURED_CODE: u8 = 3;

/// An error that ends the run: a one-line message and an exit code.
#[derive(Debug)]
pub struct Failure {
    message: String,
    code: u8,
}

impl Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl Failure {
    /// An error in the arguments or in a file that they name: exit code 2.
    pub fn bad_input(message: impl Display) -> Self {
        Self { message: message.to_string(), code: 2 }
    }

    /// A failure of a valid request: exit code 1.
    pub fn failed(message: impl Display) -> Self {
        Self { message: message.to_string(), code: 1 }
    }

    /// A valid request that could not be answered, because nothing could be measured or compared:
    /// exit code 3.
    pub fn unmeasured(message: impl Display) -> Self {
        Self { message: message.to_string(), code: UNMEASURED_CODE }
    }

    /// A failure with the exit code that other programs use for it.
    pub fn with_code(message: impl Display, code: u8) -> Self {
        Self { message: message.to_string(), code }
    }

    /// A run that a signal stopped before there was a result: exit code 130.
    pub fn stopped(message: impl Display) -> Self {
        Self { message: message.to_string(), code: 130 }
    }

    /// Names the file in which the problem is, unless it is named.
    #[must_use]
    pub fn in_file(mut self, path: &Path) -> Self {
        let path = format!("{}: ", path.display());
        if !self.message.starts_with(&path) {
            self.message.insert_str(0, &path);
        }
        self
    }

    /// Prints the message to standard error and returns the exit code.
    pub fn report(&self) -> ExitCode {
        // If standard error is closed, the message has no other destination.
        let _ = writeln!(io::stderr(), "haul: {}", self.message.replace('\n', " "));
        self.exit_code()
    }

    /// Returns the exit code as a number.
    pub fn code(&self) -> u8 {
        self.code
    }

    /// Returns the exit code.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code)
    }
}

/// Converts the error of an experiment, and chooses the exit code by its kind.
pub fn bench_failure(error: BenchError) -> Failure {
    match error {
        BenchError::Stopped | BenchError::Soak(SoakError::Interrupted) => Failure::stopped(error),
        error if error.is_unmeasured() => Failure::unmeasured(error),
        error if error.is_bad_input() => Failure::bad_input(error),
        error => Failure::failed(error),
    }
}

/// Creates the progress bar of a run.
pub fn progress_bar() -> ProgressBar {
    ProgressBar::new(0).with_style(
        ProgressStyle::with_template("{bar:30} {pos}/{len}, about {eta} left, {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    )
}

/// Updates the progress bar.
pub fn update_progress(bar: &ProgressBar, Progress { done, total, next }: Progress) {
    bar.set_length(total as u64);
    bar.set_position(done as u64);
    bar.set_message(next);
}

/// Named pipes for reports, open until the end, so that their readers wait.
static PIPES: Mutex<Vec<File>> = Mutex::new(Vec::new());

/// The destination of a report: a file, or standard output for `-`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    StandardOutput,
    File(PathBuf),
}

impl From<OsString> for Destination {
    fn from(text: OsString) -> Self {
        // A report at these paths replaces the text on standard output, as with `-`.
        const STANDARD_OUTPUT: [&str; 4] = ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"];
        let is_standard_output = STANDARD_OUTPUT.iter().any(|path| text == *path);
        if is_standard_output { Self::StandardOutput } else { Self::File(text.into()) }
    }
}

impl Destination {
    /// Checks that the destination can be written, so that a long run does not fail when it writes
    /// its report. If the destination is a named pipe, the call blocks until a program opens the
    /// pipe for reading. Call this before signal handlers are installed, so that Ctrl-C ends the
    /// wait.
    pub fn check(&self) -> Result<(), Failure> {
        match self {
            Self::StandardOutput => Ok(()),
            Self::File(path) => {
                let pipe = haul_fs::check_output(path).map_err(|error| {
                    Failure::bad_input(format!(
                        "cannot write {}: {error} (name another file)",
                        path.display()
                    ))
                })?;
                PIPES.lock().unwrap_or_else(PoisonError::into_inner).extend(pipe);
                Ok(())
            }
        }
    }

    /// Writes `text`. A regular file is replaced atomically: readers see the old content or all of
    /// `text`. A pipe or a device is written to.
    pub fn write(&self, text: &str) -> Result<(), Failure> {
        match self {
            Self::StandardOutput => print(text),
            Self::File(path) => {
                haul_fs::write_output(path, text.as_bytes(), 0o644).map_err(|error| {
                    let is_unread = Errno::from_io_error(&error) == Some(Errno::NXIO);
                    let reason =
                        if is_unread { "no program reads it".into() } else { error.to_string() };
                    Failure::failed(format!("cannot write {}: {reason}", path.display()))
                })
            }
        }
    }
}

/// Checks that files can be created in `directory`.
pub fn check_directory(directory: &Path) -> Result<(), Failure> {
    haul_fs::check_directory(directory).map_err(|error| {
        Failure::bad_input(format!(
            "cannot write to directory {}: {error} (choose another directory)",
            directory.display()
        ))
    })
}

/// Prints to standard output. A closed pipe (`| head`) is not an error.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::failed(format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// The width of text without a terminal, and the largest width of a help text.
pub const WIDTH_DEFAULT: u16 = 100;

/// Returns the terminal's width in columns. Without a terminal it is `COLUMNS`, or 100. A width of
/// 0 means that the width is unknown.
pub fn terminal_width() -> u16 {
    rustix::termios::tcgetwinsize(io::stdout())
        .ok()
        .map(|size| size.ws_col)
        .filter(|&columns| columns > 0)
        .or_else(|| std::env::var("COLUMNS").ok()?.parse().ok().filter(|&columns| columns > 0))
        .unwrap_or(WIDTH_DEFAULT)
}

/// Whether to write colours: standard output is a terminal, and `NO_COLOR` (no-color.org) is empty.
pub fn has_colour() -> bool {
    let is_refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    io::stdout().is_terminal() && !is_refused && !is_dumb
}

/// Returns a flag that SIGINT (Ctrl-C) and SIGTERM set. A second signal ends the process at once.
pub fn stop_flag() -> Result<std::sync::Arc<std::sync::atomic::AtomicBool>, Failure> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    use signal_hook::flag;
    let stop = std::sync::Arc::default();
    for signal in [SIGINT, SIGTERM] {
        // The shutdown handler runs first. At the first signal it finds the flag unset and does
        // nothing; then the other handler sets the flag.
        flag::register_conditional_shutdown(signal, 128 + signal, std::sync::Arc::clone(&stop))
            .and_then(|_| flag::register(signal, std::sync::Arc::clone(&stop)))
            .map_err(|error| {
                Failure::failed(format!("cannot handle SIGINT and SIGTERM: {error}"))
            })?;
    }
    Ok(stop)
}
