//! The end that receives: it says which files it requests, and creates the copy.

use crate::attributes::{self, AttributeSetter};
use crate::destination_folders::{DestinationFolders, DoneFolder, check_name};
use crate::error::Error;
use crate::frame::{self, FrameReader};
use crate::message::{
    Attributes, BATCH_MAX, Entry, Folder, Kind, Listed, Packed, Time, ToDestination, ToSource, crc,
};
use crate::open_destination::{OpenDestination, open_destination};
use crate::options::Options;
use crate::partial_file::{self, PartialFile};
use crate::summary::{FileError, Summary};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// The most files that are requested and not here: somewhat more than the source lists.
const REQUESTED_MAX: usize = 64 * BATCH_MAX;
/// The most hard links that wait for their files. The source lists far fewer ahead.
const WAITING_LINKS_MAX: usize = 1 << 20;
/// The largest file: the largest offset of the kernel.
const FILE_BYTES_MAX: u64 = i64::MAX as u64;

/// What the user's end accepts in the destination itself.
#[derive(Debug, Clone, Copy)]
pub enum AcceptedNames<'a> {
    /// Everything, because the source is the user's end.
    All,
    /// Everything, because the user asked for the content of a folder.
    Content,
    /// The names of the sources that the user asked for.
    These(&'a [Vec<u8>]),
}

/// Receives a copy from the source at the other end of the streams, into the destination that the
/// user named.
pub fn receive(
    from: impl Read,
    mut to: impl Write,
    destination: &[u8],
    names: AcceptedNames<'_>,
    options: Options,
) -> Result<Summary, Error> {
    let result =
        DestinationSession::new(&mut to, destination, names, options).run(FrameReader::new(from));
    let last = match &result {
        Ok(summary) => ToSource::Done(summary.clone()),
        Err(Error::Connection(_)) => return result,
        Err(Error::Destination { path, problem }) => {
            ToSource::BadDestination { path: path.clone(), problem: problem.clone() }
        }
        Err(error) => ToSource::GaveUp(error.to_string()),
    };
    let told =
        frame::write(&mut to, &last, &[]).and_then(|()| to.flush().map_err(Error::Connection));
    result.and_then(|summary| told.map(|()| summary))
}

/// A place at the destination.
#[derive(Debug, Clone)]
struct Place {
    folder: u64,
    name: Vec<u8>,
}

/// A file that is requested and not here.
#[derive(Debug)]
struct RequestedFile {
    place: Place,
    attributes: Attributes,
    /// What has the name now.
    old: Option<Stat>,
    is_linked: bool,
    /// The part that is here.
    partial: Option<PartialFile>,
    /// Why the file cannot be received: its content is ignored.
    has_failed: bool,
}

struct DestinationSession<'a, W> {
    to: &'a mut W,
    destination: &'a [u8],
    names: AcceptedNames<'a>,
    options: Options,
    setter: AttributeSetter,
    folders: DestinationFolders,
    /// The name of the single file, if the destination is not a folder.
    single_name: Option<Vec<u8>>,
    is_single_file: Option<bool>,
    entries: u64,
    requested: HashMap<u64, RequestedFile>,
    /// Files that are here and to which later entries may be links, by their paths below the
    /// destination.
    link_targets: HashMap<u64, Vec<u8>>,
    /// Links that wait for their file.
    waiting_links: HashMap<u64, Vec<Place>>,
    /// The number of links that wait.
    waiting: usize,
    summary: Summary,
}

impl<'a, W: Write> DestinationSession<'a, W> {
    fn new(
        to: &'a mut W,
        destination: &'a [u8],
        names: AcceptedNames<'a>,
        options: Options,
    ) -> Self {
        Self {
            to,
            destination,
            names,
            options,
            setter: AttributeSetter::new(options.preserve),
            folders: DestinationFolders::new(options.dry_run),
            single_name: None,
            is_single_file: None,
            entries: 0,
            requested: HashMap::new(),
            link_targets: HashMap::new(),
            waiting_links: HashMap::new(),
            waiting: 0,
            summary: Summary::default(),
        }
    }

