//! Walks the sources, one folder after another, and lists what is found. The walk holds the names
//! of the subfolders of the folders that are open, and no list of all files.

use crate::attributes;
use crate::message::{Entry, Folder, Kind, Listed};
use crate::options::{DeletionMode, Options};
use crate::source::reading;
use crate::summary::FileError;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

/// What the walk found.
#[derive(Debug)]
pub enum Found {
    /// A folder or an entry that is listed; for a regular file with what it takes to open it.
    Listed(Listed, Option<FoundFile>),
    /// All entries of a folder and its subfolders were found.
    FolderDone(u64),
    /// Something could not be read.
    Failed(FileError),
}

/// A regular file that was found.
#[derive(Debug)]
pub struct FoundFile {
    /// Its number as an entry.
    pub id: u64,
    /// The folder that holds it.
    pub folder: Arc<OpenFolder>,
    /// Its name in the folder.
    pub name: Vec<u8>,
    /// The size, in bytes.
    pub size: u64,
    /// Whether the file is packed with others.
    pub is_small: bool,
    /// The version of the content that was listed.
    pub version: u64,
    /// The ranges that the destination has.
    pub held: Vec<Range<u64>>,
}

impl FoundFile {
    /// The path below the root of the transfer.
    pub fn relative_path(&self) -> Vec<u8> {
        joined(&self.folder.relative, &self.name)
    }
}

/// An open folder of the source.
#[derive(Debug)]
pub struct OpenFolder {
    folder: OwnedFd,
    /// The path, as the user will see it in messages; empty for the process's directory.
    path: Vec<u8>,
    /// The path below the root of the transfer, for the filter.
    relative: Vec<u8>,
    device: u64,
}

impl OpenFolder {
    /// The path of an entry, for messages.
    pub fn path_of(&self, name: &[u8]) -> Vec<u8> {
        joined(&self.path, name)
    }
}

impl AsFd for OpenFolder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }
}

/// The path of an entry of a folder.
fn joined(folder: &[u8], name: &[u8]) -> Vec<u8> {
    match folder {
        b"" => name.to_vec(),
        b"/" => [b"/", name].concat(),
        folder => [folder, b"/", name].concat(),
    }
}

/// A source as the user named it.
#[derive(Debug)]
struct Source {
    path: Vec<u8>,
    /// Whether the content is copied and not the folder itself: the path ends with a slash.
    is_content: bool,
}

/// A folder whose entries are being read.
#[derive(Debug)]
struct Level {
    id: u64,
    open: Arc<OpenFolder>,
    /// `None` once all entries were read.
    entries: Option<Dir>,
    subfolders: Vec<Vec<u8>>,
}

/// The walk through all sources.
#[derive(Debug)]
pub struct Walk {
    options: Options,
    sources: VecDeque<Source>,
    levels: Vec<Level>,
    /// What is found before the next step.
    queue: VecDeque<Found>,
    folders: u64,
    entries: u64,
    /// The entries of regular files with several names, by device and inode.
    linked: HashMap<(u64, u64), u64>,
    is_done: bool,
}

impl Walk {
    /// A walk through these sources.
    pub fn new(sources: &[Vec<u8>], options: Options) -> Self {
        let sources: VecDeque<_> = sources.iter().map(|path| Source::new(path)).collect();
        let mut walk = Self {
            options,
            sources,
            levels: Vec::new(),
            queue: VecDeque::new(),
            folders: 0,
            entries: 0,
            linked: HashMap::new(),
            is_done: false,
        };
        // If nothing can be copied, the destination is not made.
        if walk.sources.iter().any(Source::exists) {
            walk.list_destination();
        }
        walk
    }

