//! Walks the sources, one folder after another, and lists what is found. The walk holds the names
//! of the subfolders of the folders that are open, and no list of all files.

use crate::attributes;
use crate::message::{Entry, Folder, Kind, Listed};
use crate::options::{DeletionMode, Options};
use crate::source::found::{FoundFile, ListedFolder, OpenFolder, joined};
use crate::source::implied::ImpliedFolders;
use crate::source::named::{NamedSource, open_named, split};
use crate::source::reading;
use crate::summary::FileError;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd;
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
    sources: VecDeque<NamedSource>,
    /// The folders that lead to the present source.
    implied: ImpliedFolders,
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
        let is_relative = options.selection.relative;
        let sources = sources.iter().map(|path| NamedSource::new(path, is_relative));
        let sources: VecDeque<_> = sources.collect();
        let mut walk = Self {
            options,
            sources,
            implied: ImpliedFolders::default(),
            levels: Vec::new(),
            queue: VecDeque::new(),
            folders: 0,
            entries: 0,
            linked: HashMap::new(),
            is_done: false,
        };
        // If nothing can be copied, the destination is not made.
        if walk.sources.iter().any(NamedSource::exists) {
            walk.list_destination();
        }
        walk
    }

    /// Whether there is one source, which is not a folder.
    pub fn is_single_file(&self) -> bool {
        let [NamedSource::Entry(path)] = self.sources.as_slices().0 else { return false };
        let follows = self.options.selection.follow_links;
        let flags = if follows { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
        let stat = rustix::fs::statat(CWD, &path[..], flags);
        stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) != FileType::Directory)
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
        let content = self.sources.iter().find_map(|source| match source {
            NamedSource::Content(path) => Some(path),
            _ => None,
        });
        let attributes = content.and_then(|path| {
            let open = open_named(path, OFlags::RDONLY, self.options.is_confined).ok()?;
            let stat = rustix::fs::fstat(&open).ok()?;
            attributes::read(&stat, open.as_fd(), b".", &self.options.preserve).ok()
        });
        let folder = Folder { parent: 0, name: Vec::new(), attributes, is_left_out: false };
        self.queue.push_back(Found::Listed(Listed::Folder(folder), None));
        self.folders = 1;
    }

    /// Lists a folder, and reads its entries next.
    fn add_folder(&mut self, parent: u64, name: &[u8], open: OpenFolder, is_named: bool) {
        // A mount point is made, and what is mounted there is left out.
        let one_file_system = self.options.selection.one_file_system && !is_named;
        let is_left_out = one_file_system
            && rustix::fs::fstat(&open).is_ok_and(|stat| stat.st_dev != open.device);
        let Some(ListedFolder { id, open, .. }) = self.list_folder(parent, name, open, is_left_out)
        else {
            return;
        };
        let entries = match (!is_left_out).then(|| Dir::read_from(&*open)).transpose() {
            Ok(entries) => entries,
            Err(errno) => {
                self.fail(&open.path.clone(), errno);
                None
            }
        };
        self.levels.push(Level { id, open, entries, subfolders: Vec::new() });
    }

    /// Lists a folder, whose content may be left out. `None` after a failure.
    fn list_folder(
        &mut self,
        parent: u64,
        name: &[u8],
        open: OpenFolder,
        is_left_out: bool,
    ) -> Option<ListedFolder> {
        let listed = rustix::fs::fstat(&open).and_then(|stat| {
            let preserve = &self.options.preserve;
            Ok((attributes::read(&stat, open.as_fd(), b".", preserve)?, stat))
        });
        let (attributes, stat) = match listed {
            Ok(listed) => listed,
            Err(errno) => {
                self.fail(&open.path, errno);
                return None;
            }
        };
        let (name, attributes) = (name.to_vec(), Some(attributes));
        let folder = Folder { parent, name: name.clone(), attributes, is_left_out };
        self.queue.push_back(Found::Listed(Listed::Folder(folder), None));
        let id = self.folders;
        self.folders += 1;
        let (device, inode) = (stat.st_dev, stat.st_ino);
        Some(ListedFolder { name, id, open: Arc::new(OpenFolder { device, inode, ..open }) })
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
    fn begin(&mut self, source: &NamedSource) {
        match source {
            NamedSource::Content(path) => self.begin_content(path),
            NamedSource::Entry(path) => self.begin_entry(path),
            NamedSource::Below { base, names, follows } => {
                self.begin_below(base, names, *follows, &source.path());
            }
        }
    }

    fn begin_content(&mut self, path: &[u8]) {
        let opened = open_named(path, OFlags::RDONLY, self.options.is_confined);
        let opened = opened.and_then(|folder| {
            let entries = Dir::read_from(&folder)?;
            Ok((OpenFolder::new(folder, path.to_vec(), Vec::new())?, entries))
        });
        match opened {
            Ok((open, entries)) => {
                let (open, entries) = (Arc::new(open), Some(entries));
                self.levels.push(Level { id: 0, open, entries, subfolders: Vec::new() });
            }
            Err(errno) => self.fail_named(path, errno),
        }
    }

    fn begin_entry(&mut self, path: &[u8]) {
        let (folder, name) = split(path);
        let named = if folder.is_empty() { b"." } else { folder };
        let opened = open_named(named, OFlags::PATH, self.options.is_confined)
            .and_then(|open| OpenFolder::new(open, folder.to_vec(), Vec::new()));
        match opened {
            Ok(open) => self.add(0, &Arc::new(open), name, true),
            Err(errno) => self.fail_named(path, errno),
        }
    }

    /// Lists the folders that lead to a source, and begins with the source.
    fn begin_below(&mut self, base: &[u8], names: &[Vec<u8>], follows: bool, path: &[u8]) {
        let Some((last, folders)) = names.split_last() else { return };
        if names.iter().any(|name| name == b"..") {
            let problem = "a path with .. cannot be kept: write /./ before the part to keep";
            return self.queue.push_back(Found::Failed(FileError::new(path, &problem)));
        }
        self.end_folders_of(|implied| implied.leave_others(base, folders));
        if let Err(errno) = self.open_implied(base, folders) {
            return self.fail_named(path, errno);
        }
        let Some((id, open)) = self.implied.innermost() else { return };
        let is_folder = rustix::fs::statat(&*open, &last[..], AtFlags::empty())
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory);
        if follows && is_folder && self.options.preserve.recursive {
            self.descend(id, &open, last, true, true);
        } else {
            self.add(id, &open, last, true);
        }
    }

    fn open_implied(&mut self, base: &[u8], folders: &[Vec<u8>]) -> rustix::io::Result<()> {
        if self.implied.innermost().is_none() {
            let path = if base == b"." { Vec::new() } else { base.to_vec() };
            // Without the right to read, as far as the folders may be searched.
            let opened = open_named(base, OFlags::PATH, self.options.is_confined)?;
            let open = OpenFolder::new(opened, path, Vec::new())?;
            self.implied.set_base(base, Arc::new(open));
        }
        for name in &folders[self.implied.depth()..] {
            let (parent, parent_open) = self.implied.innermost().ok_or(Errno::BADF)?;
            // As by rsync, a link that leads to a source becomes a folder.
            let mut flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            // The sandbox of a confined process does not stop a link that leads out.
            flags.set(OFlags::NOFOLLOW, self.options.is_confined);
            let folder = rustix::fs::openat(&*parent_open, &name[..], flags, Mode::empty())?;
            let relative = joined(&parent_open.relative, name);
            let open = OpenFolder::new(folder, parent_open.path_of(name), relative)?;
            let listed = self.list_folder(parent, name, open, true).ok_or(Errno::ACCESS)?;
            self.implied.push(listed);
        }
        Ok(())
    }

    /// Ends the folders that lead to earlier sources.
    fn end_folders_of(&mut self, leave: impl FnOnce(&mut ImpliedFolders) -> Vec<u64>) {
        self.queue.extend(leave(&mut self.implied).into_iter().map(Found::FolderDone));
    }

    /// Looks at an entry, or at what the entry leads to if links are followed. `None` after a
    /// failure. The second part tells whether a link was followed.
    fn look(&mut self, open: &OpenFolder, name: &[u8], is_named: bool) -> Option<(Stat, bool)> {
        let stat = match rustix::fs::statat(open, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            // Another process removed it after the folder was read.
            Err(Errno::NOENT) if !is_named => return None,
            Err(errno) => {
                self.fail_named(&open.path_of(name), errno);
                return None;
            }
        };
        let is_link = FileType::from_raw_mode(stat.st_mode) == FileType::Symlink;
        if !is_link || !self.options.selection.follow_links {
            return Some((stat, false));
        }
        // Attributes of what a confined process may not read stay unknown.
        let reads = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let readable = if self.options.is_confined {
            rustix::fs::openat(open, name, reads, Mode::empty()).map(drop)
        } else {
            Ok(())
        };
        match readable.and_then(|()| rustix::fs::statat(open, name, AtFlags::empty())) {
            Ok(stat) => Some((stat, true)),
            Err(_) if self.excludes(open, name, false) => None,
            Err(errno) => {
                let error = std::io::Error::from(errno);
                let problem = format!("what the symbolic link leads to cannot be read: {error}");
                let error = FileError::new(&open.path_of(name), &problem);
                self.queue.push_back(Found::Failed(error));
                None
            }
        }
    }

    /// Adds an entry of a folder.
    fn add(&mut self, folder: u64, open: &Arc<OpenFolder>, name: &[u8], is_named: bool) {
        let path = || open.path_of(name);
        let Some((stat, is_behind_link)) = self.look(open, name, is_named) else { return };
        let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if !is_folder && self.excludes(open, name, false) {
            return;
        }
        if is_folder {
            if self.options.preserve.recursive {
                self.descend(folder, open, name, is_named, is_behind_link);
            } else if is_named && self.options.selection.relative {
                self.add_folder_alone(folder, open, name);
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
        let preserve = &self.options.preserve;
        let attributes = if is_behind_link {
            attributes::read_through_link(&stat, open.as_fd(), name, preserve)
        } else {
            attributes::read(&stat, open.as_fd(), name, preserve)
        };
        let attributes = match attributes {
            Ok(attributes) => attributes,
            Err(errno) => return self.fail(&path(), errno),
        };
        let id = self.entries;
        self.entries += 1;
        if let Kind::File { is_linked: true, link_to: None, .. } = kind {
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
            is_comparable: false,
            is_behind_link,
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
                let file = (stat.st_dev, stat.st_ino);
                let link_to = self.linked.get(&file).copied().filter(|_| is_linked);
                let version = if reading::is_small(stat) { 0 } else { reading::version(stat) };
                Some(Kind::File { size: stat.st_size as u64, is_linked, version, link_to })
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
    fn descend(
        &mut self,
        parent: u64,
        open: &Arc<OpenFolder>,
        name: &[u8],
        is_named: bool,
        is_behind_link: bool,
    ) {
        if self.excludes(open, name, true) {
            return;
        }
        match open.subfolder(name, is_behind_link) {
            Ok(opened) if is_behind_link && self.is_loop(&opened) => {
                let problem = "the symbolic link leads to a folder that contains it";
                let error = FileError::new(&opened.path, &problem);
                self.queue.push_back(Found::Failed(error));
            }
            Ok(opened) => {
                // The file system of the parent tells whether something is mounted there.
                let opened = OpenFolder { device: open.device, ..opened };
                self.add_folder(parent, name, opened, is_named);
            }
            Err(errno) => self.fail(&open.path_of(name), errno),
        }
    }

    /// Lists a folder without its content.
    fn add_folder_alone(&mut self, parent: u64, open: &Arc<OpenFolder>, name: &[u8]) {
        if self.excludes(open, name, true) {
            return;
        }
        match open.subfolder(name, self.options.selection.follow_links) {
            Ok(opened) => {
                if let Some(listed) = self.list_folder(parent, name, opened, true) {
                    self.queue.push_back(Found::FolderDone(listed.id));
                }
            }
            Err(errno) => self.fail(&open.path_of(name), errno),
        }
    }

    /// Whether a folder is one of those that contain it.
    fn is_loop(&self, folder: &OpenFolder) -> bool {
        let is_same = |level: &Level| level.open.is_same(folder);
        self.levels.iter().any(is_same)
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
                    self.end_folders_of(ImpliedFolders::leave_all);
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
                self.descend(id, &open, &name, false, false);
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

/// The failure of a file at the source.
pub fn failure(path: &[u8], errno: Errno) -> FileError {
    let error = FileError::new(path, &std::io::Error::from(errno));
    FileError { has_vanished: errno == Errno::NOENT, ..error }
}