    fn run(mut self, mut frames: FrameReader<impl Read>) -> Result<Summary, Error> {
        loop {
            let next = frames.next::<ToDestination>()?;
            let (message, data) =
                next.ok_or(Error::Connection(std::io::ErrorKind::UnexpectedEof.into()))?;
            match message {
                ToDestination::Begin { is_single_file } => {
                    // Otherwise a hostile source could choose the folder of the destination.
                    let may_be_single = match self.names {
                        AcceptedNames::All => true,
                        AcceptedNames::Content => false,
                        AcceptedNames::These(names) => names.len() == 1,
                    };
                    self.is_single_file = Some(is_single_file && may_be_single);
                }
                ToDestination::List(listed) => self.list(listed)?,
                ToDestination::Pack(items) => self.unpack(items, data)?,
                ToDestination::Chunk { id, offset, crc } => self.chunk(id, offset, crc, data)?,
                ToDestination::Restart(id) => self.restart(id)?,
                ToDestination::FileDone { id, size, mtime } => self.file_done(id, size, mtime)?,
                ToDestination::Unreadable { id, error } => {
                    let requested = self.requested.remove(&id).ok_or(NOT_REQUESTED)?;
                    self.summary.add_error(error);
                    self.drop_links(id, &requested.place);
                }
                ToDestination::Failed(error) => self.summary.add_error(error),
                ToDestination::End if self.requested.is_empty() => {
                    self.summary.entries = self.entries + self.folders.count();
                    return Ok(self.summary);
                }
                ToDestination::End => return Err(Error::Protocol("an end before requested files")),
            }
        }
    }

    fn fail(&mut self, place: &Place, problem: &impl ToString) {
        let path = self.folders.path_of(place.folder, &place.name);
        self.summary.add_error(FileError::new(&path, problem));
    }

    fn fail_errno(&mut self, place: &Place, errno: Errno) {
        self.fail(place, &std::io::Error::from(errno));
    }

    /// The failure to set attributes of an entry that is here otherwise.
    fn fail_attributes(&mut self, place: &Place, errno: Errno) {
        let error = std::io::Error::from(errno);
        self.fail(place, &format!("copied, but not with all attributes: {error}"));
    }

    /// The failure of a file that could not be written. Without space, all other files would fail.
    fn fail_write(&mut self, place: &Place, errno: Errno) -> Result<(), Error> {
        if let Errno::NOSPC | Errno::DQUOT = errno {
            let path = String::from_utf8_lossy(self.destination).into_owned();
            let name = self.folders.path_of(place.folder, &place.name);
            let (name, error) = (String::from_utf8_lossy(&name), std::io::Error::from(errno));
            return Err(Error::Destination { path, problem: format!("{name}: {error}") });
        }
        self.fail_errno(place, errno);
        Ok(())
    }

    fn list(&mut self, listed: Vec<Listed>) -> Result<(), Error> {
        if listed.len() > BATCH_MAX {
            return Err(Error::Protocol("a list that is too long"));
        }
        let (mut count, mut bits) = (0, Vec::new());
        for item in listed {
            match item {
                Listed::Folder(folder) => self.add_folder(folder)?,
                Listed::Entry(entry) => {
                    if let Some(is_requested) = self.add_entry(entry)? {
                        if count % 8 == 0 {
                            bits.push(0);
                        }
                        bits[count / 8] |= u8::from(is_requested) << (count % 8);
                        count += 1;
                    }
                }
            }
        }
        if count > 0 {
            let answer = ToSource::Requested { count: count as u32, bits };
            frame::write(self.to, &answer, &[])?;
            self.to.flush().map_err(Error::Connection)?;
        }
        Ok(())
    }

