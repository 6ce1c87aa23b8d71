//! Copies within this process, random trees, and what two trees have in common.

use fastrand::Rng;
use haul_transfer::{AcceptedPaths, Options, Preserve, Session, Summary};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;

/// The attribute with the access control list of a file.
const ACL: &str = "system.posix_acl_access";

/// Copies sources to a destination, with both ends in this process.
pub fn copy(sources: &[Vec<u8>], destination: &Path, options: &Options) -> Summary {
    let (one, other) = UnixStream::pair().unwrap();
    let destination = destination.as_os_str().as_bytes().to_vec();
    let theirs = options.clone();
    let receiver = thread::spawn(move || {
        let to = other.try_clone().unwrap();
        Session::new(other, to, theirs).receive(&destination, &AcceptedPaths::All).unwrap()
    });
    let sent = Session::new(one.try_clone().unwrap(), &one, options.clone()).send(sources).unwrap();
    let received = receiver.join().unwrap();
    assert_eq!((sent.files_sent, sent.bytes_sent), (received.files_sent, received.bytes_sent));
    sent
}

/// A stream that breaks after some bytes.
pub struct CutWriter {
    pub to: UnixStream,
    /// The bytes before the end.
    pub left: u64,
}

impl Write for CutWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.left == 0 {
            self.to.shutdown(Shutdown::Both)?;
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let count = bytes.len().min(usize::try_from(self.left).unwrap());
        self.to.write_all(&bytes[..count])?;
        self.left -= count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// A source that stands for the content of a folder.
pub fn content_of(folder: &Path) -> Vec<u8> {
    [folder.as_os_str().as_bytes(), b"/"].concat()
}

/// Makes a random tree.
pub fn random_tree(random: &mut Rng, root: &Path) {
    fs::create_dir(root).unwrap();
    let mut folders = vec![root.to_owned()];
    let mut files: Vec<PathBuf> = Vec::new();
    for _ in 0..random.usize(1..60) {
        let folder = folders[random.usize(..folders.len())].clone();
        let path = folder.join(OsStr::from_bytes(&random_name(random)));
        if path.symlink_metadata().is_ok() {
            continue;
        }
        match random.u8(..12) {
            0 | 1 => {
                fs::create_dir(&path).unwrap();
                folders.push(path);
                continue;
            }
            2 => {
                std::os::unix::fs::symlink(OsStr::from_bytes(&random_name(random)), &path).unwrap();
            }
            3 if !files.is_empty() => {
                let target = &files[random.usize(..files.len())];
                fs::hard_link(target, &path).unwrap();
                continue;
            }
            4 => write_sparse(random, &path),
            5 => {
                let mode = rustix::fs::Mode::RUSR;
                let kind = rustix::fs::FileType::Fifo;
                rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).unwrap();
            }
            _ => write_file(random, &path),
        }
        if !path.is_symlink() {
            set_attributes(random, &path);
        }
        if path.symlink_metadata().unwrap().is_file() {
            files.push(path);
        }
    }
    // The entries of a folder change its time.
    for folder in folders.iter().rev() {
        set_attributes(random, folder);
    }
}

fn random_name(random: &mut Rng) -> Vec<u8> {
    let length = if random.u8(..20) == 0 { 255 } else { random.usize(1..12) };
    let byte = |random: &mut Rng| loop {
        let byte = random.u8(1..);
        if byte != b'/' {
            return byte;
        }
    };
    let name: Vec<u8> = (0..length).map(|_| byte(random)).collect();
    if name == b"." || name == b".." { b"dots".to_vec() } else { name }
}

fn write_file(random: &mut Rng, path: &Path) {
    let bytes = match random.u8(..10) {
        0 => 0,
        1 => random.usize(1 << 20..3 << 20),
        2 => random.usize(100 << 10..400 << 10),
        _ => random.usize(..20_000),
    };
    let mut content = vec![0; bytes];
    random.fill(&mut content);
    fs::write(path, content).unwrap();
}

fn write_sparse(random: &mut Rng, path: &Path) {
    let file = File::create(path).unwrap();
    let size = random.u64(1 << 20..8 << 20);
    file.set_len(size).unwrap();
    for _ in 0..random.usize(..3) {
        file.write_all_at(&[7; 5000], random.u64(..size - 5000)).unwrap();
    }
}