    /// Whether there is one source, which is not a folder.
    pub fn is_single_file(&self) -> bool {
        let [source] = self.sources.as_slices().0 else { return false };
        let stat = rustix::fs::statat(CWD, &source.path[..], AtFlags::SYMLINK_NOFOLLOW);
        !source.is_content
            && stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) != FileType::Directory)
    }

    /// Whether several sources are left.
    pub fn has_several_sources(&self) -> bool {
        self.sources.len() > 1
    }

    /// The number of entries found so far, folders included.
    pub fn found_entries(&self) -> u64 {
        self.entries + self.folders.saturating_sub(1)
    }

    /// Lists folder 0. A source whose content is copied has the place of the destination, so the
    /// destination gets the attributes of the source.
    fn list_destination(&mut self) {
        let content = self.sources.iter().find(|source| source.is_content);
        let attributes = content.and_then(|source| {
            let open = open_content(&source.path).ok()?;
            let stat = rustix::fs::fstat(&open).ok()?;
            attributes::read(&stat, open.as_fd(), b".", &self.options.preserve).ok()
        });
        let folder = Folder { parent: 0, name: Vec::new(), attributes, is_left_out: false };
        self.queue.push_back(Found::Listed(Listed::Folder(folder), None));
        self.folders = 1;
    }

    fn add_folder(&mut self, parent: u64, name: &[u8], open: OpenFolder, is_named: bool) {
        let options = &self.options;
        let listed = rustix::fs::fstat(&open).and_then(|stat| {
            let attributes = attributes::read(&stat, open.as_fd(), b".", &options.preserve)?;
            // A mount point is made, and what is mounted there is left out.
            let is_left_out =
                options.selection.one_file_system && !is_named && stat.st_dev != open.device;
            let entries = (!is_left_out).then(|| Dir::read_from(&open)).transpose()?;
            Ok((attributes, entries, stat.st_dev))
        });
        let (attributes, entries, device) = match listed {
            Ok(listed) => listed,
            Err(errno) => return self.fail(&open.path, errno),
        };
        let (name, attributes, is_left_out) = (name.to_vec(), Some(attributes), entries.is_none());
        let folder = Folder { parent, name, attributes, is_left_out };
        self.queue.push_back(Found::Listed(Listed::Folder(folder), None));
        let open = Arc::new(OpenFolder { device, ..open });
        self.levels.push(Level { id: self.folders, open, entries, subfolders: Vec::new() });
        self.folders += 1;
    }

    fn fail(&mut self, path: &[u8], errno: Errno) {
        self.queue.push_back(Found::Failed(failure(path, errno)));
    }

    /// The failure of a source that the user named: if it is missing, it did not vanish.
    fn fail_named(&mut self, path: &[u8], errno: Errno) {
        let error = FileError::new(path, &std::io::Error::from(errno));
        self.queue.push_back(Found::Failed(error));
    }

    /// Begins with the next source.
    fn begin(&mut self, source: &Source) {
        let path = &source.path[..];
        if source.is_content {
            let opened = open_content(path);
            let opened = opened.and_then(|folder| {
                let (entries, device) =
                    (Dir::read_from(&folder)?, rustix::fs::fstat(&folder)?.st_dev);
                let (path, relative) = (path.to_vec(), Vec::new());
                Ok((OpenFolder { folder, path, relative, device }, entries))
            });
            match opened {
                Ok((open, entries)) => {
                    let (open, entries) = (Arc::new(open), Some(entries));
                    self.levels.push(Level { id: 0, open, entries, subfolders: Vec::new() });
                }
                Err(errno) => self.fail_named(path, errno),
            }
            return;
        }
        let (folder, name) = split(path);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = match folder {
            b"" => rustix::fs::open(".", flags, Mode::empty()),
            folder => rustix::fs::open(folder, flags, Mode::empty()),
        };
        match opened {
            Ok(open) => {
                let (path, relative) = (folder.to_vec(), Vec::new());
                let open = Arc::new(OpenFolder { folder: open, path, relative, device: 0 });
                self.add(0, &open, name, true);
            }
            Err(errno) => self.fail_named(path, errno),
        }
    }

    /// Adds an entry of a folder.
    fn add(&mut self, folder: u64, open: &Arc<OpenFolder>, name: &[u8], is_named: bool) {
        let path = || open.path_of(name);
        let stat = match rustix::fs::statat(open, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            // Another process removed it after the folder was read.
            Err(Errno::NOENT) if !is_named => return,
            Err(errno) => return self.fail_named(&path(), errno),
        };
        let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if !is_folder && self.excludes(open, name, false) {
            return;
        }
        if is_folder {
            if self.options.preserve.recursive {
                self.descend(folder, open, name, is_named);
            } else if is_named {
                let problem = "it is a directory, and nothing asks for directories (-r, -a)";
                self.queue.push_back(Found::Failed(FileError::new(&path(), &problem)));
            }
            return;
        }
        let kind = match self.kind(&stat, open, name) {
            Ok(Some(kind)) => kind,
            Ok(None) if self.options.deletion.mode == DeletionMode::No => return,
            Ok(None) => Kind::LeftOut,
            Err(errno) => return self.fail(&path(), errno),
        };
        let attributes = match attributes::read(&stat, open.as_fd(), name, &self.options.preserve) {
            Ok(attributes) => attributes,
            Err(errno) => return self.fail(&path(), errno),
        };
        let id = self.entries;
        self.entries += 1;
        if let Kind::File { is_linked: true, .. } = kind {
            // Not before, because a file that fails does not get a number.
            self.linked.insert((stat.st_dev, stat.st_ino), id);
        }
        let file = matches!(kind, Kind::File { .. }).then(|| FoundFile {
            id,
            folder: Arc::clone(open),
            name: name.to_vec(),
            size: stat.st_size as u64,
            is_small: reading::is_small(&stat),
            version: reading::version(&stat),
            held: Vec::new(),
        });
        let entry = Entry { folder, name: name.to_vec(), kind, attributes };
        self.queue.push_back(Found::Listed(Listed::Entry(entry), file));
    }

    /// What an entry is; `None` if nothing of its kind is copied.
    fn kind(
        &self,
        stat: &Stat,
        open: &OpenFolder,
        name: &[u8],
    ) -> rustix::io::Result<Option<Kind>> {
        let preserve = self.options.preserve;
        let special = |kind| preserve.specials.then_some(kind);
        Ok(match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let is_linked = preserve.hard_links && stat.st_nlink > 1;
                if is_linked && let Some(&first) = self.linked.get(&(stat.st_dev, stat.st_ino)) {
                    return Ok(Some(Kind::HardLink(first)));
                }
                let version = if reading::is_small(stat) { 0 } else { reading::version(stat) };
                Some(Kind::File { size: stat.st_size as u64, is_linked, version })
            }
            FileType::Symlink if preserve.links => {
                let target = rustix::fs::readlinkat(open, name, Vec::new())?;
                Some(Kind::Symlink(target.into_bytes()))
            }
            FileType::Fifo => special(Kind::Fifo),
            FileType::Socket => special(Kind::Socket),
            FileType::CharacterDevice => special(Kind::CharacterDevice(stat.st_rdev)),
            FileType::BlockDevice => special(Kind::BlockDevice(stat.st_rdev)),
            _ => None,
        })
    }

    /// Opens a subfolder, and reads its entries next.
    fn descend(&mut self, parent: u64, open: &Arc<OpenFolder>, name: &[u8], is_named: bool) {
        if self.excludes(open, name, true) {
            return;
        }
        let (path, relative) = (open.path_of(name), joined(&open.relative, name));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat(open, name, flags, Mode::empty()) {
            Ok(folder) => {
                let opened = OpenFolder { folder, path, relative, device: open.device };
                self.add_folder(parent, name, opened, is_named);
            }
            Err(errno) => self.fail(&path, errno),
        }
    }

    /// Whether the filter excludes an entry.
    fn excludes(&self, folder: &OpenFolder, name: &[u8], is_folder: bool) -> bool {
        let filter = &self.options.selection.filter;
        !filter.0.is_empty() && filter.excludes(&joined(&folder.relative, name), is_folder)
    }

    /// Reads the next entry of the innermost folder, or leaves the folder.
    fn step(&mut self) {
        let Some(level) = self.levels.last_mut() else {
            match self.sources.pop_front() {
                Some(source) => self.begin(&source),
                None if !self.is_done => {
                    self.is_done = true;
                    if self.folders > 0 {
                        self.queue.push_back(Found::FolderDone(0));
                    }
                }
                None => {}
            }
            return;
        };
        let (id, open) = (level.id, Arc::clone(&level.open));
        if let Some(entries) = &mut level.entries {
            match entries.read() {
                Some(Ok(entry)) => {
                    let name = entry.file_name().to_bytes();
                    match entry.file_type() {
                        _ if name == b"." || name == b".." => {}
                        FileType::Directory => level.subfolders.push(name.to_vec()),
                        _ => {
                            let name = name.to_vec();
                            self.add(id, &open, &name, false);
                        }
                    }
                }
                Some(Err(errno)) => {
                    level.entries = None;
                    self.fail(&open.path.clone(), errno);
                }
                None => level.entries = None,
            }
        } else if let Some(name) = level.subfolders.pop() {
            if self.options.preserve.recursive {
                self.descend(id, &open, &name, false);
            }
        } else {
            self.levels.pop();
            // Folder 0 is done after the last source.
            if id != 0 {
                self.queue.push_back(Found::FolderDone(id));
            }
        }
    }
}