    fn add_folder(&mut self, folder: Folder) -> Result<(), Error> {
        let Folder { parent, name, attributes } = folder;
        if !self.folders.has_destination() {
            let is_single_file = self.is_single_file.ok_or(Error::Protocol("no beginning"))?;
            let OpenDestination { open, single_name, old } =
                open_destination(self.destination, is_single_file, self.options.dry_run)?;
            self.single_name = single_name;
            let open = open.map(Arc::new);
            // The folder of a single file is not a copy.
            let attributes = attributes.filter(|_| self.single_name.is_none());
            self.prepare(open.as_ref(), attributes.as_ref());
            self.folders.add_destination(open, attributes, old);
            return Ok(());
        }
        if self.single_name.is_some() {
            return Err(Error::Protocol("a folder in place of a file"));
        }
        self.check_top(parent, &name)?;
        let place = Place { folder: parent, name: name.clone() };
        match self.folders.add(parent, name, attributes.clone())? {
            Ok(open) => self.prepare(open.as_ref(), attributes.as_ref()),
            Err(errno) => self.fail_errno(&place, errno),
        }
        Ok(())
    }

    /// Gives a folder its group and its permissions, and for now all rights of the owner: new
    /// entries of a folder with the set-group-ID bit get the group of the folder. A failure shows
    /// when the attributes are set at the end.
    fn prepare(&self, open: Option<&Arc<OwnedFd>>, attributes: Option<&Attributes>) {
        if let (Some(open), Some(attributes), false) = (open, attributes, self.options.dry_run) {
            let _ = self.setter.prepare_folder(open, attributes);
        }
    }

    /// Refuses a name in the destination itself that the user did not ask for.
    fn check_top(&self, folder: u64, name: &[u8]) -> Result<(), Error> {
        match self.names {
            AcceptedNames::These(names) if folder == 0 && !names.iter().any(|one| one == name) => {
                Err(Error::Protocol("a name that the user did not ask for"))
            }
            _ => Ok(()),
        }
    }

    /// Adds an entry. For a regular file, whether it is requested.
    fn add_entry(&mut self, entry: Entry) -> Result<Option<bool>, Error> {
        let Entry { folder, name, kind, attributes } = entry;
        check_name(&name)?;
        self.check_top(folder, &name)?;
        let id = self.entries;
        if self.single_name.is_some() && id > 0 {
            return Err(Error::Protocol("a second file in place of one"));
        }
        self.entries += 1;
        let name = match &self.single_name {
            Some(single) if folder == 0 => single.clone(),
            _ => name,
        };
        let place = Place { folder, name };
        let opened = self.folders.get(folder)?;
        let is_file = matches!(kind, Kind::File { .. });
        let added = opened.and_then(|open| self.make_way(&open, &place).map(|old| (open, old)));
        let (open, old) = match added {
            Ok(added) => added,
            // A dry run does not make folders, so their entries are new.
            Err(Errno::NOENT) if self.options.dry_run => {
                if let Kind::File { size, .. } = kind {
                    self.count_sent(size);
                }
                return Ok(is_file.then_some(false));
            }
            Err(errno) => {
                self.fail_errno(&place, errno);
                return Ok(is_file.then_some(false));
            }
        };
        match kind {
            Kind::File { size, is_linked } => {
                // The permissions of a link or of something else do not apply to a file.
                let is_file =
                    |old: &Stat| FileType::from_raw_mode(old.st_mode) == FileType::RegularFile;
                let requested = RequestedFile {
                    place,
                    attributes,
                    old: old.filter(is_file),
                    is_linked,
                    partial: None,
                    has_failed: false,
                };
                self.add_file(id, requested, size, &open).map(Some)
            }
            Kind::HardLink(target) => {
                self.add_link(target, place)?;
                Ok(None)
            }
            kind => {
                if !self.options.dry_run
                    && let Err(errno) = self.make_special(&open, &place, &kind, &attributes, old)
                {
                    self.fail_errno(&place, errno);
                }
                Ok(None)
            }
        }
    }

    /// What has the name of an entry now; `None` if the name is free. As by rsync, an empty folder
    /// is removed.
    fn make_way(&self, open: &OwnedFd, place: &Place) -> rustix::io::Result<Option<Stat>> {
        let name = &place.name[..];
        let old = match rustix::fs::statat(open, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(None),
            stat => stat?,
        };
        if FileType::from_raw_mode(old.st_mode) != FileType::Directory {
            return Ok(Some(old));
        }
        if !self.options.dry_run {
            let removed = rustix::fs::unlinkat(open, name, AtFlags::REMOVEDIR);
            removed.map_err(|errno| match errno {
                Errno::NOTEMPTY | Errno::EXIST => Errno::ISDIR,
                errno => errno,
            })?;
        }
        Ok(None)
    }

