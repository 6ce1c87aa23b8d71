//! The end that receives: it says which files it requests, and creates the copy.
//!
//! The session reads the stream of ssh, which has the lists. Each direct stream has a thread, which
//! writes the files of that stream.

mod committer;
mod content;
mod folders;
mod journal;
mod open;
mod partial_file;
mod special;
mod tree;

use crate::attributes::{self, AttributeSetter};
use crate::direct::{DataStream, DirectStreams};
use crate::error::Error;
use crate::frame::{self, FrameReader};
use crate::message::{
    Attributes, BATCH_MAX, Entry, Folder, Held, Kind, Listed, ToDestination, ToSource,
};
use crate::options::{Durable, Options};
use crate::summary::{FileError, Summary};
use committer::Batch;
use content::RequestedFile;
use folders::{DoneFolder, check_name};
use journal::{Original, Unusable};
use open::{OpenDestination, open_destination};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use tree::{Place, Tree};

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
    to: impl Write + Send,
    destination: &[u8],
    names: AcceptedNames<'_>,
    options: Options,
    direct: Option<&DirectStreams>,
    abort: Box<dyn FnOnce() + Send>,
) -> Result<Summary, Error> {
    let shared = Shared {
        destination,
        options,
        setter: AttributeSetter::new(options.preserve),
        tree: Mutex::new(Tree::new(options.dry_run)),
        batch: Mutex::default(),
        abort: Mutex::new(Some(abort)),
        streams: Mutex::default(),
        changed: Condvar::new(),
        to: Mutex::new(Some(to)),
    };
    thread::scope(|scope| {
        if let Some(direct) = direct {
            let shared = &shared;
            scope.spawn(move || {
                while let Some(stream) = direct.next() {
                    receive_through(scope, stream, shared, direct);
                }
            });
        }
        let session =
            DestinationSession { shared: &shared, names, single_name: None, is_single_file: None };
        let result = session.run(FrameReader::new(from));
        let result = shared.streams().failure.take().map_or(result, Err);
        // What is whole stays after a failure.
        let ended = shared.end_batches();
        let result = result.and_then(|summary| ended.map(|()| summary));
        // Before the streams close, so that the source knows the reason.
        let told = shared.tell_end(&result);
        if let Some(direct) = direct {
            direct.end();
        }
        result.and_then(|summary| told.map(|()| summary))
    })
}

/// Receives content through a direct stream, on a new thread.
fn receive_through<'s, W: Write + Send>(
    scope: &'s Scope<'s, '_>,
    stream: DataStream,
    shared: &'s Shared<'_, W>,
    direct: &'s DirectStreams,
) {
    scope.spawn(move || {
        let (id, from) = (stream.id(), stream.into_reader());
        let result = take_stream(FrameReader::new(from), shared, direct, id);
        direct.forget(id);
        if let Err(error) = result {
            shared.fail(error);
        }
    });
}

/// Takes the messages of a direct stream, until the stream or the session ends.
fn take_stream<W: Write + Send>(
    mut frames: FrameReader<impl Read>,
    shared: &Shared<'_, W>,
    direct: &DirectStreams,
    id: u64,
) -> Result<(), Error> {
    let mut is_used = false;
    loop {
        let (message, data) = match frames.next::<ToDestination>() {
            _ if shared.streams().is_over => return Ok(()),
            Ok(Some((ToDestination::StreamDone, _))) => return Ok(()),
            Ok(Some(next)) => next,
            Ok(None) => return Err(Error::Connection(std::io::ErrorKind::UnexpectedEof.into())),
            Err(error) => return Err(error),
        };
        if !std::mem::replace(&mut is_used, true) {
            direct.mark_used(id);
        }
        direct.add_bytes(data.len() as u64);
        shared.take_content(message, data)?;
    }
}

/// What the streams of a destination share.
struct Shared<'a, W> {
    destination: &'a [u8],
    options: Options,
    setter: AttributeSetter,
    tree: Mutex<Tree>,
    batch: Mutex<Batch>,
    /// Ends the stream of ssh, which the session may wait for.
    abort: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    streams: Mutex<Streams>,
    /// All requested files are here, or a stream failed.
    changed: Condvar,
    /// The stream to the source; `None` once the source was told the end.
    to: Mutex<Option<W>>,
}

/// How the streams end.
#[derive(Debug, Default)]
struct Streams {
    /// Whether everything was sent.
    is_over: bool,
    /// The failure of a direct stream.
    failure: Option<Error>,
}