impl Iterator for Walk {
    type Item = Found;

    fn next(&mut self) -> Option<Found> {
        loop {
            if let Some(found) = self.queue.pop_front() {
                return Some(found);
            }
            if self.is_done {
                return None;
            }
            self.step();
        }
    }
}

impl Source {
    fn new(path: &[u8]) -> Self {
        // Without a path, the home directory of the other host is meant.
        let path = if path.is_empty() { b"." } else { path };
        let is_content = path.ends_with(b"/") || path == b"." || path.ends_with(b"/.") || {
            path == b".." || path.ends_with(b"/..")
        };
        let mut path = path;
        if path.ends_with(b"/.") {
            path = &path[..path.len() - 1];
        }
        while path.len() > 1 && path.ends_with(b"/") {
            path = &path[..path.len() - 1];
        }
        Self { path: path.to_vec(), is_content }
    }

    fn exists(&self) -> bool {
        let flags = if self.is_content { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
        rustix::fs::statat(CWD, &self.path[..], flags).is_ok()
    }
}

/// Opens a folder that the user named, whose path may lead through links.
fn open_content(path: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
}

/// The folder and the last component of a path.
pub fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(0) => (b"/", &path[1..]),
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}

/// The failure of a file at the source.
pub fn failure(path: &[u8], errno: Errno) -> FileError {
    let error = FileError::new(path, &std::io::Error::from(errno));
    FileError { has_vanished: errno == Errno::NOENT, ..error }
}

/// The name that a source has at the destination; `None` for a source whose content is copied.
pub fn name_of(path: &Path) -> Option<Vec<u8>> {
    let source = Source::new(path.as_os_str().as_bytes());
    (!source.is_content).then(|| split(&source.path).1.to_vec())
}
