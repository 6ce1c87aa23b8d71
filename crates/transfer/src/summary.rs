//! What a transfer did.

use serde::{Deserialize, Serialize};

/// What a transfer did, as the destination counted it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Summary {
    /// Entries that the source found: files, directories, links and others.
    pub entries: u64,
    /// Regular files whose content was sent.
    pub files_sent: u64,
    /// The bytes of their content. Holes are not counted.
    pub bytes_sent: u64,
    /// The bytes that were at the destination from an interrupted transfer.
    pub bytes_held: u64,
    /// The bytes of blocks that were equal to blocks of an earlier version at the destination. In a
    /// chain, these blocks are sent nevertheless if another host lacks them.
    pub bytes_equal: u64,
    /// Regular files that were up to date.
    pub files_up_to_date: u64,
    /// Regular files that differ from the original and stay as they are, as the options ask.
    pub files_kept: u64,
    /// Regular files that became hard links to files of an earlier copy.
    pub files_linked: u64,
    /// The bytes that compression saved on the way.
    pub bytes_saved: u64,
    /// Errors of single files, of both ends, in the order in which they happened.
    pub errors: Vec<FileError>,
    /// Errors beyond those that `errors` has room for.
    pub errors_left_out: u64,
    /// Errors of files that vanished from the source, listed or not.
    pub files_vanished: u64,
    /// Entries that the sources lacked, and that were deleted.
    pub entries_deleted: u64,
    /// Entries that were not deleted because they were too many, or because of an error.
    pub deletions_refused: u64,
    /// Why nothing was deleted.
    pub deletion_problem: Option<String>,
    /// The paths of what was deleted, or would be: the first of many.
    pub deleted_paths: Vec<String>,
    /// What the user should know, and what is not an error.
    pub notices: Vec<String>,
}

/// The most errors that a summary lists.
const ERRORS_MAX: usize = 1000;
/// The most notices of a summary.
const NOTICES_MAX: usize = 20;
/// The most bytes of the errors that a summary lists.
const ERRORS_BYTES_MAX: usize = 256 << 10;
/// The most bytes of a path or a problem in a summary.
const TEXT_BYTES_MAX: usize = 4096;

/// The failure of one file, which did not stop the transfer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FileError {
    /// The path, with bytes that are not UTF-8 replaced.
    pub path: String,
    /// What failed.
    pub problem: String,
    /// Whether the file vanished from the source during the transfer.
    pub has_vanished: bool,
    /// Whether the failure is one of the destination. The path then begins at the destination.
    pub is_at_destination: bool,
}

impl Summary {
    /// Adds what the user should know. Of many notices, the first are kept.
    pub(crate) fn add_notice(&mut self, mut notice: String) {
        truncate(&mut notice);
        if self.notices.len() < NOTICES_MAX {
            self.notices.push(notice);
        }
    }

    /// Adds a path that is deleted. Of many paths, the first are kept.
    pub(crate) fn add_deleted(&mut self, path: &[u8]) {
        let mut path = String::from_utf8_lossy(path).into_owned();
        truncate(&mut path);
        let bytes: usize = self.deleted_paths.iter().map(String::len).sum();
        if self.deleted_paths.len() < ERRORS_MAX && bytes + path.len() <= ERRORS_BYTES_MAX {
            self.deleted_paths.push(path);
        }
    }

    /// Adds the failure of a file.
    pub(crate) fn add_error(&mut self, mut error: FileError) {
        self.files_vanished += u64::from(error.has_vanished);
        truncate(&mut error.path);
        truncate(&mut error.problem);
        let listed = self.errors.iter().map(|error| error.path.len() + error.problem.len());
        let bytes = listed.sum::<usize>() + error.path.len() + error.problem.len();
        if self.errors.len() < ERRORS_MAX && bytes <= ERRORS_BYTES_MAX {
            self.errors.push(error);
        } else {
            self.errors_left_out += 1;
        }
    }
}

/// Shortens a text, because the other end may send a long text.
fn truncate(text: &mut String) {
    if text.len() > TEXT_BYTES_MAX {
        let is_end = |&at: &usize| text.is_char_boundary(at);
        let end = (0..=TEXT_BYTES_MAX).rev().find(is_end).unwrap_or(0);
        text.truncate(end);
    }
}

impl FileError {
    pub(crate) fn new(path: &[u8], problem: &impl ToString) -> Self {
        Self {
            path: String::from_utf8_lossy(path).into_owned(),
            problem: problem.to_string(),
            has_vanished: false,
            is_at_destination: false,
        }
    }
}