    /// Decides whether a file is requested. A file that is up to date gets its attributes.
    fn add_file(
        &mut self,
        id: u64,
        requested: RequestedFile,
        size: u64,
        open: &Arc<OwnedFd>,
    ) -> Result<bool, Error> {
        let is_up_to_date = requested.old.as_ref().is_some_and(|old| {
            old.st_size as u64 == size && attributes::mtime(old) == requested.attributes.mtime
        });
        if is_up_to_date && !self.options.ignore_times {
            self.summary.files_up_to_date += 1;
            if !self.options.dry_run
                && let Err(errno) = self.set_up_to_date(open, &requested)
            {
                self.fail_errno(&requested.place, errno);
            }
            self.add_target(id, &requested)?;
            return Ok(false);
        }
        if self.options.dry_run {
            self.count_sent(size);
            return Ok(false);
        }
        if self.requested.len() >= REQUESTED_MAX {
            return Err(Error::Protocol("too many files at a time"));
        }
        self.requested.insert(id, requested);
        Ok(true)
    }

    /// Counts a file that a dry run does not send.
    fn count_sent(&mut self, size: u64) {
        self.summary.files_sent += 1;
        self.summary.bytes_sent += size;
    }

    /// Sets the attributes of a file that is up to date.
    fn set_up_to_date(&self, open: &OwnedFd, requested: &RequestedFile) -> rustix::io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let name = &requested.place.name[..];
        let file = match rustix::fs::openat(open, name, flags, Mode::empty()) {
            // The owner may not read the file, so it gets what can be set by its name.
            Err(Errno::ACCESS) => {
                let (attributes, old) = (&requested.attributes, requested.old.as_ref());
                return self.setter.set_at(open.as_fd(), name, attributes, old);
            }
            opened => opened?,
        };
        self.setter.set(
            &file,
            &requested.attributes,
            requested.attributes.mtime,
            requested.old.as_ref(),
        )
    }

    /// Makes a file that is here known as the target of links.
    fn add_target(&mut self, id: u64, requested: &RequestedFile) -> Result<(), Error> {
        if !requested.is_linked {
            return Ok(());
        }
        let path = self.folders.path_of(requested.place.folder, &requested.place.name);
        let waiting = self.waiting_links.remove(&id).unwrap_or_default();
        self.waiting -= waiting.len();
        for place in waiting {
            self.link(&path, &place)?;
        }
        self.link_targets.insert(id, path);
        Ok(())
    }

    fn add_link(&mut self, target: u64, place: Place) -> Result<(), Error> {
        if target >= self.entries {
            return Err(Error::Protocol("a link to a later entry"));
        }
        if self.options.dry_run {
            return Ok(());
        }
        if let Some(existing) = self.link_targets.get(&target).cloned() {
            self.link(&existing, &place)?;
        } else if self.requested.contains_key(&target) {
            self.waiting += 1;
            if self.waiting > WAITING_LINKS_MAX {
                return Err(Error::Protocol("too many hard links to files that are not here"));
            }
            self.waiting_links.entry(target).or_default().push(place);
        } else {
            self.fail(&place, &"the file that it is a hard link to was not copied");
        }
        Ok(())
    }

    /// The links to a file that was not copied.
    fn drop_links(&mut self, id: u64, target: &Place) {
        let path = self.folders.path_of(target.folder, &target.name);
        let path = String::from_utf8_lossy(&path).into_owned();
        let waiting = self.waiting_links.remove(&id).unwrap_or_default();
        self.waiting -= waiting.len();
        for place in waiting {
            self.fail(&place, &format!("it is a hard link to {path}, which was not copied"));
        }
    }

    /// Makes a link to a file by its path below the destination. The file's folder may be complete
    /// and closed.
    fn link(&mut self, target: &[u8], place: &Place) -> Result<(), Error> {
        let linked = match self.folders.get(place.folder)? {
            Ok(open) => self.folders.open_parent(target).and_then(|(parent, target)| {
                let make = |temporary_name: &[u8]| {
                    let flags = AtFlags::empty();
                    rustix::fs::linkat(&parent, target, &*open, temporary_name, flags)
                };
                partial_file::replace(&open, &place.name, make, |_| Ok(()))
            }),
            Err(errno) => Err(errno),
        };
        if let Err(errno) = linked {
            self.fail_errno(place, errno);
        }
        Ok(())
    }

    /// Makes something else than a file or a folder, or sets its attributes if it exists.
    fn make_special(
        &self,
        open: &OwnedFd,
        place: &Place,
        kind: &Kind,
        attributes: &Attributes,
        old: Option<Stat>,
    ) -> rustix::io::Result<()> {
        let name = &place.name[..];
        if old.as_ref().is_some_and(|old| is_same_special(open, name, kind, old)) {
            return self.setter.set_at(open.as_fd(), name, attributes, old.as_ref());
        }
        let make = |temporary_name: &[u8]| {
            let (kind, device) = match kind {
                Kind::Symlink(target) => {
                    return rustix::fs::symlinkat(&target[..], open, temporary_name);
                }
                Kind::Fifo => (FileType::Fifo, 0),
                Kind::Socket => (FileType::Socket, 0),
                Kind::CharacterDevice(device) => (FileType::CharacterDevice, *device),
                Kind::BlockDevice(device) => (FileType::BlockDevice, *device),
                Kind::File { .. } | Kind::HardLink(_) => return Err(Errno::INVAL),
            };
            rustix::fs::mknodat(open, temporary_name, kind, Mode::RUSR | Mode::WUSR, device)
        };
        partial_file::replace(open, name, make, |temporary_name| {
            self.setter.set_at(open.as_fd(), temporary_name, attributes, None)
        })
    }

    fn unpack(&mut self, items: Vec<Packed>, data: &[u8]) -> Result<(), Error> {
        let mut rest = data;
        for item in items {
            match item {
                Packed::FolderDone(number) => self.folder_done(number)?,
                Packed::File { id, bytes, crc, mtime } => {
                    let (content, after) =
                        rest.split_at_checked(bytes as usize).ok_or(TOO_SHORT)?;
                    rest = after;
                    check(content, crc)?;
                    let mut requested = self.requested.remove(&id).ok_or(NOT_REQUESTED)?;
                    let written = self.write_at(&mut requested, content, 0)?;
                    let size = content.len() as u64;
                    self.finish(id, requested, written.map(|()| size), mtime)?;
                }
            }
        }
        if rest.is_empty() { Ok(()) } else { Err(Error::Protocol("bytes of no file")) }
    }

    /// Writes a part of a file. The inner error is one of the file.
    fn write_at(
        &mut self,
        requested: &mut RequestedFile,
        data: &[u8],
        offset: u64,
    ) -> Result<Result<(), Errno>, Error> {
        if requested.partial.is_none() {
            let created = self
                .folders
                .get(requested.place.folder)?
                .and_then(|open| PartialFile::create(&open, &requested.place.name));
            match created {
                Ok(created) => requested.partial = Some(created),
                Err(errno) => return Ok(Err(errno)),
            }
        }
        let Some(partial) = &requested.partial else { return Ok(Err(Errno::IO)) };
        self.summary.bytes_sent += data.len() as u64;
        let written = partial.file().write_all_at(data, offset);
        Ok(written.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)))
    }

    fn chunk(&mut self, id: u64, offset: u64, crc: u64, data: &[u8]) -> Result<(), Error> {
        check(data, crc)?;
        let end = offset.checked_add(data.len() as u64);
        if end.is_none_or(|end| end > FILE_BYTES_MAX) {
            return Err(Error::Protocol("a chunk behind the end of all files"));
        }
        let mut requested = self.requested.remove(&id).ok_or(NOT_REQUESTED)?;
        if !requested.has_failed
            && let Err(errno) = self.write_at(&mut requested, data, offset)?
        {
            self.fail_write(&requested.place, errno)?;
            requested.has_failed = true;
            requested.partial = None;
        }
        self.requested.insert(id, requested);
        Ok(())
    }

    fn restart(&mut self, id: u64) -> Result<(), Error> {
        let requested = self.requested.get_mut(&id).ok_or(NOT_REQUESTED)?;
        requested.partial = None;
        Ok(())
    }

    fn file_done(&mut self, id: u64, size: u64, mtime: Time) -> Result<(), Error> {
        if size > FILE_BYTES_MAX {
            return Err(Error::Protocol("a file larger than all files"));
        }
        let mut requested = self.requested.remove(&id).ok_or(NOT_REQUESTED)?;
        if requested.has_failed {
            self.drop_links(id, &requested.place);
            return Ok(());
        }
        // A file with nothing but a hole comes without a chunk.
        let written = self.write_at(&mut requested, &[], 0)?;
        self.finish(id, requested, written.map(|()| size), mtime)
    }

    /// Gives a file its size, its attributes and its name.
    fn finish(
        &mut self,
        id: u64,
        mut requested: RequestedFile,
        size: Result<u64, Errno>,
        mtime: Time,
    ) -> Result<(), Error> {
        let finished = size.and_then(|size| {
            let partial = requested.partial.take().ok_or(Errno::IO)?;
            // The last bytes may be a hole.
            if rustix::fs::fstat(&partial)?.st_size as u64 != size {
                rustix::fs::ftruncate(&partial, size)?;
            }
            // The content counts more than an attribute that cannot be set.
            let set =
                self.setter.set(&partial, &requested.attributes, mtime, requested.old.as_ref());
            partial.commit(&requested.place.name).map(|()| set)
        });
        match finished {
            Ok(set) => {
                if let Err(errno) = set {
                    self.fail_attributes(&requested.place, errno);
                }
                self.summary.files_sent += 1;
                self.add_target(id, &requested)
            }
            Err(errno) => {
                self.fail_write(&requested.place, errno)?;
                self.drop_links(id, &requested.place);
                Ok(())
            }
        }
    }

    fn folder_done(&mut self, number: u64) -> Result<(), Error> {
        let path = self.folders.path_of(number, b"");
        let removed = self.folders.remove(number)?;
        if self.options.dry_run {
            return Ok(());
        }
        let done = removed.and_then(|DoneFolder { open, attributes, old }| match attributes {
            Some(attributes) => self.setter.set(&open, &attributes, attributes.mtime, old.as_ref()),
            None => Ok(()),
        });
        if let Err(errno) = done {
            self.summary.add_error(FileError::new(&path, &std::io::Error::from(errno)));
        }
        Ok(())
    }
}

const NOT_REQUESTED: Error = Error::Protocol("a file that is not requested");
const TOO_SHORT: Error = Error::Protocol("fewer bytes than it announced");

/// Refuses content that does not have its checksum.
fn check(content: &[u8], expected: u64) -> Result<(), Error> {
    // TCP and ssh check too, so this is a fault of a program or of memory.
    if crc(content) == expected { Ok(()) } else { Err(Error::Protocol("a wrong checksum")) }
}

/// Whether what has the name is what would be made.
fn is_same_special(open: &OwnedFd, name: &[u8], kind: &Kind, old: &Stat) -> bool {
    match (kind, FileType::from_raw_mode(old.st_mode)) {
        (Kind::Symlink(target), FileType::Symlink) => {
            let now = rustix::fs::readlinkat(open, name, Vec::new());
            now.is_ok_and(|now| now.as_bytes() == target)
        }
        (Kind::Fifo, FileType::Fifo) | (Kind::Socket, FileType::Socket) => true,
        (Kind::CharacterDevice(device), FileType::CharacterDevice)
        | (Kind::BlockDevice(device), FileType::BlockDevice) => *device == old.st_rdev,
        _ => false,
    }
}