fn set_attributes(random: &mut Rng, path: &Path) {
    let is_root = rustix::process::geteuid().is_root();
    if is_root && random.bool() {
        std::os::unix::fs::lchown(path, Some(random.u32(..70_000)), Some(random.u32(..70_000)))
            .unwrap();
    }
    if random.u8(..4) == 0 && path.is_file() {
        let _ = rustix::fs::setxattr(
            path,
            "user.test",
            &random.u64(..).to_le_bytes(),
            rustix::fs::XattrFlags::empty(),
        );
    }
    if random.u8(..6) == 0 {
        // Version 2: the owner, the user 1234, the group, the mask, others; each with its rights.
        let entries = [
            (1, 6, u32::MAX),
            (2, 4, 1234),
            (4, 5, u32::MAX),
            (16, 5, u32::MAX),
            (32, 1, u32::MAX),
        ];
        let mut acl = 2_u32.to_le_bytes().to_vec();
        for (tag, rights, id) in entries {
            acl.extend_from_slice(&u16::to_le_bytes(tag));
            acl.extend_from_slice(&u16::to_le_bytes(rights));
            acl.extend_from_slice(&id.to_le_bytes());
        }
        // Not every file system has such lists.
        let _ = rustix::fs::setxattr(path, ACL, &acl, rustix::fs::XattrFlags::empty());
    }
    let mode = if is_root { random.u32(..0o10000) } else { random.u32(..0o1000) | 0o700 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let time = rustix::fs::Timespec {
        tv_sec: random.i64(0..2_000_000_000),
        tv_nsec: random.i64(0..1_000_000_000),
    };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::utimensat(rustix::fs::CWD, path, &times, flags).unwrap();
}

/// A line for each entry of a tree, with everything that a copy has in common with it.
pub fn dump(root: &Path) -> Vec<String> {
    dump_with(root, &Preserve::ALL, true)
}

/// Like [`dump`], without the times and access control lists that a copy does not preserve, and
/// without what rsync 3.5 copies differently: the times of symbolic links, and the rights of the
/// group in access control lists of directories.
pub fn dump_of(root: &Path, preserve: &Preserve) -> Vec<String> {
    dump_with(root, preserve, false)
}

fn dump_with(root: &Path, preserve: &Preserve, compares_all: bool) -> Vec<String> {
    let (lines, first_paths) = Default::default();
    let mut dump = Dump { root, preserve, compares_all, lines, first_paths };
    dump.add(root);
    dump.lines
}

struct Dump<'a> {
    root: &'a Path,
    preserve: &'a Preserve,
    compares_all: bool,
    lines: Vec<String>,
    /// The first path of each inode with several names.
    first_paths: HashMap<u64, Vec<u8>>,
}

impl Dump<'_> {
    fn add(&mut self, path: &Path) {
        let stat = fs::symlink_metadata(path).unwrap();
        let name = path.strip_prefix(self.root).unwrap().as_os_str().as_bytes().to_vec();
        let kind = stat.file_type();
        let content = if kind.is_file() {
            let content = fs::read(path).unwrap();
            let has_holes = stat.blocks() * 512 < stat.size();
            format!("file of {} bytes, holes {has_holes}: {}", content.len(), crc(&content))
        } else if kind.is_symlink() {
            format!("link to {:?}", fs::read_link(path).unwrap().as_os_str().as_bytes())
        } else if kind.is_dir() {
            "folder".to_owned()
        } else {
            assert!(kind.is_fifo() || kind.is_socket());
            "special".to_owned()
        };
        let has_times = self.preserve.times && (self.compares_all || !kind.is_symlink());
        let times = has_times.then(|| (stat.mtime(), stat.mtime_nsec()));
        let has_acl = self.preserve.acls && (self.compares_all || !kind.is_dir());
        let acl = has_acl.then(|| xattr(path, ACL));
        let linked = (stat.nlink() > 1 && kind.is_file())
            .then(|| self.first_paths.entry(stat.ino()).or_insert_with(|| name.clone()).clone());
        let linked = linked.map(|name| String::from_utf8_lossy(&name).into_owned());
        self.lines.push(format!(
            "{:?} {:o} {}:{} {times:?} {content} {:?} {acl:?} {linked:?}",
            String::from_utf8_lossy(&name),
            stat.mode(),
            stat.uid(),
            stat.gid(),
            xattr(path, "user.test"),
        ));
        if kind.is_dir() {
            let entries = fs::read_dir(path).unwrap();
            let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
            paths.sort();
            for path in paths {
                self.add(&path);
            }
        }
    }
}

fn xattr(path: &Path, name: &str) -> Vec<u8> {
    let mut value = [0; 256];
    let length = rustix::fs::lgetxattr(path, name, &mut value[..]);
    length.map(|length| value[..length].to_vec()).unwrap_or_default()
}

fn crc(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}
