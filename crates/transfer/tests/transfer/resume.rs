//! Transfers that are interrupted, and go on later.

use crate::common::{CutWriter, content_of, copy};
use fastrand::Rng;
use haul_transfer::{AcceptedPaths, Options, Session, Summary};
use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

const SIZE: u64 = 24 << 20;

/// A folder with a source of one large file, and with an empty destination.
struct Folders(tempfile::TempDir);

impl Folders {
    fn new(random: &mut Rng) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("source")).unwrap();
        fs::create_dir(folder.path().join("copy")).unwrap();
        let folders = Self(folder);
        folders.write(random);
        folders
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes the large file, with a hole in the middle.
    fn write(&self, random: &mut Rng) {
        let file = File::create(self.path("source/large")).unwrap();
        file.set_len(SIZE).unwrap();
        for part in [0, SIZE - (9 << 20)] {
            let mut bytes = vec![0; 9 << 20];
            random.fill(&mut bytes);
            file.write_all_at(&bytes, part).unwrap();
        }
    }

    fn copy(&self) -> Summary {
        copy(&[content_of(&self.path("source"))], &self.path("copy"), &Options::default())
    }

    /// Copies, and cuts the stream after so many bytes.
    fn interrupt(&self, bytes: u64) {
        let (one, other) = UnixStream::pair().unwrap();
        let destination = self.path("copy").as_os_str().as_bytes().to_vec();
        let receiver = thread::spawn(move || {
            let to = other.try_clone().unwrap();
            let session = Session::new(other, to, Options::default());
            session.receive(&destination, &AcceptedPaths::All)
        });
        let to = CutWriter { to: one.try_clone().unwrap(), left: bytes };
        let session = Session::new(one, to, Options::default());
        session.send(&[content_of(&self.path("source"))]).unwrap_err();
        receiver.join().unwrap().unwrap_err();
    }

    fn check(&self) {
        let [source, copy] = ["source/large", "copy/large"].map(|name| self.path(name));
        assert!(fs::read(source).unwrap() == fs::read(copy).unwrap());
        let names = fs::read_dir(self.path("copy")).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["large"]);
    }
}

/// The number of transfers that are interrupted at random.
fn rounds() -> usize {
    std::env::var("HAUL_TEST_CUTS").map_or(6, |text| text.parse().unwrap())
}

const JOURNAL: &str = "copy/.large.haul-journal";
const PART: &str = "copy/.large.haul-part";

#[test]
fn a_transfer_goes_on_where_it_stopped() {
    let mut random = Rng::with_seed(1);
    for _ in 0..rounds() {
        let folders = Folders::new(&mut random);
        for _ in 0..random.usize(1..4) {
            folders.interrupt(random.u64(1000..8 << 20));
        }
        let summary = folders.copy();
        assert_eq!((&summary.errors[..], &summary.notices[..]), (&[][..], &[][..]));
        // Nothing is sent twice, but for the chunk that was on the way.
        assert_eq!(summary.bytes_sent + summary.bytes_held, 18 << 20);
        folders.check();
    }
}

/// As by rsync --append, a file of the same size and time with another content would be mixed.
#[test]
fn a_source_that_changed_is_sent_from_its_beginning() {
    let mut random = Rng::with_seed(2);
    let folders = Folders::new(&mut random);
    folders.interrupt(5 << 20);
    let time = fs::metadata(folders.path("source/large")).unwrap().modified().unwrap();
    folders.write(&mut random);
    let file = File::options().write(true).open(folders.path("source/large")).unwrap();
    file.set_modified(time).unwrap();
    let summary = folders.copy();
    assert_eq!((summary.bytes_held, summary.bytes_sent), (0, 18 << 20));
    let [notice] = &summary.notices[..] else { panic!("{summary:?}") };
    assert!(notice.starts_with("large: the journal of an interrupted transfer is of another"));
    folders.check();
}

/// Whatever a crash leaves, the copy equals its source.
#[test]
fn a_damaged_journal_is_ignored() {
    let mut random = Rng::with_seed(3);
    let damage: [fn(&Folders, &mut Rng); 7] = [
        |folders, random| truncate(&folders.path(JOURNAL), random.u64(0..50)),
        |folders, random| truncate(&folders.path(JOURNAL), random.u64(57..100)),
        |folders, random| {
            let mut bytes = fs::read(folders.path(JOURNAL)).unwrap();
            let at = random.usize(..bytes.len());
            bytes[at] ^= 1;
            fs::write(folders.path(JOURNAL), bytes).unwrap();
        },
        |folders, _| truncate(&folders.path(PART), 100),
        |folders, _| fs::remove_file(folders.path(PART)).unwrap(),
        |folders, _| {
            fs::remove_file(folders.path(PART)).unwrap();
            fs::write(folders.path(PART), vec![7; 8 << 20]).unwrap();
        },
        // Every user could change the partial file.
        |folders, _| {
            fs::set_permissions(folders.path(PART), Permissions::from_mode(0o666)).unwrap();
        },
    ];
    for _ in 0..rounds().div_ceil(8) {
        for damage in damage {
            let folders = Folders::new(&mut random);
            folders.interrupt(5 << 20);
            damage(&folders, &mut random);
            let summary = folders.copy();
            assert_eq!(summary.errors, []);
            folders.check();
        }
    }
}

fn truncate(path: &Path, bytes: u64) {
    File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

/// A stream that stops in the middle, until the test lets it go on.
struct StoppingReader {
    from: UnixStream,
    left: u64,
    stopped: Sender<()>,
    go_on: Receiver<()>,
}

impl Read for StoppingReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            let _ = self.stopped.send(());
            let _ = self.go_on.recv();
            self.left = u64::MAX;
        }
        let room = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let count = self.from.read(&mut buffer[..room])?;
        self.left -= count as u64;
        Ok(count)
    }
}

/// The process of an interrupted transfer may still be there (rsync issue 330).
#[test]
fn another_transfer_takes_over_while_the_first_one_hangs() {
    for is_cut in [false, true] {
        let folders = Folders::new(&mut Rng::with_seed(4));
        let (one, other) = UnixStream::pair().unwrap();
        let destination = folders.path("copy").as_os_str().as_bytes().to_vec();
        let (stopped_tx, stopped) = channel();
        let (go_on, go_on_rx) = channel();
        let receiver = thread::spawn(move || {
            let to = other.try_clone().unwrap();
            let from =
                StoppingReader { from: other, left: 5 << 20, stopped: stopped_tx, go_on: go_on_rx };
            let session = Session::new(from, to, Options::default());
            session.receive(&destination, &AcceptedPaths::All)
        });
        let source = content_of(&folders.path("source"));
        let stream = one.try_clone().unwrap();
        let sender = thread::spawn(move || {
            let to = one.try_clone().unwrap();
            Session::new(one, to, Options::default()).send(&[source])
        });
        stopped.recv().unwrap();
        let summary = folders.copy();
        assert_eq!((&summary.errors[..], summary.bytes_held > 0), (&[][..], true), "{summary:?}");
        folders.check();
        if is_cut {
            stream.shutdown(Shutdown::Both).unwrap();
        }
        go_on.send(()).unwrap();
        let [sent, received] = [sender.join().unwrap(), receiver.join().unwrap()];
        assert_eq!([sent.is_err(), received.is_err()], [is_cut; 2]);
        folders.check();
    }
}