impl<W: Write> Shared<'_, W> {
    fn tree(&self) -> MutexGuard<'_, Tree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn batch(&self) -> MutexGuard<'_, Batch> {
        self.batch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the session because of a direct stream.
    fn fail(&self, error: Error) {
        if self.streams().is_over {
            return;
        }
        let is_broken = matches!(error, Error::Connection(_));
        let result = Err(error);
        // The session waits for the source, which ends the session when it knows the reason.
        let _ = self.tell_end(&result);
        self.streams().failure = result.err();
        let tree = self.tree();
        self.changed.notify_all();
        drop(tree);
        let abort = self.abort.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(abort) = abort.filter(|_| is_broken) {
            abort();
        }
    }

    /// Sends the last message, unless it was sent.
    fn tell_end(&self, result: &Result<Summary, Error>) -> Result<(), Error> {
        let to = self.to.lock().unwrap_or_else(PoisonError::into_inner).take();
        let last = match result {
            Ok(summary) => ToSource::Done(summary.clone()),
            // The destination of a broken connection ends without a word.
            Err(Error::Connection(_)) => return Ok(()),
            Err(Error::Destination { path, problem }) => {
                ToSource::BadDestination { path: path.clone(), problem: problem.clone() }
            }
            Err(error) => ToSource::GaveUp(error.to_string()),
        };
        let Some(mut to) = to else { return Ok(()) };
        frame::write(&mut to, &last, &[])?;
        to.flush().map_err(Error::Connection)
    }

    /// Sends an answer.
    fn answer(&self, answer: &ToSource) -> Result<(), Error> {
        let mut to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(to) = to.as_mut() else { return Ok(()) };
        frame::write(to, answer, &[])?;
        to.flush().map_err(Error::Connection)
    }

    /// Gives folders their attributes, after all of their entries.
    fn end_folders(&self, tree: &mut Tree, folders: Vec<DoneFolder>) {
        if self.options.dry_run {
            return;
        }
        for DoneFolder { path, open, attributes, old } in folders {
            let done = open.and_then(|open| match attributes {
                Some(attributes) => {
                    self.setter.set(&open, &attributes, attributes.mtime, old.as_ref())
                }
                None => Ok(()),
            });
            if let Err(errno) = done {
                let error = FileError::new(&path, &std::io::Error::from(errno));
                tree.summary.add_error(error);
            }
        }
    }

    /// Writes the names to the disk, which are in memory after the renames.
    fn sync_names(&self) {
        let destination = self.tree().destination.clone();
        if let (Durable::Batch, Some(destination)) = (self.options.durable, destination) {
            // An error was one of content, which the sync before the names reports.
            let _ = rustix::fs::syncfs(&*destination);
        }
    }

    /// Waits until all requested files are here, after everything was sent.
    fn wait_for_files(&self) -> Result<(), Error> {
        self.end_batches()?;
        let mut tree = self.tree();
        while !tree.is_complete() {
            if let Some(failure) = self.streams().failure.take() {
                return Err(failure);
            }
            tree = self.changed.wait(tree).unwrap_or_else(PoisonError::into_inner);
        }
        self.streams().is_over = true;
        Ok(())
    }
}

/// The answer for a regular file: `None` if it is not requested, and the ranges that are here.
type Answer = Option<Vec<Range<u64>>>;

/// The part of a destination that reads the stream of ssh.
struct DestinationSession<'s, 'a, W> {
    shared: &'s Shared<'a, W>,
    names: AcceptedNames<'a>,
    /// The name of the single file, if the destination is not a folder.
    single_name: Option<Vec<u8>>,
    is_single_file: Option<bool>,
}

