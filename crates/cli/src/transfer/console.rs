//! What a transfer prints while it runs: text and a progress bar, or a JSON document in each line.

use super::line::{DeletedLine, ErrorLine, FileLine, NoticeLine, TransferLine};
use super::text::printable;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{self, IsTerminal, Write};
use std::sync::Arc;

/// Where a transfer prints. Clones print to the same place.
#[derive(Debug, Clone)]
pub struct Console(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    is_json: bool,
    is_quiet: bool,
    /// Hidden unless standard error is a terminal.
    bar: ProgressBar,
}

impl Console {
    /// A console that prints text or JSON documents; if it is quiet, only errors.
    pub fn new(is_json: bool, is_quiet: bool) -> Self {
        let shows_bar = !is_json && !is_quiet && io::stderr().is_terminal();
        let bar = if shows_bar { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template("{msg}");
        let bar = bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self(Arc::new(Inner { is_json, is_quiet, bar }))
    }

    /// Whether each line is a JSON document.
    pub fn is_json(&self) -> bool {
        self.0.is_json
    }

    /// Whether only errors are printed.
    pub fn is_quiet(&self) -> bool {
        self.0.is_quiet
    }

    /// Whether the progress is shown in one line that changes.
    pub fn has_bar(&self) -> bool {
        !self.0.bar.is_hidden()
    }

    /// Prints a JSON document.
    pub fn json(&self, line: &TransferLine) {
        let Ok(text) = serde_json::to_string(line) else { return };
        // If standard output is closed, the exit code still tells the result.
        let print = || drop(writeln!(io::stdout(), "{text}"));
        self.0.bar.suspend(print);
    }

    /// Prints what the user should know, and what is not an error.
    pub fn notice(&self, message: &str) {
        if self.0.is_json {
            self.json(&TransferLine::Notice(NoticeLine { message: message.into() }));
        } else if !self.0.is_quiet {
            self.error_text(message);
        }
    }

    /// Prints the path of a file that is sent.
    pub fn file(&self, path: &[u8]) {
        let path = String::from_utf8_lossy(path);
        if self.0.is_json {
            self.json(&TransferLine::File(FileLine { path: path.into() }));
        } else {
            let print = || drop(writeln!(io::stdout(), "{}", printable(&path)));
            self.0.bar.suspend(print);
        }
    }

    /// Prints the path of an entry that was deleted, or would be.
    pub fn deleted(&self, path: &str, is_left: bool) {
        if self.0.is_json {
            return self.json(&TransferLine::Deleted(DeletedLine { path: path.into(), is_left }));
        }
        let verb = if is_left { "would delete" } else { "deleted" };
        // If standard output is closed, the exit code still tells the result.
        let _ = writeln!(io::stdout(), "{verb} {}", printable(path));
    }

    /// Prints the error of one file.
    pub fn file_error(&self, path: &str, problem: &str) {
        if self.0.is_json {
            self.json(&TransferLine::Error(ErrorLine {
                path: path.into(),
                problem: problem.into(),
            }));
        } else {
            self.error_text(&format!("{path}: {problem}"));
        }
    }

    /// Prints a line to standard error.
    pub fn error_text(&self, message: &str) {
        let print = || drop(writeln!(io::stderr(), "haul: {}", printable(message)));
        self.0.bar.suspend(print);
    }

    /// Shows the progress.
    pub fn set_bar(&self, message: String) {
        self.0.bar.set_message(message);
        self.0.bar.tick();
    }

    /// Removes the progress.
    pub fn end_bar(&self) {
        self.0.bar.finish_and_clear();
    }
}
