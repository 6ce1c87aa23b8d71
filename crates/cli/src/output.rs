//! Where results go, and what failure looks like.

use haul_bench::{BenchError, Progress};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::fs::Access;
use std::convert::Infallible;
use std::fmt::{self, Display};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

/// The end of a run that did not do what it was asked to, in one line.
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
    /// What was asked for makes no sense: exit code 2.
    pub fn bad_input(message: impl Display) -> Self {
        Self { message: message.to_string(), code: 2 }
    }

    /// It made sense and failed: exit code 1.
    pub fn failed(message: impl Display) -> Self {
        Self { message: message.to_string(), code: 1 }
    }

    /// Somebody asked for an end before there was a result: exit code 130.
    pub fn stopped(message: impl Display) -> Self {
        Self { message: message.to_string(), code: 130 }
    }

    /// Prints the line and gives the exit code.
    pub fn report(&self) -> ExitCode {
        // A standard error that is closed leaves nobody to tell.
        let _ = writeln!(io::stderr(), "haul: {}", self.message.replace('\n', " "));
        self.exit_code()
    }

    /// The exit code.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code)
    }
}

/// The end of an experiment that could not be run.
pub fn bench_failure(error: BenchError) -> Failure {
    match error {
        BenchError::Stopped => Failure::stopped(error),
        error if error.is_bad_input() => Failure::bad_input(error),
        error => Failure::failed(error),
    }
}

/// How far a run has come, on a terminal.
pub fn progress_bar() -> ProgressBar {
    ProgressBar::new(0).with_style(
        ProgressStyle::with_template("{bar:30} {pos}/{len}, about {eta} left, {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    )
}

/// Moves it on.
pub fn show(bar: &ProgressBar, Progress { done, total, next }: Progress) {
    bar.set_length(total as u64);
    bar.set_position(done as u64);
    bar.set_message(next);
}

/// A file, or standard output for `-`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    StandardOutput,
    File(PathBuf),
}

impl FromStr for Destination {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(if text == "-" { Self::StandardOutput } else { Self::File(text.into()) })
    }
}

impl Destination {
    /// Whether it could be written, asked before a long run rather than after.
    pub fn check(&self) -> Result<(), Failure> {
        let Self::File(path) = self else { return Ok(()) };
        if path.is_dir() {
            return Err(Failure::bad_input(format!(
                "cannot write {}: it is a folder",
                path.display()
            )));
        }
        check_folder(folder_of(path))
    }

    /// Writes `text` there, whole or not at all.
    pub fn write(&self, text: &str) -> Result<(), Failure> {
        match self {
            Self::StandardOutput => print(text),
            Self::File(path) => haul_fs::replace(path, text.as_bytes()).map_err(|error| {
                Failure::failed(format!("cannot write {}: {error}", path.display()))
            }),
        }
    }
}

/// Whether files can be made in `folder`.
pub fn check_folder(folder: &Path) -> Result<(), Failure> {
    let refused = |error: io::Error| {
        Failure::bad_input(format!(
            "cannot write into {}: {error} (choose another folder)",
            folder.display()
        ))
    };
    if !fs::metadata(folder).map_err(refused)?.is_dir() {
        return Err(refused(io::ErrorKind::NotADirectory.into()));
    }
    rustix::fs::access(folder, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|errno| refused(errno.into()))
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Prints to standard output. A reader that has seen enough (`| head`) is no failure.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::failed(format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// The terminal's width in columns: as it is, as `COLUMNS` says, or 100 where there is none.
pub fn width() -> u16 {
    rustix::termios::tcgetwinsize(io::stdout())
        .ok()
        .map(|size| size.ws_col)
        .filter(|&columns| columns > 0)
        .or_else(|| std::env::var("COLUMNS").ok()?.parse().ok())
        .unwrap_or(100)
}

/// A flag that Ctrl-C and SIGTERM set. A second one ends the process at once.
pub fn stop_flag() -> Result<std::sync::Arc<std::sync::atomic::AtomicBool>, Failure> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    use signal_hook::flag;
    let stop = std::sync::Arc::default();
    for signal in [SIGINT, SIGTERM] {
        // In this order the first signal finds the flag unset and only sets it.
        flag::register_conditional_shutdown(signal, 128 + signal, std::sync::Arc::clone(&stop))
            .and_then(|_| flag::register(signal, std::sync::Arc::clone(&stop)))
            .map_err(|error| Failure::failed(format!("cannot watch for Ctrl-C: {error}")))?;
    }
    Ok(stop)
}