impl<W: Write + Send> DestinationSession<'_, '_, W> {
    fn run(mut self, mut frames: FrameReader<impl Read>) -> Result<Summary, Error> {
        let shared = self.shared;
        loop {
            let next = frames.next::<ToDestination>()?;
            let (message, data) =
                next.ok_or(Error::Connection(std::io::ErrorKind::UnexpectedEof.into()))?;
            if let Some(failure) = shared.streams().failure.take() {
                return Err(failure);
            }
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
                ToDestination::FoldersDone(folders) => {
                    let mut tree = shared.tree();
                    for number in folders {
                        let done = tree.folders.end_list(number)?;
                        shared.end_folders(&mut tree, done);
                    }
                }
                ToDestination::End => {
                    shared.wait_for_files()?;
                    shared.sync_names();
                    let mut tree = shared.tree();
                    let mut summary = std::mem::take(&mut tree.summary);
                    summary.entries = tree.entries + tree.folders.count();
                    return Ok(summary);
                }
                content => shared.take_content(content, data)?,
            }
        }
    }

    fn list(&mut self, listed: Vec<Listed>) -> Result<(), Error> {
        if listed.len() > BATCH_MAX {
            return Err(Error::Protocol("a list that is too long"));
        }
        let (mut count, mut bits, mut all_held) = (0, Vec::new(), Vec::new());
        for item in listed {
            match item {
                Listed::Folder(folder) => self.add_folder(folder)?,
                Listed::Entry(entry) => {
                    let Some(requested) = self.add_entry(entry)? else { continue };
                    if count % 8 == 0 {
                        bits.push(0);
                    }
                    bits[count / 8] |= u8::from(requested.is_some()) << (count % 8);
                    if let Some(ranges) = requested.filter(|ranges| !ranges.is_empty()) {
                        let ranges = ranges.into_iter().map(|range| (range.start, range.end));
                        all_held.push(Held { index: count as u32, ranges: ranges.collect() });
                    }
                    count += 1;
                }
            }
        }
        if count == 0 {
            return Ok(());
        }
        self.shared.answer(&ToSource::Requested { count: count as u32, bits, held: all_held })
    }

    fn add_folder(&mut self, folder: Folder) -> Result<(), Error> {
        let Folder { parent, name, attributes } = folder;
        let options = self.shared.options;
        let mut tree = self.shared.tree();
        if !tree.folders.has_destination() {
            let is_single_file = self.is_single_file.ok_or(Error::Protocol("no beginning"))?;
            let OpenDestination { open, single_name, old } =
                open_destination(self.shared.destination, is_single_file, options.dry_run)?;
            self.single_name = single_name;
            let open = open.map(Arc::new);
            // The folder of a single file is not a copy.
            let attributes = attributes.filter(|_| self.single_name.is_none());
            self.prepare(open.as_ref(), attributes.as_ref());
            tree.destination.clone_from(&open);
            tree.folders.add_destination(open, attributes, old);
            return Ok(());
        }
        if self.single_name.is_some() {
            return Err(Error::Protocol("a folder in place of a file"));
        }
        self.check_top(parent, &name)?;
        let place = Place { folder: parent, name: name.clone() };
        match tree.folders.add(parent, name, attributes.clone())? {
            Ok(open) => self.prepare(open.as_ref(), attributes.as_ref()),
            Err(errno) => tree.fail_errno(&place, errno),
        }
        Ok(())
    }

    /// Gives a folder its group and its permissions, and for now all rights of the owner: new
    /// entries of a folder with the set-group-ID bit get the group of the folder. A failure shows
    /// when the attributes are set at the end.
    fn prepare(&self, open: Option<&Arc<OwnedFd>>, attributes: Option<&Attributes>) {
        let Shared { options, setter, .. } = self.shared;
        if let (Some(open), Some(attributes), false) = (open, attributes, options.dry_run) {
            let _ = setter.prepare_folder(open, attributes);
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

    /// Adds an entry. For a regular file, the answer to the source.
    fn add_entry(&mut self, entry: Entry) -> Result<Option<Answer>, Error> {
        let Entry { folder, name, kind, attributes } = entry;
        check_name(&name)?;
        self.check_top(folder, &name)?;
        let Shared { options, setter, .. } = self.shared;
        let mut tree = self.shared.tree();
        let id = tree.entries;
        if self.single_name.is_some() && id > 0 {
            return Err(Error::Protocol("a second file in place of one"));
        }
        tree.entries += 1;
        let name = match &self.single_name {
            Some(single) if folder == 0 => single.clone(),
            _ => name,
        };
        let place = Place { folder, name };
        let opened = tree.folders.get(folder)?;
        let is_file = matches!(kind, Kind::File { .. });
        let is_new = tree.folders.is_new(folder);
        let added = opened.and_then(|open| {
            let old = if is_new { None } else { make_way(*options, &open, &place.name)? };
            Ok((open, old))
        });
        let (open, old) = match added {
            Ok(added) => added,
            // A dry run does not make folders, so their entries are new.
            Err(Errno::NOENT) if options.dry_run => {
                if let Kind::File { size, .. } = kind {
                    count_sent(&mut tree.summary, size);
                }
                return Ok(is_file.then_some(None));
            }
            Err(errno) => {
                tree.fail_errno(&place, errno);
                return Ok(is_file.then_some(None));
            }
        };
        match kind {
            Kind::File { size, is_linked, version } => {
                // The permissions of a link or of something else do not apply to a file.
                let is_file =
                    |old: &Stat| FileType::from_raw_mode(old.st_mode) == FileType::RegularFile;
                let file = RequestedFile::new(place, attributes, old.filter(is_file), is_linked);
                self.add_file(&mut tree, id, file, Original { version, size }, &open).map(Some)
            }
            Kind::HardLink(target) => {
                if target >= tree.entries {
                    return Err(Error::Protocol("a link to a later entry"));
                }
                if !options.dry_run {
                    tree.add_link(target, place)?;
                }
                Ok(None)
            }
            kind => {
                if !options.dry_run
                    && let Err(errno) =
                        special::make_special(setter, &open, &place.name, &kind, &attributes, old)
                {
                    tree.fail_errno(&place, errno);
                }
                Ok(None)
            }
        }
    }

    /// Decides whether a file is requested. A file that is up to date gets its attributes.
    fn add_file(
        &self,
        tree: &mut Tree,
        id: u64,
        mut file: RequestedFile,
        original: Original,
        open: &Arc<OwnedFd>,
    ) -> Result<Answer, Error> {
        let size = original.size;
        let options = self.shared.options;
        let is_up_to_date = file.old.as_ref().is_some_and(|old| {
            old.st_size as u64 == size && attributes::mtime(old) == file.attributes.mtime
        });
        if is_up_to_date && !options.ignore_times {
            tree.summary.files_up_to_date += 1;
            if !options.dry_run
                && let Err(errno) = self.set_up_to_date(open, &file)
            {
                tree.fail_errno(&file.place, errno);
            }
            let done = tree.add_target(id, &file)?;
            self.shared.end_folders(tree, done);
            return Ok(None);
        }
        if options.dry_run {
            count_sent(&mut tree.summary, size);
            return Ok(None);
        }
        let ranges = file.resume(open, original).unwrap_or_else(|unusable| {
            let reason = match unusable {
                Unusable::Torn => "is torn",
                Unusable::Foreign => "is of another version",
            };
            let path = tree.folders.path_of(file.place.folder, &file.place.name);
            tree.summary.add_notice(format!(
                "{}: the journal of an interrupted transfer {reason}, so the file is sent from \
                 its beginning",
                String::from_utf8_lossy(&path)
            ));
            Vec::new()
        });
        tree.summary.bytes_held += ranges.iter().map(|range| range.end - range.start).sum::<u64>();
        tree.request(id, file)?;
        Ok(Some(ranges))
    }

    /// Sets the attributes of a file that is up to date.
    fn set_up_to_date(&self, open: &OwnedFd, file: &RequestedFile) -> rustix::io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let (name, setter) = (&file.place.name[..], &self.shared.setter);
        let (attributes, old) = (&file.attributes, file.old.as_ref());
        let opened = match rustix::fs::openat(open, name, flags, Mode::empty()) {
            // The owner may not read the file, so it gets what can be set by its name.
            Err(Errno::ACCESS) => return setter.set_at(open.as_fd(), name, attributes, old),
            opened => opened?,
        };
        setter.set(&opened, attributes, attributes.mtime, old)
    }
}

/// What has the name of an entry now; `None` if the name is free. As by rsync, an empty folder is
/// removed.
fn make_way(options: Options, open: &OwnedFd, name: &[u8]) -> rustix::io::Result<Option<Stat>> {
    let old = match rustix::fs::statat(open, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(None),
        stat => stat?,
    };
    if FileType::from_raw_mode(old.st_mode) != FileType::Directory {
        return Ok(Some(old));
    }
    if !options.dry_run {
        let removed = rustix::fs::unlinkat(open, name, AtFlags::REMOVEDIR);
        removed.map_err(|errno| match errno {
            Errno::NOTEMPTY | Errno::EXIST => Errno::ISDIR,
            errno => errno,
        })?;
    }
    Ok(None)
}

/// Counts a file that a dry run does not send.
fn count_sent(summary: &mut Summary, size: u64) {
    summary.files_sent += 1;
    summary.bytes_sent += size;
}
